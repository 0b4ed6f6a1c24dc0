"""Turns and the ledger of their tool calls: what was begun, what is known of it, what may be done again."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import apsw

from hermes_agent import errors
from hermes_agent.store import encoding, processes

S = TypeVar("S", bound=StrEnum)


class TurnState(StrEnum):
    """Where a piece of work stands; the last four are ends."""

    ACCEPTED = "accepted"
    RUNNING = "running"
    WAITING_APPROVAL = "waiting_approval"
    WAITING_RETRY = "waiting_retry"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_end(self) -> bool:
        return self in _ENDS


_ENDS = frozenset((TurnState.DONE, TurnState.FAILED, TurnState.CANCELLED, TurnState.EXPIRED))
_OPEN = ", ".join(f"'{state}'" for state in TurnState if state not in _ENDS)
ENDS = ", ".join(f"'{state}'" for state in TurnState if state in _ENDS)
"""The last states, as an SQL list."""


class CallState(StrEnum):
    """What is on disk about one tool call."""

    PROPOSED = "proposed"
    """Stored with the model's reply; it has provably not run."""
    STARTED = "started"
    """Stored before dispatch: it may have run."""
    FINISHED = "finished"
    """Its result is stored, not yet as a row."""
    DONE = "done"
    """Its result is a row of the transcript."""
    UNKNOWN = "unknown"
    """It was interrupted; whether it took effect is not known."""


@dataclass(frozen=True, slots=True)
class CallKey:
    """A call's place in its turn: which model call proposed it, and where in the reply."""

    step: int
    index: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """A call as the model asked for it."""

    key: CallKey
    call_id: str
    name: str
    effect: str


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One row of the ledger."""

    key: CallKey
    call_id: str
    name: str
    effect: str
    state: CallState
    result: str | None


class TurnRecord(NamedTuple):
    """One turn as it stands on disk."""

    key: int
    id: str
    session_key: int
    state: TurnState
    owner: str
    input: str | None
    """The message, while it waits for its turn; None once it is a row."""
    user_seq: int | None
    end_seq: int | None
    attempts: int
    crash_resumes: int
    reason: str | None
    error: str | None
    prose: str | None
    """What the person reads of a turn that ended without an answer."""
    options: dict[str, Any]
    """What else the turn was told when it was taken."""
    deadline: float | None
    retry_at: float | None
    """When a turn that waits to be tried again is due; wall-clock seconds."""
    accepted_at: float
    ended_at: float | None
    usage: tuple[int, ...]
    """`USAGE` of all its attempts, once it has ended."""
    first_event: int | None
    """Number of the event with which it began to run."""


USAGE = ("api_calls", "input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "reasoning_tokens")
"""What is counted of a turn, in the order of `TurnRecord.usage`."""

_FIELDS = TurnRecord._fields
_COLUMNS = ", ".join(_FIELDS)
_COUNTERS = "api_call_count, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, reasoning_tokens"
_COUNT_FROM = f"(SELECT json_array({_COUNTERS}) FROM sessions WHERE key = ?)"
"""The session's counters as a turn begins; its end leaves the difference."""
_COUNTED = (
    "(SELECT json_array("
    + ", ".join(f"s.{name.strip()} - (usage ->> {i})" for i, name in enumerate(_COUNTERS.split(",")))
    + ") FROM sessions s WHERE s.key = session_key)"
)


def _record(values: tuple[Any, ...]) -> TurnRecord:
    fields = dict(zip(_FIELDS, values, strict=True))
    fields["state"] = _state(TurnState, fields["state"])
    fields["options"] = json.loads(fields["options"]) if fields["options"] else {}
    fields["usage"] = tuple(json.loads(fields["usage"])) if fields["usage"] and fields["ended_at"] is not None else ()
    return TurnRecord(**fields)


def _state(kind: type[S], value: Any) -> S:
    try:
        return kind(value)
    except ValueError as error:
        raise errors.StoreDamaged(f"the ledger says {value!r} where a state should be; restore a backup") from error


def _clean(text: str | None) -> str | None:
    return None if text is None else encoding.clean_text(text)


def new_turn_id() -> str:
    """A turn's public id."""
    return "turn_" + secrets.token_hex(16)


