"""The one rule engine over transcript rows: what a strict provider accepts, and how rows get there.

`sanitize` is pure: it never changes a row it was given, and gives back the very list when
nothing is wrong. `check_strict` says the same rules a second time, on its own, in the words
of a provider; a fake server and the tests hold `sanitize` to it.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

from hermes_agent.transcript import rows as row_forms
from hermes_agent.transcript.rows import Row

NO_RESULT = (
    "[no result recorded: this call was interrupted, so it is not known whether it ran; "
    "check its effect before repeating it]"
)
"""Answers a call whose result is not in the transcript."""
NO_REPLY = "[no reply was recorded here]"
"""Stands for an assistant row without text and calls, and where a user row must not follow directly."""
EMPTY_MESSAGE = "[empty message]"
"""Stands for a user, system or developer row without content."""

OUTCOME_NOTE = "_outcome_note"
"""Mark on a row: why nothing followed it, as the text of the note that is derived after it."""
DERIVED = "_derived"
"""Mark on a row that `sanitize` made and no store holds."""

_SPEAKERS = ("system", "developer", "user", "assistant", "tool")
_SAFE = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_GONE: Any = object()


def sanitize(rows: list[Row], *, strict_alternation: bool = True) -> list[Row]:
    """Return rows that a strict provider accepts.

    Rows that are fine are the same objects, changed ones are copies, and the list itself
    comes back when nothing was wrong. Keys that are not sent are left alone. Running it
    again changes nothing.
    """
    tidy = [row for row in map(_tidy, rows) if row is not None]
    paired = _pair(tidy)
    alternating = _alternate(paired) if strict_alternation else paired
    filled = _fill_empty_replies(alternating)
    if len(filled) == len(rows) and all(map(operator.is_, filled, rows)):
        return rows
    return filled


# -- one row by itself ------------------------------------------------------------------------


def _tidy(row: Row) -> Row | None:
    """Put right what can be judged without the row's neighbours; None drops the row."""
    if not isinstance(row, dict):  # pyright: ignore[reportUnnecessaryIsInstance] - stored by anybody
        return None
    role = row.get("role")
    if role not in _SPEAKERS:
        return None
    changes: Row = {}
    calls = row.get("tool_calls", _GONE)
    if calls is not _GONE:
        kept = _tidy_calls(calls) if role == "assistant" else _GONE
        if kept is not calls:
            changes["tool_calls"] = calls = kept
    if role != "tool":
        if "tool_call_id" in row:
            changes["tool_call_id"] = _GONE
        if "name" in row:
            _tidy_speaker(row["name"], changes)
    content = row.get("content")
    shaped = row_forms.as_content(content)
    if role != "assistant" and row_forms.is_blank(shaped):
        shaped = row_forms.NO_OUTPUT if role == "tool" else EMPTY_MESSAGE
    elif isinstance(shaped, list) and not shaped:
        shaped = None
    if shaped is not content:
        changes["content"] = shaped
    return _changed(row, changes) if changes else row


def _tidy_speaker(name: Any, changes: Row) -> None:
    """The optional `name` of a speaker: coerced when it is a text, else removed."""
    if not isinstance(name, str) or not name.strip():
        changes["name"] = _GONE
    elif (safe := row_forms.safe_name(name)) != name:
        changes["name"] = safe


def _tidy_calls(calls: Any) -> Any:
    """Put each call into its legal shape; ids are left to the pairing."""
    if not isinstance(calls, list):
        return _GONE
    old = cast("list[Any]", calls)
    new = [_tidy_call(cast("Row", call)) for call in old if isinstance(call, dict)]
    if not new:
        return _GONE
    return old if len(new) == len(old) and all(map(operator.is_, new, old)) else new


def _tidy_call(call: Row) -> Row:
    function = call.get("function")
    if isinstance(function, dict):
        function = cast("Row", function)
        name, arguments = function.get("name"), function.get("arguments")
    else:
        function, name, arguments = cast("Row", {}), None, function
    safe = row_forms.safe_name(name)
    text = row_forms.wire_arguments(arguments)
    if safe is not name or text is not arguments:
        function = {**function, "name": safe, "arguments": text}
    if len(function) > 2:
        function = row_forms.clean_json(function)
    if function is not call.get("function") or call.get("type") != "function":
        call = {**call, "type": "function", "function": function}
    if len(call) > 2 + ("id" in call):
        extras = {key: value for key, value in call.items() if key != "id"}
        cleaned = row_forms.clean_json(extras)
        if cleaned is not extras:
            call = {**({"id": call["id"]} if "id" in call else {}), **cleaned}
    return call


