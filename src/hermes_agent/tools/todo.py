"""`todo`: the agent's own task list of one session.

The list lives in the context's session state; the transcript row of the last result is
its durable copy, from which `restore` rebuilds it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from hermes_agent.errors import ToolError
from hermes_agent.tools.arguments import flag
from hermes_agent.tools.context import ToolContext
from hermes_agent.tools.registry import Arguments, Effect, ToolEntry
from hermes_agent.tools.results import json_handler

Item = dict[str, str]

STATUSES = ("pending", "in_progress", "completed", "cancelled")
MAX_ITEMS = 256
MAX_CHARACTERS = 4_000

_STATE = "todos"
_NAMES = frozenset({"todo", "todo_list"})


def restore(rows: Sequence[Mapping[str, Any]]) -> list[Item]:
    """The list as the last `todo` result among these messages shows it; empty when there is none."""
    for row in reversed(rows):
        if row.get("role") != "tool" or not _NAMES & {row.get("name"), row.get("tool_name")}:
            continue
        items = _from_result(row.get("content"))
        if items is not None:
            return items
    return []


def _run(args: Arguments, context: ToolContext) -> dict[str, Any]:
    items = cast("list[Item]", context.session_state.get(_STATE, []))
    given = args.get("todos")
    merge = flag(args, "merge")
    if given is not None:
        items = _merged(items if merge else [], _entries(given))
        if len(items) > MAX_ITEMS:
            raise ToolError(f"The list would have {len(items)} items; keep at most {MAX_ITEMS}.")
        # A new list each time: whoever holds the old one keeps what it read.
        context.session_state[_STATE] = items
    summary = {"total": len(items), **dict.fromkeys(STATUSES, 0)}
    for item in items:
        summary[item["status"]] += 1
    return {"todos": items, "summary": summary}


def _entries(given: object) -> list[dict[str, Any]]:
    if isinstance(given, str):
        # Some models send the array as JSON text.
        try:
            given = json.loads(given)
        except ValueError:
            raise ToolError("'todos' must be a list of {id, content, status}.") from None
    if not isinstance(given, list):
        raise ToolError("'todos' must be a list of {id, content, status}.")
    entries = cast("list[Any]", given)
    for entry in entries:
        if not isinstance(entry, dict):
            raise ToolError("Each item of 'todos' must be an object {id, content, status}.")
    return cast("list[dict[str, Any]]", entries)


def _merged(items: list[Item], entries: list[dict[str, Any]]) -> list[Item]:
    """The items with the entries laid over them by id; new ids are appended in order."""
    result = {item["id"]: item for item in items}
    for entry in entries:
        key = _free_id(result) if entry.get("id") in (None, "") else str(entry["id"])
        old = result.get(key, {})
        content = entry.get("content", old.get("content"))
        if not isinstance(content, str) or not content.strip():
            raise ToolError(f"Item {key!r} has no content.")
        if len(content) > MAX_CHARACTERS:
            raise ToolError(f"Item {key!r} has {len(content)} characters; keep at most {MAX_CHARACTERS}.")
        status = entry.get("status", old.get("status", STATUSES[0]))
        if status not in STATUSES:
            raise ToolError(f"Item {key!r} has the status {status!r:.40}; use one of {', '.join(STATUSES)}.")
        result[key] = {"id": key, "content": content, "status": status}
    return list(result.values())


def _free_id(taken: Mapping[str, Item]) -> str:
    number = len(taken) + 1
    while str(number) in taken:
        number += 1
    return str(number)


def _from_result(content: object) -> list[Item] | None:
    if not isinstance(content, str) or not content.startswith("{"):
        return None
    try:
        # Something may have been appended to the row behind the JSON.
        value = json.JSONDecoder().raw_decode(content)[0]
        return _merged([], _entries(value["todos"]))
    except (ValueError, KeyError, ToolError):
        return None


TOOL = ToolEntry(
    name="todo",
    toolset="todo",
    description=(
        "Keep the task list of this conversation. Use it for work of three steps or more: write the plan, "
        "keep one item in_progress, mark it completed as soon as it is. Without todos it shows the list; "
        "with todos it replaces it, or with merge changes items by id and adds new ones."
    ),
    parameters={
        "type": "object",
        "properties": {
            "todos": {
                "type": "array",
                "maxItems": MAX_ITEMS,
                "items": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "string"},
                        "content": {"type": "string", "maxLength": MAX_CHARACTERS},
                        "status": {"type": "string", "enum": list(STATUSES)},
                    },
                    "required": ["id", "content", "status"],
                },
            },
            "merge": {"type": "boolean", "default": False},
        },
    },
    handler=json_handler(_run),
    # Only the agent's own list changes, and it is rebuilt from the transcript.
    effect=Effect.PURE,
    inline=True,
    max_result_chars=0,
    aliases=("todo_list",),
)
