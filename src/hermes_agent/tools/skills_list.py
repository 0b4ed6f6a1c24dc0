"""`skills_list`: names and descriptions of the skills under HERMES_HOME, nothing of their bodies.

A skill is `skills/CATEGORY/NAME/SKILL.md` with `name` and `description` in its front matter;
only those two lines are understood, so no YAML parser is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hermes_agent.errors import ToolError
from hermes_agent.tools.arguments import text
from hermes_agent.tools.context import ToolContext
from hermes_agent.tools.registry import Arguments, Effect, ToolEntry
from hermes_agent.tools.results import json_handler

_HEAD_BYTES = 8192
_MAX_NAME = 64
_MAX_DESCRIPTION = 1024
_FENCE = "---"


def _run(args: Arguments, context: ToolContext) -> dict[str, Any]:
    wanted = text(args, "category", "")
    skills: list[dict[str, str]] = []
    categories: list[str] = []
    for category in _folders(context.home / "skills"):
        found = [skill for folder in _folders(category) if (skill := _skill(folder, category.name))]
        if found:
            categories.append(category.name)
        if wanted in ("", category.name):
            skills += found
    if wanted and wanted not in categories:
        raise ToolError(f"There is no category {wanted!r}; there are: {', '.join(categories) or 'none'}.")
    return {"success": True, "skills": skills, "categories": categories}


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _skill(folder: Path, category: str) -> dict[str, str] | None:
    file = folder / "SKILL.md"
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        fields = _front_matter(stream.read(_HEAD_BYTES).decode("utf-8", "replace"))
    return {
        "name": fields.get("name", folder.name)[:_MAX_NAME],
        "description": fields.get("description", "")[:_MAX_DESCRIPTION],
        "category": category,
    }


def _front_matter(head: str) -> dict[str, str]:
    """The `key: value` lines between the two fences; indented lines go on with the value before."""
    lines = head.removeprefix("\ufeff").splitlines()
    fields: dict[str, str] = {}
    if not lines or lines[0].rstrip() != _FENCE:
        return fields
    key = ""
    for line in lines[1:]:
        if line.rstrip() == _FENCE:
            break
        if line[:1] in (" ", "\t"):
            if key:
                fields[key] = f"{fields[key]} {line.strip()}".strip()
            continue
        key, colon, value = line.partition(":")
        key = key.strip() if colon else ""
        if key:
            # `>` and `|` only announce that the value stands in the lines below.
            fields[key] = "" if value.strip() in (">", "|", ">-", "|-") else _unquoted(value.strip())
    return fields


def _unquoted(value: str) -> str:
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    return value[1:-1] if quoted else value


TOOL = ToolEntry(
    name="skills_list",
    toolset="skills",
    description="List the skills at hand, with one line on each; optionally of one category.",
    parameters={
        "type": "object",
        "properties": {"category": {"type": "string", "description": "Only skills of this category."}},
    },
    handler=json_handler(_run),
    effect=Effect.PURE,
    parallel=True,
)
