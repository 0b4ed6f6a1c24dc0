"""The JSON object in a request's body, read strictly and within limits; everything else is a 4xx that says why.

Strictly: declared as JSON, UTF-8, an object, no key twice, no NaN and no number beyond
64 bits or a double, at most 64 levels deep. Within limits: so many bytes, declared or
chunked but not compressed, in so many seconds. The texts in the object are valid Unicode
without NUL.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar, cast

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hermes_agent.gateway.replies import ApiError
from hermes_agent.store import encoding

LIMIT = 10_000_000
"""Bytes of a body."""
TIMEOUT = 30.0
"""Seconds from the first look at a body to its last byte."""
MAX_DEPTH = 64
MAX_VALUES = 100_000
"""Lists, objects and commas: a body of the largest size could hold millions and take seconds to parse."""

_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([^\s;\"]*)", re.IGNORECASE)
_UNCLEAN = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
"""An escape for NUL or for half a character; also two halves that make a whole one."""
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b'{}[]"'))
_NO_VALUES = bytes(set(range(256)) - set(b'{[,"'))
_LONGEST_SHOWN = 300
_INT64 = 2**63
_FIELD = re.compile(r"(?:Object missing required field|Object contains unknown field) `(.*)`", re.DOTALL)
_Kind = TypeVar("_Kind")


async def read_json(request: web.Request, *, limit: int = LIMIT, seconds: float = TIMEOUT) -> dict[str, Any]:
    """The object in the body; `{}` when there is no body. Raises `ApiError` 400, 408, 413 or 415.

    `ConnectionError` passes through when the client went away meanwhile.
    """
    if not request.body_exists:
        return {}
    kind = request.headers.get("Content-Type")
    if kind is not None:
        _check_type(kind)
    _check_encoding(request)
    length = request.content_length
    if length is not None and length > limit:
        raise too_large(limit)
    body = await _read(request, limit, seconds)
    if not body:
        return {}
    if kind is None:
        raise _wrong_type()
    return parse(body)


def parse(body: bytes) -> dict[str, Any]:
    """The object in `body`. Raises `ApiError` 400."""
    brackets = body.count(b"{") + body.count(b"[")
    if brackets + body.count(b",") > MAX_VALUES:
        _check_count(body)
    try:
        value = _decoder.decode(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _invalid(f"not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise _too_deep() from None
    except _Refused as error:
        raise _invalid(str(error)) from None
    if type(value) is not dict:
        raise _invalid(f"expected an object, got {_NAMES[type(value)]}")
    if brackets > MAX_DEPTH:
        _check_depth(body)
    if b"\\u" in body and _UNCLEAN.search(body):
        return encoding.clean_json(value)
    return cast("dict[str, Any]", value)


def decode(fields: Mapping[str, Any], kind: type[_Kind], *, codes: Mapping[str, str] | None = None) -> _Kind:
    """`fields` as a `kind`, checked. Raises `ApiError` 400 that names the field in `param`.

    The code is the one that `codes` has for the top-level field, else `missing_FIELD`,
    `unknown_field` or `invalid_FIELD`.
    """
    try:
        return msgspec.convert(fields, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _wrong(str(error), codes or {}) from None


class _Refused(ValueError):
    """Valid for Python's parser, but not for us."""


async def _read(request: web.Request, limit: int, seconds: float) -> bytes:
    content = request.content
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            while chunk := await content.readany():
                size += len(chunk)
                if size > limit:
                    raise too_large(limit)
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(
            408, "body_timeout", f"The request body did not arrive within {seconds:g} seconds.", close=True
        ) from None
    except (web.RequestPayloadError, HttpProcessingError):
        raise ApiError(400, "invalid_body", "The request body is not encoded as its headers say.", close=True) from None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _check_encoding(request: web.Request) -> None:
    """Compressed bodies are refused: nobody sends them, and a small one can unpack to gigabytes."""
    name = request.headers.get("Content-Encoding")
    if name is not None and name.strip().lower() not in {"", "identity"}:
        raise ApiError(
            415,
            "unsupported_content_encoding",
            "The request body must not be compressed.",
            param="Content-Encoding",
            headers={"Accept-Encoding": "identity"},
            close=True,
        )


def _check_type(declared: str) -> None:
    """A page can send `text/plain` to another site unasked; JSON needs the site's consent."""
    if declared == "application/json":
        return
    name, _, parameters = declared.partition(";")
    name = name.strip().lower()
    charset = _CHARSET.search(f";{parameters}")
    if name != "application/json" and not (name.startswith("application/") and name.endswith("+json")):
        raise _wrong_type()
    if charset is not None and charset.group(1).lower() not in {"utf-8", "utf8", "us-ascii"}:
        raise ApiError(415, "unsupported_content_type", "JSON must be sent as UTF-8.", param="Content-Type")


def _wrong_type() -> ApiError:
    return ApiError(415, "unsupported_content_type", "Content-Type must be application/json.", param="Content-Type")


def _check_count(body: bytes) -> None:
    if len(_outside_texts(body, _NO_VALUES)) > MAX_VALUES:
        raise _invalid(f"more than {MAX_VALUES} values")


def _outside_texts(body: bytes, unwanted: bytes) -> bytes:
    """What valid JSON has outside of its texts, without the unwanted bytes."""
    without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    return b"".join(without_escapes.translate(None, unwanted).split(b'"')[::2])


def _check_depth(body: bytes) -> None:
    """Raise `ApiError` if valid JSON is nested too deep; a few passes over the bytes, none of them in Python."""
    brackets = _outside_texts(body, _NO_BRACKETS).translate(_SQUARE)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise _too_deep()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _Refused(f"the key {_shown(twice)} stands twice in an object")
    return fields


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -_INT64 <= (number := int(digits)) < _INT64:
        raise _Refused("a whole number needs more than 64 bits")
    return number


def _fraction(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _Refused(f"the number {_shown(digits)} is too large")
    return number


def _constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not JSON")


_decoder = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_whole, parse_float=_fraction, parse_constant=_constant
)
_NAMES = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false", type(None): "null"}


def _wrong(said: str, codes: Mapping[str, str]) -> ApiError:
    """The answer to one of msgspec's messages: `Expected ..., got ... - at `$.a.b[0]``."""
    problem, _, path = said.partition(" - at `$")
    # A message may show what the client sent, as long as that was.
    problem, path = problem[:_LONGEST_SHOWN], path[:_LONGEST_SHOWN]
    path = path.rstrip("`").replace("[...]", "").strip(".")
    named = _FIELD.fullmatch(problem)
    param = ".".join(part for part in (path, named.group(1) if named else "") if part)
    top = re.split(r"[.\[]", param, maxsplit=1)[0]
    if named is None:
        code = f"invalid_{top}" if top else "invalid_request"
        message = f"{param}: {problem}" if param else problem
    elif "missing" in problem:
        code, message = f"missing_{top}", f"{param} is required"
    else:
        code, message = "unknown_field", f"{_shown(param)} is not a field of this request"
    return ApiError(400, codes.get(top, code), message.replace("`", ""), param=param or None)


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:57] + "...")


def _invalid(why: str) -> ApiError:
    return ApiError(400, "invalid_json", f"Invalid JSON in request body: {why}")


def _too_deep() -> ApiError:
    return _invalid(f"nested deeper than {MAX_DEPTH} levels")


def too_large(limit: int) -> ApiError:
    return ApiError(413, "body_too_large", f"The request body is larger than {limit} bytes.", close=True)
