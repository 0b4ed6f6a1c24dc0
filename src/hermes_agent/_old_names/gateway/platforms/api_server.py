"""The old name of `hermes_agent.gateway.platforms.api_server`."""

from __future__ import annotations

from hermes_agent.old_names import become

become(__name__)
