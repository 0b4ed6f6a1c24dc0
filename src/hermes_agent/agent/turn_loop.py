"""A turn, top to bottom: ask the model, store its reply, run its calls, until it has answered.

Nothing is shown and nothing runs before the row that says so is durable.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Protocol

from hermes_agent import failpoints
from hermes_agent.agent import results
from hermes_agent.agent.control import IterationBudget, TurnControl, TurnParked
from hermes_agent.agent.journal import Journal
from hermes_agent.agent.publish import publish
from hermes_agent.agent.results import Exit, Totals
from hermes_agent.agent.wire import Wire, WireTools
from hermes_agent.baton import waiting
from hermes_agent.errors import FailureReason, ProviderError, TurnInterrupted
from hermes_agent.providers.base import (
    AttemptFailed,
    Provider,
    ReasoningDelta,
    Reply,
    Request,
    StreamEvent,
    TextDelta,
    ToolCall,
)
from hermes_agent.store.turns import CallState, TurnState
from hermes_agent.store.usage import UsageDelta
from hermes_agent.store.writer import TurnEnd
from hermes_agent.tools.registry import Effect, registry
from hermes_agent.transcript import rows
from hermes_agent.transcript.rows import ArgumentsError

Message = dict[str, Any]

MAX_STRIKES = 3
"""Replies in a row in which no call could be run, before the turn gives up."""
MAX_CUTS = 2
"""How often a reply whose calls were cut by the output limit is asked for again."""


class Host(Protocol):
    """What the loop needs of the agent that runs the turn."""

    model: str
    provider: str
    valid_tool_names: set[str]
    max_tokens: int | None
    control: TurnControl
    journal: Journal
    interim_assistant_callback: Callable[..., Any] | None
    stream_delta_callback: Callable[..., Any] | None
    reasoning_callback: Callable[..., Any] | None
    status_callback: Callable[..., Any] | None
    step_callback: Callable[..., Any] | None

    def flush(self, messages: list[Message]) -> bool: ...
    def _execute_tool_calls(
        self, assistant_message: Any, messages: list[Message], effective_task_id: str, api_call_count: int = 0
    ) -> None: ...
    @property
    def persistence_failed(self) -> bool: ...
    @property
    def persistence_error(self) -> Exception | None: ...


@dataclass(slots=True)
class Turn:
    """One turn on its way: the live transcript and what was counted."""

    messages: list[Message]
    start: int
    """Index in `messages` where the turn's own rows begin."""
    wire: Wire
    tools: WireTools
    model: Provider
    budget: IterationBudget
    task_id: str
    call_ids: set[str] = field(default_factory=set[str])
    """Ids of earlier calls, so that none is given twice."""
    request_fields: dict[str, Any] = field(default_factory=dict[str, Any])
    api_calls: int = 0
    totals: Totals = field(default_factory=Totals)
    reasoning: str = ""
    served_model: str = ""
    streamed: list[str] = field(default_factory=list[str])
    """Provisional text of the model call that runs."""
    said: str = ""
    strikes: int = 0
    cuts: int = 0


def run(agent: Host, turn: Turn) -> Exit:
    """Go on from the last row of the transcript until the turn ends."""
    while True:
        exit_ = _begin_step(agent, turn)
        if exit_ is None:
            try:
                reply = _ask(agent, turn)
            except TurnInterrupted:
                exit_ = _stopped(agent, "".join(turn.streamed))
            except ProviderError as error:
                exit_ = results.failed(
                    "all_retries_exhausted_no_response",
                    error.reason,
                    str(error),
                    error.partial or "".join(turn.streamed),
                )
            else:
                exit_ = _tool_round(agent, turn, reply) if reply.tool_calls else _answer(agent, turn, reply)
        if exit_ is not None:
            return exit_


def finish_open_calls(agent: Host, turn: Turn) -> Exit | None:
    """Settle what a dead process left of its last reply: run what may run, say what is not known."""
    records = [record for record in agent.journal.restore() if record.state not in (CallState.DONE, CallState.UNKNOWN)]
    reply = next((row for row in reversed(turn.messages) if row["role"] == "assistant"), None)
    if reply is None or not records:
        return None
    wanted = {record.call_id for record in records}
    calls = [_sdk_call(call) for call in reply.get("tool_calls") or () if call["id"] in wanted]
    return _execute(agent, turn, str(reply.get("content") or ""), calls)