def _changed(row: Row, changes: Row) -> Row:
    return {key: value for key, value in {**row, **changes}.items() if value is not _GONE}


# -- calls and results ----------------------------------------------------------------------


def _pair(rows: list[Row]) -> list[Row]:
    """Give each call exactly one result, directly after it, in call order."""
    paired: list[Row] = []
    position = 0
    while position < len(rows):
        row = rows[position]
        position += 1
        if row["role"] == "tool":
            continue  # answers no open call: an answer stands directly after its calls
        calls = row.get("tool_calls") if row["role"] == "assistant" else None
        if not calls:
            paired.append(row)
            continue
        start = position
        while position < len(rows) and rows[position]["role"] == "tool":
            position += 1
        results = rows[start:position]
        if _is_paired(calls, results):
            paired.append(row)
            paired += results
        else:
            paired += _exchange(row, results)
    return paired


def _is_paired(calls: list[Row], results: list[Row]) -> bool:
    if len(calls) != len(results):
        return False
    for call, result in zip(calls, results, strict=True):
        call_id = call.get("id")
        if not isinstance(call_id, str) or result.get("tool_call_id") != call_id or not _SAFE.fullmatch(call_id):
            return False
        name = call["function"]["name"]
        if result.get("name", name) != name:
            return False
    return len(calls) == 1 or len({call["id"] for call in calls}) == len(calls)


def _exchange(row: Row, results: list[Row]) -> list[Row]:
    """Rebuild an assistant row and its results: one result a call, made up where none is recorded."""
    keys, calls = _identify(row["tool_calls"])
    answers = _match(keys, calls, results)
    out = [_settled(call, answer) for call, answer in zip(calls, answers, strict=True)]
    note = next((text for each in (*reversed(results), row) if (text := _note(each))), "")
    if note and not _note(out[-1]):
        out[-1] = {**out[-1], OUTCOME_NOTE: note}
    old = row["tool_calls"]
    if len(calls) == len(old) and all(map(operator.is_, calls, old)):
        return [row, *out]
    return [{**row, "tool_calls": calls}, *out]


def _identify(calls: list[Row]) -> tuple[list[str], list[Row]]:
    """Return each distinct call with a legal id of its own, and the id that it came with.

    A derived id counts as none: its result may have been stored with the blank one.
    """
    keys: list[str] = []
    kept: list[Row] = []
    open_keys: set[str] = set()
    taken: set[str] = set()
    for index, call in enumerate(calls):
        key = _stripped(call.get("id"))
        if key and key in open_keys:
            continue  # the same call said twice
        open_keys.add(key)
        function = call["function"]
        derived = row_forms.derived_id(function["name"], function["arguments"], index)
        call_id = row_forms.free_id(row_forms.safe_id(key) or derived, taken)
        taken.add(call_id)
        keys.append("" if key == derived else key)
        kept.append(call if call.get("id") == call_id else {**call, "id": call_id})
    return keys, kept


def _match(keys: list[str], calls: list[Row], results: list[Row]) -> list[Row | None]:
    """Find the first result of each call: by id, then by half of a composite id, blank ids by position."""
    exact: dict[str, int] = {}
    halves: dict[str, list[int]] = {}
    for index, (key, call) in enumerate(zip(keys, calls, strict=True)):
        exact.setdefault(call["id"], index)
        if key:
            exact[key] = index
        for half in _halves(key):
            halves.setdefault(half, []).append(index)
    blank = iter([index for index, key in enumerate(keys) if not key])
    answers: list[Row | None] = [None] * len(calls)
    for result in results:
        key = _stripped(result.get("tool_call_id"))
        index = exact.get(key) if key else next((at for at in blank if answers[at] is None), None)
        if index is None and key:
            index = next((at for half in _halves(key) for at in halves.get(half, ()) if answers[at] is None), None)
        if index is not None and answers[index] is None:
            answers[index] = result
    return answers


