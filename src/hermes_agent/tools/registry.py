"""Every tool the agent can offer, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Arguments = dict[str, Any]
Handler = Callable[..., Any]
"""`handler(args, context=ToolContext)` -> str (JSON by convention), or any JSON value or list of content parts."""


class Effect(StrEnum):
    """What repeating a call may do; it drives parallelism, retry, approval and recovery."""

    PURE = "pure"
    """Changes nothing outside the agent: may run again."""
    IDEMPOTENT = "idempotent"
    """A second run with the same arguments leaves the same state: may run again with the same id."""
    UNSAFE = "unsafe"
    """Anything else; never run again by itself."""


@dataclass(slots=True)
class ToolEntry:
    """One tool: its schema for the model, its handler, and what the executor must know about it."""

    name: str
    toolset: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments object."""
    handler: Handler
    effect: Effect | Callable[[Arguments], Effect] = Effect.UNSAFE
    parallel: bool = False
    """May run beside other parallel calls of the same batch."""
    reads: Callable[[Arguments], Iterable[str]] | None = None
    """Paths the call reads, for tools whose parallelism depends on paths."""
    writes: Callable[[Arguments], Iterable[str]] | None = None
    """Paths the call writes; an empty answer means unknown, which is a barrier."""
    inline: bool = False
    """Runs on the turn's own thread: short, or it talks to the person."""
    max_result_chars: int | None = None
    """Largest result kept inline; None takes the common budget, 0 means no limit."""
    timeout: float | None = None
    """Seconds before the executor gives the call up; None takes the common deadline, 0 means none."""
    aliases: tuple[str, ...] = ()
    available: Callable[[], bool] = field(default=lambda: True)

    def effect_of(self, args: Arguments) -> Effect:
        """The effect class of one call; a classifier that fails counts as unsafe."""
        if isinstance(self.effect, Effect):
            return self.effect
        try:
            return self.effect(args)
        except Exception:  # noqa: BLE001 - plugin boundary: doubt is unsafe
            return Effect.UNSAFE

    def definition(self) -> dict[str, Any]:
        """The tool as a chat-completions `tools` item."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }


class Registry:
    """A name table of tools; reads take no lock."""

    def __init__(self) -> None:
        self._entries: dict[str, ToolEntry] = {}
        self._aliases: dict[str, str] = {}
        self._lock = threading.Lock()

    def register(self, entry: ToolEntry) -> ToolEntry:
        """Add a tool; a second one of the same name replaces the first."""
        with self._lock:
            self._entries[entry.name] = entry
            for alias in entry.aliases:
                self._aliases[alias] = entry.name
        return entry

    def unregister(self, name: str) -> None:
        """Remove a tool; unknown names are ignored."""
        with self._lock:
            entry = self._entries.pop(name, None)
            for alias in entry.aliases if entry else ():
                self._aliases.pop(alias, None)

    def get_entry(self, name: str) -> ToolEntry | None:
        """The tool of that name or alias."""
        return self._entries.get(name) or self._entries.get(self._aliases.get(name, ""))

    def entries(self) -> list[ToolEntry]:
        """Every tool, in order of registration."""
        return list(self._entries.values())


registry = Registry()
