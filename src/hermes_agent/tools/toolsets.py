"""Named groups of tools, and which tools a choice of groups gives.

A plain toolset holds the tools that were registered under its name, so a plugin can add
to it; a composite names other toolsets. A known name whose tools do not exist here gives none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hermes_agent.errors import UsageError
from hermes_agent.tools import builtin
from hermes_agent.tools import registry as registries
from hermes_agent.tools.registry import Registry, ToolEntry

PLAIN = (
    "browser", "clarify", "code_execution", "cronjob", "delegation", "file", "image_gen", "memory",
    "messaging", "search", "session_search", "skills", "terminal", "todo", "tts", "vision", "web",
)  # fmt: skip

_CODING = ("file", "terminal", "todo", "skills", "memory", "session_search", "web", "delegation", "code_execution")
_EVERYTHING = ("all",)
_CHAT = tuple(name for name in PLAIN if name != "clarify")

COMPOSITES: dict[str, tuple[str, ...]] = {
    "all": PLAIN,
    "coding": _CODING,
    "debugging": ("terminal", "web", "file"),
    "safe": ("web", "vision", "image_gen"),
    "hermes-cli": _EVERYTHING,
    "hermes-api-server": _CHAT,
    "hermes-acp": _CHAT,
    "hermes-cron": _CHAT,
    "hermes-webhook": ("web", "vision", "clarify"),
    "hermes-telegram": _EVERYTHING,
    "hermes-discord": _EVERYTHING,
    "hermes-slack": _EVERYTHING,
}


def resolve(enabled: Sequence[str] | None, disabled: Sequence[str], registry: Registry) -> list[ToolEntry]:
    """The available tools of the enabled toolsets without the disabled ones, by name.

    `enabled` None means every registered tool. The order is the same in every process,
    so that the request's prefix stays the same. Raises UsageError for an unknown toolset.
    """
    entries = registry.entries()
    known = {*PLAIN, *COMPOSITES, *(entry.toolset for entry in entries)}
    without = _plain_names(disabled, known)
    wanted = known if enabled is None else _plain_names(enabled, known)
    chosen = [entry for entry in entries if entry.toolset in wanted - without and entry.available()]
    return sorted(chosen, key=lambda entry: entry.name)


def get_tool_definitions(
    enabled_toolsets: Sequence[str] | None = None, disabled_toolsets: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """The chosen tools as the `tools` of a chat-completions request."""
    builtin.register_builtin()
    entries = resolve(enabled_toolsets, disabled_toolsets or (), registries.registry)
    return [entry.definition() for entry in entries]


def check_toolset_requirements() -> dict[str, bool]:
    """For each toolset that has tools here: can at least one of them be used?"""
    builtin.register_builtin()
    result: dict[str, bool] = {}
    for entry in registries.registry.entries():
        result[entry.toolset] = result.get(entry.toolset, False) or entry.available()
    return dict(sorted(result.items()))


def _plain_names(names: Iterable[str], known: set[str]) -> set[str]:
    """The plain toolsets behind these names."""
    result: set[str] = set()
    for name in names:
        if name not in known:
            raise UsageError(f"There is no toolset {name!r}.{_nearest(name, known)}")
        members = COMPOSITES.get(name)
        result |= {name} if members is None else _plain_names(members, known)
    return result


def _nearest(name: str, known: set[str]) -> str:
    from difflib import get_close_matches  # noqa: PLC0415 - only a wrong name needs it; it would slow every start

    close = get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else f" There are: {', '.join(sorted(known))}."
