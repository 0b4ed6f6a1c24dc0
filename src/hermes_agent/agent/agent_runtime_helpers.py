"""The name under which embedders know the transcript rules; the rules are in `transcript.rules`."""

from __future__ import annotations

from hermes_agent.transcript import rules
from hermes_agent.transcript.rows import Row


def sanitize_api_messages(messages: list[Row]) -> list[Row]:
    """Return messages that a strict provider accepts; see `rules.sanitize`."""
    return rules.sanitize(messages)
