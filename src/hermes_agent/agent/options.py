"""What an `AIAgent` can be told when it is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hermes_agent.settings import Settings
from hermes_agent.store.session_db import SessionDB
from hermes_agent.tools.context import Ask

Callback = Callable[..., Any]

_ACCEPTED = frozenset(
    """
    api_mode credential_pool request_overrides reasoning_config service_tier providers_allowed providers_ignored
    providers_order provider_sort provider_require_parameters provider_data_collection fallback_model iteration_budget
    run_budget_seconds checkpoints_enabled verbose_logging save_trajectories tool_progress_mode log_prefix
    log_prefix_chars suppress_status_output skip_context_files load_soul_identity skip_memory skip_background_review
    user_id chat_id thread_id gateway_session_key pass_session_id tool_delay quiet_mode parent_session_id
    """.split()
)
"""Options of the published constructor that mean nothing to this core yet."""


class AgentOptions(NamedTuple):
    """The constructor's keyword arguments; every one may be left out."""

    base_url: str = ""
    api_key: str = ""
    provider: str = ""
    model: str = ""
    max_tokens: int | None = None
    max_iterations: int | None = None
    enabled_toolsets: list[str] | None = None
    disabled_toolsets: list[str] | None = None
    ephemeral_system_prompt: str = ""
    """Added to each request's system message, never stored."""
    prefill_messages: list[dict[str, Any]] | None = None
    """Put behind the system message of each request, never stored."""
    settings: Settings | None = None
    """The settings of this home, if the caller has read them already."""
    cwd: str | Path | None = None
    platform: str = "library"
    session_id: str = ""
    session_db: SessionDB | None = None
    script: str | Path | None = None
    """Script file of the offline model (`provider="scripted"`)."""
    ask: Ask | None = None
    """Puts approval questions to a person; None means that nobody is there."""
    yolo: bool = False
    interim_assistant_callback: Callback | None = None
    tool_start_callback: Callback | None = None
    tool_complete_callback: Callback | None = None
    tool_progress_callback: Callback | None = None
    stream_delta_callback: Callback | None = None
    reasoning_callback: Callback | None = None
    status_callback: Callback | None = None
    step_callback: Callback | None = None


_KNOWN = frozenset(AgentOptions._fields)


def parse(given: dict[str, Any]) -> AgentOptions:
    """Check the names of the arguments; raises `TypeError` naming the nearest known one."""
    unknown = [name for name in given if name not in _KNOWN and name not in _ACCEPTED]
    if unknown:
        import difflib  # noqa: PLC0415 - only for a mistake

        near = difflib.get_close_matches(unknown[0], [*_KNOWN, *_ACCEPTED], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"AIAgent has no option {unknown[0]!r}{hint}")
    return AgentOptions(**{name: value for name, value in given.items() if name in _KNOWN and value is not None})
