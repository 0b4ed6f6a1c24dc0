"""The old name of `hermes_agent.agent.agent_runtime_helpers`."""

from __future__ import annotations

from hermes_agent.old_names import become

become(__name__)
