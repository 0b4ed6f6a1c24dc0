"""Deliberate faults of the durable protocol, put into one life, to show that the checks would see them.

A mutant replaces a function of a loaded module, so it may only be applied in a process that
dies afterwards. Each names the kind of trial that can catch it and the points to begin with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import apsw

from hermes_agent import log
from hermes_agent.agent import journal, publish, run, tool_executor, turn_loop
from hermes_agent.delivery import runner
from hermes_agent.store import leases, messages, processes, session_db, sessions, turns, writer
from hermes_agent.store.turns import CallKey, CallState, TurnState
from hermes_agent.store.writer import Batch, TurnEnd
from hermes_agent.transcript import rows


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: what it does, how it is put in, and where it shows."""

    what: str
    apply: Callable[[], None]
    kind: str = "kill"
    """`kill`, `zombie` (a frozen owner wakes up), `poison` (dies in each life) or `crowd` (many resume at once)."""
    focus: tuple[str, ...] = ()
    """Failpoints to kill at first; the others come after."""


MUTANTS: dict[str, Mutant] = {}


Apply = Callable[[], None]


def _mutant(what: str, *, kind: str = "kill", focus: tuple[str, ...] = ()) -> Callable[[Apply], Apply]:
    def add(apply: Apply) -> Apply:
        MUTANTS[apply.__name__] = Mutant(what, apply, kind, focus)
        return apply

    return add


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(old)` in the place of `owner.name`."""
    setattr(owner, name, make(getattr(owner, name)))


def _always(value: Any) -> Callable[[Any], Any]:
    """In the place of a function: one that does nothing and returns `value`."""

    def make(_old: Any) -> Any:
        def stub(*_: Any, **__: Any) -> Any:
            return value

        return stub

    return make


# -- what is shown before it is stored -----------------------------------------------------


@_mutant("the final text is shown before its row is stored", focus=("turn.before_end",))
def final_shown_before_stored() -> None:
    def make(old: Any) -> Any:
        def answer(agent: Any, turn: Any, reply: Any) -> Any:
            publish.publish(agent.interim_assistant_callback, reply.content)
            return old(agent, turn, reply)

        return answer

    _replace(turn_loop, "_answer", make)


@_mutant("a tool's result is shown before its row is stored", focus=("executor.before_row",))
def result_shown_before_stored() -> None:
    def make(old: Any) -> Any:
        def commit(self: Any, slot: Any) -> Any:
            content = self._value(slot.outcome)
            publish.publish(self._agent.tool_complete_callback, slot.call_id, slot.name, slot.args, content)
            return old(self, slot)

        return commit

    _replace(tool_executor._Run, "_commit", make)


@_mutant("the text beside tool calls is shown before its row is stored", focus=("loop.before_proposals",))
def interim_shown_before_stored() -> None:
    def make(old: Any) -> Any:
        def tool_round(agent: Any, turn: Any, reply: Any) -> Any:
            if reply.content:
                publish.publish(agent.interim_assistant_callback, reply.content)
            return old(agent, turn, reply)

        return tool_round

    _replace(turn_loop, "_tool_round", make)


@_mutant("a message is acknowledged before it is stored", focus=("runner.before_admit", "runner.before_accept"))
def ack_before_commit() -> None:
    def make(old: Any) -> Any:
        def admit(self: Any, *given: Any) -> Any:
            admitted = self._notices.admitted
            if not any(isinstance(value, turns.TurnRecord) for value in given):
                admitted("")
            self._notices.admitted = None
            try:
                return old(self, *given)
            finally:
                self._notices.admitted = admitted

        return admit

    _replace(runner.Runner, "_turn", make)
    _replace(runner.Runner, "_wait_in_line", make)


# -- the ledger ----------------------------------------------------------------------------


@_mutant("a call runs without a `started` row", focus=("tool.after_effect", "executor.returned"))
def no_started_row() -> None:
    _replace(journal.Journal, "start", _always(None))


@_mutant("`started` is stored after the call has run", focus=("tool.after_effect",))
def started_after_dispatch() -> None:
    start = journal.Journal.start

    def make(old: Any) -> Any:
        def run_call(self: Any, slot: Any, **how: Any) -> Any:
            outcome = old(self, slot, **how)
            if slot.effect != "pure":
                start(self._agent.journal, [slot.call_id])
            return outcome

        return run_call

    _replace(journal.Journal, "start", _always(None))
    _replace(tool_executor._Run, "_run", make)


@_mutant("an unsafe call that had started runs again on resume", focus=("tool.after_effect", "executor.returned"))
def unsafe_rerun() -> None:
    def make(old: Any) -> Any:
        def known(self: Any, slot: Any) -> Any:
            record = self._agent.journal.record(slot.call_id)
            return None if record is not None and record.state is CallState.STARTED else old(self, slot)

        return known

    _replace(tool_executor._Run, "_known", make)


@_mutant("a call that had started is taken for done on resume", focus=("executor.started", "tool.before_effect"))
def started_taken_for_done() -> None:
    def make(old: Any) -> Any:
        def known(self: Any, slot: Any) -> Any:
            record = self._agent.journal.record(slot.call_id)
            if record is not None and record.state is CallState.STARTED:
                return tool_executor._Outcome('{"append": "surely"}')
            return old(self, slot)

        return known

    _replace(tool_executor._Run, "_known", make)


@_mutant("the calls of a reply are not stored")
def proposals_not_stored() -> None:
    _replace(journal.Journal, "stage_proposals", _always(None))


@_mutant("the calls of a reply are stored in a second transaction", focus=("store.anchored",))
def proposals_separate() -> None:
    def make(old: Any) -> Any:
        def commit(self: Any, batch: Batch) -> Any:
            proposals, batch.proposals = batch.proposals, []
            placed = old(self, batch)
            if proposals:
                old(self, Batch(proposals=proposals))
            return placed

        return commit

    _replace(writer.SessionWriter, "commit", make)


@_mutant("a tool row is stored without the call's new state")
def result_without_ledger_state() -> None:
    _replace(journal.Journal, "stage_result", _always(None))


@_mutant("a tool row and the call's new state are two transactions", focus=("store.anchored",))
def result_separate() -> None:
    def make(old: Any) -> Any:
        def commit(self: Any, batch: Batch) -> Any:
            results, batch.results = batch.results, cast("dict[int, tuple[CallKey, CallState]]", {})
            placed = old(self, batch)
            for index, (key, state) in results.items():
                self._apply(self._done_later(key, state, placed[index]), [("tool.done", "")])
            return placed

        return commit

    def done_later(self: Any, key: CallKey, state: CallState, seq: int) -> Callable[[apsw.Connection], None]:
        return lambda conn: turns.mark_done(conn, self._turn_key, key, state, seq, self.fence)

    cast("Any", writer.SessionWriter)._done_later = done_later
    _replace(writer.SessionWriter, "commit", make)


@_mutant("a result that waits for a slower call is dropped", focus=("executor.finished_kept",))
def finished_dropped() -> None:
    _replace(journal.Journal, "finish", _always(None))


@_mutant("results of a concurrent batch become rows in the order in which they come", focus=("executor.finished_kept",))
def order_by_completion() -> None:
    def make(old: Any) -> Any:
        def drive(self: Any, slots: list[Any], *, parallel: bool) -> None:
            if not parallel:
                old(self, slots, parallel=parallel)
                return
            self._launch(slots, parallel=True)
            waiting = list(slots)
            while waiting:
                ready = next((slot for slot in waiting if slot.outcome is not None), None)
                if ready is None:
                    time.sleep(0.0005)
                    continue
                waiting.remove(ready)
                self._commit(ready)

        return drive

    _replace(tool_executor._Run, "_drive", make)


# -- turns and resumption --------------------------------------------------------------------


@_mutant("the final row and the end of the turn are two transactions", focus=("store.anchored",))
def turn_end_separate() -> None:
    def make(old: Any) -> Any:
        def commit(self: Any, batch: Batch) -> Any:
            end, batch.end = batch.end, cast("TurnEnd | None", None)
            placed = old(self, batch)
            if end is not None:
                old(self, Batch(end=end))
            return placed

        return commit

    _replace(writer.SessionWriter, "commit", make)


@_mutant("a waiting message gets a second turn when it is run by another process", focus=("runner.accepted",))
def no_dedupe() -> None:
    def make(old: Any) -> Any:
        def turn(self: Any, claim: Any, text: str, _accepted: Any) -> Any:
            return old(self, claim, text, None)

        return turn

    _replace(runner.Runner, "_turn", make)


@_mutant("a resumed turn stores its message again", focus=("runner.admitted", "loop.before_model"))
def message_stored_again() -> None:
    def make(old: Any) -> Any:
        def resume(self: Any, claim: Any, record: Any) -> Any:
            for row in claim.rows_since(record.user_seq)[:1]:
                user = rows.user_row(row.fields()["content"], timestamp=time.time())
                claim._turn_key = record.key
                claim.commit(Batch(rows=[session_db.encode_row(user)]))
                claim._turn_key = None
            return old(self, claim, record)

        return resume

    _replace(run.AIAgent, "_resume", make)


@_mutant("a resumed turn begins again at its message", focus=("executor.after_row", "loop.after_model"))
def resume_from_scratch() -> None:
    def make(old: Any) -> Any:
        def turn(self: Any, messages_: list[Any], start: int, *more: Any) -> Any:
            begin = start + 1 if self.journal.writer is not None and self.journal.writer.turn_key is not None else None
            return old(self, messages_[:begin], start, *more)

        return turn

    _replace(run.AIAgent, "_turn", make)
    _replace(turn_loop, "finish_open_calls", _always(None))


@_mutant("what a resumed turn does depends on chance", focus=("executor.finished_kept",))
def resume_by_chance() -> None:
    def make(old: Any) -> Any:
        def known(self: Any, slot: Any) -> Any:
            record = self._agent.journal.record(slot.call_id)
            if record is not None and record.state is CallState.FINISHED and time.monotonic_ns() // 1000 % 2:
                return tool_executor._Outcome("[interrupted]", state=CallState.UNKNOWN, ran=False)
            return old(self, slot)

        return known

    _replace(tool_executor._Run, "_known", make)


@_mutant("a turn that takes the process down is tried for ever", kind="poison", focus=("turn.resumed",))
def no_poison() -> None:
    cast("Any", run).MAX_CRASH_RESUMES = 1000


# -- leases and fences ---------------------------------------------------------------------------


def _adopt_new_head(old: Any) -> Any:
    def call(self: Any, *given: Any) -> Any:
        def head(conn: apsw.Connection) -> sessions.Head | None:
            return sessions.head(conn, self._head.id)

        self._head = self._database.read(head) or self._head
        return old(self, *given)

    return call


@_mutant("a writer whose session was taken over writes on", kind="zombie")
def no_fence() -> None:
    for name in ("commit", "start_calls", "finish_call"):
        _replace(writer.SessionWriter, name, _adopt_new_head)


@_mutant("the lease of a dead process is respected for ever", focus=("executor.started",))
def lease_never_expires() -> None:
    _replace(leases.Holder, "is_live", _always(True))


@_mutant("a lease does not keep others out", kind="crowd")
def no_lease() -> None:
    _replace(leases, "refuse_if_held", _always(None))


@_mutant("a new owner gets the old fence", focus=("executor.started", "loop.before_model"))
def fence_not_raised() -> None:
    def make(_: Any) -> Any:
        def acquire(conn: apsw.Connection, session_key: int, session_id: str) -> int:
            leases.refuse_if_held(conn, session_key, session_id)
            conn.execute("UPDATE sessions SET fence = max(fence, 1) WHERE key = ?", (session_key,))
            fence = sessions.known(conn, session_id).fence
            owner = (processes.identity(), processes.boot_id(), processes.boot_seconds() + leases.TTL)
            conn.execute("INSERT OR REPLACE INTO session_leases VALUES (?, ?, ?, ?, ?)", (session_key, fence, *owner))
            return fence

        return acquire

    _replace(leases, "acquire", make)


# -- the file ------------------------------------------------------------------------------------


@_mutant("rows are stored without their chain")
def chain_not_written() -> None:
    _replace(messages, "link", _always(b"\0" * 16))


@_mutant("the anchor is written before the commit", focus=("store.before_commit",))
def anchor_before_commit() -> None:
    def make(old: Any) -> Any:
        def commit(self: Any, batch: Batch) -> Any:
            placed = messages.place(batch.rows, self._head.last_seq, self._head.head)
            if placed:
                self._anchors.record(self._head.key, placed[-1].seq, placed[-1].hash)
            return old(self, batch)

        return commit

    _replace(writer.SessionWriter, "commit", make)


@_mutant("a stored row is changed by a later commit")
def row_changed() -> None:
    def make(old: Any) -> Any:
        def end(conn: apsw.Connection, turn_key: int, state: TurnState, *more: Any) -> None:
            conn.execute("UPDATE messages SET timestamp = 1 WHERE turn_key = ? AND role = 'user'", (turn_key,))
            old(conn, turn_key, state, *more)

        return end

    _replace(turns, "end", make)


@_mutant("keys are written to the log", focus=("terminal.spawned", "terminal.exited"))
def secret_logged() -> None:
    def make(_: Any) -> Any:
        def redact(text: str, _secrets: Any = ()) -> str:
            return text

        return redact

    _replace(log, "redact", make)
