"""The tools that come with hermes. Importing this loads them; nothing is registered until asked."""

from __future__ import annotations

from hermes_agent.tools import patch, read_file, search_files, skills_list, terminal, todo, write_file
from hermes_agent.tools.registry import Registry, ToolEntry, registry

TOOLS: tuple[ToolEntry, ...] = (
    terminal.TOOL,
    read_file.TOOL,
    write_file.TOOL,
    patch.TOOL,
    search_files.TOOL,
    todo.TOOL,
    skills_list.TOOL,
)


def register_builtin(into: Registry = registry) -> None:
    """Add the built-in tools; a name that is taken already is left as it is."""
    for tool in TOOLS:
        if into.get_entry(tool.name) is None:
            into.register(tool)
