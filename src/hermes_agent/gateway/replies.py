"""What the API answers with: JSON values, and one shape for everything that went wrong.

{"error": {"message", "type", "param", "code"}}                          always
{"error": {..., "failure": {"reason", "retryable", "action"}}}           where a turn, the store or a model failed
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from hermes_agent import log
from hermes_agent.errors import (
    FAILURES,
    AmbiguousSession,
    FailureReason,
    HermesError,
    ProviderError,
    SettingsError,
    UnknownSession,
)
from hermes_agent.store import encoding

STATUS: dict[FailureReason, int] = {
    # The caller goes too fast, or too far: waiting or changing the request helps.
    FailureReason.RATE_LIMIT: 429,
    FailureReason.QUEUE_FULL: 429,
    FailureReason.USAGE: 400,
    FailureReason.CONTEXT_OVERFLOW: 400,
    FailureReason.CONTENT_BLOCKED: 400,
    FailureReason.MODEL_NOT_FOUND: 404,
    FailureReason.MAX_ITERATIONS: 422,
    # Somebody else got there first.
    FailureReason.SESSION_BUSY: 409,
    FailureReason.STALE_LEASE: 409,
    FailureReason.MESSAGE_CONFLICT: 409,
    FailureReason.INTERRUPTED: 409,
    # The model's server: its key, bill and faults are not the caller's, so never 401 or 402.
    FailureReason.OVERLOADED: 502,
    FailureReason.SERVER_ERROR: 502,
    FailureReason.CONNECTION: 502,
    FailureReason.INVALID_RESPONSE: 502,
    FailureReason.EMPTY_RESPONSE: 502,
    FailureReason.INVALID_TOOL_CALLS: 502,
    FailureReason.TRUNCATED: 502,
    FailureReason.AUTH: 502,
    FailureReason.BILLING: 502,
    FailureReason.BAD_REQUEST: 502,
    FailureReason.NOT_CONFIGURED: 502,
    FailureReason.TIMEOUT: 504,
    # This process.
    FailureReason.DRAINING: 503,
    FailureReason.DEADLINE: 504,
    # The store: 503 where it is there again after a while or a restart.
    FailureReason.STORE_FULL: 507,
    FailureReason.STORE_LOCKED: 503,
    FailureReason.STORE_IO: 503,
    FailureReason.STORE_MISSING: 503,
    FailureReason.STORE_READ_ONLY: 503,
    FailureReason.STORE_REPLACED: 503,
    FailureReason.STORE_DAMAGED: 500,
    FailureReason.STORE_FOREIGN: 500,
    FailureReason.STORE_UNSAFE_PLACE: 500,
    FailureReason.TOOL_FAILED: 500,
    FailureReason.POISON: 500,
    FailureReason.UNKNOWN: 500,
}
"""The HTTP status of a failure outside a turn; of a failed turn for clients that want one (`Prefer: status=strict`)."""

_CODES = {
    FailureReason.QUEUE_FULL: "rate_limit_exceeded",
    FailureReason.DRAINING: "gateway_draining",
    FailureReason.SESSION_BUSY: "session_active_turn",
}
"""Where clients know a failure by another code than its reason."""
_TYPES = {401: "gateway_auth_error", 403: "permission_error", 429: "rate_limit_error"}
_WAIT = 1
"""Seconds after which to try again where nobody said how long."""

_encode = msgspec.json.Encoder().encode


class ApiError(Exception):
    """A request that is answered with an error. Code and message are for the client; secrets are blotted out."""

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        error_type: str = "",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        failure: FailureReason | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = log.redact(message)
        self.type = error_type or _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
        self.param = param
        self.headers = dict(headers or {})
        self.failure = failure
        self.close = close
        """The connection ends with this answer: what else the client sends is of no use."""

    def body(self) -> dict[str, Any]:
        """The envelope, for an answer of its own or as an event of a stream."""
        error: dict[str, Any] = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        if self.failure is not None:
            error["failure"] = failure_fields(self.failure)
        return {"error": error}

    def to_response(self) -> web.Response:
        headers = self.headers
        if self.failure is not None and not FAILURES[self.failure].retry:
            # OpenAI's clients repeat whatever failed with 409, 429 or 5xx unless they are told not to.
            headers = {**headers, "X-Should-Retry": "false"}
        response = json_reply(self.body(), self.status, headers)
        if self.close:
            response.force_close()
        return response


def failure_fields(reason: FailureReason) -> dict[str, Any]:
    """A reason as the API shows it."""
    failure = FAILURES[reason]
    return {"reason": reason.value, "retryable": failure.retry, "action": failure.advice}


def from_error(error: HermesError) -> ApiError:
    """The answer to an error of the program."""
    message = str(error)
    if isinstance(error, UnknownSession):
        return ApiError(404, "session_not_found", message)
    if isinstance(error, AmbiguousSession):
        return ApiError(409, "ambiguous_session", message)
    if isinstance(error, SettingsError):
        # The operator's mistake, not the caller's; its text may show a line of the file.
        return ApiError(500, "settings_error", "A setting of this server cannot be used; see its log.")
    reason = error.reason
    status = STATUS[reason]
    headers: dict[str, str] = {}
    if FAILURES[reason].retry and status in {409, 429, 503}:
        wait = error.retry_after if isinstance(error, ProviderError) else None
        headers["Retry-After"] = str(math.ceil(wait) if wait is not None and 0 <= wait < math.inf else _WAIT)
    return ApiError(status, _CODES.get(reason, reason.value), message, headers=headers, failure=reason)


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """`value` as JSON. What JSON cannot hold is made valid: NaN becomes null, a lone surrogate U+FFFD."""
    return web.Response(body=to_json(value), status=status, headers=headers, content_type="application/json")


def to_json(value: Any) -> bytes:
    """The bytes of `json_reply`."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(encoding.clean_json(msgspec.to_builtins(value)))
