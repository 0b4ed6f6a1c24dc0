"""Name the reason of a provider's failure: structured codes first, then the HTTP status, then words."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from hermes_agent.errors import FailureReason, HermesError, ProviderError

MAX_RETRY_AFTER = 600.0
_MAX_TEXT = 300
_MAX_READ = 20_000
_MIN_SECRET = 12
_MIN_PIECE = 6


@dataclass(frozen=True, slots=True)
class _Rule:
    reason: FailureReason
    codes: frozenset[str]
    """Exact error codes or types that decide whatever the status is."""
    words: re.Pattern[str] | None
    """Decides when the status is in `statuses`."""
    statuses: frozenset[int]


def _rule(reason: FailureReason, codes: str, words: str = "", statuses: Iterable[int] = ()) -> _Rule:
    pattern = re.compile(words, re.IGNORECASE) if words else None
    return _Rule(reason, frozenset(codes.split()), pattern, frozenset({0, 400, 422, *statuses}))


_RESETS = re.compile(r"try again (in|after)|retry (in|after)|rate.?limit|too many requests|per minute", re.IGNORECASE)
"""Words of a limit that lifts by itself: such a refusal is no billing matter."""

_BILLING_WORDS = (
    r"payment required|billing|current quota|(usd |monthly )?spend(ing)? limit|out of credits?|"
    r"insufficient (credits?|balance|funds|quota)|credit balance|quota exhausted"
)

_RULES = (
    _rule(
        FailureReason.BILLING,
        "insufficient_quota terminal_quota_exhausted billing_hard_limit_reached billing_not_active "
        "payment_required insufficient_credits insufficient_balance credits_exhausted",
    ),
    _rule(
        FailureReason.CONTEXT_OVERFLOW,
        "context_length_exceeded exceed_context_size_error context_window_exceeded request_too_large",
        r"(maximum |max )?context (length|window|size)|(prompt|input|request) is too long|reduce the length|"
        r"too many (input )?tokens|input token count|maximum number of tokens",
        (413, 500),
    ),
    _rule(
        FailureReason.CONTENT_BLOCKED,
        "content_filter content_policy_violation content_policy_blocked data_inspection_failed",
        r"content (management )?policy|safety system|content filter|flagged (by|as|for)",
        (403, 451),
    ),
    _rule(
        FailureReason.MODEL_NOT_FOUND,
        "model_not_found model_not_available invalid_model unknown_model",
        r"model\b.{0,80}\b(does not exist|not found|is not available)|(no such|unknown|invalid) model",
    ),
    _rule(
        FailureReason.AUTH,
        "invalid_api_key authentication_error permission_error permission_denied unauthenticated",
        r"(invalid|incorrect|missing|no) api.?key|api key not valid|unauthori[sz]ed|authentication",
    ),
    _rule(
        FailureReason.OVERLOADED,
        "overloaded overloaded_error engine_overloaded server_overloaded server_busy",
        r"overloaded|at capacity|server (is )?busy",
        (429, 502, 503, 529),
    ),
    _rule(
        FailureReason.RATE_LIMIT,
        "rate_limit rate_limit_exceeded rate_limit_error rate_limited too_many_requests resource_exhausted",
        r"rate.?limit|too many requests|throttl|slow down|resource.exhausted",
        (403,),
    ),
)

_BY_STATUS = {
    401: FailureReason.AUTH,
    402: FailureReason.BILLING,
    403: FailureReason.AUTH,
    404: FailureReason.MODEL_NOT_FOUND,
    408: FailureReason.TIMEOUT,
    413: FailureReason.CONTEXT_OVERFLOW,
    429: FailureReason.RATE_LIMIT,
    503: FailureReason.OVERLOADED,
    529: FailureReason.OVERLOADED,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What a provider said about a failure, in whatever shape it said it."""

    text: str = ""
    codes: tuple[str, ...] = ()
    status: int = 0
    retry_after: float | None = None


