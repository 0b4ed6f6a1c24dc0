"""Questions of running turns to a person, whoever answers first and on whichever surface.

A question is a row. The turn's thread waits for its decision; when the process dies the row
stays, can be answered meanwhile, and the resumed turn finds it.
"""

from __future__ import annotations

import threading
import time

from hermes_agent import failpoints
from hermes_agent.agent.control import TurnParked
from hermes_agent.delivery.events import Hub
from hermes_agent.errors import UsageError
from hermes_agent.store.approvals import ApprovalRecord, ApprovalState
from hermes_agent.store.intake import Intake
from hermes_agent.store.writer import SessionWriter
from hermes_agent.tools.context import ApprovalRequest, Ask, Decision

_LOOK_SECONDS = 1.0
"""How often a waiting turn looks for a decision that another process stored."""

CHOICES = {"once": Decision.ONCE, "session": Decision.SESSION, "deny": Decision.DENY}


class Questions:
    """The open questions of one store, as far as turns of this process ask them."""

    def __init__(self, intake: Intake, hub: Hub, seconds: float) -> None:
        self._intake = intake
        self._hub = hub
        self._seconds = seconds
        self._changed = threading.Condition()
        self._changes = 0
        """Counts whatever may let somebody go on who waits."""
        self._given_up: set[str] = set()
        self._closed = False

    def asker(self, writer: SessionWriter, turn_id: str) -> Ask:
        """What the tools of a turn ask by, which runs under this lease; answers DENY when the time is over.

        Raises `StoreError` when the question or the use of its decision could not be stored,
        and `TurnParked` when the process is about to end: the question stays open then.
        """

        def ask(request: ApprovalRequest) -> Decision:
            shown = {"tool": request.tool, "command": request.command, "why": request.why}
            if self._intake.is_granted(turn_id, shown):
                return Decision.SESSION
            record = writer.ask(request.call_id, "approval", shown, self._seconds)
            failpoints.hit("approval.asked")
            self._hub.touch(writer.session_id)
            given_up = not self._await(record, turn_id)
            failpoints.hit("approval.before_use")
            used = writer.settle_question(record, given_up=given_up)
            failpoints.hit("approval.used")
            self._hub.touch(writer.session_id)
            if used.state is not ApprovalState.APPROVED:
                return Decision.DENY
            return CHOICES.get(used.answer or "", Decision.ONCE)

        return ask

    def decide(self, approval_id: str, choice: str, by: str) -> tuple[bool, ApprovalRecord]:
        """Decide a question with `once`, `session` or `deny`; only the first decision is True.

        Raises `UsageError` for an unknown question or choice.
        """
        if choice not in CHOICES:
            raise UsageError(f"the choice is one of {', '.join(CHOICES)}, not {choice!r}")
        state = ApprovalState.DENIED if choice == "deny" else ApprovalState.APPROVED
        found = self._intake.decide(approval_id, state, choice, by)
        self._tell()
        return found

    def waiting(self, turn_id: str | None = None) -> list[ApprovalRecord]:
        """Open questions, of one turn or of all."""
        now = time.time()
        return [record for record in self._intake.approvals(turn_id) if record.expires_at > now]

    def give_up(self, turn_id: str) -> None:
        """Nobody needs an answer for this turn any more."""
        self._given_up.add(turn_id)
        self._tell()

    def forget(self, turn_id: str) -> None:
        """The turn does not run here any more."""
        self._given_up.discard(turn_id)

    def close(self) -> None:
        """The process is about to end: who still waits leaves, and its question stays."""
        self._closed = True
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _await(self, record: ApprovalRecord, turn_id: str) -> bool:
        """Wait until the question is decided or its time is over; False when its turn was stopped."""
        while True:
            changes = self._changes
            found = self._intake.approval(record.id)
            left = record.expires_at - time.time()
            if found is None or found.state is not ApprovalState.PENDING or left <= 0:
                return True
            if turn_id in self._given_up:
                return False
            if self._closed:
                raise TurnParked
            with self._changed:
                if changes == self._changes:
                    self._changed.wait(min(left, _LOOK_SECONDS))
