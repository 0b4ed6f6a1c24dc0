"""What the model is offered. Importing this module makes the built-in tools known to the registry."""

from __future__ import annotations

from hermes_agent.tools.builtin import register_builtin
from hermes_agent.tools.toolsets import check_toolset_requirements, get_tool_definitions

__all__ = ["check_toolset_requirements", "get_tool_definitions"]

register_builtin()