def accept(
    conn: apsw.Connection,
    session_key: int,
    text: str,
    turn_id: str,
    *,
    user_seq: int | None = None,
    options: dict[str, Any] | None = None,
    deadline: float | None = None,
) -> TurnRecord:
    """Store a message that waits for its turn; `user_seq` is the row that holds it already, if one does."""
    conn.execute(
        "INSERT INTO turns (id, session_key, state, owner, input, user_seq, options, deadline, accepted_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            turn_id, session_key, TurnState.ACCEPTED, processes.identity(), encoding.clean_text(text), user_seq,
            encoding.encode(options).decode() if options else None, deadline, time.time(),
        ),
    )  # fmt: skip
    return by_key(conn, conn.last_insert_rowid())


def begin(conn: apsw.Connection, session_key: int, turn_id: str, user_seq: int, fence: int, event: int) -> int:
    """Store a turn that starts now with that event; returns its key."""
    return begun(conn, session_key, turn_id, user_seq, fence, event).key


def begun(
    conn: apsw.Connection,
    session_key: int,
    turn_id: str,
    user_seq: int,
    fence: int,
    event: int,
    *,
    options: dict[str, Any] | None = None,
    deadline: float | None = None,
) -> TurnRecord:
    """The same, for a turn that was told more; returns it."""
    now, owner = time.time(), processes.identity()
    conn.execute(
        "INSERT INTO turns (id, session_key, state, owner, user_seq, attempts, fence, first_event, accepted_at,"
        f" started_at, options, deadline, usage) VALUES (?, ?, ?, ?, ?, 1, ?, ?, ?, ?, ?, ?, {_COUNT_FROM})",
        (
            turn_id, session_key, TurnState.RUNNING, owner, user_seq, fence, event, now, now,
            encoding.encode(options).decode() if options else None, deadline, session_key,
        ),
    )  # fmt: skip
    return TurnRecord(
        conn.last_insert_rowid(), turn_id, session_key, TurnState.RUNNING, owner, None, user_seq, None, 1, 0,
        None, None, None, options or {}, deadline, None, now, None, (), event,
    )  # fmt: skip


def start(conn: apsw.Connection, turn_key: int, user_seq: int, fence: int, event: int) -> None:
    """Turn an accepted message into a turn that runs from that event on; its row is number `user_seq`.

    Raises `StoreError` when it does not wait any more.
    """
    conn.execute(
        "UPDATE turns SET state = ?, owner = ?, input = NULL, user_seq = ?, attempts = attempts + 1, fence = ?,"
        f" first_event = ?, started_at = ?, usage = {_COUNT_FROM.replace('?', 'session_key')}"
        f" WHERE key = ? AND state = '{TurnState.ACCEPTED}'",
        (TurnState.RUNNING, processes.identity(), user_seq, fence, event, time.time(), turn_key),
    )
    if conn.changes() != 1:
        raise errors.StoreError("the message was withdrawn, or is being answered already")


def put_off(conn: apsw.Connection, turn_key: int, reason: str, error: str | None, retry_at: float) -> None:
    """A running turn failed and waits to be tried again."""
    conn.execute(
        "UPDATE turns SET state = ?, reason = ?, error = ?, retry_at = ? WHERE key = ? AND state = ?",
        (TurnState.WAITING_RETRY, _clean(reason), _clean(error), retry_at, turn_key, TurnState.RUNNING),
    )
    if conn.changes() != 1:
        raise errors.StoreError("the turn does not run any more")


def give_up(conn: apsw.Connection, turn_key: int, state: TurnState, reason: str, prose: str) -> bool:
    """End a turn that waits to be tried again; False when it does not."""
    conn.execute(
        f"UPDATE turns SET state = ?, reason = ?, prose = ?, retry_at = NULL, ended_at = ?, usage = {_COUNTED},"
        " end_seq = (SELECT s.last_seq FROM sessions s WHERE s.key = session_key) WHERE key = ? AND state = ?",
        (state, _clean(reason), _clean(prose), time.time(), turn_key, TurnState.WAITING_RETRY),
    )
    return conn.changes() == 1


def retry(conn: apsw.Connection, turn_key: int, fence: int) -> None:
    """Begin the next attempt of a turn that waited for it; counted in the same write."""
    conn.execute(
        "UPDATE turns SET state = ?, owner = ?, fence = ?, attempts = attempts + 1, retry_at = NULL, reason = NULL,"
        " error = NULL WHERE key = ? AND state = ?",
        (TurnState.RUNNING, processes.identity(), fence, turn_key, TurnState.WAITING_RETRY),
    )
    if conn.changes() != 1:
        raise errors.StoreError("the turn does not wait for another attempt")


