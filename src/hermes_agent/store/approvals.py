"""Questions to a person that outlive the process: decided once, used once, bound to what was shown."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import apsw
import msgspec

from hermes_agent import errors
from hermes_agent.store import encoding


class ApprovalState(StrEnum):
    """Where a question stands; every state but the first is final."""

    PENDING = "pending"
    APPROVED = "approved"
    DENIED = "denied"
    ANSWERED = "answered"
    """A question that wanted words, not a yes."""
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    """Its turn ended before anybody decided."""


@dataclass(frozen=True, slots=True)
class ApprovalRecord:
    """One question as it stands on disk."""

    id: str
    turn_key: int
    call_id: str
    """The ledger's id `turn.step.index` of the call that waits."""
    kind: str
    """`approval` or `question`."""
    request: dict[str, Any]
    """What was shown."""
    request_hash: bytes
    state: ApprovalState
    answer: str | None
    decided_by: str | None
    asked_at: float
    expires_at: float
    used_at: float | None


_COLUMNS = (
    "id, turn_key, call_id, kind, request, request_hash, state, answer, decided_by, asked_at, expires_at, used_at"
)


def request_hash(request: dict[str, Any]) -> bytes:
    """What binds a decision to exactly what was shown."""
    return hashlib.sha256(encoding.encode(request)).digest()


def new_approval_id() -> str:
    """A question's public id."""
    return "appr_" + secrets.token_hex(12)


def asked(conn: apsw.Connection, turn_key: int, call_id: str, request: dict[str, Any]) -> ApprovalRecord | None:
    """The question that this call asks already in the same words, decided or not, if nothing was made of it yet."""
    digest = request_hash(request)
    for record in of_call(conn, turn_key, call_id):
        if record.request_hash == digest and record.used_at is None and record.state is not ApprovalState.CANCELLED:
            return record
    return None


def ask(
    conn: apsw.Connection,
    approval_id: str,
    turn_key: int,
    call_id: str,
    kind: str,
    request: dict[str, Any],
    expires_at: float,
) -> None:
    """Store a question."""
    conn.execute(
        "INSERT INTO approvals (id, turn_key, call_id, kind, request, request_hash, state, asked_at, expires_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            approval_id, turn_key, call_id, kind, encoding.encode(request).decode(), request_hash(request),
            ApprovalState.PENDING, time.time(), expires_at,
        ),
    )  # fmt: skip


def decide(
    conn: apsw.Connection, approval_id: str, state: ApprovalState, answer: str | None, by: str, now: float
) -> bool:
    """Decide a question that is still open and has not expired; True for the one decision that counts."""
    conn.execute(
        "UPDATE approvals SET state = ?, answer = ?, decided_by = ?, decided_at = ?"
        " WHERE id = ? AND state = ? AND expires_at > ?",
        (
            state,
            None if answer is None else encoding.clean_text(answer),
            by,
            now,
            approval_id,
            ApprovalState.PENDING,
            now,
        ),
    )
    return conn.changes() == 1


def use(conn: apsw.Connection, approval_id: str) -> bool:
    """Use up a decision; True once."""
    conn.execute(
        "UPDATE approvals SET used_at = ? WHERE id = ? AND used_at IS NULL AND state <> ?",
        (time.time(), approval_id, ApprovalState.PENDING),
    )
    return conn.changes() == 1


def close(
    conn: apsw.Connection, state: ApprovalState, *, turn_key: int | None = None, before: float | None = None
) -> int:
    """Give open questions their last state: those of a turn, or those that expired before a wall-clock time."""
    conn.execute(
        "UPDATE approvals SET state = ?1, decided_at = ?2 WHERE state = ?3"
        " AND (?4 IS NULL OR turn_key = ?4) AND (?5 IS NULL OR expires_at <= ?5)",
        (state, time.time(), ApprovalState.PENDING, turn_key, before),
    )
    return conn.changes()


def granted(conn: apsw.Connection, session_key: int, request: dict[str, Any]) -> bool:
    """Whether exactly this was allowed until the end of the session."""
    rows = conn.execute(
        "SELECT 1 FROM approvals a JOIN turns t ON t.key = a.turn_key"
        " WHERE t.session_key = ? AND a.request_hash = ? AND a.state = ? AND a.answer = 'session' LIMIT 1",
        (session_key, request_hash(request), ApprovalState.APPROVED),
    )
    return bool(rows.fetchall())


def find(conn: apsw.Connection, approval_id: str) -> ApprovalRecord | None:
    """A question by its id."""
    for values in conn.execute(f"SELECT {_COLUMNS} FROM approvals WHERE id = ?", (approval_id,)):
        return _record(values)
    return None


def known(conn: apsw.Connection, approval_id: str) -> ApprovalRecord:
    """A question by its id, which must be there; raises `UsageError`."""
    found = find(conn, approval_id)
    if found is None:
        raise errors.UsageError(f"there is no question {approval_id!r}")
    return found


def of_call(conn: apsw.Connection, turn_key: int, call_id: str) -> list[ApprovalRecord]:
    """The questions of one call, oldest first."""
    rows = conn.execute(
        f"SELECT {_COLUMNS} FROM approvals WHERE turn_key = ? AND call_id = ? ORDER BY asked_at, id",
        (turn_key, call_id),
    )
    return [_record(values) for values in rows]


def waiting(conn: apsw.Connection, turn_key: int | None = None) -> list[ApprovalRecord]:
    """Open questions, of one turn or of all, oldest first."""
    rows = conn.execute(
        f"SELECT {_COLUMNS} FROM approvals WHERE state = ?1 AND (?2 IS NULL OR turn_key = ?2) ORDER BY asked_at, id",
        (ApprovalState.PENDING, turn_key),
    )
    return [_record(values) for values in rows]


def _record(values: Any) -> ApprovalRecord:
    (key, turn_key, call_id, kind, request, digest, state, answer, by, asked_at, expires_at, used_at) = cast(
        "tuple[str, int, str, str, str, bytes, str, str | None, str | None, float, float, float | None]", values
    )
    shown: dict[str, Any] = msgspec.json.decode(request)
    return ApprovalRecord(
        key, turn_key, call_id, kind, shown, digest, ApprovalState(state), answer, by, asked_at, expires_at, used_at
    )
