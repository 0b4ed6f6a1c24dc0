-- Where a conversation goes on whose client keeps no session id.

-- digest over all that was said up to the message that began the turn; only while nothing followed it
ALTER TABLE turns ADD COLUMN transcript BLOB;
CREATE INDEX turns_by_transcript ON turns (transcript) WHERE transcript IS NOT NULL;

-- Names that clients gave to sessions, as digests over owner, kind and name.
CREATE TABLE session_names (
    digest BLOB PRIMARY KEY,
    session_key INTEGER NOT NULL
) WITHOUT ROWID;