def ask_to_stop(conn: apsw.Connection, turn_key: int, reason: str) -> None:
    """Store why a running turn shall end; it stays open until whoever runs it ends it."""
    conn.execute(
        "UPDATE turns SET reason = ? WHERE key = ? AND state IN (?, ?)",
        (reason, turn_key, TurnState.RUNNING, TurnState.WAITING_APPROVAL),
    )


def wait_for_approval(conn: apsw.Connection, turn_key: int, *, waits: bool) -> None:
    """Say that a running turn waits for a person, or does not any more."""
    states = (TurnState.RUNNING, TurnState.WAITING_APPROVAL)
    conn.execute("UPDATE turns SET state = ? WHERE key = ? AND state = ?", (states[waits], turn_key, states[not waits]))


def withdraw(
    conn: apsw.Connection, turn_key: int, reason: str, state: TurnState = TurnState.CANCELLED, prose: str | None = None
) -> bool:
    """End a turn whose message has not begun to be answered; False if it has."""
    conn.execute(
        "UPDATE turns SET state = ?, reason = ?, prose = ?, ended_at = ?, usage = NULL WHERE key = ? AND state = ?",
        (state, _clean(reason), _clean(prose), time.time(), turn_key, TurnState.ACCEPTED),
    )
    return conn.changes() == 1


def resume(conn: apsw.Connection, turn_key: int, fence: int, *, to_go_on: bool = True) -> None:
    """Take over a turn whose process died; counts as a resume if it shall go on and did not just wait for a person.

    Raises `StoreError` when the turn has ended.
    """
    conn.execute(
        "UPDATE turns SET state = ?, owner = ?, fence = ?,"
        f" crash_resumes = crash_resumes + iif(state = '{TurnState.WAITING_APPROVAL}', 0, ?)"
        f" WHERE key = ? AND state IN ({_OPEN})",
        (TurnState.RUNNING, processes.identity(), fence, int(to_go_on), turn_key),
    )
    if conn.changes() != 1:
        raise errors.StoreError("the turn has ended; there is nothing to go on with")


def park(conn: apsw.Connection, turn_key: int, fence: int) -> None:
    """Leave a running turn to the next process, on purpose: going on with it is no resume after a crash."""
    conn.execute(
        f"UPDATE turns SET crash_resumes = crash_resumes - 1 WHERE key = ? AND fence = ? AND state IN ({_OPEN})",
        (turn_key, fence),
    )


def end(
    conn: apsw.Connection,
    turn_key: int,
    state: TurnState,
    end_seq: int,
    reason: str | None,
    error: str | None,
    prose: str | None = None,
) -> None:
    """Close a turn; a turn that is closed stays as it is."""
    conn.execute(
        f"UPDATE turns SET state = ?, end_seq = ?, reason = ?, error = ?, prose = ?, ended_at = ?, usage = {_COUNTED}"
        f" WHERE key = ? AND state IN ({_OPEN})",
        (state, end_seq, _clean(reason), _clean(error), _clean(prose), time.time(), turn_key),
    )


def open_turns(conn: apsw.Connection, session_key: int) -> list[TurnRecord]:
    """The session's turns that have not ended, oldest first."""
    rows = conn.execute(
        f"SELECT {_COLUMNS} FROM turns WHERE session_key = ? AND state IN ({_OPEN}) ORDER BY key",
        (session_key,),
    )
    return [_record(values) for values in rows]


def find(conn: apsw.Connection, turn_id: str) -> TurnRecord | None:
    """The turn of that public id, or of one unambiguous beginning of it of at least 24 hex digits."""
    for values in conn.execute(f"SELECT {_COLUMNS} FROM turns WHERE id = ?", (turn_id,)):
        return _record(values)
    if len(turn_id) < _SHORTEST:
        return None
    rows = conn.execute(f"SELECT {_COLUMNS} FROM turns WHERE id > ?1 AND id < ?1 || 'g' LIMIT 2", (turn_id,)).fetchall()
    return _record(rows[0]) if len(rows) == 1 else None


_SHORTEST = len("turn_") + 24