def read_fault(body: Any) -> Fault:
    """Read an error body: bytes, text or decoded JSON of any known shape."""
    if isinstance(body, bytes):
        body = body[:_MAX_READ].decode("utf-8", "replace")
    if isinstance(body, str):
        text = body[:_MAX_READ]
        try:
            body = json.loads(text)
        except ValueError:
            return Fault(re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL | re.IGNORECASE))
    if isinstance(body, list) and body:
        body = cast("list[Any]", body)[0]
    if not isinstance(body, Mapping):
        return Fault("" if body is None else str(cast("object", body)))
    outer = cast("Mapping[str, Any]", body)
    inner: Any = outer.get("error")
    levels: list[Mapping[str, Any]] = [outer]
    if isinstance(inner, Mapping):
        levels.insert(0, cast("Mapping[str, Any]", inner))
    return Fault(_message(levels, inner), _codes(levels), _status(levels), _wait(levels))


def _message(levels: list[Mapping[str, Any]], inner: Any) -> str:
    for level in levels:
        for key in ("message", "error_message", "detail", "msg", "title"):
            if isinstance(level.get(key), str) and level[key]:
                return cast("str", level[key])
    if isinstance(inner, str) and inner:
        return inner
    return json.dumps(levels[0], ensure_ascii=False, default=str)


def _codes(levels: list[Mapping[str, Any]]) -> tuple[str, ...]:
    found: list[str] = []
    for level in levels:
        for key in ("code", "type", "error_type", "error_code", "status"):
            value = level.get(key)
            if isinstance(value, str) and value:
                found.append(value.lower())
    return tuple(found)


def _status(levels: list[Mapping[str, Any]]) -> int:
    for level in levels:
        for key in ("status", "status_code", "code", "error_code", "http_status"):
            value = level.get(key)
            if isinstance(value, str) and value.isdecimal():
                value = int(value[:4])
            if isinstance(value, int) and 400 <= value < 600:
                return value
    return 0


def _wait(levels: list[Mapping[str, Any]]) -> float | None:
    return next((wait for level in levels if (wait := _seconds(level.get("retry_after"))) is not None), None)


def is_fault(frame: Mapping[str, Any]) -> bool:
    """Whether a decoded frame or body that came with status 200 is in truth an error."""
    if frame.get("error"):
        return True
    if isinstance(frame.get("choices"), list) and frame["choices"]:
        return False
    return (
        frame.get("object") == "error"
        or any(isinstance(frame.get(key), str) and frame[key] for key in ("error_type", "error_message"))
        or (bool(frame.get("code")) and isinstance(frame.get("message"), str))
    )


def classify_http(
    status: int,
    headers: Mapping[str, str],
    body: Any,
    *,
    where: str = "",
    secrets: Iterable[str] = (),
    default: FailureReason = FailureReason.UNKNOWN,
) -> ProviderError:
    """Return the error that an HTTP answer means; status 0 or 200 is an error inside a stream.

    `where` (host and model) begins the message; `secrets` and pieces of them never appear in it.
    """
    fault = read_fault(body)
    if status in (0, 200):
        status = fault.status
    lowered = {name.lower(): value for name, value in headers.items()}
    text = redact(" ".join(fault.text.split()), secrets)[:_MAX_TEXT]
    reason = _judge(status, fault, default)
    said = [part for part in (where, f"HTTP {status}" if status else "", text) if part]
    if status == 404 and "model" not in text.lower():
        said.append("is the base URL right? It usually ends in /v1")
    return ProviderError(
        ": ".join(said) or reason.value,
        reason=reason,
        status=status,
        retry_after=retry_after(lowered) if retry_after(lowered) is not None else fault.retry_after,
    )


