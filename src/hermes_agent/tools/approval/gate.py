"""Decide whether a shell command runs: it is run, a person is asked, or it is refused.

The hard floor always refuses. What provably only reads, and no secrets, runs. All else
runs when the operator lifted approvals or a person says yes, and is refused otherwise:
nobody to ask means no.
"""

from __future__ import annotations

import hashlib
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hermes_agent.tools.approval import secret_files
from hermes_agent.tools.approval.floor import floor
from hermes_agent.tools.approval.reading import Reading, read_command
from hermes_agent.tools.context import ApprovalRequest, Decision, ToolContext

_STATE = "terminal.approved"
"""Key of the session's memory: hashes of the commands a person allowed until the session ends."""

_BLANKS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180e\u2800\u3164\uffa0")
"""Letters and marks that show nothing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the command runs and, if not, what the model is told."""

    run: bool
    message: str
    reading: Reading


def decide(command: str, context: ToolContext, cwd: Path | None = None) -> Verdict:
    """Decide about exactly this command in this folder; asks the person when that is needed and possible."""
    where = cwd or context.cwd
    never = floor(command, where)
    if never:
        message = f"Refused, and no approval can change that: {never}. Find another way to reach the goal."
        return Verdict(False, message, Reading(False, never))
    reading = read_command(command, where)
    why = reading.why
    if reading.read_only:
        why = secret_files.shown_by(reading, where)
        if not why:
            return Verdict(True, "", reading)
    if context.yolo:
        return Verdict(True, "", reading)
    approved = cast("set[str]", context.session_state.setdefault(_STATE, set[str]()))
    key = _key(command, where)
    if key in approved:
        return Verdict(True, "", reading)
    if context.ask is None:
        return Verdict(False, _nobody(why), reading)
    answer = context.ask(ApprovalRequest("terminal", command, _question(command, why, where), context.call_id))
    if answer is Decision.SESSION:
        approved.add(key)
    if answer in (Decision.ONCE, Decision.SESSION):
        return Verdict(True, "", reading)
    message = "The person said no to this command. Do not try it again in another form; ask what to do instead."
    return Verdict(False, message, reading)


def visible(command: str) -> str:
    """The command for a person's eyes: every character that shows nothing, or moves others, as `<U+200B>`."""
    if command.isascii() and command.isprintable():
        return command
    return "".join(char if _shows(char) else f"<U+{ord(char):04X}>" for char in command)


def _shows(char: str) -> bool:
    if char in " \n":
        return True
    if char in _BLANKS or "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef":
        return False
    return unicodedata.category(char)[0] not in "CZ"


def _key(command: str, cwd: Path) -> str:
    return hashlib.sha256(f"{cwd}\0{command}".encode("utf-8", "surrogatepass")).hexdigest()


def _question(command: str, why: str, cwd: Path) -> str:
    sentence = f"It is not certain that it only reads: {why}. It would run in {visible(str(cwd))}."
    if visible(command) != command:
        sentence += " It holds hidden characters, shown as <U+…>."
    return sentence


def _nobody(why: str) -> str:
    return (
        f"Not run: this command needs a person's approval ({why}), and nobody can be asked here. "
        "Use a command that only reads, or the file tools; or tell the person to approve it "
        "in an interactive terminal, or to run hermes with --yolo."
    )
