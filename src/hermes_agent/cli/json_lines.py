"""`--format stream-json`: one JSON object a line on standard output.

Every line has a `type`:

    session         session_id, model: first, always
    delta           text, step, attempt; `provisional`: void if a `retry` of the same step follows
    retry           step, attempt (the next one), message
    message         role, text: an answer of the model; stored
    tool_started    id, name, args
    tool_completed  id, name, is_error, duration (seconds), result (cut), note; stored
    notice          message
    recovered       as result: an earlier turn that a dead process had left is finished
    result          the turn's end: last, always
    error           reason, message, advice, exit_code: nothing was run
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hermes_agent.cli.screen import Stream
from hermes_agent.cli.surface import Call, Outcome, Result, exit_code, failure_of
from hermes_agent.errors import HermesError

MAX_RESULT = 4000
"""Characters of a tool's result that are shown."""

RESULT_KEYS = (
    "final_response completed failed interrupted partial failure_reason error turn_exit_reason api_calls model"
    " served_model provider session_id turn_id input_tokens output_tokens cache_read_tokens cache_write_tokens"
    " reasoning_tokens total_tokens"
).split()


class JsonLines:
    """Writes what happens in a conversation as JSON lines."""

    def __init__(self, out: Stream) -> None:
        self._out = out
        self._step = 0
        self._attempt = 1

    def opened(self, session_id: str, model: str) -> None:
        self._line("session", session_id=session_id, model=model)

    def step(self) -> None:
        self._step, self._attempt = self._step + 1, 1

    def delta(self, text: str) -> None:
        self._line("delta", text=text, step=self._step, attempt=self._attempt, provisional=True)

    def void(self, why: str) -> None:
        self._attempt += 1
        self._line("retry", step=self._step, attempt=self._attempt, message=why)

    def message(self, text: str) -> None:
        self._line("message", role="assistant", text=text)

    def tool_started(self, call: Call) -> None:
        self._line("tool_started", id=call.id, name=call.name, args=call.args)

    def tool_completed(self, call: Call, outcome: Outcome) -> None:
        result = outcome.result if isinstance(outcome.result, str) else json.dumps(outcome.result, ensure_ascii=False)
        self._line(
            "tool_completed",
            id=call.id,
            name=call.name,
            is_error=outcome.failed,
            duration=round(outcome.seconds, 3),
            result=result[:MAX_RESULT],
            cut=len(result) > MAX_RESULT,
            note=outcome.note,
        )

    def notice(self, text: str) -> None:
        self._line("notice", message=text)

    def ended(self, result: Result, *, earlier: bool = False) -> None:
        if result["completed"]:
            self.message(str(result["final_response"]))
        self._line("recovered" if earlier else "result", **report(result))

    def asking(self) -> AbstractContextManager[None]:
        return nullcontext()

    def refused(self, error: HermesError) -> None:
        """Nothing was run."""
        failure = error.failure
        self._line(
            "error", reason=str(error.reason), message=str(error), advice=failure.advice, exit_code=failure.exit_code
        )

    def _line(self, kind: str, **fields: Any) -> None:
        # ASCII: what is not valid Unicode stays valid JSON, and no reader's encoding matters.
        self._out.raw(json.dumps({"type": kind, **fields}, default=str) + "\n")


def report(result: Result) -> dict[str, Any]:
    """The main facts of a turn's result, for machines."""
    facts = {name: result.get(name) for name in RESULT_KEYS}
    return {**facts, "message": "" if result["completed"] else failure_of(result), "exit_code": exit_code(result)}
