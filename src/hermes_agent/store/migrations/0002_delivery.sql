-- What delivery needs: options and waits of a turn, who sent a message under which id, and questions to a person.

ALTER TABLE turns ADD COLUMN options TEXT;
ALTER TABLE turns ADD COLUMN deadline REAL;
ALTER TABLE turns ADD COLUMN retry_at REAL;
ALTER TABLE turns ADD COLUMN started_at REAL;
ALTER TABLE turns ADD COLUMN prose TEXT;
ALTER TABLE turns ADD COLUMN usage TEXT;
ALTER TABLE turns ADD COLUMN first_event INTEGER;

CREATE INDEX turns_open ON turns (state) WHERE state NOT IN ('done', 'failed', 'cancelled', 'expired');

CREATE INDEX tool_calls_unknown ON tool_calls (state) WHERE state = 'unknown';

-- A message as it came: the same id of the same sender names the same turn for ever after.
-- body_hash tells a repeat from another message under the same id.
CREATE TABLE inbox (
    sender TEXT NOT NULL,
    scope TEXT NOT NULL,
    message_id TEXT NOT NULL,
    turn_key INTEGER NOT NULL,
    body_hash BLOB NOT NULL,
    received_at REAL NOT NULL,
    PRIMARY KEY (sender, scope, message_id)
) WITHOUT ROWID;

CREATE INDEX inbox_by_turn ON inbox (turn_key);

-- Questions to a person: decided once, used once, bound to exactly what was shown.
CREATE TABLE approvals (
    id TEXT PRIMARY KEY,
    turn_key INTEGER NOT NULL,
    call_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    request TEXT NOT NULL,
    request_hash BLOB NOT NULL,
    state TEXT NOT NULL,
    answer TEXT,
    decided_by TEXT,
    asked_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    decided_at REAL,
    used_at REAL
) WITHOUT ROWID;

CREATE INDEX approvals_by_turn ON approvals (turn_key, call_id);
