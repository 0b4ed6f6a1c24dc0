"""What a running tool is handed from the floors above it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from hermes_agent.cancellation import Cancellation


class Decision(StrEnum):
    """A person's answer to an approval question."""

    ONCE = "once"
    SESSION = "session"
    DENY = "deny"


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """A question to a person: may exactly this be done?"""

    tool: str
    command: str
    """The exact text that will run."""
    why: str
    """Why it needs a yes, as one sentence."""
    call_id: str = ""
    """The ledger's id of the call that asks."""


Ask = Callable[[ApprovalRequest], Decision]
"""Puts the question to a person; raises nothing, answers DENY when nobody is there."""


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Bounds that tools keep, from the settings of this turn."""

    terminal_timeout: float = 180.0
    """Seconds a foreground command may run by default."""
    output_max_bytes: int = 50_000
    read_max_chars: int = 100_000
    read_max_lines: int = 2000
    read_max_line_length: int = 2000


@dataclass(slots=True)
class ToolContext:
    """One tool call's surroundings.

    `call_id` is the ledger's id `turn.step.index` ("" outside a stored turn): unique
    for ever, so a tool can hand it on as an idempotency key.
    """

    home: Path
    cwd: Path
    session_id: str = ""
    turn_id: str = ""
    call_id: str = ""
    cancellation: Cancellation = field(default_factory=Cancellation)
    ask: Ask | None = None
    """None: nobody is there to ask, so what needs a yes is refused."""
    yolo: bool = False
    """The operator lifted approvals; the hard floor still holds."""
    env_passthrough: tuple[str, ...] = ()
    """Names of environment variables a child process may inherit beside the fixed list."""
    limits: ToolLimits = field(default_factory=ToolLimits)
    session_state: dict[str, Any] = field(default_factory=dict[str, Any])
    """Per-session memory of tools (todo list, last shell folder), kept by the agent while it lives."""
