"""Writing one session: rows, ledger, events and counters that belong together, in one transaction.

A `SessionWriter` holds the session's lease. It knows where the session ends without
asking, and every transaction proves with one conditional UPDATE that this is still so.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import apsw

from hermes_agent import errors, failpoints
from hermes_agent.store import anchors, leases, messages, sessions, turns, usage
from hermes_agent.store.database import Database
from hermes_agent.store.turns import CallKey, CallState, Proposal, TurnRecord, TurnState

Event = tuple[str, str | None]
"""Kind and what it is about."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How a turn ended."""

    state: TurnState
    reason: str | None = None
    error: str | None = None


@dataclass(slots=True)
class Batch:
    """What one commit holds."""

    rows: list[messages.Row] = field(default_factory=list[messages.Row])
    begin: bool = False
    """A new turn begins with the first row."""
    start: int | None = None
    """Key of an accepted turn that begins with the first row."""
    proposals: list[Proposal] = field(default_factory=list[Proposal])
    results: dict[int, tuple[CallKey, CallState]] = field(default_factory=dict[int, tuple[CallKey, CallState]])
    """By index in `rows`: the call whose result that row is, and its new state."""
    usage: usage.UsageDelta | None = None
    end: TurnEnd | None = None

    def __bool__(self) -> bool:
        return bool(self.rows or self.proposals or self.usage or self.end)


