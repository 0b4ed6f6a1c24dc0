"""A small client for OpenAI-compatible servers with the call shape of the OpenAI SDK.

`OpenAI(api_key=..., base_url=...).chat.completions.create(model=..., messages=..., stream=...)`
answers with objects that are dicts and read like attributes. A failure is always one
`ProviderError`; no message of it holds the key.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit

from hermes_agent.cancellation import Cancellation
from hermes_agent.errors import FailureReason, ProviderError, SettingsError, TurnInterrupted
from hermes_agent.providers import classify, sse
from hermes_agent.version import VERSION

if TYPE_CHECKING:
    from hermes_agent.providers.transport import Answer

_Address = tuple[str, str, int, str | None]
"""Scheme, host, port and proxy."""

MAX_BODY = 64 * 1024 * 1024
_DRAIN_SECONDS = 0.5
_SECRET_HEADERS = ("auth", "key", "token", "secret", "cookie")


class View(dict[str, Any]):
    """A JSON object whose members read as attributes too; an absent member is None."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _view(self.get(name))


def _view(value: Any) -> Any:
    if isinstance(value, dict):
        return View(cast("dict[str, Any]", value))
    if isinstance(value, list):
        return [_view(item) for item in cast("list[Any]", value)]
    return value


class OpenAI:
    """A client of one endpoint; every client of one endpoint in the process shares its connections.

    `timeout` is the longest silence in seconds; `proxy` the URL of an HTTP proxy.
    """

    def __init__(
        self,
        *,
        api_key: str,
        base_url: str,
        timeout: float = 600,
        default_headers: Mapping[str, str] | None = None,
        proxy: str | None = None,
    ) -> None:
        self.api_key = api_key
        self.base_url = base_url.rstrip("/")
        self.timeout = timeout
        self._address, self._target = _where(self.base_url, proxy)
        headers = {
            "Host": _host_header(self._address),
            "User-Agent": f"hermes-agent/{VERSION}",
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            **(default_headers or {}),
        }
        self._headers = _encode_headers(headers)
        self._secrets = _secrets(headers)
        self.chat = _Chat(self)

    @property
    def host(self) -> str:
        """The server's name, for messages."""
        return _host_header(self._address)

    def fault(self, reason: FailureReason, text: str, model: str) -> ProviderError:
        """Return an error about this endpoint whose text holds no secret."""
        said = classify.redact(" ".join(text.split())[:300], self._secrets)
        return ProviderError(": ".join(part for part in (self.where(model), said) if part), reason=reason)

    def refusal(self, status: int, headers: Mapping[str, str], body: object, model: str) -> ProviderError:
        """Return the error that the server's answer means."""
        default = FailureReason.SERVER_ERROR
        where = self.where(model)
        return classify.classify_http(status, headers, body, where=where, secrets=self._secrets, default=default)

    def where(self, model: str) -> str:
        return f"{self.host} ({model})" if model else self.host

    def send(self, body: dict[str, Any], options: dict[str, Any]) -> Answer:
        """Send one request; return its answer once a head with status 200 came."""
        from hermes_agent.providers import transport  # noqa: PLC0415 - 100 ms of httpcore and ssl at first use

        cancellation = cast("Cancellation | None", options.get("cancellation"))
        content = encode_body(body)
        headers = [*self._headers, (b"Content-Length", b"%d" % len(content))]
        if options.get("extra_headers"):
            headers += _encode_headers(options["extra_headers"])
        timeout = self.timeout if options.get("timeout") is None else float(options["timeout"])
        model = str(body.get("model") or "")
        with faults(self, model, cancellation):
            answer = transport.post(
                transport.Endpoint(*self._address),
                self._target,
                headers,
                content,
                timeout=timeout,
                cancellation=cancellation,
            )
        if answer.status == 200:
            return answer
        with faults(self, model, cancellation):
            raise self.refusal(answer.status, answer.headers, read_all(answer), model)


