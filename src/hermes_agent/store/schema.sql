-- The store as the current version makes it. An older file reaches the same shape through migrations/.
-- Session and row numbers: messages.id and events.id are session key * 2^24 + number, so one primary key
-- orders a session's rows, names them for ever and needs no second index.

CREATE TABLE migrations (
    version INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at REAL NOT NULL
);

CREATE TABLE state_meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE system_prompts (
    hash BLOB PRIMARY KEY,
    prompt TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE sessions (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    source TEXT NOT NULL,
    title TEXT UNIQUE,
    model TEXT,
    model_config TEXT,
    system_prompt_hash BLOB,
    parent_session_id TEXT,
    user_id TEXT,
    cwd TEXT,
    started_at REAL NOT NULL,
    ended_at REAL,
    end_reason TEXT,
    -- from here on: moved by every commit
    last_active REAL NOT NULL,
    fence INTEGER NOT NULL DEFAULT 0,
    last_seq INTEGER NOT NULL DEFAULT 0,
    last_event INTEGER NOT NULL DEFAULT 0,
    head BLOB NOT NULL DEFAULT x'',
    -- of the active rows: whoever changes that mark changes this number in the same transaction
    message_count INTEGER NOT NULL DEFAULT 0,
    tool_call_count INTEGER NOT NULL DEFAULT 0,
    api_call_count INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    cache_read_tokens INTEGER NOT NULL DEFAULT 0,
    cache_write_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0,
    -- what the person set
    pinned INTEGER NOT NULL DEFAULT 0,
    archived INTEGER NOT NULL DEFAULT 0,
    hidden INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX sessions_recent ON sessions (started_at);

-- Append-only. wire: the row as it is sent, encoded once. extra: what is stored but not sent.
-- hash: chained over the rows of the session; the marks (active, compacted) are outside it.
CREATE TABLE messages (
    id INTEGER PRIMARY KEY,
    role TEXT NOT NULL,
    wire TEXT NOT NULL,
    extra TEXT,
    timestamp REAL NOT NULL,
    turn_key INTEGER,
    event INTEGER NOT NULL,
    hash BLOB NOT NULL,
    active INTEGER NOT NULL DEFAULT 1,
    compacted INTEGER NOT NULL DEFAULT 0,
    content TEXT GENERATED ALWAYS AS (json_extract(wire, '$.content')) VIRTUAL
);

-- One hash over each full block of a session's rows, so that reading it need not hash row by row.
-- id: the block's last row; chain: that row's hash. A session without them is checked row by row.
CREATE TABLE seals (
    id INTEGER PRIMARY KEY,
    chain BLOB NOT NULL,
    digest BLOB NOT NULL
);

CREATE VIRTUAL TABLE messages_fts USING fts5(content, content='messages', content_rowid='id');

CREATE TABLE turns (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    session_key INTEGER NOT NULL,
    state TEXT NOT NULL,
    owner TEXT NOT NULL,
    input TEXT,
    user_seq INTEGER,
    end_seq INTEGER,
    attempts INTEGER NOT NULL DEFAULT 0,
    crash_resumes INTEGER NOT NULL DEFAULT 0,
    fence INTEGER NOT NULL DEFAULT 0,
    reason TEXT,
    error TEXT,
    accepted_at REAL NOT NULL,
    ended_at REAL,
    -- what else it was told when it was taken; JSON
    options TEXT,
    deadline REAL,
    retry_at REAL,
    started_at REAL,
    -- what the person reads of a turn that ended without an answer
    prose TEXT,
    -- the session's counters as it began; once it has ended, what it used itself
    usage TEXT,
    -- number of the event with which it began to run
    first_event INTEGER,
    -- digest over all that was said up to the message that began it; only while nothing followed it
    transcript BLOB
);

CREATE INDEX turns_by_session ON turns (session_key, state);
CREATE INDEX turns_open ON turns (state) WHERE state NOT IN ('done', 'failed', 'cancelled', 'expired');
CREATE INDEX turns_by_transcript ON turns (transcript) WHERE transcript IS NOT NULL;

-- The effect ledger: one row a call, id turn.step.index.
CREATE TABLE tool_calls (
    turn_key INTEGER NOT NULL,
    step INTEGER NOT NULL,
    idx INTEGER NOT NULL,
    call_id TEXT NOT NULL,
    name TEXT NOT NULL,
    effect TEXT NOT NULL,
    state TEXT NOT NULL,
    fence INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    result TEXT,
    result_seq INTEGER,
    PRIMARY KEY (turn_key, step, idx)
) WITHOUT ROWID;

-- What happened in a session beside its rows. A row is an event too and carries its number itself.
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    ref TEXT,
    at REAL NOT NULL
);

-- One sequence a session, 1..n without gaps: what every client's cursor walks over.
CREATE VIEW session_events AS
SELECT id, kind, ref, at FROM events
UNION ALL
SELECT (id >> 24 << 24) | event, 'message', CAST(id & 16777215 AS TEXT), timestamp FROM messages;

CREATE TABLE session_leases (
    session_key INTEGER PRIMARY KEY,
    fence INTEGER NOT NULL,
    owner TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    expires REAL NOT NULL
);

CREATE TABLE usage (
    session_key INTEGER NOT NULL,
    model TEXT NOT NULL,
    provider TEXT NOT NULL,
    api_calls INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    cache_read_tokens INTEGER NOT NULL DEFAULT 0,
    cache_write_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0,
    first_seen REAL NOT NULL,
    last_seen REAL NOT NULL,
    PRIMARY KEY (session_key, model, provider)
) WITHOUT ROWID;

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

-- Names that clients gave to sessions, as digests over owner, kind and name.
CREATE TABLE session_names (
    digest BLOB PRIMARY KEY,
    session_key INTEGER NOT NULL
) WITHOUT ROWID;