def _judge(status: int, fault: Fault, default: FailureReason) -> FailureReason:
    codes = frozenset(fault.codes)
    for rule in _RULES:
        if codes & rule.codes:
            return rule.reason
    if status in (0, 400, 403, 422, 429) and re.search(_BILLING_WORDS, fault.text, re.IGNORECASE):
        if not _RESETS.search(fault.text):
            return FailureReason.BILLING
        return _BY_STATUS.get(status, FailureReason.RATE_LIMIT)
    words = " ".join((*fault.codes, fault.text))
    for rule in _RULES:
        if rule.words is not None and status in rule.statuses and rule.words.search(words):
            return rule.reason
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status >= 500:
        return FailureReason.SERVER_ERROR
    if status >= 400:
        return FailureReason.BAD_REQUEST
    if status >= 300:
        return FailureReason.INVALID_RESPONSE
    return default


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asked to wait, at most `MAX_RETRY_AFTER`; None for nothing usable.

    Header names are in lower case.
    """
    wait = _seconds(headers.get("retry-after-ms"), unit=0.001)
    if wait is not None:
        return wait
    value = headers.get("retry-after")
    wait = _seconds(value)
    if wait is not None or not value or "GMT" not in value.upper():
        return wait
    until = _date(value)
    if until is None:
        return None
    # The server's own clock, when it tells it: ours may be wrong.
    now = _date(headers.get("date", ""))
    return _seconds(until - (time.time() if now is None else now))


def _date(text: str) -> float | None:
    from email.utils import parsedate_to_datetime  # noqa: PLC0415 - 30 ms, for a rare header form

    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError):
        return None


def _seconds(value: Any, unit: float = 1.0) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if not math.isfinite(value) or value <= 0:
        return None
    return min(float(value) * unit, MAX_RETRY_AFTER)


def redact(text: str, secrets: Iterable[str]) -> str:
    """Replace every secret, and every piece of one that is long enough to help a thief."""
    for secret in secrets:
        if len(secret) >= _MIN_SECRET:
            text = _without(text, secret)
    return text


def _without(text: str, secret: str) -> str:
    kept: list[str] = []
    at = 0
    while at < len(text):
        end = at
        while end < len(text) and text[at : end + 1] in secret:
            end += 1
        if end - at >= _MIN_PIECE:
            kept.append("***")
            at = end
        else:
            kept.append(text[at])
            at += 1
    return "".join(kept)


def classify_exception(error: Exception, *, where: str = "", secrets: Iterable[str] = ()) -> ProviderError:
    """Return the error that a foreign client's exception means; what nobody knows is UNKNOWN."""
    cause: BaseException | None = error
    for _ in range(5):
        if cause is None:
            break
        if isinstance(cause, ProviderError):
            return cause
        status, headers, body = _http_facts(cause)
        if status:
            return classify_http(status, headers, body or str(cause), where=where, secrets=secrets)
        reason = _transport_reason(cause)
        if reason is not None:
            return ProviderError(_line(where, cause, secrets), reason=reason)
        cause = cause.__cause__ or cause.__context__
    reason = error.reason if isinstance(error, HermesError) else FailureReason.UNKNOWN
    return ProviderError(_line(where, error, secrets), reason=reason)


def _line(where: str, error: BaseException, secrets: Iterable[str]) -> str:
    text = redact(" ".join(str(error).split()), secrets)[:_MAX_TEXT]
    return ": ".join(part for part in (where, type(error).__name__, text) if part)


def _http_facts(error: BaseException) -> tuple[int, dict[str, str], Any]:
    response: Any = getattr(error, "response", None)
    status: Any = getattr(error, "status_code", None) or getattr(response, "status_code", None)
    headers: Any = getattr(response, "headers", None) or getattr(error, "headers", None)
    body: Any = getattr(error, "body", None) or getattr(response, "text", None)
    pairs = cast("Mapping[Any, Any]", headers).items() if isinstance(headers, Mapping) else ()
    return (
        status if isinstance(status, int) and status >= 300 else 0,
        {str(name): str(value) for name, value in pairs},
        cast("Any", body) if isinstance(body, str | bytes | dict | list) else None,
    )


def _transport_reason(error: BaseException) -> FailureReason | None:
    name = type(error).__name__
    if isinstance(error, TimeoutError) or "Timeout" in name:
        return FailureReason.TIMEOUT
    if isinstance(error, ConnectionError) or any(
        word in name for word in ("ConnectError", "ConnectionError", "ReadError", "WriteError", "RemoteProtocolError")
    ):
        return FailureReason.CONNECTION
    return None
