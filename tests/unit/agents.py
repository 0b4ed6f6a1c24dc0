"""Agents for tests: the scripted model, real tools, a real store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hermes_agent.agent.run import AIAgent
from hermes_agent.tools.registry import Effect, ToolEntry, registry

Reply = dict[str, Any]


def say(text: str, **more: Any) -> Reply:
    """A reply of text."""
    return {"text": text, **more}


def call(*calls: tuple[str, dict[str, Any]] | tuple[str, dict[str, Any], str], text: str = "") -> Reply:
    """A reply with tool calls, each (name, arguments) or (name, arguments, id)."""
    return {
        "text": text,
        "tool_calls": [
            {"name": item[0], "arguments": item[1], **({"id": item[2]} if len(item) == 3 else {})} for item in calls
        ],
    }


def make_agent(folder: Path, replies: list[Reply], **options: Any) -> AIAgent:
    """An agent whose model plays `replies`; its tools are those of the toolset `test` while there are any."""
    script = folder / "script.json"
    script.write_text(json.dumps({"model": "scripted", "replies": replies}))
    registered = any(entry.toolset == "test" for entry in registry.entries())
    options.setdefault("enabled_toolsets", ["test" if registered else "todo"])
    return AIAgent(provider="scripted", script=script, cwd=folder, **options)


@contextmanager
def tools(**handlers: Callable[..., Any] | tuple[Callable[..., Any], Effect] | ToolEntry) -> Iterator[None]:
    """Register tools of toolset `test` for the block; a bare handler is pure and parallel."""
    entries: list[ToolEntry] = []
    for name, given in handlers.items():
        if isinstance(given, ToolEntry):
            entries.append(given)
            continue
        handler, effect = given if isinstance(given, tuple) else (given, Effect.PURE)
        entries.append(
            ToolEntry(name, "test", name, {"type": "object", "properties": {}}, handler, effect=effect, parallel=True)
        )
    for entry in entries:
        registry.register(entry)
    try:
        yield
    finally:
        for entry in entries:
            registry.unregister(entry.name)
