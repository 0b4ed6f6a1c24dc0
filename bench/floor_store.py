"""The floor's store: one table, one index, one search index kept by a trigger, and nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw

Message = dict[str, Any]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, rows INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS messages (
    id INTEGER PRIMARY KEY, session TEXT, role TEXT, content TEXT, extra TEXT, at REAL);
CREATE INDEX IF NOT EXISTS messages_session ON messages (session, id);
CREATE VIRTUAL TABLE IF NOT EXISTS found USING fts5(content, content='messages', content_rowid='id');
CREATE TRIGGER IF NOT EXISTS index_it AFTER INSERT ON messages BEGIN
    INSERT INTO found (rowid, content) VALUES (new.id, new.content);
END;
"""
_INSERT = "INSERT INTO messages (session, role, content, extra, at) VALUES (?, ?, ?, ?, ?)"


class FloorStore:
    """A SQLite file written in the plainest way, through the same SQLite library as ours."""

    def __init__(self, path: Path, *, synchronous: str = "FULL") -> None:
        self._connection = apsw.Connection(str(path))
        self.execute = self._connection.execute
        self.commits = 0
        self.execute("PRAGMA journal_mode=WAL")
        self.execute(f"PRAGMA synchronous={synchronous}")
        self.execute(_SCHEMA)

    def close(self) -> None:
        self._connection.close()

    def create(self, session: str) -> None:
        self.insert(session)
        self.commits += 1

    def insert(self, session: str) -> None:
        """A session, within a commit of the caller."""
        self.execute("INSERT INTO sessions (id) VALUES (?)", (session,))

    def append(self, session: str, message: Message) -> None:
        """One row, one commit."""
        self.execute("BEGIN IMMEDIATE")
        self.add(session, message)
        self.execute("COMMIT")
        self.commits += 1

    def add(self, session: str, message: Message) -> None:
        """One row, within a commit of the caller."""
        self.execute(_INSERT, _row(session, message))
        self.execute("UPDATE sessions SET rows = rows + 1 WHERE id = ?", (session,))

    def append_all(self, session: str, messages: Sequence[Message]) -> None:
        """Many rows, one commit."""
        self.execute("BEGIN IMMEDIATE")
        self._connection.executemany(_INSERT, [_row(session, message) for message in messages])
        self.execute("UPDATE sessions SET rows = rows + ? WHERE id = ?", (len(messages), session))
        self.execute("COMMIT")
        self.commits += 1

    def read(self, session: str) -> list[Message]:
        """A session's messages as dicts."""
        found: list[Message] = []
        for role, content, extra in self.execute(
            "SELECT role, content, extra FROM messages WHERE session = ? ORDER BY id", (session,)
        ):
            message = {"role": role, "content": content}
            if extra:
                message.update(json.loads(extra))
            found.append(message)
        return found


def _row(session: str, message: Message) -> tuple[Any, ...]:
    extra = {key: value for key, value in message.items() if key not in ("role", "content")}
    return session, message["role"], message["content"], json.dumps(extra) if extra else None, time.time()
