"""Running turns: hold the session's lease, hand the agent its user row, finish what was left, settle.

Every surface runs its turns here. A message for a busy session is stored first and waits
as a row; messages of one session run in the order in which they were taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hermes_agent import failpoints
from hermes_agent.cancellation import Cancellation
from hermes_agent.delivery import policy
from hermes_agent.errors import FailureReason, SessionBusy, TurnInterrupted
from hermes_agent.store import processes
from hermes_agent.store.session_db import SessionDB, encode_row
from hermes_agent.store.turns import TurnRecord, TurnState
from hermes_agent.store.writer import Batch, PutOff, SessionWriter, TurnEnd
from hermes_agent.transcript import rows

Message = dict[str, Any]
Result = dict[str, Any]

_POLL_SECONDS = 0.2


class Agent(Protocol):
    """What the runner needs of an agent."""

    def adopt(self, claim: SessionWriter) -> None: ...
    def recover(self) -> list[Result]: ...
    def run_conversation(self, user_message: Any, *, conversation_history: list[Message], task_id: str) -> Result: ...


@dataclass(frozen=True, slots=True)
class SessionFields:
    """How a session is made when it does not exist yet."""

    source: str = "cli"
    model: str | None = None
    cwd: str | None = None
    model_config: dict[str, Any] | None = None
    """Where the model is, if the session shall remember it."""


@dataclass(slots=True)
class Notices:
    """What a surface may want to tell the person while the runner works; each may be None."""

    admitted: Callable[[str], None] | None = None
    """The message is durable, once and for all; its turn's id."""
    waiting: Callable[[str], None] | None = None
    """The session is busy, and why; the message is stored and waits."""
    recovering: Callable[[TurnRecord], None] | None = None
    """A turn that a dead process left is finished first."""
    recovered: Callable[[Result], None] | None = None


# -- one attempt ------------------------------------------------------------------


def user_row(content: Any, options: dict[str, Any], timestamp: float) -> Message:
    """A message as the row that begins its turn."""
    row = rows.user_row(content, timestamp=timestamp)
    for name in ("author", "display_kind"):
        if name in options:
            row[name] = options[name]
    return row


def begin(claim: SessionWriter, turn: TurnRecord) -> None:
    """Make a turn that waits run under this lease: its row, if nothing holds it yet, and its state are one commit."""
    rows_: list[Message] = []
    if turn.state is TurnState.ACCEPTED and turn.user_seq is None:
        content = turn.options.get("content", turn.input or "")
        rows_ = [user_row(content, turn.options, time.time())]
    failpoints.hit("runner.before_admit")
    claim.commit(Batch(rows=[encode_row(row) for row in rows_], resume=turn))
    failpoints.hit("runner.admitted")


def attempt(claim: SessionWriter, agent: Agent, user_seq: int, *, again: bool, attempts: int) -> Result:
    """Hand the running turn's user row to the agent, with what stood before it, and return its result.

    With `again` the agent leaves the turn open when its failure is one that is tried again.
    """
    stored = claim.conversation()
    at = next(i for i, row in enumerate(stored) if row["_seq"] == user_seq)
    handed: Any = agent
    agent.adopt(claim)
    handed._pending_cli_user_message = stored[at]
    handed.leave_open = leaves_open(attempts) if again else None
    return agent.run_conversation(stored[at]["content"], conversation_history=stored[:at], task_id=claim.session_id)


def leaves_open(attempts: int) -> Callable[[FailureReason], bool]:
    """What tells an agent whether the turn whose attempt of that number failed stays open, to be tried again."""

    def leave_open(reason: FailureReason) -> bool:
        return policy.again(reason, attempts)

    return leave_open


def settle(claim: SessionWriter, result: Result, *, again: bool, attempts: int) -> float | None:
    """End the turn, or put it off, if the agent left it open; returns when it is due again, wall-clock seconds.

    An agent that could not store leaves its turn open on purpose.
    """
    if claim.turn_key is None or str(result.get("turn_exit_reason")) == "session_persistence_failed":
        return None
    if result.get("failed") or not result.get("completed"):
        reason = policy.reason_of(result.get("failure_reason"))
        error, prose = _text(result.get("error")), _text(result.get("final_response"))
        if again and result.get("failed") and policy.again(reason, attempts):
            calls = result.get("api_calls")
            due = time.time() + policy.delay(reason, waited=isinstance(calls, int) and calls > 1)
            claim.commit(Batch(put_off=PutOff(str(reason), error, due)))
            return due
        state = TurnState.CANCELLED if result.get("interrupted") else TurnState.FAILED
        claim.commit(Batch(end=TurnEnd(state, str(reason), error, prose)))
    else:
        reply = rows.assistant_row(_text(result.get("final_response")), timestamp=time.time())
        claim.commit(Batch(rows=[encode_row(reply)], end=TurnEnd(TurnState.DONE)))
    return None


