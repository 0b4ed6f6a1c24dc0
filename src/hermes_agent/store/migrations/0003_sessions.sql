-- What a person does with whole sessions: mark, remove and branch them.

ALTER TABLE sessions ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN archived INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN hidden INTEGER NOT NULL DEFAULT 0;

-- What is left of a removed session.
-- stage: 0 its rows are still to be erased, 1 older copies of them may be in the file, 2 nothing of it is left.
CREATE TABLE tombstones (
    session_key INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    deleted_at REAL NOT NULL,
    stage INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX tombstones_by_id ON tombstones (id);
CREATE INDEX tombstones_unfinished ON tombstones (stage) WHERE stage < 2;

-- Turns of another session whose results a branch shows: the files that hold them stay as long as it does.
CREATE TABLE lent_turns (
    turn_id TEXT NOT NULL,
    session_key INTEGER NOT NULL,
    PRIMARY KEY (turn_id, session_key)
) WITHOUT ROWID;

CREATE INDEX lent_turns_by_session ON lent_turns (session_key);