class SessionWriter:
    """The right to write one session. Get one with `SessionDB.claim`; not for two threads' rows at once."""

    def __init__(self, database: Database, witness: anchors.Anchors, head: sessions.Head) -> None:
        self._database = database
        self._anchors = witness
        self._head = head
        self._turn_key: int | None = None
        self.turn_id = ""
        """Public id of the turn that runs, or of the last one."""
        self._lock = threading.Lock()
        self.released = False
        _keeper.watch(self)

    @property
    def session_id(self) -> str:
        return self._head.id

    @property
    def session_key(self) -> int:
        return self._head.key

    @property
    def fence(self) -> int:
        return self._head.fence

    @property
    def last_seq(self) -> int:
        """Number of the session's last row."""
        return self._head.last_seq

    @property
    def turn_key(self) -> int | None:
        """Key of the turn that runs, None between turns."""
        return self._turn_key

    # -- turns --------------------------------------------------------------

    def open_turns(self) -> list[TurnRecord]:
        """The session's turns that have not ended, oldest first."""
        return self._database.read(lambda conn: turns.open_turns(conn, self._head.key))

    def take_over(self, turn: TurnRecord, *, to_go_on: bool = True) -> None:
        """Make a dead process's running turn ours: to go on, which is counted durably, or only to end it."""

        def work(conn: apsw.Connection) -> None:
            turns.resume(conn, turn.key, self._head.fence, to_go_on=to_go_on)

        with self._lock:
            self._apply(work, [("turn.resumed", turn.id)])
            self._turn_key, self.turn_id = turn.key, turn.id

    def ledger(self, step: int | None = None) -> list[turns.CallRecord]:
        """The calls of the running turn."""
        key = self._turn_key
        return [] if key is None else self._database.read(lambda conn: turns.calls(conn, key, step))

    def last_step(self) -> int:
        """The highest step number of the running turn, 0 before its first call."""
        key = self._turn_key
        return 0 if key is None else self._database.read(lambda conn: turns.last_step(conn, key))

    def rows_since(self, seq: int) -> list[messages.Stored]:
        """The session's rows from number `seq` on."""
        return self._database.read(lambda conn: list(messages.select(conn, self._head.key, after=seq - 1)))

    # -- writes -------------------------------------------------------------

    def commit(self, batch: Batch) -> list[int]:
        """Make the batch durable; returns the numbers of its rows.

        Raises `StaleLease` when the session was taken over, `StoreError` when the disk
        refuses. When a commit fails half way the file is asked whether it holds the batch.
        """
        with self._lock:
            placed = messages.place(batch.rows, self._head.last_seq, self._head.head)
            begins = batch.begin or batch.start is not None
            turn_id = turns.new_turn_id() if batch.begin else self._accepted_id(batch.start) or self.turn_id
            before: list[Event] = [("turn.running", turn_id)] if begins else []
            after: list[Event] = [] if batch.end is None else [(f"turn.{batch.end.state}", turn_id)]
            first = self._head.last_event + len(before) + 1
            turn_key = self._turn_key

            def work(conn: apsw.Connection) -> None:
                nonlocal turn_key
                if batch.begin:
                    turn_key = turns.begin(conn, self._head.key, turn_id, self._head.last_seq + 1, self._head.fence)
                elif batch.start is not None:
                    turn_key = batch.start
                    turns.start(conn, batch.start, self._head.last_seq + 1, self._head.fence)
                messages.insert(conn, self._head.key, placed, turn_key, first)
                if turn_key is None:
                    return
                self._ledger(conn, turn_key, batch, placed)
                if batch.end is not None:
                    last = placed[-1].seq if placed else self._head.last_seq
                    turns.end(conn, turn_key, batch.end.state, last, batch.end.reason, batch.end.error)

            self._apply(work, before, after, placed, batch.usage, len(batch.proposals))
            self._turn_key, self.turn_id = (None if batch.end is not None else turn_key), turn_id
            if placed:
                self._anchors.record(self._head.key, self._head.last_seq, self._head.head)
                failpoints.hit("store.anchored")
            return [item.seq for item in placed]

    def start_calls(self, keys: Sequence[CallKey]) -> None:
        """Store, durably and before dispatch, that these calls may now run."""

        def work(conn: apsw.Connection) -> None:
            for key in keys:
                turns.mark_started(conn, self._running(), key, self._head.fence)

        with self._lock:
            self._apply(work, [("tool.started", self.call_name(key)) for key in keys])

    def finish_call(self, key: CallKey, result: str) -> None:
        """Keep a result that waits for an earlier call of its batch."""

        def work(conn: apsw.Connection) -> None:
            turns.mark_finished(conn, self._running(), key, result, self._head.fence)

        with self._lock:
            self._apply(work, [("tool.finished", self.call_name(key))])

    def call_name(self, key: CallKey) -> str:
        """The ledger's public id of a call of the running turn: `turn.step.index`."""
        return f"{self.turn_id}.{key.step}.{key.index}"

    def set_system_prompt(self, prompt: str) -> None:
        """Keep the session's system prompt; rides on the next durable commit."""
        key, fence = self._head.key, self._head.fence
        self._database.write(lambda conn: sessions.set_system_prompt(conn, key, fence, prompt), durable=False)

    def renew(self) -> None:
        """Extend the lease; raises `StaleLease` when it is not ours any more."""
        self._database.write(lambda conn: leases.renew(conn, self._head.key, self._head.fence), durable=False)

    def release(self) -> None:
        """Give the session back; a second call does nothing."""
        if self.released:
            return
        self.released = True
        _keeper.forget(self)
        key, fence = self._head.key, self._head.fence
        self._database.write(lambda conn: leases.release(conn, key, fence), durable=False)
        failpoints.hit("lease.released")

    # -- inside -------------------------------------------------------------

    def _running(self) -> int:
        if self._turn_key is None:
            raise errors.StoreError("no turn is running on this session")
        return self._turn_key

    def _accepted_id(self, turn_key: int | None) -> str:
        for turn in self.open_turns() if turn_key is not None else ():
            if turn.key == turn_key:
                return turn.id
        return ""

    def _ledger(self, conn: apsw.Connection, turn_key: int, batch: Batch, placed: list[messages.Placed]) -> None:
        if batch.proposals:
            turns.propose(conn, turn_key, batch.proposals, self._head.fence)
        for index, (key, state) in batch.results.items():
            turns.mark_done(conn, turn_key, key, state, placed[index].seq, self._head.fence)

    def _apply(
        self,
        work: Callable[[apsw.Connection], None],
        before: list[Event],
        after: Sequence[Event] = (),
        placed: Sequence[messages.Placed] = (),
        used: usage.UsageDelta | None = None,
        calls: int = 0,
    ) -> None:
        """Run one transaction under the fence and move the head when it is durable.

        The events `before` and `after` (at most one) stand around those of the placed rows.
        """
        old = self._head
        new = sessions.Head(
            old.key,
            old.id,
            old.fence,
            placed[-1].seq if placed else old.last_seq,
            old.last_event + len(before) + len(placed) + len(after),
            placed[-1].hash if placed else old.head,
        )
        if new.last_event > messages.MAX_SEQ:
            raise errors.StoreError(f"a session holds at most {messages.MAX_SEQ} events; start a new one")
        now = time.time()

        def transaction(conn: apsw.Connection) -> None:
            _move(conn, old, new, now, len(placed), calls, used)
            work(conn)
            for events, first in ((before, old.last_event + 1), (after, new.last_event)):
                for number, (kind, ref) in enumerate(events, first):
                    conn.execute(_EVENT, (messages.row_id(old.key, number), kind, ref, now))
            if used is not None:
                usage.add(conn, old.key, used)

        def landed(conn: apsw.Connection) -> bool:
            return sessions.head(conn, new.id) == new

        self._database.write(transaction, landed=landed if new != old else None, place=old.key)
        self._head = new


