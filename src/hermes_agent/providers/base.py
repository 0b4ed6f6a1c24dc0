"""What a model provider is: one request in, one whole reply out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hermes_agent.cancellation import Cancellation

Message = dict[str, Any]
"""One chat-completions message as a plain JSON object."""


@dataclass(slots=True)
class ToolCall:
    """One call the model asked for; `arguments` is the JSON text as the model wrote it.

    Mutable in `id` and `name` only: the loop writes its repaired id and name back
    before anything runs, so that the row, the executor and the wire agree.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one model call, as the provider counted them."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """One whole answer of a model.

    `finish_reason` is normalised: "stop", "tool_calls", "length", "content_filter",
    or "incomplete" when the provider ended without saying why.
    """

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    reasoning: str = ""
    model: str = ""
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One model call.

    `messages` may carry a property `encoded` (bytes of the JSON array) made by the
    wire builder; a provider that sends JSON uses it and encodes nothing again.
    """

    model: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further request fields, sent as they are."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A provisional piece of the answer: void until the whole reply is stored."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A provisional piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """A try failed and the next one starts in `wait` seconds; streamed pieces are void."""

    error: Exception
    wait: float


StreamEvent = TextDelta | ReasoningDelta | AttemptFailed
OnEvent = Callable[[StreamEvent], None]


class Provider(Protocol):
    """Answers requests of one model endpoint."""

    def complete(self, request: Request, on_event: OnEvent | None, cancellation: Cancellation) -> Reply:
        """Return the whole reply; stream pieces to `on_event` when it is given.

        Raises `ProviderError` with one typed reason, or `TurnInterrupted` soon after
        `cancellation` is set. Never returns a cut answer as a whole one.
        """
        ...