def _text(value: object) -> str:
    """Text of a result; an agent that is not ours may put anything there."""
    return value if isinstance(value, str) else ""


# -- one session, on the caller's thread ------------------------------------------


class Runner:
    """Runs the turns of one session of one store with one agent."""

    def __init__(
        self, db: SessionDB, agent: Agent, session_id: str, fields: SessionFields, notices: Notices | None = None
    ) -> None:
        self._db = db
        self._agent = agent
        self._session_id = session_id
        self._fields = fields
        self._notices = notices or Notices()

    def run(self, text: str, cancellation: Cancellation | None = None) -> Result:
        """Take a message and run its turn; returns the agent's result.

        The message is durable before anything runs. Waits while another process runs a turn
        on the session; `TurnInterrupted` when `cancellation` ends the wait (the message is
        then withdrawn). Raises `StoreError` when the message could not be stored: nothing ran.
        """
        accepted: TurnRecord | None = None
        while True:
            try:
                claim = self._claim()
            except SessionBusy as busy:
                if accepted is None:
                    accepted = self._wait_in_line(text, str(busy))
            else:
                try:
                    self._finish_earlier(claim)
                    if not self._others_first(claim, accepted):
                        return self._turn(claim, text, accepted)
                finally:
                    claim.release()
                if accepted is None:
                    accepted = self._wait_in_line(text, "other messages of this session are waiting")
            self._pause(accepted, cancellation)

    def recover(self) -> list[Result]:
        """Finish what dead processes left in the session; returns the results, oldest first."""
        claim = self._claim()
        try:
            return self._finish_earlier(claim)
        finally:
            claim.release()

    # -- inside -----------------------------------------------------------------

    def _claim(self) -> SessionWriter:
        fields = self._fields
        return self._db.claim(
            self._session_id,
            source=fields.source,
            model=fields.model,
            cwd=fields.cwd,
            model_config=fields.model_config,
        )

    def _wait_in_line(self, text: str, why: str) -> TurnRecord:
        failpoints.hit("runner.before_accept")
        accepted = self._db.accept_turn(self._session_id, text)
        failpoints.hit("runner.accepted")
        if self._notices.admitted is not None:
            self._notices.admitted(accepted.id)
        if self._notices.waiting is not None:
            self._notices.waiting(why)
        return accepted

    def _pause(self, accepted: TurnRecord, cancellation: Cancellation | None) -> None:
        if cancellation is None:
            time.sleep(_POLL_SECONDS)
        elif cancellation.wait(_POLL_SECONDS):
            self._db.withdraw_turn(accepted, str(FailureReason.INTERRUPTED))
            raise TurnInterrupted(cancellation.reason)

    def _finish_earlier(self, claim: SessionWriter) -> list[Result]:
        """Continue crashed turns and run messages whose senders died while they waited."""
        self._agent.adopt(claim)
        done: list[Result] = []
        open_turns = claim.open_turns()
        if self._notices.recovering is not None:
            for turn in open_turns:
                if turn.state is not TurnState.ACCEPTED:
                    self._notices.recovering(turn)
        if open_turns:
            done += self._agent.recover()
        for turn in open_turns:
            if turn.state is TurnState.ACCEPTED and processes.is_alive(turn.owner) is False:
                done.append(self._turn(claim, turn.input or "", turn))
        if self._notices.recovered is not None:
            for result in done:
                self._notices.recovered(result)
        return done

    def _others_first(self, claim: SessionWriter, accepted: TurnRecord | None) -> bool:
        """Whether a message of another live process was taken before ours."""
        return any(
            turn.state is TurnState.ACCEPTED and (accepted is None or turn.key < accepted.key)
            for turn in claim.open_turns()
        )

    def _turn(self, claim: SessionWriter, text: str, accepted: TurnRecord | None) -> Result:
        user_seq = claim.last_seq + 1
        if accepted is not None:
            user_seq = accepted.user_seq or user_seq
            begin(claim, accepted)
        else:
            failpoints.hit("runner.before_admit")
            claim.commit(Batch(rows=[encode_row(rows.user_row(text, timestamp=time.time()))], begin=True))
            failpoints.hit("runner.admitted")
            if self._notices.admitted is not None:
                self._notices.admitted(claim.turn_id)
        result = attempt(claim, self._agent, user_seq, again=False, attempts=1)
        settle(claim, result, again=False, attempts=1)
        failpoints.hit("runner.settled")
        return result
