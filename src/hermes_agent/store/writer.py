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
from typing import Any

import apsw

from hermes_agent import errors, failpoints
from hermes_agent.store import anchors, approvals, leases, messages, sessions, turns, usage
from hermes_agent.store.approvals import ApprovalRecord, ApprovalState
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
    prose: str | None = None
    """What the person reads when there was no answer."""


@dataclass(frozen=True, slots=True)
class PutOff:
    """A failed attempt whose turn shall be tried again."""

    reason: str
    error: str | None
    retry_at: float
    """Wall-clock seconds."""


@dataclass(slots=True)
class Batch:
    """What one commit holds."""

    rows: list[messages.Row] = field(default_factory=list[messages.Row])
    begin: bool = False
    """A new turn begins with the first row."""
    resume: TurnRecord | None = None
    """An accepted turn, or one that waits to be tried again, that runs from now on."""
    put_off: PutOff | None = None
    proposals: list[Proposal] = field(default_factory=list[Proposal])
    results: dict[int, tuple[CallKey, CallState]] = field(default_factory=dict[int, tuple[CallKey, CallState]])
    """By index in `rows`: the call whose result that row is, and its new state."""
    usage: usage.UsageDelta | None = None
    end: TurnEnd | None = None

    def __bool__(self) -> bool:
        return bool(self.rows or self.proposals or self.usage or self.end or self.put_off)