# -- one step -------------------------------------------------------------------


def _begin_step(agent: Host, turn: Turn) -> Exit | None:
    if agent.control.cancellation.requested:
        return _stopped(agent)
    if agent.control.parked:
        raise TurnParked
    words = agent.control.take_steering()
    if words:
        turn.messages.append({**rows.user_row(words, timestamp=time.time()), "display_kind": "steer"})
        if not agent.flush(turn.messages):
            return results.not_stored(agent.persistence_error)
    if not turn.budget.consume():
        used, limit = turn.budget.used, turn.budget.max_total
        return results.failed(
            f"max_iterations_reached({used}/{limit})",
            FailureReason.MAX_ITERATIONS,
            f"The turn was stopped after {used} model calls, its limit.",
        )
    return None


def _stopped(agent: Host, partial: str = "") -> Exit:
    """Somebody, or the clock, stopped the turn."""
    why, said = agent.control.why, agent.control.cancellation.reason
    if why is FailureReason.INTERRUPTED:
        return results.interrupted(said, partial)
    return results.failed(f"stopped({why})", why, said, partial)


def _ask(agent: Host, turn: Turn) -> Reply:
    turn.wire.follow(turn.messages, turn.start)
    turn.api_calls += 1
    turn.streamed.clear()
    publish(agent.step_callback, turn.api_calls, [])
    request = Request(
        model=agent.model,
        messages=turn.wire.messages(),
        tools=turn.tools,
        max_tokens=agent.max_tokens if not turn.cuts else (agent.max_tokens or 4096) * 2**turn.cuts,
        extra=turn.request_fields,
    )
    listens = agent.stream_delta_callback is not None or agent.reasoning_callback is not None
    failpoints.hit("loop.before_model")
    listener: Callable[[StreamEvent], None] | None = (lambda event: _show(agent, turn, event)) if listens else None
    reply = turn.model.complete(request, listener, agent.control.cancellation)
    failpoints.hit("loop.after_model")
    _count(agent, turn, reply)
    return reply


def _show(agent: Host, turn: Turn, event: StreamEvent) -> None:
    """Pass a provisional piece on; it is void until the reply is stored."""
    match event:
        case TextDelta(text):
            turn.streamed.append(text)
            publish(agent.stream_delta_callback, text)
        case ReasoningDelta(text):
            publish(agent.reasoning_callback, text)
        case AttemptFailed(error, wait):
            turn.streamed.clear()
            publish(agent.status_callback, "retry", f"{error} Trying again in {wait:.0f} s.")


def _count(agent: Host, turn: Turn, reply: Reply) -> None:
    turn.reasoning, turn.served_model = reply.reasoning, reply.model
    used = reply.usage
    delta = UsageDelta(model=agent.model, provider=agent.provider)
    if used is not None:
        totals = turn.totals
        totals.input_tokens += used.input_tokens
        totals.output_tokens += used.output_tokens
        totals.cache_read_tokens += used.cache_read_tokens
        totals.cache_write_tokens += used.cache_write_tokens
        totals.reasoning_tokens += used.reasoning_tokens
        totals.last_prompt_tokens = used.input_tokens
        delta = replace(
            delta,
            input_tokens=used.input_tokens,
            output_tokens=used.output_tokens,
            cache_read_tokens=used.cache_read_tokens,
            cache_write_tokens=used.cache_write_tokens,
            reasoning_tokens=used.reasoning_tokens,
        )
    agent.journal.stage_usage(delta)


def _answer(agent: Host, turn: Turn, reply: Reply) -> Exit:
    """The model is done: its row, the turn's end and whatever rides with them are one commit."""
    turn.messages.append(
        rows.assistant_row(
            reply.content, timestamp=time.time(), finish_reason=reply.finish_reason, reasoning=reply.reasoning
        )
    )
    agent.journal.stage_end(TurnEnd(TurnState.DONE))
    failpoints.hit("turn.before_end")
    if not agent.flush(turn.messages):
        return results.not_stored(agent.persistence_error)
    failpoints.hit("turn.after_end")
    return results.answered(reply.content, reply.finish_reason)


