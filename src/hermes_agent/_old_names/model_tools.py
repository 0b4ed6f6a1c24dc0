"""The old name of `hermes_agent.tools.model_tools`."""

from __future__ import annotations

from hermes_agent.old_names import become

become(__name__)