class SessionWriter:
    """The right to write one session. Get one with `SessionDB.claim`; not for two threads' rows at once."""

    def __init__(
        self,
        database: Database,
        witness: anchors.Anchors,
        head: sessions.Head,
        turn: tuple[int | None, str] = (None, ""),
    ) -> None:
        self._database = database
        self._anchors = witness
        self._head = head
        self._turn_key, self.turn_id = turn
        """Public id of the turn that runs, or of the last one."""
        self.release_at_end = False
        """Give the lease back in the very commit that ends the turn."""
        self._lock = threading.Lock()
        self._prompt: str | None = None
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

    def asks_about(self, key: CallKey) -> bool:
        """Whether a started call of the running turn still waits for a person, so that it has provably not run."""
        turn = self._turn_key
        if turn is None:
            return False
        name = self.call_name(key)
        asked = self._database.read(lambda conn: approvals.of_call(conn, turn, name))
        return bool(asked) and asked[-1].used_at is None

    def last_step(self) -> int:
        """The highest step number of the running turn, 0 before its first call."""
        key = self._turn_key
        return 0 if key is None else self._database.read(lambda conn: turns.last_step(conn, key))

    def conversation(self) -> list[dict[str, Any]]:
        """The session as chat messages, as `SessionDB.get_messages_as_conversation` gives them.

        It costs less: under the lease nobody else writes, so the session's end need not be asked for.
        Raises `StaleLease` when the session was taken over.
        """
        head = self._head

        def work(conn: apsw.Connection) -> tuple[list[dict[str, Any]], dict[int, str]]:
            active = sessions.active_rows(conn, head.key, head.fence)
            if active is None:
                raise _stale(head)
            found = messages.conversation(conn, head.key, last_seq=head.last_seq, head=head.head, active=active)
            return found, turns.outcomes(conn, head.key)

        found, outcomes = self._database.read(work)
        for row in found if outcomes else ():
            if row["_seq"] in outcomes:
                row["_turn_outcome"] = outcomes[row["_seq"]]
        return found

    def rows_since(self, seq: int) -> list[messages.Stored]:
        """The session's rows from number `seq` on."""
        return self._database.read(lambda conn: list(messages.select(conn, self._head.key, after=seq - 1)))

    def park(self) -> None:
        """Leave the running turn open for the next process, which will not count that as a crash."""
        key, fence = self._turn_key, self._head.fence
        if key is not None:
            self._database.write(lambda conn: turns.park(conn, key, fence))

    # -- writes -------------------------------------------------------------

    def commit(self, batch: Batch) -> list[int]:
        """Make the batch durable; returns the numbers of its rows.

        Raises `StaleLease` when the session was taken over, `StoreError` when the disk
        refuses. When a commit fails half way the file is asked whether it holds the batch.
        """
        with self._lock:
            placed = messages.place(batch.rows, self._head.last_seq, self._head.head)
            turn_id = batch.resume.id if batch.resume else turns.new_turn_id() if batch.begin else self.turn_id
            before: list[Event] = [("turn.running", turn_id)] if batch.begin or batch.resume else []
            after = _closing(batch, turn_id)
            first = self._head.last_event + len(before) + 1
            turn_key = self._turn_key

            def work(conn: apsw.Connection) -> None:
                nonlocal turn_key
                if batch.begin:
                    head = self._head
                    turn_key = turns.begin(conn, head.key, turn_id, head.last_seq + 1, head.fence, head.last_event + 1)
                elif batch.resume is not None:
                    turn_key = self._resume(conn, batch.resume)
                messages.insert(conn, self._head.key, placed, turn_key, first)
                if turn_key is not None:
                    self._ledger(conn, turn_key, batch, placed)
                    self._close(conn, turn_key, batch, placed[-1].seq if placed else self._head.last_seq)

            self._apply(work, before, after, placed, batch.usage, len(batch.proposals))
            closes = batch.end is not None or batch.put_off is not None
            self._turn_key, self.turn_id = (None if closes else turn_key), turn_id
            if closes and self.release_at_end:
                self._forget()
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

    def ask(self, call_id: str, kind: str, request: dict[str, Any], seconds: float) -> ApprovalRecord:
        """Store a question of the running turn to a person, or find the one that its call asks already."""
        with self._lock:
            turn = self._running()
            record = self._database.read(lambda conn: approvals.asked(conn, turn, call_id, request))
            if record is not None and record.state is not ApprovalState.PENDING:
                return record
            question = approvals.new_approval_id() if record is None else record.id

            def work(conn: apsw.Connection) -> None:
                turns.wait_for_approval(conn, turn, waits=True)
                if record is None:
                    approvals.ask(conn, question, turn, call_id, kind, request, time.time() + seconds)

            self._apply(work, [self._question(question, call_id, "requested")] if record is None else [])
            return self._database.read(lambda conn: approvals.known(conn, question))

    def settle_question(self, record: ApprovalRecord, *, given_up: bool = False) -> ApprovalRecord:
        """Use up a decision, once, or close a question whose time is over or that was given up; the turn goes on.

        Raises `StoreError` when it was used up before, or is not decided at all.
        """
        with self._lock:
            turn = self._running()

            def work(conn: apsw.Connection) -> None:
                approvals.close(conn, ApprovalState.EXPIRED, turn_key=turn, before=time.time())
                if given_up:
                    approvals.close(conn, ApprovalState.CANCELLED, turn_key=turn)
                if not approvals.use(conn, record.id):
                    raise errors.StoreError("this question is open, or what was decided was used up before")
                turns.wait_for_approval(conn, turn, waits=bool(approvals.waiting(conn, turn)))

            self._apply(work, [self._question(record.id, record.call_id, "decided")])
            return self._database.read(lambda conn: approvals.known(conn, record.id))

    def _question(self, approval_id: str, call_id: str, what: str) -> Event:
        return f"approval.{what}", f"{call_id or self.turn_id}.{approval_id}"

    def call_name(self, key: CallKey) -> str:
        """The ledger's public id of a call of the running turn: `turn.step.index`."""
        return f"{self.turn_id}.{key.step}.{key.index}"

    def system_prompt(self) -> str:
        """The session's system prompt, "" when none is stored."""
        if self._prompt is None:
            with self._database.reading() as conn:
                self._prompt = sessions.prompt_of(conn, self._head.key)
        return self._prompt

    def set_system_prompt(self, prompt: str) -> None:
        """Keep the session's system prompt; rides on the next durable commit."""
        key, fence = self._head.key, self._head.fence
        self._database.write(lambda conn: sessions.set_system_prompt(conn, key, fence, prompt), durable=False)
        self._prompt = prompt

    def renew(self) -> None:
        """Extend the lease; raises `StaleLease` when it is not ours any more."""
        self._database.write(lambda conn: leases.renew(conn, self._head.key, self._head.fence), durable=False)

    def release(self) -> None:
        """Give the session back; once that is done, a second call does nothing. The lease is not renewed any more."""
        if self.released:
            return
        _keeper.forget(self)
        key, fence = self._head.key, self._head.fence
        self._database.write(lambda conn: leases.release(conn, key, fence), durable=False)
        self.released = True
        failpoints.hit("lease.released")

    # -- inside -------------------------------------------------------------

    def _running(self) -> int:
        if self._turn_key is None or self.released:
            raise errors.StoreError("no turn is running on this session")
        return self._turn_key

    def _resume(self, conn: apsw.Connection, turn: TurnRecord) -> int:
        if turn.state is TurnState.ACCEPTED:
            head = self._head
            turns.start(conn, turn.key, turn.user_seq or head.last_seq + 1, head.fence, head.last_event + 1)
        else:
            turns.retry(conn, turn.key, self._head.fence)
        return turn.key

    def _ledger(self, conn: apsw.Connection, turn_key: int, batch: Batch, placed: list[messages.Placed]) -> None:
        if batch.proposals:
            turns.propose(conn, turn_key, batch.proposals, self._head.fence)
        for index, (key, state) in batch.results.items():
            turns.mark_done(conn, turn_key, key, state, placed[index].seq, self._head.fence)

    def _close(self, conn: apsw.Connection, turn_key: int, batch: Batch, last: int) -> None:
        """End the turn, or put it off, and give the lease back if that was wished."""
        if batch.end is not None:
            end = batch.end
            turns.end(conn, turn_key, end.state, last, end.reason, end.error, end.prose)
            approvals.close(conn, ApprovalState.CANCELLED, turn_key=turn_key)
        elif batch.put_off is not None:
            turns.put_off(conn, turn_key, batch.put_off.reason, batch.put_off.error, batch.put_off.retry_at)
        else:
            return
        if self.release_at_end:
            leases.release(conn, self._head.key, self._head.fence)

    def _forget(self) -> None:
        self.released = True
        _keeper.forget(self)

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