def _move(
    conn: apsw.Connection,
    old: sessions.Head,
    new: sessions.Head,
    now: float,
    rows: int,
    calls: int,
    used: usage.UsageDelta | None,
) -> None:
    """Advance the session's row, if it still stands where we left it and is still ours."""
    if used is None:
        values = (new.last_seq, new.last_event, new.head, now, rows, calls, old.key, old.fence, old.last_event)
        conn.execute(_MOVE, values)
    else:
        conn.execute(
            _MOVE_USED,
            (
                new.last_seq, new.last_event, new.head, now, rows, calls,
                used.api_calls, used.input_tokens, used.output_tokens, used.cache_read_tokens,
                used.cache_write_tokens, used.reasoning_tokens,
                old.key, old.fence, old.last_event,
            ),
        )  # fmt: skip
    if conn.changes() != 1:
        raise errors.StaleLease(
            f"session {old.id} was taken over by another process, or moved on by a write that was cut off; "
            "this write was dropped"
        )


_EVENT = "INSERT INTO events VALUES (?, ?, ?, ?)"
_SET = (
    "UPDATE sessions SET last_seq = ?, last_event = ?, head = ?, last_active = ?,"
    " message_count = message_count + ?, tool_call_count = tool_call_count + ?"
)
_WHERE = " WHERE key = ? AND fence = ? AND last_event = ?"
_MOVE = _SET + _WHERE
_MOVE_USED = (
    _SET + ", api_call_count = api_call_count + ?, input_tokens = input_tokens + ?, output_tokens = output_tokens + ?,"
    " cache_read_tokens = cache_read_tokens + ?, cache_write_tokens = cache_write_tokens + ?,"
    " reasoning_tokens = reasoning_tokens + ?" + _WHERE
)


class Appender:
    """Appends to sessions nobody runs a turn on.

    It remembers where the sessions end that it wrote last. The conditional UPDATE that
    moves a session shows whether that still holds: whoever takes the session's lease or
    writes to it changes what the condition compares.
    """

    def __init__(self, database: Database, witness: anchors.Anchors) -> None:
        self._database = database
        self._anchors = witness
        self._ends: dict[str, sessions.Head] = {}

    def append(self, session_id: str, rows: Sequence[messages.Row]) -> list[int]:
        """Append rows; returns their ids.

        Raises `SessionBusy` while a turn runs, since the rows would fall into the middle of it.
        """
        if not rows:
            return []
        remembered = self._ends.pop(session_id, None)
        new = remembered

        def work(conn: apsw.Connection) -> sessions.Head:
            nonlocal new
            if remembered is not None:
                with suppress(errors.StaleLease):
                    new = _append(conn, remembered, rows)
                    return new
            old = sessions.known(conn, session_id)
            leases.refuse_if_held(conn, old.key, session_id)
            self._anchors.check_end(old.key, session_id, old.last_seq)
            new = _append(conn, old, rows)
            return new

        def landed(conn: apsw.Connection) -> bool:
            return new is not None and messages.hash_of(conn, new.key, new.last_seq) == new.head

        head = self._database.write(work, landed=landed, place=0 if remembered is None else remembered.key)
        self._anchors.record(head.key, head.last_seq, head.head)
        if len(self._ends) < _REMEMBERED:
            self._ends[session_id] = head
        return [messages.row_id(head.key, seq) for seq in range(head.last_seq - len(rows) + 1, head.last_seq + 1)]


_REMEMBERED = 64


def _append(conn: apsw.Connection, old: sessions.Head, rows: Sequence[messages.Row]) -> sessions.Head:
    placed = messages.place(rows, old.last_seq, old.head)
    last = placed[-1]
    new = sessions.Head(old.key, old.id, old.fence, last.seq, old.last_event + len(placed), last.hash)
    now = time.time()
    _move(conn, old, new, now, len(placed), 0, None)
    messages.insert(conn, old.key, placed, None, old.last_event + 1)
    return new


class _Keeper:
    """Renews the leases of this process from one daemon thread, while there are any.

    A writer that nobody refers to any more is not renewed; its lease runs out.
    """

    def __init__(self) -> None:
        self._writers: weakref.WeakSet[SessionWriter] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, writer: SessionWriter) -> None:
        with self._changed:
            self._writers.add(writer)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="hermes-leases", daemon=True)
                self._thread.start()

    def forget(self, writer: SessionWriter) -> None:
        with self._changed:
            self._writers.discard(writer)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(leases.RENEW_EVERY)
                writers = list(self._writers)
                if not writers:
                    self._thread = None
                    return
            while writers:
                writer = writers.pop()
                try:
                    writer.renew()
                except errors.StaleLease:
                    self.forget(writer)
                except errors.HermesError:
                    # a busy disk gets the next round; the writer learns the rest from its next commit
                    continue
                finally:
                    del writer


_keeper = _Keeper()


def _renew_keeper() -> None:
    global _keeper  # noqa: PLW0603 - the parent's writers and thread did not come along
    _keeper = _Keeper()


os.register_at_fork(after_in_child=_renew_keeper)
