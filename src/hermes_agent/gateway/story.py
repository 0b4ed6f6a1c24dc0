"""What happened in a turn, told to clients: every event of the session becomes the frames that speak of it.

A story is always told from the turn's beginning, so that who comes late and who comes back
hear the same frames. The pieces of a message's text add up to the stored text: what was not
said as it came is said when its row is there, and what was said and does not count is
called back first (`void`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from hermes_agent import log
from hermes_agent.agent import plan
from hermes_agent.delivery.events import Event
from hermes_agent.gateway.following import follow_turn
from hermes_agent.gateway.profile import Profile
from hermes_agent.store.approvals import ApprovalRecord
from hermes_agent.store.turns import TurnState
from hermes_agent.tools.approval.gate import visible
from hermes_agent.tools.registry import Effect, registry
from hermes_agent.transcript import rows

Fields = dict[str, Any]

CHOICES = ("once", "session", "deny")
_ENDS = frozenset(f"turn.{state}" for state in TurnState if state.is_end)
_PREVIEW = 500
_LONGEST = 4000
"""Characters of a text that are looked at for a preview."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One thing to tell.

    Kinds: `queued`, `started`, `retrying`, `resumed`, `steered`, `delta`, `void`, `thinking`,
    `reasoning`, `interim`, `tool.started`, `tool.completed`, `tool.failed`,
    `approval.request`, `approval.responded` and, last, `end`.
    """

    kind: str
    fields: Fields = field(default_factory=dict[str, Any])
    number: int | None = None
    """Number of the event that is told in full with this frame; None for what is told again or does not last."""
    at: float = 0.0


@dataclass(slots=True)
class _Call:
    """A call that the model asked for."""

    id: str
    name: str
    args: Fields
    at: float
    told: bool = False
    """It was told that it runs."""


async def tell(profile: Profile, turn_id: str, after: int | None = None) -> AsyncGenerator[Frame | None]:
    """The frames of a turn, those behind event `after`; None for a heartbeat. Ends with `end`, which always comes."""
    story = Story([secret.reveal() for secret in profile.settings.secrets])
    last = after or 0
    comes_back = after is not None
    async with aclosing(follow_turn(profile, turn_id)) as events:
        async for event in events:
            if event is None:
                yield None
                continue
            question = None
            if event.kind.startswith("approval."):
                question = await profile.read(profile.service.intake.approval, event.data["approval_id"])
            is_new = event.number is None or event.number > last
            if comes_back and is_new:
                story.doubt()
                comes_back = False
            frames = story.tell(event, question)
            if not is_new:
                # what a client has seen is told again only where it is the end
                frames = [frame for frame in frames if frame.kind == "end"]
            for frame in frames:
                yield frame


class Story:
    """Makes frames of a turn's events, which are given in order and from the first on."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._secrets = secrets
        self._attempt = 0
        self._said = ""
        """What was said of the message that comes."""
        self._unsure = False
        """The client may have heard something of that message before."""
        self._thought = False
        self._step = 0
        self._calls: dict[str, _Call] = {}
        self._by_id: dict[str, _Call] = {}

    def doubt(self) -> None:
        """From here on the client listens again: what it heard of the message that comes is not known."""
        self._said, self._unsure = "", True

    def tell(self, event: Event, question: ApprovalRecord | None = None) -> list[Frame]:
        """The frames of one event."""
        if event.number is None:
            return self._provisional(event)
        frames = self._durable(event, question)
        if not frames:
            return []
        *first, last = frames
        return [*first, Frame(last.kind, last.fields, event.number, last.at)]

    # -- what lasts ---------------------------------------------------------------

    def _durable(self, event: Event, question: ApprovalRecord | None) -> list[Frame]:
        kind, at = event.kind, event.at
        if kind == "message":
            return self._row(event)
        if kind == "tool.started":
            call = self._calls.get(event.data["call_id"].partition(".")[2])
            return [] if call is None else self._begins(call, at)
        if kind.startswith("approval."):
            return [] if question is None else [self._question(kind, question, at)]
        if kind == "turn.running":
            self._attempt += 1
            return [Frame("started", {"attempt": 1}, at=at)] if self._attempt == 1 else self._unsay()
        if kind in ("turn.waiting_retry", "turn.resumed"):
            what = "retrying" if kind == "turn.waiting_retry" else "resumed"
            return [*self._unsay(), Frame(what, {"attempt": self._attempt}, at=at)]
        return [Frame("end", {}, at=at)] if kind in _ENDS else []

    def _row(self, event: Event) -> list[Frame]:
        row, at = event.data, event.at
        role = row["role"]
        if role == "user":
            return [Frame("steered", {"text": text_of(row)}, at=at)] if row.get("display_kind") == "steer" else []
        if role == "tool":
            return self._result(row, at)
        frames = self._words(row)
        calls = cast("list[Fields]", row.get("tool_calls") or [])
        if calls:
            self._step += 1
            if text_of(row):
                frames.append(Frame("interim", {"text": text_of(row), "already_streamed": True}, at=at))
            for index, asked in enumerate(calls):
                call = _call(asked, at)
                self._calls[f"{self._step}.{index}"] = self._by_id[call.id] = call
                if _is_pure(call):
                    frames += self._begins(call, at)
        return frames

    def _words(self, row: Fields) -> list[Frame]:
        """What is to be said of a row of the model so that the client has heard all of it."""
        frames: list[Frame] = []
        text, said = text_of(row), self._said
        if (self._unsure and text) or not text.startswith(said):
            frames, said = [Frame("void", {"attempt": self._attempt})], ""
        thoughts = row.get("reasoning")
        if thoughts and not self._thought:
            frames.append(Frame("thinking", {"delta": thoughts, "attempt": self._attempt}))
        if thoughts:
            frames.append(Frame("reasoning", {"text": thoughts, "already_streamed": True}))
        if text[len(said) :]:
            frames.append(Frame("delta", {"delta": text[len(said) :], "attempt": self._attempt}))
        self._said, self._unsure, self._thought = "", False, False
        return frames

    def _begins(self, call: _Call, at: float) -> list[Frame]:
        if call.told:
            return []
        call.told, call.at = True, at
        preview, args = self._redact(plan.preview(call.name, call.args)), self._clean(call.args)
        fields = {"tool_call_id": call.id, "tool": call.name, "preview": preview, "args": args}
        return [Frame("tool.started", fields, at=at)]

    def _result(self, row: Fields, at: float) -> list[Frame]:
        name = str(row.get("tool_name") or row.get("name") or "")
        call = self._by_id.get(str(row.get("tool_call_id"))) or _Call(str(row.get("tool_call_id")), name, {}, at)
        frames = self._begins(call, at)
        unknown = row.get("effect_disposition") == "unknown"
        failed = unknown or plan.is_error(row.get("content")) or row.get("effect_disposition") == "none"
        fields = {
            "tool_call_id": call.id,
            "tool": name,
            "duration": round(max(at - call.at, 0.0), 3),
            "error": failed,
            "preview": self._redact(text_of(row)[:_LONGEST])[:_PREVIEW],
        }
        if unknown:
            fields["unknown"] = True
        return [*frames, Frame("tool.failed" if failed else "tool.completed", fields, at=at)]

    def _question(self, kind: str, question: ApprovalRecord, at: float) -> Frame:
        if kind == "approval.requested":
            return Frame("approval.request", question_fields(question, self._secrets), at=at)
        return Frame(
            "approval.responded",
            {
                "request_id": question.id,
                "choice": question.answer or "deny",
                "state": str(question.state),
                "decided_by": question.decided_by,
                "resolved": 1,
            },
            at=at,
        )

    # -- what does not --------------------------------------------------------------

    def _provisional(self, event: Event) -> list[Frame]:
        if event.kind in _ENDS:
            return [Frame("end", {}, at=event.at)]
        attempt = event.data.get("attempt", self._attempt)
        if event.kind == "void":
            return self._unsay()
        text = str(event.data.get("text", ""))
        if event.kind == "reasoning":
            self._thought = True
            return [Frame("thinking", {"delta": text, "attempt": attempt})]
        if event.kind != "delta":
            return []
        frames = [Frame("void", {"attempt": attempt})] if self._unsure else []
        self._said, self._unsure = self._said + text, False
        return [*frames, Frame("delta", {"delta": text, "attempt": attempt})]

    def _unsay(self) -> list[Frame]:
        said = self._said or self._unsure
        self._said, self._unsure, self._thought = "", False, False
        return [Frame("void", {"attempt": self._attempt})] if said else []

    # -- texts ------------------------------------------------------------------------

    def _redact(self, text: str) -> str:
        return log.redact(text, self._secrets)

    def _clean(self, value: Any) -> Any:
        """The value with its texts redacted."""
        if isinstance(value, str):
            return self._redact(value)
        if isinstance(value, list):
            return [self._clean(item) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            return {name: self._clean(item) for name, item in cast("Fields", value).items()}
        return value


def question_fields(question: ApprovalRecord, secrets: Sequence[str]) -> Fields:
    """A question as a client shows it: nothing hidden in the command, and no secret."""
    shown = question.request
    return {
        "request_id": question.id,
        "call_id": question.call_id,
        "tool": shown.get("tool", ""),
        "command": log.redact(visible(str(shown.get("command", ""))), secrets),
        "why": log.redact(str(shown.get("why", "")), secrets),
        "choices": list(CHOICES),
        "request_hash": question.request_hash.hex(),
        "created_at": question.asked_at,
        "expires_at": question.expires_at,
    }


def text_of(row: Fields) -> str:
    """The text of a row's content."""
    content = row.get("content")
    if isinstance(content, list):
        parts = cast("list[Fields]", content)
        return "\n".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")
    return content if isinstance(content, str) else ""


def _call(asked: Fields, at: float) -> _Call:
    function = cast("Fields", asked.get("function") or {})
    try:
        args = rows.parse_arguments(str(function.get("arguments", "")))
    except rows.ArgumentsError:
        args = {}
    return _Call(str(asked.get("id", "")), str(function.get("name", "")), args, at)


def _is_pure(call: _Call) -> bool:
    """Whether it runs without a word of its own in the events."""
    entry = registry.get_entry(call.name)
    return entry is not None and entry.effect_of(call.args) is Effect.PURE
