"""Running the calls of one reply: one code path, sequential, concurrent or segmented.

For each call: parse, store `started` (all but pure tools), run, then in call order append
the tool row, flush it together with the call's state, and only then show it. When a flush
says False nothing more is shown, dispatched or appended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hermes_agent import failpoints
from hermes_agent.agent import plan
from hermes_agent.agent.control import TurnControl
from hermes_agent.agent.journal import Journal
from hermes_agent.agent.publish import publish
from hermes_agent.agent.tool_dispatch_helpers import make_tool_result_message
from hermes_agent.agent.workers import MAX_WORKERS, Workers
from hermes_agent.errors import HermesError
from hermes_agent.store.turns import CallState
from hermes_agent.tools import results
from hermes_agent.tools.registry import Effect, ToolEntry, registry
from hermes_agent.tools.results import ResultBudget, TurnBudget, maybe_persist_tool_result
from hermes_agent.transcript import rows
from hermes_agent.transcript.rows import ArgumentsError

Message = dict[str, Any]

CALL_SECONDS = 420.0
"""Deadline of a call whose tool declares none."""
GRACE_SECONDS = 2.0
"""How long running calls may take to notice that the turn was stopped."""


class Host(Protocol):
    """What the executor needs of the agent that runs the turn."""

    control: TurnControl
    journal: Journal
    workers: Workers
    result_budget: ResultBudget
    valid_tool_names: set[str]
    tool_start_callback: Callable[..., Any] | None
    tool_complete_callback: Callable[..., Any] | None
    tool_progress_callback: Callable[..., Any] | None

    def _flush_messages_to_session_db(self, messages: list[Message]) -> bool | None: ...
    def note_persistence_failure(self, error: Exception | None) -> None: ...
    @property
    def persistence_failed(self) -> bool: ...
    @property
    def working_directory(self) -> Path: ...
    def dispatch_sequential(self, name: str, args: dict[str, Any], task_id: str, call_id: str) -> Any: ...
    def dispatch_concurrent(
        self, name: str, args: dict[str, Any], task_id: str, call_id: str, messages: list[Message]
    ) -> Any: ...


@dataclass(slots=True)
class _Outcome:
    """What became of a call."""

    value: Any = None
    error: BaseException | None = None
    state: CallState = CallState.DONE
    disposition: str | None = None
    ran: bool = True
    stored: bool = False
    """Its result is durable: as its row, or in the ledger while it waits for an earlier call."""


@dataclass(slots=True)
class _Slot:
    """One call on its way through the executor."""

    call_id: str
    name: str
    args: dict[str, Any]
    entry: ToolEntry | None
    effect: Effect
    outcome: _Outcome | None = None
    started_at: float = 0.0
    deadline: float | None = None
    running: bool = field(default=False)


def execute_tool_calls_sequential(
    agent: Host,
    assistant_message: Any,
    messages: list[Message],
    effective_task_id: str,
    api_call_count: int = 0,  # noqa: ARG001
) -> None:
    """Run the calls one after the other; each result is durable before the next dispatch."""
    _Run(agent, messages, effective_task_id, TurnBudget(agent.result_budget)).segment(
        plan.calls_of(assistant_message), parallel=False
    )


def execute_tool_calls_concurrent(
    agent: Host,
    assistant_message: Any,
    messages: list[Message],
    effective_task_id: str,
    api_call_count: int = 0,  # noqa: ARG001
) -> None:
    """Run the calls side by side; results become rows in call order, each as early as that allows."""
    _Run(agent, messages, effective_task_id, TurnBudget(agent.result_budget)).segment(
        plan.calls_of(assistant_message), parallel=True
    )


def execute_tool_calls_segmented(
    agent: Host,
    assistant_message: Any,
    messages: list[Message],
    effective_task_id: str,
    api_call_count: int = 0,  # noqa: ARG001 - part of the published signature
    segments: Sequence[tuple[str, Sequence[Any]]] | None = None,
) -> None:
    """Run the calls in segments ("parallel" or "sequential"), planned here unless they are given."""
    if segments is None:
        segments = plan.segments(plan.calls_of(assistant_message), agent.working_directory)
    run = _Run(agent, messages, effective_task_id, TurnBudget(agent.result_budget))
    for kind, calls in segments:
        if agent.persistence_failed:
            return
        run.segment(list(calls), parallel=kind == "parallel")


class _Run:
    """The execution of one batch."""

    def __init__(self, agent: Host, messages: list[Message], task_id: str, budget: TurnBudget) -> None:
        self._agent = agent
        self._messages = messages
        self._task_id = task_id
        self._budget = budget
        self._changed = threading.Condition()

    def segment(self, calls: Sequence[Any], *, parallel: bool) -> None:
        """Run one segment to its end, or to the first row that could not be stored."""
        slots = [self._slot(call) for call in calls]
        try:
            self._drive(slots, parallel=parallel)
        except BaseException:
            self._leave(slots)
            raise

    # -- the one loop -------------------------------------------------------

    def _drive(self, slots: list[_Slot], *, parallel: bool) -> None:
        committed = launched = 0
        while committed < len(slots):
            if self._agent.persistence_failed:
                return
            if committed < launched and slots[committed].outcome is not None:
                if not self._commit(slots[committed]):
                    return
                committed += 1
                continue
            room = MAX_WORKERS - sum(slot.running for slot in slots) if parallel else 1 - (launched - committed)
            batch = slots[launched : launched + room] if room > 0 else []
            if batch:
                if not self._launch(batch, parallel=parallel):
                    return
                launched += len(batch)
                continue
            self._wait(slots[committed:launched])
            if not self._keep_finished(slots[committed:launched]):
                return

    def _launch(self, batch: list[_Slot], *, parallel: bool) -> bool:
        """Dispatch calls that may run; the others get their outcome at once."""
        cancellation = self._agent.control.cancellation
        for slot in batch:
            if slot.outcome is None and cancellation.requested:
                why = cancellation.reason
                slot.outcome = _Outcome(f"[cancelled: {slot.name} was skipped, {why}]", disposition="none", ran=False)
        todo = [slot for slot in batch if slot.outcome is None]
        failpoints.hit("executor.before_start")
        try:
            self._agent.journal.start([slot.call_id for slot in todo if slot.effect is not Effect.PURE])
        except HermesError as error:
            self._agent.note_persistence_failure(error)
            return False
        failpoints.hit("executor.started")
        for slot in todo:
            self._announce(slot)
            slot.started_at = time.monotonic()
            if slot.entry is not None and slot.entry.inline and not parallel:
                slot.outcome = self._run(slot, parallel=False)
                continue
            seconds = CALL_SECONDS if slot.entry is None or slot.entry.timeout is None else slot.entry.timeout
            slot.deadline = slot.started_at + seconds if seconds > 0 else None
            slot.running = True
            self._agent.workers.submit(lambda slot=slot: self._work(slot, parallel=parallel))
        return True

    def _work(self, slot: _Slot, *, parallel: bool) -> None:
        outcome = self._run(slot, parallel=parallel)
        with self._changed:
            if slot.outcome is None:
                slot.outcome = outcome
            slot.running = False
            self._changed.notify()

    def _run(self, slot: _Slot, *, parallel: bool) -> _Outcome:
        agent = self._agent
        failpoints.hit("executor.dispatched")
        try:
            if parallel:
                value = agent.dispatch_concurrent(slot.name, slot.args, self._task_id, slot.call_id, self._messages)
            else:
                value = agent.dispatch_sequential(slot.name, slot.args, self._task_id, slot.call_id)
        except BaseException as error:  # noqa: BLE001 - carried to the turn's thread, which decides
            return _Outcome(error=error)
        failpoints.hit("executor.returned")
        return _Outcome(value)

    def _wait(self, slots: list[_Slot]) -> None:
        """Sleep until a call ends, its time is up, or the turn was stopped and the grace is over."""
        cancellation = self._agent.control.cancellation
        with self._changed, cancellation.aborting(self._poke):
            grace: float | None = None
            while not any(slot.outcome is not None and not slot.outcome.stored for slot in slots):
                now = time.monotonic()
                if cancellation.requested and grace is None:
                    grace = now + GRACE_SECONDS
                limits = [
                    limit for limit in (grace, *(slot.deadline for slot in slots if slot.running)) if limit is not None
                ]
                if limits and min(limits) <= now:
                    self._give_up(slots, now, grace)
                    return
                self._changed.wait(None if not limits else min(limits) - now)

    def _poke(self) -> None:
        """Wake the waiting thread; called from a signal handler too, where the lock may be ours already."""
        threading.Thread(target=self._notify, daemon=True).start()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify()

    def _give_up(self, slots: list[_Slot], now: float, grace: float | None) -> None:
        stopped = grace is not None and grace <= now
        for slot in slots:
            late = slot.deadline is not None and slot.deadline <= now
            if not slot.running or slot.outcome is not None or not (stopped or late):
                continue
            seconds = now - slot.started_at
            what = (
                self._agent.control.cancellation.reason if stopped and not late else f"timed out after {seconds:.0f} s"
            )
            sure = slot.effect is Effect.PURE
            text = f"[abandoned: {slot.name} was still running, {what}" + (
                "]" if sure else "; its effect is unknown, inspect before repeating it]"
            )
            slot.outcome = _Outcome(
                text, state=CallState.DONE if sure else CallState.UNKNOWN, disposition="none" if sure else "unknown"
            )
        self._agent.workers.abandon()

    def _keep_finished(self, slots: list[_Slot]) -> bool:
        """Store results that wait behind a slower call; the first of `slots` becomes a row at once."""
        for slot in slots:
            if slot.outcome is not None and slot.outcome.error is not None:
                self._raise_through(slot.outcome.error)
        for slot in slots[1:] if slots and slots[0].outcome is None else ():
            outcome = slot.outcome
            if outcome is None or outcome.stored:
                continue
            outcome.stored = True
            if slot.effect is Effect.PURE or not outcome.ran or outcome.state is CallState.UNKNOWN:
                continue
            outcome.value, outcome.error = self._value(outcome), None
            try:
                self._agent.journal.finish(slot.call_id, _text(outcome.value))
            except HermesError as error:
                self._agent.note_persistence_failure(error)
                return False
            failpoints.hit("executor.finished_kept")
        return True

    def _leave(self, slots: list[_Slot]) -> None:
        """Something that must not be swallowed came up: stop the batch, keep what ends within the grace."""
        self._agent.control.cancellation.cancel("the turn was left")
        until = time.monotonic() + GRACE_SECONDS
        with self._changed:
            while any(slot.running for slot in slots) and time.monotonic() < until:
                self._changed.wait(until - time.monotonic())
        self._agent.workers.abandon()
        for slot in slots:
            outcome = slot.outcome
            if outcome is None or outcome.error is not None or outcome.stored or not outcome.ran:
                continue
            if slot.effect is Effect.PURE or outcome.state is CallState.UNKNOWN:
                continue
            try:
                self._agent.journal.finish(slot.call_id, _text(self._value(outcome)))
            except HermesError:
                return

    @staticmethod
    def _raise_through(error: BaseException) -> None:
        if not isinstance(error, Exception):
            raise error

    # -- one call -----------------------------------------------------------

    def _slot(self, call: Any) -> _Slot:
        name, arguments, call_id = plan.parts_of(call)
        entry = registry.get_entry(name)
        if name not in self._agent.valid_tool_names and (
            entry is None or entry.name not in self._agent.valid_tool_names
        ):
            known = ", ".join(sorted(self._agent.valid_tool_names))
            slot = _Slot(call_id, name, {}, None, Effect.PURE)
            slot.outcome = _Outcome(results.error_result(f"Unknown tool: {name}. Available: {known}"), ran=False)
            return slot
        try:
            args = rows.parse_arguments(arguments)
        except ArgumentsError as error:
            slot = _Slot(call_id, name, {}, entry, Effect.PURE)
            text = f"Invalid tool arguments for {name}: {error}. Nothing was run; send one JSON object."
            slot.outcome = _Outcome(results.error_result(text), ran=False)
            return slot
        slot = _Slot(call_id, name, args, entry, Effect.UNSAFE if entry is None else entry.effect_of(args))
        slot.outcome = self._known(slot)
        return slot

    def _known(self, slot: _Slot) -> _Outcome | None:
        """What an earlier process left of the call: its result, or that nobody can say."""
        record = self._agent.journal.record(slot.call_id)
        if record is None:
            return None
        if record.state is CallState.FINISHED:
            return _Outcome(_from_text(record.result or ""), stored=True)
        again = record.effect in (Effect.PURE, Effect.IDEMPOTENT) and not self._agent.control.cancellation.requested
        if record.state is CallState.STARTED and not again and not self._agent.journal.asks_about(slot.call_id):
            text = (
                f"[interrupted: {slot.name} was started and the process ended before its result was known. "
                "It may have taken effect, or still be running: inspect before repeating it]"
            )
            return _Outcome(text, state=CallState.UNKNOWN, disposition="unknown", ran=False)
        return None

    def _announce(self, slot: _Slot) -> None:
        agent = self._agent
        publish(agent.tool_progress_callback, "tool.started", slot.name, plan.preview(slot.name, slot.args), slot.args)
        publish(agent.tool_start_callback, slot.call_id, slot.name, slot.args)

    def _value(self, outcome: _Outcome) -> results.Content:
        if outcome.error is not None:
            return results.error_result(outcome.error)
        return results.normalise(outcome.value)

    def _commit(self, slot: _Slot) -> bool:
        """Make the call's row durable, then show it. False: it could not be stored."""
        agent, outcome = self._agent, slot.outcome
        assert outcome is not None
        if outcome.error is not None:
            self._raise_through(outcome.error)
        content = maybe_persist_tool_result(
            content=self._value(outcome),
            tool_name=slot.name,
            tool_use_id=agent.journal.public_id(slot.call_id) or slot.call_id,
            env=None,
            config=agent.result_budget,
            threshold=self._budget.threshold_for(slot.name, slot.entry.max_result_chars if slot.entry else None),
        )
        self._budget.add(content)
        row = make_tool_result_message(slot.name, content, slot.call_id, effect_disposition=outcome.disposition)
        self._messages.append(row)
        agent.journal.stage_result(row, slot.call_id, outcome.state)
        failpoints.hit("executor.before_row")
        if _flush(agent, self._messages) is False:
            return False
        outcome.stored = True
        failpoints.hit("executor.after_row")
        seconds = time.monotonic() - slot.started_at if slot.started_at else 0.0
        failed = outcome.error is not None or plan.is_error(content)
        publish(
            agent.tool_progress_callback, "tool.completed", slot.name, None, None,
            duration=seconds, is_error=failed, result=content,
        )  # fmt: skip
        publish(agent.tool_complete_callback, slot.call_id, slot.name, slot.args, content)
        failpoints.hit("executor.shown")
        return True


def _flush(agent: Host, messages: list[Message]) -> bool | None:
    """Flush through the agent's one entry; an exception counts as False."""
    try:
        stored = agent._flush_messages_to_session_db(messages)
    except Exception as error:  # noqa: BLE001 - whoever replaced the entry may raise anything
        agent.note_persistence_failure(error)
        return False
    if stored is False:
        agent.note_persistence_failure(None)
    return stored


def _text(content: results.Content) -> str:
    return content if isinstance(content, str) else "\0parts:" + results.to_json(content)


def _from_text(text: str) -> Any:
    if not text.startswith("\0parts:"):
        return text
    import json  # noqa: PLC0415 - only for kept results with images

    return json.loads(text.removeprefix("\0parts:"))