def _closing(batch: Batch, turn_id: str) -> list[Event]:
    """The event with which a batch ends."""
    if batch.end is not None:
        return [(f"turn.{batch.end.state}", turn_id)]
    return [] if batch.put_off is None else [(f"turn.{TurnState.WAITING_RETRY}", turn_id)]


def begin_turn(
    conn: apsw.Connection,
    old: sessions.Head,
    rows: Sequence[messages.Row],
    turn_id: str,
    *,
    user_seq: int | None = None,
    options: dict[str, Any] | None = None,
    deadline: float | None = None,
) -> tuple[sessions.Head, TurnRecord]:
    """Begin a turn on a session whose lease was just taken; part of the caller's transaction.

    `rows` is the user's row, or nothing when row `user_seq` holds it already. Returns the
    session's new head and the turn.
    """
    placed = messages.place(rows, old.last_seq, old.head)
    last_seq, chain = (placed[-1].seq, placed[-1].hash) if placed else (old.last_seq, old.head)
    new = sessions.Head(old.key, old.id, old.fence, last_seq, old.last_event + 1 + len(placed), chain)
    if new.last_event > messages.MAX_SEQ:
        raise errors.StoreError(f"a session holds at most {messages.MAX_SEQ} events; start a new one")
    now = time.time()
    _move(conn, old, new, now, len(placed), 0, None)
    event = old.last_event + 1
    turn = turns.begun(
        conn, old.key, turn_id, user_seq or last_seq, old.fence, event, options=options, deadline=deadline
    )
    conn.execute(_EVENT, (messages.row_id(old.key, event), "turn.running", turn_id, now))
    messages.insert(conn, old.key, placed, turn.key, event + 1)
    return new, turn


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
        raise _stale(old)


def _stale(head: sessions.Head) -> errors.StaleLease:
    return errors.StaleLease(
        f"session {head.id} was taken over by another process, or moved on by a write that was cut off; "
        "nothing was written"
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
                    new = append(conn, remembered, rows)
                    return new
            old = sessions.known(conn, session_id)
            leases.refuse_if_held(conn, old.key, session_id)
            self._anchors.check_end(old.key, session_id, old.last_seq)
            new = append(conn, old, rows)
            return new

        def landed(conn: apsw.Connection) -> bool:
            return new is not None and messages.hash_of(conn, new.key, new.last_seq) == new.head

        head = self._database.write(work, landed=landed, place=0 if remembered is None else remembered.key)
        self._anchors.record(head.key, head.last_seq, head.head)
        if len(self._ends) < _REMEMBERED:
            self._ends[session_id] = head
        return [messages.row_id(head.key, seq) for seq in range(head.last_seq - len(rows) + 1, head.last_seq + 1)]


_REMEMBERED = 64


def append(conn: apsw.Connection, old: sessions.Head, rows: Sequence[messages.Row]) -> sessions.Head:
    """Append rows of nobody's turn, at least one; part of the caller's transaction. Returns the session's new head."""
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
