"""Rows of the transcript: how one is encoded, numbered, chained, stored and read back."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import apsw
import msgspec

from hermes_agent import errors

SEQ_BITS = 24
MAX_SEQ = (1 << SEQ_BITS) - 1
"""Rows, and events, that one session can hold."""
BLOCK = 64
"""Rows under one seal."""

_decode = msgspec.json.Decoder().decode
_pack = struct.Struct("<16sqdI").pack
_sha256 = hashlib.sha256
_INSERT = (
    "INSERT INTO messages (id, role, wire, extra, timestamp, turn_key, event, hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_INDEX = "INSERT INTO messages_fts (rowid, content) VALUES (?, ?)"
_RANGE = "FROM messages WHERE id > ? AND id <= ? ORDER BY id"
_RAW = f"SELECT CAST(wire AS BLOB), CAST(extra AS BLOB), timestamp, active {_RANGE}"

_Raw = tuple[bytes, bytes | None, float, int]
"""A row as the seals and links see it."""


class Row(NamedTuple):
    """One message on its way into the store.

    `wire` is the JSON of what is sent to a model, `extra` the JSON of what is stored
    beside it (None for nothing), `text` what the search index shall find, "" for nothing.
    """

    role: str
    wire: bytes
    extra: bytes | None
    timestamp: float
    text: str = ""


class Placed(NamedTuple):
    """A row with its number in the session and its link in the chain."""

    row: Row
    seq: int
    hash: bytes


def row_id(session_key: int, seq: int) -> int:
    """The primary key of a session's row or event number `seq`."""
    return (session_key << SEQ_BITS) | seq


# -- writing ---------------------------------------------------------------------


def link(previous: bytes, seq: int, row: Row) -> bytes:
    """The chain value of a row: 16 bytes over the previous value and all that is stored of it."""
    return _link(previous, seq, row.wire, row.extra, row.timestamp)


def _link(previous: bytes, seq: int, wire: bytes, extra: bytes | None, timestamp: float) -> bytes:
    return _sha256(_pack(previous, seq, timestamp, len(wire)) + wire + (extra or b"")).digest()[:16]


def place(rows: Sequence[Row], last_seq: int, head: bytes) -> list[Placed]:
    """Number and chain new rows behind row `last_seq` whose chain value is `head`."""
    if last_seq + len(rows) > MAX_SEQ:
        raise errors.StoreError(f"a session holds at most {MAX_SEQ} rows; start a new one")
    placed: list[Placed] = []
    for seq, row in enumerate(rows, last_seq + 1):
        head = link(head, seq, row)
        placed.append(Placed(row, seq, head))
    return placed


def insert(conn: apsw.Connection, session_key: int, placed: Sequence[Placed], turn_key: int | None, event: int) -> None:
    """Store placed rows, the first as event number `event`, and index what can be searched.

    Part of the caller's transaction.
    """
    for number, item in enumerate(placed, event):
        row = item.row
        key = row_id(session_key, item.seq)
        extra = None if row.extra is None else row.extra.decode()
        conn.execute(_INSERT, (key, row.role, row.wire.decode(), extra, row.timestamp, turn_key, number, item.hash))
        if row.text:
            conn.execute(_INDEX, (key, row.text))
        if item.seq % BLOCK == 0:
            _seal(conn, session_key, item)


def _seal(conn: apsw.Connection, session_key: int, last: Placed) -> None:
    """Seal the block that `last` completes; one whose rows do not fit their chain gets no seal."""
    start = last.seq - BLOCK
    chain = first = (hash_of(conn, session_key, start) or b"") if start else b""
    block = _block(conn.execute(_RAW, (row_id(session_key, start), row_id(session_key, last.seq))))
    try:
        for seq, (wire, extra, timestamp, _) in enumerate(block, start + 1):
            chain = _link(chain, seq, wire, extra, timestamp)
        digest = _digest(first, block, chain)
    except (TypeError, struct.error):
        return
    if chain == last.hash and len(block) == BLOCK:
        conn.execute("INSERT INTO seals VALUES (?, ?, ?)", (row_id(session_key, last.seq), chain, digest))


def _block(rows: Iterator[Any]) -> list[_Raw]:
    return list(islice(rows, BLOCK))


def _digest(first: bytes, block: list[_Raw], chain: bytes) -> bytes:
    """One hash over a block of rows, between the chain values before and after it."""
    wires, extras, times, _ = zip(*block, strict=True)
    count = len(block)
    sizes = struct.pack(
        f"<{count}d{count}I{count}I", *times, *map(len, wires), *[len(extra) if extra else 0 for extra in extras]
    )
    return _sha256(b"".join((first, chain, sizes, *wires, *filter(None, extras)))).digest()


# -- reading ---------------------------------------------------------------------


