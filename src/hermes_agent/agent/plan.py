"""Which calls of a reply may run side by side, in their order, without stepping on each other.

A call that talks to a person, changes what nobody can name, or whose arguments cannot be
read is a barrier. Calls on paths run together unless one writes what another touches.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from hermes_agent.tools.registry import registry
from hermes_agent.transcript import rows
from hermes_agent.transcript.rows import ArgumentsError

Segment = tuple[str, list[Any]]

PARALLEL, SEQUENTIAL = "parallel", "sequential"


def parts_of(call: Any) -> tuple[str, Any, str]:
    """Name, arguments and id of a call, whatever client made the object."""
    function = getattr(call, "function", call)
    return (
        str(getattr(function, "name", "") or ""),
        getattr(function, "arguments", ""),
        str(getattr(call, "id", "") or ""),
    )


def calls_of(assistant_message: Any) -> list[Any]:
    """The calls of a reply."""
    return list(getattr(assistant_message, "tool_calls", None) or ())


def segments(calls: Sequence[Any], cwd: Path) -> list[Segment]:
    """Cut the calls into runs, in order; a run of one is sequential, neighbours of a kind are one."""
    found: list[Segment] = []
    run: list[Any] = []
    reads: list[str] = []
    writes: list[str] = []

    def close() -> None:
        if run:
            _add(found, PARALLEL if len(run) > 1 else SEQUENTIAL, list(run))
        run.clear()
        reads.clear()
        writes.clear()

    for call in calls:
        claim = _claim(call, cwd)
        if claim is None:
            close()
            _add(found, SEQUENTIAL, [call])
            continue
        read, written = claim
        if _overlap(read, writes) or _overlap(written, writes) or _overlap(written, reads):
            close()
        run.append(call)
        reads += read
        writes += written
    close()
    return found


def _add(found: list[Segment], kind: str, calls: list[Any]) -> None:
    if found and found[-1][0] == kind == SEQUENTIAL:
        found[-1][1].extend(calls)
    else:
        found.append((kind, calls))


def _claim(call: Any, cwd: Path) -> tuple[list[str], list[str]] | None:
    """The paths a call reads and writes; None when it must run alone."""
    name, arguments, _ = parts_of(call)
    entry = registry.get_entry(name)
    if entry is None or entry.inline or not (entry.parallel or entry.writes):
        return None
    try:
        args = rows.parse_arguments(arguments)
    except ArgumentsError:
        return None
    read = _resolved(entry.reads(args), cwd) if entry.reads else []
    written = _resolved(entry.writes(args), cwd) if entry.writes else []
    if entry.writes and not written:
        return None
    return read, written


def _resolved(paths: Iterable[str], cwd: Path) -> list[str]:
    return [os.path.realpath(cwd / os.path.expanduser(path)) for path in paths if path and "\0" not in path]


def _overlap(paths: Sequence[str], others: Sequence[str]) -> bool:
    return any(_contains(a, b) or _contains(b, a) for a in paths for b in others)


def _contains(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def preview(name: str, args: dict[str, Any]) -> str:
    """One short line that tells a person what the call is about."""
    for key in ("command", "pattern", "path", "query", "url", "name"):
        value = args.get(key)
        if isinstance(value, str) and value:
            return " ".join(value.split())[:120]
    return name if not args else ", ".join(args)[:120]


def is_error(content: Any) -> bool:
    """Whether a result says that the call failed, by the tools' convention."""
    if not isinstance(content, str) or not content.startswith("{") or '"error"' not in content:
        return False
    try:
        value = json.loads(content)
    except ValueError:
        return False
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    return bool(fields.get("error")) and fields.get("success") is not True
