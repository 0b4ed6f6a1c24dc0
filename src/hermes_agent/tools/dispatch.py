"""Running one registered tool: the last step of every way a call can take."""

from __future__ import annotations

from typing import Any

from hermes_agent.tools import results
from hermes_agent.tools.context import ToolContext
from hermes_agent.tools.registry import Arguments, registry


def call_tool(name: str, args: Arguments, context: ToolContext) -> Any:
    """Run the tool of that name or alias and return what its handler returned.

    An unknown name is an error result, not an exception; what the handler raises goes through.
    """
    entry = registry.get_entry(name)
    if entry is None:
        return results.error_result(f"Unknown tool: {name}")
    return entry.handler(args, context=context)
