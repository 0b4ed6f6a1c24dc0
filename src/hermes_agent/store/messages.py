"""Rows of the transcript: how one is encoded, numbered, chained, stored and read back."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apsw
import msgspec

from hermes_agent import errors

SEQ_BITS = 24
MAX_SEQ = (1 << SEQ_BITS) - 1
"""Rows one session can hold."""

_decode = msgspec.json.Decoder().decode
_INSERT = "INSERT INTO messages (id, role, wire, extra, timestamp, turn_key, hash) VALUES (?, ?, ?, ?, ?, ?, ?)"
_INDEX = "INSERT INTO messages_fts (rowid, content) SELECT id, content FROM messages WHERE id = ?"


@dataclass(frozen=True, slots=True)
class Row:
    """One message on its way into the store.

    `wire` is the JSON of what is sent to a model, `extra` the JSON of what is stored
    beside it (None for nothing), `text` what the search index shall find, "" for nothing.
    """

    role: str
    wire: bytes
    extra: bytes | None
    timestamp: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class Placed:
    """A row with its number in the session and its link in the chain."""

    row: Row
    seq: int
    hash: bytes


def row_id(session_key: int, seq: int) -> int:
    """The primary key of a session's row or event number `seq`."""
    return (session_key << SEQ_BITS) | seq


def link(previous: bytes, seq: int, row: Row) -> bytes:
    """The chain value of a row: 16 bytes over the previous value and all that is stored of it."""
    digest = hashlib.blake2b(previous, digest_size=16)
    digest.update(struct.pack("<qd", seq, row.timestamp))
    digest.update(row.wire)
    digest.update(b"\0")
    if row.extra:
        digest.update(row.extra)
    return digest.digest()


def place(rows: Sequence[Row], last_seq: int, head: bytes) -> list[Placed]:
    """Number and chain new rows behind row `last_seq` whose chain value is `head`."""
    if last_seq + len(rows) > MAX_SEQ:
        raise errors.StoreError(f"a session holds at most {MAX_SEQ} rows; start a new one")
    placed: list[Placed] = []
    for seq, row in enumerate(rows, last_seq + 1):
        head = link(head, seq, row)
        placed.append(Placed(row, seq, head))
    return placed


def insert(conn: apsw.Connection, session_key: int, placed: Iterable[Placed], turn_key: int | None) -> None:
    """Store placed rows and index what can be searched; part of the caller's transaction."""
    for item in placed:
        row = item.row
        key = row_id(session_key, item.seq)
        extra = None if row.extra is None else row.extra.decode()
        conn.execute(_INSERT, (key, row.role, row.wire.decode(), extra, row.timestamp, turn_key, item.hash))
        if row.text:
            conn.execute(_INDEX, (key,))


@dataclass(frozen=True, slots=True)
class Stored:
    """A row as it was read back."""

    id: int
    role: str
    wire: str
    extra: str | None
    timestamp: float
    turn_key: int | None
    active: int
    compacted: int

    @property
    def seq(self) -> int:
        return self.id & MAX_SEQ

    def fields(self) -> dict[str, Any]:
        """The row as one dict: what is sent and what is stored beside it."""
        fields: dict[str, Any] = _decode(self.wire)
        if self.extra is not None:
            fields.update(_decode(self.extra))
        fields["timestamp"] = self.timestamp
        return fields


_SELECT = "SELECT id, role, wire, extra, timestamp, turn_key, active, compacted FROM messages"


def select(conn: apsw.Connection, session_key: int, *, after: int = 0, until: int = MAX_SEQ) -> Iterator[Stored]:
    """A session's rows `after` < seq <= `until`, in order, whatever their marks."""
    bounds = (row_id(session_key, after), row_id(session_key, until))
    for values in conn.execute(f"{_SELECT} WHERE id > ? AND id <= ? ORDER BY id", bounds):
        yield Stored(*values)


def newest(conn: apsw.Connection, session_key: int, limit: int) -> list[Stored]:
    """The last `limit` rows of a session, in order."""
    bounds = (row_id(session_key, 0), row_id(session_key, MAX_SEQ), limit)
    rows = conn.execute(f"{_SELECT} WHERE id > ? AND id <= ? ORDER BY id DESC LIMIT ?", bounds)
    return [Stored(*values) for values in rows][::-1]


def conversation(conn: apsw.Connection, session_key: int, head: bytes) -> list[dict[str, Any]]:
    """A session's active rows as dicts with `_db_persisted` and `_seq`, after checking the whole chain.

    Raises `StoreDamaged` when a row was changed, removed or added outside this program.
    """
    bounds = (row_id(session_key, 0), row_id(session_key, MAX_SEQ))
    rows = conn.execute(
        "SELECT id, wire, extra, timestamp, active, hash FROM messages WHERE id > ? AND id <= ? ORDER BY id", bounds
    )
    base, chain, expected = bounds[0], b"", 0
    found: list[dict[str, Any]] = []
    pack, blake2b, decode, append = struct.Struct("<qd").pack, hashlib.blake2b, _decode, found.append
    for key, wire, extra, timestamp, active, stored in rows:
        expected += 1
        digest = blake2b(chain, digest_size=16)
        digest.update(pack(expected, timestamp) + wire.encode() + b"\0")
        if extra is not None:
            digest.update(extra.encode())
        chain = digest.digest()
        if chain != stored or key != base + expected:
            raise errors.StoreDamaged(_broken_chain(expected))
        if active:
            fields = decode(wire)
            if extra is not None:
                fields.update(decode(extra))
            fields["timestamp"] = timestamp
            fields["_db_persisted"] = True
            fields["_seq"] = expected
            append(fields)
    if chain != head:
        raise errors.StoreDamaged(_broken_chain(expected + 1))
    return found


def _broken_chain(seq: int) -> str:
    return (
        f"row {seq} of this session was changed or is missing: the store was damaged or edited outside hermes; "
        "nothing was changed, restore a backup of state.db or start a new session"
    )


def hash_of(conn: apsw.Connection, session_key: int, seq: int) -> bytes | None:
    """The chain value of one row, None when it does not exist."""
    for (value,) in conn.execute("SELECT hash FROM messages WHERE id = ?", (row_id(session_key, seq),)):
        return value
    return None


def text_of(content: Any) -> str:  # noqa: ANN401 - any JSON value a provider or plugin put there
    """What the search index shall find of a message's content."""
    if isinstance(content, str):
        return content
    return "x" if content else ""


