"""What one transcript row looks like: constructors, call ids, tool names, encoded form.

A row is a plain dict in chat-completions shape. The wire keys are sent to the model, keys
that start with `_` are marks in memory (never stored, never sent), all others are stored
only. What a constructor returns is accepted by a strict provider as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NoReturn, cast

import msgspec

from hermes_agent.providers.base import ToolCall
from hermes_agent.store import encoding

Row = dict[str, Any]

# The store's forms of a row, under the name that the floors above it use.
WIRE_KEYS = encoding.WIRE_KEYS
clean_text = encoding.clean_text
clean_json = encoding.clean_json
split = encoding.split
encode = encoding.encode

ID_LENGTH = 64
NO_OUTPUT = "[no output]"
"""Content of a tool row whose tool returned nothing."""
UNNAMED_TOOL = "invalid_tool"
"""Stands for a tool name that holds nothing usable."""
INVALID_ARGUMENTS = "_invalid_arguments"
"""Key under which arguments that were no JSON object keep their original text."""
INVALID_ARGUMENTS_LIMIT = 2000

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_UNSAFE = re.compile(r"[^a-zA-Z0-9_-]")
_NUL_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_NAME_END = re.compile(r"""["'`<>]""")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SEPARATOR = re.compile(r"[-\s]+")
_TOOL_SUFFIX = "_tool"
_NAME_CUTOFF = 0.7

# Checks that a text is one JSON object without building its values; refuses lone surrogates.
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ArgumentsError(ValueError):
    """The arguments of a call are not one JSON object; `truncated` says that the text looks cut."""

    def __init__(self, message: str, *, truncated: bool = False) -> None:
        super().__init__(message)
        self._truncated = truncated

    @property
    def truncated(self) -> bool:
        return self._truncated


# -- content -------------------------------------------------------------------------------


def json_text(value: Any) -> str:
    """Write any value as clean JSON text; what JSON cannot say becomes its type's name in brackets."""
    try:
        return clean_text(msgspec.json.encode(clean_json(value), order="deterministic").decode())
    except (TypeError, ValueError, RecursionError):
        return f"[{type(value).__name__}]"


def as_content(value: Any) -> str | list[Any] | None:
    """Bring a value into one of the shapes of `content`: text, a list of typed parts, None.

    Other JSON values become their JSON text. What is in shape comes back as the same object.
    """
    if isinstance(value, str):
        return clean_text(value)
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        return json_text(value)
    old = cast("Sequence[Any]", value)
    new = [_part(item) for item in old]
    if isinstance(value, list) and all(a is b for a, b in zip(old, new, strict=True)):
        return cast("list[Any]", value)
    return new


def is_blank(content: Any) -> bool:
    """Say whether a content in shape shows nothing: no text, no part that is not text."""
    if isinstance(content, str):
        return not content or content.isspace()
    return all(part["type"] == "text" and is_blank(part["text"]) for part in content or ())


def _part(item: Any) -> Any:
    if isinstance(item, str):
        return {"type": "text", "text": clean_text(item)}
    if not isinstance(item, dict):
        return {"type": "text", "text": json_text(item)}
    part = cast("dict[str, Any]", clean_json(item))
    if not isinstance(part.get("type"), str):
        return {"type": "text", "text": json_text(part)}
    if part["type"] == "text" and not isinstance(part.get("text"), str):
        text = part.get("text")
        return {**part, "text": "" if text is None else json_text(text)}
    return part


# -- constructors ---------------------------------------------------------------------------


def user_row(content: Any, *, timestamp: float) -> Row:
    """Make a user row; `content` is text or a list of content parts."""
    return {"role": "user", "content": as_content(content) or "", "timestamp": timestamp}


def assistant_row(
    content: Any,
    tool_calls: Iterable[ToolCall] = (),
    *,
    timestamp: float,
    finish_reason: str = "",
    reasoning: str = "",
) -> Row:
    """Make an assistant row; with calls and no text, `content` is None.

    Names and arguments that a strict provider would refuse are stored in their safe form.
    """
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": safe_name(call.name), "arguments": wire_arguments(call.arguments)},
        }
        for call in tool_calls
    ]
    row: Row = {"role": "assistant", "content": as_content(content) or ""}
    if calls:
        row["content"] = row["content"] or None
        row["tool_calls"] = calls
    row["timestamp"] = timestamp
    if finish_reason:
        row["finish_reason"] = clean_text(finish_reason)
    if reasoning:
        row["reasoning"] = clean_text(reasoning)
    return row


def tool_row(
    name: str,
    content: Any,
    call_id: str,
    *,
    timestamp: float,
    effect_disposition: str | None = None,
) -> Row:
    """Make the row of one tool result; a result of nothing says so.

    `name` is in the form that the call's row has, `tool_name` as the tool was asked for.
    """
    shaped = as_content(content)
    row: Row = {
        "role": "tool",
        "name": safe_name(name),
        "tool_name": clean_text(name),
        "content": NO_OUTPUT if is_blank(shaped) else shaped,
        "tool_call_id": call_id,
        "timestamp": timestamp,
    }
    if effect_disposition is not None:
        row["effect_disposition"] = effect_disposition
    return row


# -- call ids -------------------------------------------------------------------------------


def safe_id(call_id: str) -> str:
    """Bring an id into `[a-zA-Z0-9_-]{1,64}` without merging two different ids; "" stays ""."""
    call_id = call_id.strip()
    if not call_id or _NAME.fullmatch(call_id):
        return call_id
    mark = "_" + _digest(call_id, 6)
    return _UNSAFE.sub("_", call_id)[: ID_LENGTH - len(mark)] + mark


