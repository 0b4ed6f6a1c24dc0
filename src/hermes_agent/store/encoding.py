"""The bytes of a row: cleaned once at the edge, encoded once, the same for ever after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

WIRE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
"""What is sent to a model, the role first; every other key is stored beside it."""

_OWN_OR_WIRE = frozenset((*WIRE_KEYS, "timestamp"))
_REPLACEMENT = "\ufffd"
_encode = msgspec.json.Encoder(order="deterministic").encode
_encode_any_keys = msgspec.json.Encoder().encode


def clean_text(text: str) -> str:
    """`text` without NUL and lone surrogates, each replaced by U+FFFD; the same object when it was clean.

    SQLite's length and search stop at a NUL.
    """
    return join_pairs(text.replace("\0", _REPLACEMENT) if "\0" in text else text)


def join_pairs(text: str) -> str:
    """`text` as UTF-8 can hold it: a pair written as two halves becomes its character, a lone half U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def clean_json(value: Any) -> Any:
    """The same for every string inside a JSON value; clean parts are returned as they are."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        items = cast("list[Any]", value)
        cleaned = [clean_json(item) for item in items]
        return items if all(a is b for a, b in zip(cleaned, items, strict=True)) else cleaned
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        new = {clean_json(key): clean_json(item) for key, item in fields.items()}
        same = all(a is b for a, b in zip(new.values(), fields.values(), strict=False)) and new.keys() == fields.keys()
        return fields if same else new
    return value


def split(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The part of a row that is sent and the part that is only stored; marks (`_…`) are in neither."""
    wire = {key: fields[key] for key in WIRE_KEYS if key in fields and (fields[key] is not None or key == "content")}
    extra = {
        key: value
        for key, value in fields.items()
        if key not in _OWN_OR_WIRE and value is not None and not key.startswith("_")
    }
    return wire, extra


def searchable(role: str, content: Any) -> str:
    """What the search index shall find of a message, "" for nothing: just what SQLite finds in the stored row."""
    if role == "system" or not content:
        return ""
    if isinstance(content, str):
        return clean_text(content)
    if isinstance(content, (list, dict)):
        return encode({"": content})[4:-1].decode()
    return ""


def encode(value: Mapping[str, Any]) -> bytes:
    """Compact UTF-8 JSON with sorted keys, the same bytes for the same value; strings are cleaned where they must be.

    Raises `TypeError` naming the key of a value that JSON cannot hold.
    """
    try:
        encoded = _encode(value)
    except (UnicodeEncodeError, msgspec.MsgspecError):
        return _encode(clean_json(dict(value)))
    except (TypeError, RecursionError):
        return _encode({key: _plain(key, item) for key, item in value.items()})
    return _encode(clean_json(dict(value))) if b"\\u0000" in encoded else encoded


def _plain(key: str, value: Any) -> Any:
    """`value` in JSON's own types: keys that are no strings become some."""
    try:
        return msgspec.json.decode(_encode_any_keys(clean_json(value)))
    except (TypeError, UnicodeEncodeError, RecursionError, msgspec.MsgspecError) as error:
        raise TypeError(f"the value of {key!r} cannot be stored as JSON: {error}") from error