class Stored(NamedTuple):
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
        try:
            fields: dict[str, Any] = _decode(self.wire)
            if self.extra is not None:
                fields.update(_decode(self.extra))
            fields["timestamp"] = self.timestamp
        except (msgspec.MsgspecError, AttributeError, TypeError, ValueError) as error:
            raise errors.StoreDamaged(_broken_chain(self.seq)) from error
        return fields


_SELECT = "SELECT id, role, wire, extra, timestamp, turn_key, active, compacted"


def select(conn: apsw.Connection, session_key: int, *, after: int = 0, until: int = MAX_SEQ) -> Iterator[Stored]:
    """A session's rows `after` < seq <= `until`, in order, whatever their marks."""
    bounds = (row_id(session_key, after), row_id(session_key, until))
    for values in conn.execute(f"{_SELECT} {_RANGE}", bounds):
        yield _stored(values)


def select_events(conn: apsw.Connection, session_key: int, after: int, limit: int) -> Iterator[tuple[int, Stored]]:
    """The same for at most `limit` rows behind row `after`, each with its event number."""
    bounds = (row_id(session_key, after), row_id(session_key, MAX_SEQ), limit)
    for *values, event in conn.execute(f"{_SELECT}, event {_RANGE} LIMIT ?", bounds):
        yield cast("int", event), _stored(tuple(values))


def _stored(values: tuple[Any, ...]) -> Stored:
    return Stored(*values)


def conversation(
    conn: apsw.Connection, session_key: int, *, last_seq: int, head: bytes, active: int | None
) -> list[dict[str, Any]]:
    """A session's active rows as dicts with `_db_persisted` and `_seq`, after checking each against the chain.

    The session says that it ends at row `last_seq` with chain value `head`, and how many
    rows are active (None: that is not checked). Raises `StoreDamaged` when a row was changed, removed or added
    outside this program.
    """
    bounds = (row_id(session_key, 0), row_id(session_key, MAX_SEQ))
    seals: dict[int, tuple[bytes, bytes]] = {}
    if last_seq >= BLOCK:
        for key, *seal in conn.execute("SELECT id, chain, digest FROM seals WHERE id > ? AND id <= ?", bounds):
            seals[cast("int", key) & MAX_SEQ] = cast("tuple[bytes, bytes]", tuple(seal))
    rows = conn.execute(_RAW, bounds)
    seq, chain = 0, b""
    found: list[dict[str, Any]] = []
    decode, append = _decode, found.append
    while block := _block(rows):
        chain = _verify(conn, session_key, seq, chain, block, seals.get(seq + BLOCK))
        for wire, extra, timestamp, mark in block:
            seq += 1
            if mark:
                fields: dict[str, Any] = decode(wire)
                if extra is not None:
                    fields.update(decode(extra))
                fields["timestamp"] = timestamp
                fields["_db_persisted"] = True
                fields["_seq"] = seq
                append(fields)
    if seq != last_seq or chain != head:
        raise errors.StoreDamaged(_broken_chain(min(seq, last_seq) + 1 if seq != last_seq else seq))
    if active is not None and len(found) != active:
        raise errors.StoreDamaged(
            f"{len(found)} rows of this session are marked as active, there were {active}: "
            "the store was damaged or edited outside hermes; restore a backup of state.db or start a new session"
        )
    return found


def _verify(
    conn: apsw.Connection,
    session_key: int,
    seq: int,
    chain: bytes,
    block: list[_Raw],
    seal: tuple[bytes, bytes] | None,
) -> bytes:
    """The chain value behind the block that follows row `seq`; by its seal, or else row by row.

    Raises `StoreDamaged` naming the first row that does not fit.
    """
    try:
        if seal is not None and len(block) == BLOCK and _digest(chain, block, seal[0]) == seal[1]:
            return seal[0]
    except (TypeError, struct.error):
        pass
    bounds = (row_id(session_key, seq), row_id(session_key, MAX_SEQ), len(block))
    hashes = conn.execute(f"SELECT id, hash {_RANGE} LIMIT ?", bounds).fetchall()
    for (key, stored), (wire, extra, timestamp, _) in zip(hashes, block, strict=True):
        seq += 1
        try:
            chain = _link(chain, seq, wire, extra, timestamp)
        except (TypeError, struct.error):
            chain = b""
        if chain != stored or key != row_id(session_key, seq):
            raise errors.StoreDamaged(_broken_chain(seq))
    return chain


def _broken_chain(seq: int) -> str:
    return (
        f"row {seq} of this session was changed or is missing: the store was damaged or edited outside hermes; "
        "nothing was changed, restore a backup of state.db or start a new session"
    )


def hash_of(conn: apsw.Connection, session_key: int, seq: int) -> bytes | None:
    """The chain value of one row, None when it does not exist."""
    for (value,) in conn.execute("SELECT hash FROM messages WHERE id = ?", (row_id(session_key, seq),)):
        return cast("bytes", value)
    return None


def decoded(stored: bytes) -> dict[str, Any]:
    """What is stored beside a row."""
    found: dict[str, Any] = _decode(stored)
    return found