class faults:  # noqa: N801 - used as a with statement; a generator would cost more than the request's head
    """Turn what the transport raises inside the block into `ProviderError` or `TurnInterrupted`."""

    __slots__ = ("_cancellation", "_client", "_model")

    def __init__(self, client: OpenAI, model: str, cancellation: Cancellation | None) -> None:
        self._client = client
        self._model = model
        self._cancellation = cancellation

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None or isinstance(error, ProviderError):
            return
        if isinstance(error, TurnInterrupted):
            raise TurnInterrupted(self._cancellation.reason if self._cancellation else "") from None
        if kind.__module__.partition(".")[0] == "httpcore":
            timeout = "Timeout" in kind.__name__
            reason = FailureReason.TIMEOUT if timeout else FailureReason.CONNECTION
            text = str(error) or kind.__name__
            if "CERTIFICATE_VERIFY_FAILED" in text:
                text = f"the server's TLS certificate was not accepted: {text}"
            raise self._client.fault(reason, text, self._model) from error


class _Chat:
    def __init__(self, client: OpenAI) -> None:
        self.completions = Completions(client)


class Completions:
    """The chat completions of one client."""

    def __init__(self, client: OpenAI) -> None:
        self._client = client

    def create(self, **kwargs: Any) -> Any:
        """Ask for one completion: a `View` of the answer, or with `stream=True` a `Stream`.

        `cancellation`, `timeout`, `extra_headers` and `extra_body` are read here; everything
        else becomes the request's body. A value with an attribute `encoded` is sent as those bytes.
        """
        options = {key: kwargs.pop(key, None) for key in ("cancellation", "timeout", "extra_headers", "extra_body")}
        body: dict[str, Any] = {**kwargs, **(options["extra_body"] or {})}
        model = str(body.get("model") or "")
        cancellation = cast("Cancellation | None", options["cancellation"])
        answer = self._client.send(body, options)
        if body.get("stream"):
            return Stream(self._client, answer, model, cancellation)
        with faults(self._client, model, cancellation):
            raw = read_all(answer)
        decoded = _decode(raw)
        if not isinstance(decoded, dict):
            text = f"not a JSON object: {raw[:120].decode('utf-8', 'replace')!r}"
            raise self._client.fault(FailureReason.INVALID_RESPONSE, text, model)
        view = View(cast("dict[str, Any]", decoded))
        if classify.is_fault(view):
            raise self._client.refusal(200, answer.headers, view, model)
        return view


