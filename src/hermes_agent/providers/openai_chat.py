"""The provider for every OpenAI-compatible chat endpoint, through our client or a foreign one.

`client` is asked for at each call, so it may be replaced between calls. A foreign client gets
plain lists of dicts, and streams only when somebody listens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from hermes_agent.baton import waiting
from hermes_agent.cancellation import Cancellation
from hermes_agent.errors import ProviderError, TurnInterrupted
from hermes_agent.providers import assembly, classify
from hermes_agent.providers.assembly import StreamAssembler
from hermes_agent.providers.base import OnEvent, Reply, Request, TextDelta
from hermes_agent.providers.classify import classify_http
from hermes_agent.providers.openai_client import OpenAI

__all__ = ["OpenAIChat", "StreamAssembler", "classify_http"]


class OpenAIChat:
    """Answers requests through `client().chat.completions.create`, called exactly once a request.

    With our own `OpenAI` a cancellation ends a blocked read; with a foreign client it is
    seen between two chunks.
    """

    def __init__(self, client: Callable[[], Any], *, name: str) -> None:
        self._client = client
        self.name = name

    def complete(self, request: Request, on_event: OnEvent | None, cancellation: Cancellation) -> Reply:
        """Return the whole reply; see `Provider.complete`."""
        _check(cancellation)
        client = self._client()
        call = _Call(client, self.name, request)
        answer = call.create(streaming=on_event is not None, cancellation=cancellation)
        if on_event is None or isinstance(assembly.member(answer, "choices"), list | tuple):
            reply = call.read(answer)
            if on_event is not None and reply.content:
                on_event(TextDelta(reply.content))
            return reply
        try:
            return call.assemble(answer, on_event, cancellation)
        finally:
            close = getattr(answer, "close", None)
            if callable(close):
                close()


class _Call:
    """One request through one client."""

    def __init__(self, client: Any, name: str, request: Request) -> None:
        self._client = client
        self._request = request
        self._ours = isinstance(client, OpenAI)
        host = client.host if isinstance(client, OpenAI) else name
        self._where = f"{host} ({request.model})" if request.model else host

    def create(self, *, streaming: bool, cancellation: Cancellation) -> Any:
        kwargs = self._arguments(streaming=streaming)
        if self._ours:
            return self._client.chat.completions.create(**kwargs, cancellation=cancellation)
        try:
            with waiting:
                return self._client.chat.completions.create(**kwargs)
        except (ProviderError, TurnInterrupted):
            raise
        except Exception as exc:
            raise self._foreign(exc) from exc

    def _arguments(self, *, streaming: bool) -> dict[str, Any]:
        request = self._request
        messages = request.messages if self._ours else [dict(message) for message in request.messages]
        kwargs: dict[str, Any] = {**request.extra, "model": request.model, "messages": messages}
        if request.max_tokens is not None:
            kwargs["max_tokens"] = request.max_tokens
        if request.tools:
            kwargs["tools"] = request.tools if self._ours else [dict(tool) for tool in request.tools]
        else:
            kwargs.pop("tool_choice", None)
        if streaming:
            kwargs["stream"] = True
            if self._ours:
                kwargs["stream_options"] = {"include_usage": True}
        return kwargs

    def read(self, answer: Any) -> Reply:
        return assembly.read_reply(answer, where=self._where)

    def assemble(self, stream: Any, on_event: OnEvent, cancellation: Cancellation) -> Reply:
        assembler = StreamAssembler(where=self._where)
        broken: ProviderError | None = None
        chunks = iter(cast("Iterable[Any]", stream))
        while True:
            try:
                chunk = self._next(chunks)
            except StopIteration:
                break
            except ProviderError as exc:
                broken = exc
                break
            for event in assembler.feed(chunk):
                on_event(event)
            _check(cancellation)
        assembler.done = getattr(stream, "done", False) is True
        return assembler.reply(broken=broken)

    def _next(self, chunks: Iterator[Any]) -> Any:
        if self._ours:
            return next(chunks)
        try:
            with waiting:
                return next(chunks)
        except (StopIteration, ProviderError, TurnInterrupted):
            raise
        except Exception as exc:
            raise self._foreign(exc) from exc

    def _foreign(self, error: Exception) -> ProviderError:
        """The meaning of a foreign client's exception; its traceback stays with it as the cause."""
        key = getattr(self._client, "api_key", None)
        secrets = (key,) if isinstance(key, str) else ()
        return classify.classify_exception(error, where=self._where, secrets=secrets)


def _check(cancellation: Cancellation) -> None:
    if cancellation.requested:
        raise TurnInterrupted(cancellation.reason)