def _settled(call: Row, answer: Row | None) -> Row:
    name, call_id = call["function"]["name"], call["id"]
    if answer is None:
        return {"role": "tool", "name": name, "content": NO_RESULT, "tool_call_id": call_id, DERIVED: True}
    changes: Row = {}
    if answer.get("tool_call_id") != call_id:
        changes["tool_call_id"] = call_id
    if answer.get("name", name) != name:
        changes["name"] = name
    return {**answer, **changes} if changes else answer


def _stripped(call_id: Any) -> str:
    return call_id.strip() if isinstance(call_id, str) else ""


def _halves(key: str) -> set[str]:
    return {half for part in key.split("|", 1) if (half := part.strip())}


# -- order and empties ----------------------------------------------------------------------


def note_between(before: Row | None, row: Row) -> Row | None:
    """Return the assistant note that must stand between two rows of a request, or None."""
    if before is None or row["role"] != "user" or before["role"] not in ("user", "tool"):
        return None
    return {"role": "assistant", "content": _note(before) or NO_REPLY, DERIVED: True}


def _alternate(rows: list[Row]) -> list[Row]:
    """Put a note before a user row that follows a user or tool row.

    System rows between the two do not count: some providers lift them out of the list.
    """
    out: list[Row] = []
    before: Row | None = None
    for row in rows:
        role = row["role"]
        if role == "user" and (note := note_between(before, row)):
            out.append(note)
        if role not in ("system", "developer"):
            before = row
        out.append(row)
    return out


def _fill_empty_replies(rows: list[Row]) -> list[Row]:
    """Drop empty assistant rows at the end; give a text to the others.

    At the end nothing was said yet, so the model may answer in its place. Further up the
    row keeps two turns apart. Its text is the one that `note_between` makes once a user row
    follows, so that a later request begins with the bytes of this one.
    """
    filled = [{**row, "content": _note(row) or NO_REPLY} if _is_empty_reply(row) else row for row in rows]
    end = len(rows)
    while end and _is_empty_reply(rows[end - 1]):
        end -= 1
    note = next((text for row in rows[end:] if (text := _note(row))), "")
    if note and end and not _note(filled[end - 1]):
        filled[end - 1] = {**filled[end - 1], OUTCOME_NOTE: note}
    return filled[:end]


def _is_empty_reply(row: Row) -> bool:
    return row["role"] == "assistant" and not row.get("tool_calls") and row_forms.is_blank(row.get("content"))


def _note(row: Row) -> str:
    note = row.get(OUTCOME_NOTE)
    return row_forms.clean_text(note) if isinstance(note, str) and note.strip() else ""


# -- the same rules as a provider says them ---------------------------------------------------

_ROLES = ("system", "developer", "user", "assistant", "tool")
_PATTERN = re.compile(r"^[a-zA-Z0-9_-]{1,64}\Z")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


_ARGUMENTS = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse)


def check_strict(messages: Sequence[Any], *, alternation: bool = True) -> str | None:
    """Return what a strict provider would refuse first in a request's messages, or None."""
    waiting: list[str] = []
    last_speaker = ""
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        fault = _shape_fault(message, where) or _text_fault(message, where)
        if fault:
            return fault
        role = message["role"]
        if role == "tool":
            fault = _answer_fault(message, waiting, where)
        elif waiting:
            fault = _unanswered(waiting)
        elif role == "user" and alternation and last_speaker in ("user", "tool"):
            fault = (
                "Conversation roles must alternate user/assistant/user/assistant/...: "
                f"unexpected role 'user' after role '{last_speaker}' at {where}."
            )
        if fault:
            return fault
        if role == "assistant":
            waiting = [call["id"] for call in message.get("tool_calls", ())]
        if role not in ("system", "developer"):
            last_speaker = role
    return _unanswered(waiting) if waiting else None


def _unanswered(waiting: Iterable[str]) -> str:
    return (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
        "'tool_call_id'. The following tool_call_ids did not have response messages: " + ", ".join(waiting)
    )


def _answer_fault(message: Row, waiting: list[str], where: str) -> str | None:
    call_id = message.get("tool_call_id")
    if call_id not in waiting:
        return (
            f"Invalid parameter: {where} with role 'tool' must be a response to a preceding message "
            f"with 'tool_calls'; no open call has the id {call_id!r}."
        )
    if call_id != waiting[0]:
        return f"{where}: tool results must be in call order: expected '{waiting[0]}', got '{call_id}'."
    del waiting[0]
    return None


