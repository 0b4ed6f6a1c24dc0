"""The bytes of a row: cleaned once at the edge, encoded once, the same for ever after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

WIRE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
"""What is sent to a model, in this order; every other key is stored beside it."""

_OWN_COLUMNS = frozenset(("timestamp",))
_REPLACEMENT = "\ufffd"
_encode = msgspec.json.Encoder().encode


def clean_text(text: str) -> str:
    """`text` without NUL and lone surrogates, each replaced by U+FFFD; the same object when it was clean.

    SQLite's length and search stop at a NUL, and UTF-8 has no form for half a pair.
    """
    if "\0" in text:
        text = text.replace("\0", _REPLACEMENT)
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        # a proper pair written as two halves becomes its character, a lone half the replacement
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def clean_json(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """The same for every string inside a JSON value; clean parts are returned as they are."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        items = cast("list[Any]", value)
        cleaned = [clean_json(item) for item in items]
        return value if all(a is b for a, b in zip(cleaned, items, strict=True)) else cleaned
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        new = {clean_json(key): clean_json(item) for key, item in fields.items()}
        same = all(a is b for a, b in zip(new.values(), fields.values(), strict=False)) and new.keys() == fields.keys()
        return value if same else new
    return value


def split(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The part of a row that is sent and the part that is only stored; marks (`_…`) are in neither."""
    wire = {key: fields[key] for key in WIRE_KEYS if key in fields and (key == "content" or fields[key] is not None)}
    extra = {
        key: value
        for key, value in fields.items()
        if key not in WIRE_KEYS and key not in _OWN_COLUMNS and value is not None and not key.startswith("_")
    }
    return wire, extra


def encode(value: Mapping[str, Any]) -> bytes:
    """Compact UTF-8 JSON, the same bytes for the same value; strings are cleaned where they must be.

    Raises `TypeError` naming the key of a value that JSON cannot hold.
    """
    try:
        encoded = _encode(value)
    except (UnicodeEncodeError, msgspec.MsgspecError):
        return _encode(clean_json(dict(value)))
    except TypeError as error:
        for key, item in value.items():
            try:
                _encode(item)
            except (TypeError, UnicodeEncodeError):
                raise TypeError(f"the value of {key!r} cannot be stored as JSON: {error}") from error
        raise
    return _encode(clean_json(dict(value))) if b"\\u0000" in encoded else encoded