def derived_id(name: str, arguments: str, index: int) -> str:
    """Make the id of a call that came without one, from what it says and where it stands."""
    return "call_" + _digest(f"{name}:{arguments}:{index}", 12)


def free_id(base: str, seen: Collection[str]) -> str:
    """Return `base`, or `base_d2`, `base_d3`, … when it is taken.

    A provider may repeat one id for a whole session, so the free number is found by
    doubling and halving, not by counting from 2 each time.
    """
    if base not in seen:
        return base

    def numbered(number: int) -> str:
        suffix = f"_d{number}"
        return base[: ID_LENGTH - len(suffix)] + suffix

    taken, free = 1, 2
    while numbered(free) in seen:
        taken, free = free, free * 2
    while free - taken > 1:
        middle = (taken + free) // 2
        if numbered(middle) in seen:
            taken = middle
        else:
            free = middle
    return numbered(free)


def assign_call_ids(calls: Iterable[ToolCall], seen: set[str]) -> None:
    """Write a safe id, unique among `seen`, back to each call and add it to `seen`.

    The same reply after the same history gets the same ids.
    """
    for index, call in enumerate(calls):
        wanted = safe_id(call.id) or derived_id(call.name, call.arguments, index)
        call.id = free_id(wanted, seen)
        seen.add(call.id)


def _digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:length]


# -- names and arguments --------------------------------------------------------------------


def safe_name(name: Any) -> str:
    """Bring a tool name into `[a-zA-Z0-9_-]{1,64}`; a legal name comes back as it is."""
    if not isinstance(name, str):
        return UNNAMED_TOOL
    if _NAME.fullmatch(name):
        return name
    return _UNSAFE.sub("_", name.strip())[:64] or UNNAMED_TOOL


def repair_tool_name(name: str, valid: Collection[str]) -> str | None:
    """Return the valid tool name that `name` evidently means, or None."""
    if name in valid:
        return name
    if "\0" in name:
        return None
    name = _NAME_END.split(name, maxsplit=1)[0].strip()
    if not name:
        return None
    if name in valid:
        return name
    known: dict[str, str] = {}
    for candidate in sorted(valid):
        known.setdefault(_normal_name(candidate), candidate)
    if name.lower() in valid:
        return name.lower()
    spellings = [_normal_name(name)]
    while len(spellings) < 3 and spellings[-1].endswith(_TOOL_SUFFIX):
        spellings.append(spellings[-1].removesuffix(_TOOL_SUFFIX))
    for spelling in spellings:
        if spelling in known:
            return known[spelling]
    # Local import: only a model's misspelling needs it, and it costs start-up time.
    from difflib import get_close_matches  # noqa: PLC0415

    close = get_close_matches(spellings[-1], known, n=1, cutoff=_NAME_CUTOFF)
    return known[close[0]] if close else None


def _normal_name(name: str) -> str:
    return _SEPARATOR.sub("_", _CAMEL.sub("_", name)).lower()


def parse_arguments(text: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a call as a clean object; nothing at all means no arguments.

    Raises `ArgumentsError`, quoting what the parser said, for anything but one JSON object,
    and the same for the stored form of such a thing.
    """
    if text is None:
        return {}
    if isinstance(text, dict):
        return clean_json(text)
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - a provider may send anything
        raise ArgumentsError(f"the arguments must be a JSON object, not {_json_kind(text)}")
    if not text or text.isspace():
        return {}
    try:
        value = clean_json(_ARGUMENTS.decode(text))
    except RecursionError:
        raise ArgumentsError("the arguments are not usable: nested too deeply") from None
    except ValueError as error:
        truncated = not text.rstrip().endswith(("}", "]"))
        raise ArgumentsError(f"the arguments are not valid JSON: {error}", truncated=truncated) from error
    if not isinstance(value, dict):
        raise ArgumentsError(f"the arguments must be a JSON object, not {_json_kind(value)}")
    fields = cast("dict[str, Any]", value)
    if fields.keys() == {INVALID_ARGUMENTS}:
        # the stored form of arguments that were no object: a resumed turn refuses them like the first one
        parse_arguments(str(fields[INVALID_ARGUMENTS]))
        raise ArgumentsError("the arguments are not usable")
    return fields


def wire_arguments(value: Any) -> str:
    """Return the text of one JSON object for a call's `arguments`; a legal text comes back as it is.

    What is no object is kept, cut, as a text inside one; NUL and lone surrogates hidden
    in escapes are replaced.
    """
    if isinstance(value, str) and _is_clean_object(value):
        return value
    try:
        return json.dumps(parse_arguments(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):
        original = value if isinstance(value, str) else json_text(value)
        kept = {INVALID_ARGUMENTS: clean_text(original[:INVALID_ARGUMENTS_LIMIT])}
        return json.dumps(kept, ensure_ascii=False, separators=(",", ":"))


def _is_clean_object(text: str) -> bool:
    if clean_text(text) is not text or ("\\u0000" in text and _NUL_ESCAPE.search(text)):
        return False
    try:
        _OBJECT.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _refuse_constant(constant: str) -> NoReturn:
    message = f"{constant} is not JSON"
    raise ValueError(message)


_ARGUMENTS = json.JSONDecoder(parse_constant=_refuse_constant)


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {"list": "a list", "str": "a string", "bool": "a boolean", "int": "a number", "float": "a number"}
    return kinds.get(type(value).__name__, type(value).__name__)