def by_key(conn: apsw.Connection, turn_key: int) -> TurnRecord:
    """The turn of that key, which must be there."""
    for values in conn.execute(f"SELECT {_COLUMNS} FROM turns WHERE key = ?", (turn_key,)):
        return _record(values)
    raise errors.StoreError("the turn is gone")


def outcomes(conn: apsw.Connection, session_key: int) -> dict[int, str]:
    """Why turns ended without an answer, by the number of the last row each of them left."""
    rows = conn.execute(
        "SELECT end_seq, state, reason FROM turns WHERE session_key = ? AND state IN (?, ?, ?)",
        (session_key, TurnState.FAILED, TurnState.CANCELLED, TurnState.EXPIRED),
    )
    return {seq: reason or state for seq, state, reason in rows if seq is not None}


def propose(conn: apsw.Connection, turn_key: int, proposals: list[Proposal], fence: int) -> None:
    """Store the calls of one reply."""
    conn.executemany(
        "INSERT INTO tool_calls (turn_key, step, idx, call_id, name, effect, state, fence)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (turn_key, p.key.step, p.key.index, _clean(p.call_id), _clean(p.name), p.effect, CallState.PROPOSED, fence)
            for p in proposals
        ],
    )


def mark_started(conn: apsw.Connection, turn_key: int, key: CallKey, fence: int) -> None:
    """Store that a call is about to be dispatched."""
    conn.execute(
        "UPDATE tool_calls SET state = ?, fence = ?, attempt = attempt + 1 WHERE turn_key = ? AND step = ? AND idx = ?"
        f" AND state IN ('{CallState.PROPOSED}', '{CallState.STARTED}')",
        (CallState.STARTED, fence, turn_key, key.step, key.index),
    )
    _moved(conn, key, CallState.STARTED)


def mark_finished(conn: apsw.Connection, turn_key: int, key: CallKey, result: str, fence: int) -> None:
    """Keep the result of a call that waits for an earlier one of its batch."""
    conn.execute(
        "UPDATE tool_calls SET state = ?, result = ?, fence = ? WHERE turn_key = ? AND step = ? AND idx = ?"
        f" AND state = '{CallState.STARTED}'",
        (CallState.FINISHED, _clean(result), fence, turn_key, key.step, key.index),
    )
    _moved(conn, key, CallState.FINISHED)


def mark_done(
    conn: apsw.Connection, turn_key: int, key: CallKey, state: CallState, result_seq: int, fence: int
) -> None:
    """Store that a call's result is row `result_seq`; `state` is DONE or UNKNOWN."""
    conn.execute(
        "UPDATE tool_calls SET state = ?, result = NULL, result_seq = ?, fence = ?"
        f" WHERE turn_key = ? AND step = ? AND idx = ? AND state NOT IN ('{CallState.DONE}', '{CallState.UNKNOWN}')",
        (state, result_seq, fence, turn_key, key.step, key.index),
    )
    _moved(conn, key, state)


def _moved(conn: apsw.Connection, key: CallKey, state: CallState) -> None:
    """A call moves forward only; anything else is a fault of the program and is not stored."""
    if conn.changes() != 1:
        raise errors.StoreError(f"call {key.step}.{key.index} cannot become {state}: the ledger says otherwise")


def calls(conn: apsw.Connection, turn_key: int, step: int | None = None) -> list[CallRecord]:
    """The ledger of a turn (or of one step of it), in call order."""
    rows = conn.execute(
        "SELECT step, idx, call_id, name, effect, state, result FROM tool_calls"
        " WHERE turn_key = ?1 AND (?2 IS NULL OR step = ?2) ORDER BY step, idx",
        (turn_key, step),
    )
    return [
        CallRecord(CallKey(step_, idx), call_id, name, effect, _state(CallState, state), result)
        for step_, idx, call_id, name, effect, state, result in rows
    ]


def last_step(conn: apsw.Connection, turn_key: int) -> int:
    """The highest step number of a turn, 0 before its first call."""
    for (value,) in conn.execute("SELECT max(step) FROM tool_calls WHERE turn_key = ?", (turn_key,)):
        return value or 0
    return 0


def unknown_effects(conn: apsw.Connection) -> int:
    """How many calls are in doubt."""
    for (count,) in conn.execute(f"SELECT count(*) FROM tool_calls WHERE state = '{CallState.UNKNOWN}'"):
        return count
    return 0