def _shape_fault(message: Any, where: str) -> str | None:
    if not isinstance(message, dict):
        return f"Invalid type for '{where}': expected an object."
    fields = cast("Row", message)
    role = fields.get("role")
    if role not in _ROLES:
        return f"Invalid value: {role!r}. Supported values for '{where}.role' are: {', '.join(_ROLES)}."
    if "tool_calls" in fields and role != "assistant":
        return f"Unknown parameter: '{where}.tool_calls'."
    if "tool_call_id" in fields and role != "tool":
        return f"Unknown parameter: '{where}.tool_call_id'."
    if "name" in fields and not _is_name(fields["name"]):
        return _pattern_fault(f"{where}.name")
    content = fields.get("content")
    if "tool_calls" in fields:
        fault = _calls_fault(fields["tool_calls"], where)
        if fault:
            return fault
        if content is None:
            return None
    fault = _content_fault(content, f"{where}.content")
    if fault or role != "assistant" or "tool_calls" in fields or _shows_something(cast("str | list[Row]", content)):
        return fault
    return f"Invalid value for '{where}.content': an assistant message needs text or 'tool_calls'."


def _content_fault(content: Any, where: str) -> str | None:
    if isinstance(content, str):
        return None
    if not isinstance(content, list):
        return f"Invalid value for '{where}': expected a string or an array of parts, got {type(content).__name__}."
    parts = cast("list[Any]", content)
    if not parts:
        return f"Invalid '{where}': expected an array with minimum length 1, but got an empty array instead."
    for at, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(cast("Row", part).get("type"), str):
            return f"Missing required parameter: '{where}[{at}].type'."
        if part["type"] == "text" and not isinstance(cast("Row", part).get("text"), str):
            return f"Missing required parameter: '{where}[{at}].text'."
    return None


def _shows_something(content: str | list[Row]) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(part["type"] != "text" or part["text"].strip() for part in content)


def _calls_fault(calls: Any, where: str) -> str | None:
    if not isinstance(calls, list) or not calls:
        return f"Invalid '{where}.tool_calls': expected an array with minimum length 1, but got an empty array instead."
    seen: set[str] = set()
    for at, call in enumerate(cast("list[Any]", calls)):
        fault = _call_fault(call, f"{where}.tool_calls[{at}]")
        if fault:
            return fault
        if call["id"] in seen:
            return f"Duplicate value for 'tool_call_id' of {call['id']!r} in '{where}.tool_calls'."
        seen.add(call["id"])
    return None


def _call_fault(call: Any, where: str) -> str | None:
    if not isinstance(call, dict) or cast("Row", call).get("type") != "function":
        return f"Invalid value for '{where}.type': expected 'function'."
    call_id = cast("Row", call).get("id")
    if not isinstance(call_id, str) or not call_id.strip() or len(call_id) > 64:
        return f"Invalid '{where}.id': expected a string with 1 to 64 characters."
    function = cast("Row", call).get("function")
    if not isinstance(function, dict):
        return f"Missing required parameter: '{where}.function'."
    if not _is_name(cast("Row", function).get("name")):
        return _pattern_fault(f"{where}.function.name")
    if not _is_object_text(cast("Row", function).get("arguments")):
        return f"Invalid '{where}.function.arguments': expected a JSON object as a string."
    return None


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and _PATTERN.match(name) is not None


def _pattern_fault(where: str) -> str:
    return (
        f"Invalid '{where}': string does not match pattern. "
        "Expected a string that matches the pattern '^[a-zA-Z0-9_-]{1,64}$'."
    )


def _is_object_text(text: Any) -> bool:
    if not isinstance(text, str):
        return False
    try:
        value = _ARGUMENTS.decode(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)


def _text_fault(value: Any, where: str) -> str | None:
    if isinstance(value, str):
        if "\0" in value:
            return f"Invalid '{where}': unsupported Unicode escape sequence \\u0000 cannot be converted to text."
        if not value.isascii() and _LONE_SURROGATE.search(value):
            return f"Invalid '{where}': the body is not valid UTF-8, a surrogate stands alone."
        return None
    if isinstance(value, dict):
        named = cast("Row", value).items()
        faults = (_text_fault(key, where) or _text_fault(item, f"{where}.{key}") for key, item in named)
    elif isinstance(value, list):
        faults = (_text_fault(item, f"{where}[{at}]") for at, item in enumerate(cast("list[Any]", value)))
    else:
        return None
    return next((fault for fault in faults if fault), None)
