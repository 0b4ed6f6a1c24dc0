"""What a conversation shows itself on, and the quietest of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from msgspec import Struct

from hermes_agent.cli.screen import Stream, one_line
from hermes_agent.errors import FAILURES, FailureReason, HermesError, UsageError

Result = dict[str, Any]


class Call(Struct, frozen=True):
    """One tool call."""

    id: str
    name: str
    args: dict[str, Any]
    about: str = ""
    """One short line about it."""


class Outcome(Struct, frozen=True):
    """How a tool call ended; its row is stored."""

    failed: bool
    seconds: float
    result: Any
    note: str = ""
    """What a person should see of the result at once; often nothing."""
    blocked: bool = False
    """It was not run, because nobody allowed it."""
    unknown: bool = False
    """It was cut off; whether it took effect is not known."""


class Surface(Protocol):
    """Shows what happens in a conversation. All calls but `asking` come from the turn's thread."""

    def opened(self, session_id: str, model: str) -> None:
        """The conversation will run in this session."""
        ...

    def step(self) -> None:
        """A model call begins."""
        ...

    def delta(self, text: str) -> None:
        """A piece of the answer, void unless the whole is stored."""
        ...

    def void(self, why: str) -> None:
        """What this model call streamed is void; it is made again."""
        ...

    def message(self, text: str) -> None:
        """A stored text of the model that comes before tool calls."""
        ...

    def tool_started(self, call: Call) -> None: ...

    def tool_completed(self, call: Call, outcome: Outcome) -> None: ...

    def notice(self, text: str) -> None:
        """One line that the person should know."""
        ...

    def ended(self, result: Result, *, earlier: bool = False) -> None:
        """A turn ended: the one that was asked for, or an earlier one that a dead process had left."""
        ...

    def asking(self) -> AbstractContextManager[None]:
        """Keep still while a question stands on the terminal; any thread."""
        ...


class Quiet:
    """Prints the final text of the turn and nothing else; notices go to standard error."""

    def __init__(self, out: Stream, err: Stream, *, earlier: bool = False) -> None:
        self._out = out
        self._err = err
        self._earlier = earlier
        """The answers of earlier turns are what was asked for."""

    def opened(self, session_id: str, model: str) -> None: ...

    def step(self) -> None: ...

    def delta(self, text: str) -> None: ...

    def void(self, why: str) -> None:
        self.notice(why)

    def message(self, text: str) -> None: ...

    def tool_started(self, call: Call) -> None: ...

    def tool_completed(self, call: Call, outcome: Outcome) -> None:
        if outcome.blocked:
            self.notice(f"{call.name} was not run: {call.about}: {outcome.note}")

    def notice(self, text: str) -> None:
        self._err.write(f"hermes: {one_line(text)}\n")

    def ended(self, result: Result, *, earlier: bool = False) -> None:
        if earlier and not self._earlier:
            self.notice(f"the earlier turn that was interrupted {_how(result)}")
        elif result["completed"]:
            self._out.write(text_of(result) + "\n")

    def asking(self) -> AbstractContextManager[None]:
        return nullcontext()


def _how(result: Result) -> str:
    return "is finished" if result["completed"] else f"failed: {failure_of(result)}"


def text_of(result: Result) -> str:
    """The final text, without line breaks at its end."""
    return str(result.get("final_response") or "").rstrip("\n")


def reason_of(result: Result) -> FailureReason | None:
    """Why the turn has no answer; None when it has one."""
    published = str(result.get("failure_reason") or "")
    if not published:
        return None
    kind, _, detail = published.partition(":")
    for name in (kind, f"store_{detail}", FailureReason.STORE_IO if detail else FailureReason.UNKNOWN):
        if name in FailureReason.__members__.values():
            return FailureReason(name)
    return FailureReason.UNKNOWN


def failure_of(result: Result) -> str:
    """One line: what went wrong and what to do."""
    reason = reason_of(result) or FailureReason.UNKNOWN
    what = one_line(str(result.get("error") or reason.replace("_", " "))).rstrip(".")
    return f"{what}. {FAILURES[reason].advice}"


def exit_code(result: Result) -> int:
    """The exit code that a turn's result stands for."""
    reason = reason_of(result)
    return 0 if reason is None else FAILURES[reason].exit_code


def line_of(error: HermesError) -> str:
    """One line: what kept something from being begun and what to do."""
    what = one_line(str(error))
    if isinstance(error, UsageError):
        return what
    advice = error.failure.advice
    return what if advice in what else f"{what.rstrip('.')}. {advice}"