class Stream:
    """The chunks of one streamed completion, as `View`s.

    Ends with the server's `[DONE]` (then `done` is true) or with the body. An error that the
    server puts into the stream is raised as `ProviderError`. Close it, or read it to its end.
    """

    def __init__(self, client: OpenAI, answer: Answer, model: str, cancellation: Cancellation | None) -> None:
        self._client = client
        self._answer = answer
        self._model = model
        self._cancellation = cancellation
        self._chunks = self._read()
        self.done = False

    def __iter__(self) -> Iterator[View]:
        return self

    def __next__(self) -> View:
        return next(self._chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the request; a connection with unread bytes is closed."""
        self._chunks.close()
        self._answer.close()

    def _read(self) -> Generator[View, None, None]:
        answer = self._answer
        try:
            with faults(self._client, self._model, self._cancellation):
                if answer.headers.get("content-type", "").startswith("application/json"):
                    yield from self._events([sse.Event("", read_all(answer).decode("utf-8", "replace"))])
                    return
                decoder = sse.Decoder()
                pieces = iter(answer)
                for piece in pieces:
                    yield from self._events(decoder.feed(piece))
                    if self.done:
                        self._drain(pieces)
                        return
                yield from self._events(decoder.finish())
        except ValueError as exc:
            raise self._client.fault(FailureReason.INVALID_RESPONSE, str(exc), self._model) from exc
        finally:
            answer.close()

    def _events(self, events: list[sse.Event]) -> Iterator[View]:
        for event in events:
            if event.data.strip() == "[DONE]":
                self.done = True
                return
            decoded = _decode(event.data)
            chunk = View(cast("dict[str, Any]", decoded)) if isinstance(decoded, dict) else None
            if event.name == "error" or (chunk is not None and classify.is_fault(chunk)):
                raise self._client.refusal(event.status, self._answer.headers, chunk or event.data, self._model)
            if decoded is _BROKEN:
                raise ValueError(f"a frame of the stream is not JSON: {event.data[:120]!r}")
            if chunk is not None:
                yield chunk

    def _drain(self, pieces: Iterator[bytes]) -> None:
        """Read what ends the body, so that the connection can be used again."""
        self._answer.hurry(_DRAIN_SECONDS)
        try:
            with faults(self._client, self._model, self._cancellation):
                for _ in range(8):
                    if next(pieces, None) is None:
                        return
        except ProviderError:
            return  # the answer is whole; only the connection is lost


_BROKEN = object()
# Made once: the functions of the json module make a new one for every call with options.
_decoder = json.JSONDecoder(strict=False)
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _decode(text: str | bytes) -> Any:
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    try:
        return _decoder.decode(text)
    except ValueError:
        return _BROKEN


def read_all(answer: Answer) -> bytes:
    """Return the whole body and give the connection back; raises `ValueError` when it is too long."""
    pieces: list[bytes] = []
    size = 0
    try:
        for piece in answer:
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BODY:
                raise ProviderError("the answer is too long", reason=FailureReason.INVALID_RESPONSE)
    finally:
        answer.close()
    return b"".join(pieces)


def encode_body(body: Mapping[str, Any]) -> bytes:
    """Return the request's JSON; what is already encoded is copied, not encoded again."""
    plain: dict[str, Any] = {}
    parts: list[bytes] = []
    for key, value in body.items():
        encoded = getattr(value, "encoded", None)
        if isinstance(encoded, bytes):
            parts += (b',"%s":' % key.encode(), encoded)
        else:
            plain[key] = value
    head = _encoder.encode(plain).encode("utf-8", "replace")  # half a surrogate pair is no UTF-8
    if not parts:
        return head
    if not plain:
        parts[0] = parts[0][1:]
    return b"".join((head[:-1], *parts, b"}"))


def _where(base_url: str, proxy: str | None) -> tuple[_Address, str]:
    try:
        parts = urlsplit(base_url)
        port = parts.port
    except ValueError as exc:
        raise SettingsError(f"the base URL {base_url!r} cannot be read: {exc}") from exc
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not _is_host(host):
        raise SettingsError(f"the base URL {base_url!r} must look like https://host/v1")
    if proxy:
        proxy = proxy if "://" in proxy else f"http://{proxy}"
        if not proxy.startswith("http://"):
            raise SettingsError("only http:// proxies are supported; unset the proxy variable or name another one")
    target = parts.path.rstrip("/")
    if not target.endswith("/chat/completions"):
        target += "/chat/completions"
    if parts.query:
        target += "?" + parts.query
    port = port or (443 if parts.scheme == "https" else 80)
    return (parts.scheme, host, port, proxy or None), target


def _is_host(name: str) -> bool:
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def _host_header(address: _Address) -> str:
    scheme, host, port, _ = address
    name = f"[{host}]" if ":" in host else host
    return name if port == (443 if scheme == "https" else 80) else f"{name}:{port}"


def _encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    try:
        return [(name.encode("ascii"), str(value).strip().encode("latin-1")) for name, value in headers.items()]
    except UnicodeEncodeError:
        raise SettingsError("the API key or a header has a character that HTTP cannot carry") from None


def _secrets(headers: Mapping[str, str]) -> tuple[str, ...]:
    found: list[str] = []
    for name, value in headers.items():
        if any(word in name.lower() for word in _SECRET_HEADERS):
            found.append(str(value).partition(" ")[2].strip() or str(value))
    return tuple(found)