def _tool_round(agent: Host, turn: Turn, reply: Reply) -> Exit | None:
    if reply.finish_reason == "length":
        return _cut(agent, turn, reply)
    turn.cuts = 0
    reply = _once_each(reply)
    runnable = _prepare(agent, turn, reply)
    turn.strikes = 0 if runnable else turn.strikes + 1
    turn.messages.append(
        rows.assistant_row(
            reply.content,
            reply.tool_calls,
            timestamp=time.time(),
            finish_reason=reply.finish_reason,
            reasoning=reply.reasoning,
        )
    )
    agent.journal.stage_proposals(
        [(call.id, call.name, _effect(call.name, call.arguments)) for call in reply.tool_calls]
    )
    failpoints.hit("loop.before_proposals")
    if not agent.flush(turn.messages):
        return results.not_stored(agent.persistence_error)
    failpoints.hit("loop.after_proposals")
    text = reply.content.strip()
    if text and text != turn.said:
        turn.said = text
        publish(agent.interim_assistant_callback, reply.content, already_streamed=bool(turn.streamed))
    publish(agent.stream_delta_callback, None)
    failpoints.hit("loop.shown")
    calls = [
        SimpleNamespace(id=call.id, type="function", function=SimpleNamespace(name=call.name, arguments=call.arguments))
        for call in reply.tool_calls
    ]
    exit_ = _execute(agent, turn, reply.content, calls)
    if exit_ is None and turn.strikes >= MAX_STRIKES:
        return results.failed(
            "invalid_tool_calls",
            FailureReason.INVALID_TOOL_CALLS,
            f"The model sent {turn.strikes} unusable tool calls in a row.",
        )
    return exit_


def _execute(agent: Host, turn: Turn, content: str, calls: list[SimpleNamespace]) -> Exit | None:
    message = SimpleNamespace(content=content, tool_calls=calls)
    with waiting:
        agent._execute_tool_calls(message, turn.messages, turn.task_id, turn.api_calls)
    return results.not_stored(agent.persistence_error) if agent.persistence_failed else None


def _prepare(agent: Host, turn: Turn, reply: Reply) -> bool:
    """Write ids and repaired names back to the calls before anything is stored; True if one can run."""
    rows.assign_call_ids(reply.tool_calls, turn.call_ids)
    runnable = False
    for call in reply.tool_calls:
        entry = registry.get_entry(call.name)
        known = call.name if entry is not None and entry.name in agent.valid_tool_names else None
        name = known or rows.repair_tool_name(call.name, agent.valid_tool_names)
        if name is not None:
            call.name = name
            runnable = runnable or _is_readable(call.arguments)
    return runnable


def _is_readable(arguments: str) -> bool:
    try:
        rows.parse_arguments(arguments)
    except ArgumentsError:
        return False
    return True


def _once_each(reply: Reply) -> Reply:
    """The reply without calls that repeat an earlier one of it to the letter and are not pure.

    Models and proxies double a call by mistake; asked for twice on purpose, it comes again.
    """
    kept: dict[tuple[str, str], ToolCall] = {}
    calls = [
        call
        for call in reply.tool_calls
        if kept.setdefault((call.name, call.arguments), call) is call
        or _effect(call.name, call.arguments) == Effect.PURE
    ]
    return reply if len(calls) == len(reply.tool_calls) else replace(reply, tool_calls=tuple(calls))


def _effect(name: str, arguments: str) -> str:
    entry = registry.get_entry(name)
    if entry is None:
        return Effect.UNSAFE
    try:
        return entry.effect_of(rows.parse_arguments(arguments))
    except ArgumentsError:
        return Effect.PURE


def _sdk_call(call: Message) -> SimpleNamespace:
    function = call["function"]
    return SimpleNamespace(
        id=call["id"],
        type="function",
        function=SimpleNamespace(name=function["name"], arguments=function["arguments"]),
    )


def _cut(agent: Host, turn: Turn, reply: Reply) -> Exit | None:
    """The output limit cut the reply inside its calls: never run them; ask again with more room."""
    if turn.cuts < MAX_CUTS:
        turn.cuts += 1
        turn.budget.refund()
        publish(agent.status_callback, "cut", "The model's tool call was cut by the output limit; asking again.")
        return None
    return results.failed(
        "truncated",
        FailureReason.TRUNCATED,
        "The model's tool call was cut by its output limit and was not run.",
        reply.content,
    )
