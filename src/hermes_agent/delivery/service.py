"""One message in, one reply out: every message is taken once, answered once, and waits as a row.

`DeliveryService` runs the turns of one store on a few threads. A message is durable when `submit`
returns; its turn runs when its session is free and a place is left, one turn a session at a
time, in the order in which they were taken. What a process leaves unfinished, the next one
goes on with. Nobody who waits for an answer holds a thread, and who goes away changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from hermes_agent import failpoints, log
from hermes_agent.agent.control import TurnParked
from hermes_agent.delivery import policy, runner
from hermes_agent.delivery.approvals import Questions
from hermes_agent.delivery.events import LAST, Follower, Hub, Wake
from hermes_agent.delivery.lines import Lines
from hermes_agent.delivery.listener import Listener
from hermes_agent.delivery.receipts import Receipt, receipt_of
from hermes_agent.delivery.runner import Agent
from hermes_agent.delivery.threads import Clock, Pool
from hermes_agent.errors import (
    FAILURES,
    Draining,
    FailureReason,
    HermesError,
    LeaseError,
    QueueFull,
    SessionBusy,
    StaleLease,
    StoreError,
    UnknownSession,
    UsageError,
)
from hermes_agent.store import processes
from hermes_agent.store.deliveries import Incoming, Limits
from hermes_agent.store.intake import Intake, Taken, TurnView
from hermes_agent.store.session_db import SessionDB
from hermes_agent.store.turns import TurnRecord, TurnState
from hermes_agent.store.writer import SessionWriter

_log = log.get("delivery")

_BUSY_SECONDS = 0.2
"""How soon a session that another process works on is tried again."""
_STUCK_SECONDS = 5.0
"""How soon a turn is tried again whose step the store refused."""
_FORGET_SECONDS = 3600.0
_STOPPED = "stopped by the user"
_PARK_SECONDS = 2.0
"""How long turns may take to come to a safe point when the process stops."""


@dataclass(frozen=True, slots=True)
class Order:
    """A turn that shall be run: what an agent for it must know."""

    session_id: str
    turn: TurnRecord
    attempt: int
    listener: Listener


MakeAgent = Callable[[Order], Agent]
"""Makes the agent of one attempt; called on the turn's thread."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may run and wait in one process."""

    running: int = 64
    waiting: int = 1024
    waiting_per_session: int = 32
    approval_seconds: float = 300.0


Told = Callable[[Receipt | None], None]


@dataclass(slots=True)
class _Live:
    """A turn that runs on a thread of this process."""

    session_id: str
    agent: Any = None


class _Ran(NamedTuple):
    """What a thread did for a session."""

    ended: str = ""
    """The turn that is over."""
    again_in: float | None = None
    """In how many seconds there is more to do, if there is."""


class DeliveryService:
    """Takes messages for the sessions of one store and runs their turns; any thread may call it."""

    def __init__(
        self,
        db: SessionDB,
        make_agent: MakeAgent,
        bounds: Bounds | None = None,
        ended: Callable[[Receipt], None] | None = None,
    ) -> None:
        """`ended` is called on the turn's thread with each turn that has ended here; it must be quick."""
        self._observer = ended
        self.bounds = bounds or Bounds()
        self.db = db
        self.intake = Intake(db, Limits(self.bounds.waiting_per_session, self.bounds.waiting))
        self.hub = Hub()
        self.clock = Clock()
        self.questions = Questions(self.intake, self.hub, self.bounds.approval_seconds)
        self._make_agent = make_agent
        self._pool = Pool(self.bounds.running + 4, "hermes-turn")
        self._lines = Lines(
            self.bounds.running, lambda session_id: self._pool.put(lambda: self._work(session_id, None))
        )
        self._lock = threading.Lock()
        self._live: dict[str, _Live] = {}
        self._open: dict[str, list[Told]] = {}
        """Turns of this process that have not ended, and who waits for their end."""
        self._stops: dict[str, tuple[str, FailureReason]] = {}
        """Turns of this process that were asked to stop, and why."""
        self._stuck: dict[str, tuple[FailureReason, str]] = {}
        """Turns whose last step the store refused, and why; they are tried again by themselves."""
        self._draining = False

    # -- messages -----------------------------------------------------------------

    def submit(self, session_id: str, message: Incoming, create: Mapping[str, Any] | None = None) -> Receipt:
        """Take a message; it is durable, once, when this returns.

        A repeat under its id returns the receipt of the first. Raises `MessageConflict`,
        `QueueFull`, `Draining`, `UnknownSession`, or what the store says: nothing was taken then.
        """
        receipt, job = self._admit(session_id, message, create)
        if job is not None:
            self._pool.put(job)
        return receipt

    def submit_soon(
        self,
        session_id: str,
        message: Incoming,
        create: Mapping[str, Any] | None,
        taken: Callable[[Receipt | Exception], None],
    ) -> None:
        """The same without waiting: `taken` is called on another thread with the receipt, or with what was raised."""

        def job() -> None:
            try:
                receipt, run = self._admit(session_id, message, create)
            except Exception as error:  # noqa: BLE001 - it belongs to the caller
                taken(error)
                return
            taken(receipt)
            if run is not None:
                run()

        self._pool.put(job)

    def get(self, turn_id: str) -> Receipt | None:
        """What is known of a turn."""
        view = self.intake.find(turn_id)
        if view is None:
            return None
        receipt = receipt_of(view)
        stuck = None if receipt.is_final else self._stuck.get(view.turn.id)
        return receipt if stuck is None else receipt._replace(reason=stuck[0], error=stuck[1])

    def find_message(self, sender: str, message_id: str) -> Receipt | None:
        """What is known of a sender's message, by the sender's id."""
        view = self.intake.find_message(sender, message_id)
        return None if view is None else receipt_of(view)

    def pending(self, sender: str | None = None, limit: int = 100) -> list[Receipt]:
        """What is known of at most `limit` messages that are not answered yet, a sender's or all, oldest first."""
        return [receipt_of(view) for view in self.intake.unanswered(sender, limit)]

    def when_ended(self, turn_id: str, call: Told) -> bool:
        """Call `call` once, with the receipt, when the turn has ended or this process can do no more for it.

        False, and never, if it does not run or wait in this process.
        """
        with self._lock:
            waiters = self._open.get(turn_id)
            if waiters is None:
                return False
            waiters.append(call)
            return True

    def wait(self, turn_id: str, seconds: float) -> Receipt | None:
        """What is known of a turn when it has ended, or after so many seconds; never raises for the time."""
        deadline = time.monotonic() + seconds
        told: SimpleQueue[Receipt | None] = SimpleQueue()
        while not self.when_ended(turn_id, told.put):
            receipt = self.get(turn_id)
            left = deadline - time.monotonic()
            if receipt is None or receipt.is_final or left <= 0:
                return receipt
            time.sleep(min(_BUSY_SECONDS, left))
        try:
            return told.get(timeout=max(deadline - time.monotonic(), 0))
        except Empty:
            return self.get(turn_id)

    def cancel(self, turn_id: str, why: str = _STOPPED) -> Receipt | None:
        """Withdraw a message that waits, or ask its turn to stop at its next safe point; returns what is known then.

        The request is durable: a turn that its process leaves unfinished is not gone on with.
        """
        view = self.intake.find(turn_id)
        if view is None:
            return None
        if not view.turn.state.is_end and not self._end_waiting(view, *_stopped(why)):
            self.intake.ask_to_stop(view.turn)
            self._stop(view.turn.id, why, FailureReason.INTERRUPTED)
        return self.get(view.turn.id)

    def steer(self, turn_id: str, text: str) -> bool:
        """Give a running turn a word that reaches the model with its next call; False if it does not run here."""
        live = self._live.get(turn_id)
        if live is None or live.agent is None:
            return False
        live.agent.steer(text)
        return True

    def is_live(self, turn_id: str) -> bool:
        """Whether the turn runs in this process."""
        return turn_id in self._live

    # -- following ------------------------------------------------------------------

    def follow(self, session_id: str, wake: Wake, after: int | None = None) -> Follower:
        """Follow a session's events behind event number `after`, by default from now on."""
        place = self.intake.place(session_id, LAST if after is None else after)
        return Follower(self.hub, self.intake, session_id, place, wake)

    def follow_turn(self, turn_id: str, wake: Wake, after: int | None = None) -> Follower:
        """Follow a session from the beginning of one of its turns, or behind a later event of it.

        Raises `UsageError` for an unknown turn.
        """
        view = self._view(turn_id)
        if view.turn.first_event is None:
            place = self.intake.place(view.session_id, LAST)
            view = self._view(turn_id)
            if view.turn.first_event is None:  # it begins behind that place, if ever
                return Follower(self.hub, self.intake, view.session_id, place, wake)
        first = view.turn.first_event - 1
        return self.follow(view.session_id, wake, first if after is None else max(after, first))

    def is_here(self, turn_id: str) -> bool:
        """Whether this process will end the turn."""
        return turn_id in self._open

    # -- the process ------------------------------------------------------------------

    def recover(self) -> int:
        """Go on with every delivered turn that a dead process left; returns how many. Forgets ids that are too old."""
        found = 0
        for session_id, turn in self.intake.unfinished():
            if processes.is_alive(turn.owner) is False or turn.owner == processes.identity():
                found += 1
                if turn.reason == FailureReason.INTERRUPTED:
                    self._stops[turn.id] = _STOPPED, FailureReason.INTERRUPTED
                self._put_in_line(session_id, turn.id)
                self._expire_at(turn)
        for session_id in self._lines.sessions():
            self._lines.call(session_id)
        self._tidy()
        return found

    @property
    def load(self) -> dict[str, int]:
        """How many turns run and wait in this process."""
        return {"running": self._lines.running, "waiting": self._lines.waiting, "open": len(self._open)}

    @property
    def is_draining(self) -> bool:
        return self._draining

    def drain(self, seconds: float) -> bool:
        """Take nothing more and begin nothing; True when all that runs has ended within the time.

        What still runs then is asked to leave at its next safe point, and stays open for the next process.
        """
        self._draining = True
        self._lines.close()
        settled = self._lines.settled(seconds)
        if not settled:
            for live in list(self._live.values()):
                if live.agent is not None:
                    live.agent.control.park()
            self.questions.close()
            settled = self._lines.settled(_PARK_SECONDS)
        for turn_id in list(self._open):
            self._tell(turn_id)
        return settled

    def close(self) -> None:
        """Stop the threads; turns that run are left to them."""
        self._draining = True
        self._lines.close()
        self.clock.close()
        self._pool.close()

    # -- taking -----------------------------------------------------------------------

    def _admit(
        self, session_id: str, message: Incoming, create: Mapping[str, Any] | None
    ) -> tuple[Receipt, Callable[[], None] | None]:
        """Take a message; returns its receipt and, when its turn may begin now, what runs it."""
        if self._draining:
            seen = self.intake.known(message)
            if seen is None:
                raise Draining
            return receipt_of(self._view(seen.id)), None
        at_once = self._lines.take(session_id)
        try:
            user = runner.user_row(message.content, dict(message.options), time.time())
            taken = self.intake.take(session_id, message, user, at_once=at_once, create=create)
        except BaseException:
            if at_once:
                self._lines.give(session_id)
            raise
        if not taken.is_new:
            if at_once:
                self._lines.give(session_id)
            return receipt_of(self._view(taken.turn.id)), None
        _log.debug("delivery.taken", session_id=session_id, turn_id=taken.turn.id, waits=taken.claim is None)
        self._expire_at(taken.turn)
        receipt = Receipt(
            taken.turn.id, session_id, taken.turn.state, is_new=True, attempts=taken.turn.attempts,
            sender=message.sender, scope=message.scope, message_id=message.message_id,
            accepted_at=taken.turn.accepted_at,
        )  # fmt: skip
        with self._lock:
            self._open.setdefault(taken.turn.id, [])
        if taken.claim is not None:
            return receipt, lambda: self._work(session_id, taken)
        self._put_in_line(session_id, taken.turn.id)
        if at_once:  # somebody else works on the session
            self._lines.give(session_id, call=False)
            self.clock.after(_BUSY_SECONDS, lambda: self._lines.call(session_id))
        else:
            self._lines.call(session_id)
        return receipt, None

    def _put_in_line(self, session_id: str, turn_id: str, *, first: bool = False) -> None:
        self._lines.put(session_id, turn_id, first=first)
        with self._lock:
            self._open.setdefault(turn_id, [])

    def _start(self, session_id: str) -> None:
        self._pool.put(lambda: self._work(session_id, None))

    # -- running ----------------------------------------------------------------------

    def _work(self, session_id: str, taken: Taken | None) -> None:
        """Run one turn of a session, on a thread of the pool; the session and a place are ours.

        Whoever waits for the turn hears of its end when they are free again.
        """
        ran = _Ran()
        try:
            if taken is not None and taken.claim is not None:
                ran = self._run(session_id, taken.claim, taken.turn)
            else:
                ran = self._run_next(session_id)
        except SessionBusy:
            ran = _Ran(again_in=_BUSY_SECONDS)
        except UnknownSession:
            self._forget_line(session_id)
        except StaleLease as error:
            _log.warning("delivery.lease_lost", session_id=session_id, error=str(error))
            ran = _Ran(again_in=_BUSY_SECONDS)
        except HermesError as error:
            _log.error("delivery.store_refused", session_id=session_id, reason=str(error.reason), error=str(error))
            ran = _Ran(again_in=1.0)
        finally:
            self._lines.give(session_id, call=ran.again_in is None)
        if ran.ended:
            self._ended(session_id, ran.ended)
        if ran.again_in is not None:
            self.clock.after(ran.again_in, lambda: self._lines.call(session_id))

    def _run_next(self, session_id: str) -> _Ran:
        """Claim the session and run the first of its turns that is due."""
        claim = self.db.claim(session_id)
        try:
            for turn in claim.open_turns():
                if turn.state is TurnState.ACCEPTED:
                    if processes.is_alive(turn.owner) and turn.owner != processes.identity():
                        return _Ran(again_in=_BUSY_SECONDS)  # its own process runs it
                    if self._is_late(turn):
                        self._end_waiting(self._view(turn.id), *_LATE)
                        continue
                elif turn.state is TurnState.WAITING_RETRY and (turn.retry_at or 0) > time.time():
                    return _Ran(again_in=max((turn.retry_at or 0) - time.time(), 0.01))
                return self._run(session_id, claim, turn)
            self._forget_line(session_id)
            return _Ran()
        finally:
            self._release(claim)

    def _run(self, session_id: str, claim: SessionWriter, turn: TurnRecord) -> _Ran:
        """Run an attempt at a turn."""
        live = self._live[turn.id] = _Live(session_id)
        claim.release_at_end = True
        number = turn.attempts + (turn.state in (TurnState.ACCEPTED, TurnState.WAITING_RETRY))
        try:
            again_in = self._attempt(claim, turn, live, number)
        except TurnParked:
            claim.park()
            _log.info("delivery.parked", session_id=session_id, turn_id=turn.id)
            self._tell(turn.id)
            return _Ran()
        finally:
            self._live.pop(turn.id, None)
            self.questions.forget(turn.id)
            self.hub.end(session_id)
            self._release(claim)
        if again_in is None:
            self._lines.leave(session_id, turn.id)
            return _Ran(ended=turn.id)
        if turn.id in self._stops and self._end_waiting(self._view(turn.id), *_stopped(*self._stops[turn.id])):
            return _Ran()
        self._put_in_line(session_id, turn.id, first=True)
        if turn.id in self._stuck:
            self._tell(turn.id)
        return _Ran(again_in=again_in)

    def _attempt(self, claim: SessionWriter, turn: TurnRecord, live: _Live, number: int) -> float | None:
        """Run an attempt and store how it ended; returns in how many seconds the next one is due, if one is."""
        begins = turn.state in (TurnState.ACCEPTED, TurnState.WAITING_RETRY)
        if begins:
            runner.begin(claim, turn)
        crashed = claim.turn_key is None  # a dead process ran it
        try:
            result = self._result(claim, turn, live, number, crashed=crashed)
        except (StoreError, LeaseError):
            raise
        except HermesError as error:
            result = _no_result(error.reason, str(error))
        except Exception as error:  # noqa: BLE001 - the turn's boundary: whoever waits for it must hear
            _log.failure("delivery.turn_crashed", error, session_id=claim.session_id, turn_id=turn.id)
            result = _no_result(FailureReason.UNKNOWN, f"internal error: {type(error).__name__}")
        if crashed and "turn_exit_reason" not in result:
            claim.take_over(turn, to_go_on=False)
        failpoints.hit("service.before_settle")
        due = runner.settle(claim, result, again=True, attempts=number)
        failpoints.hit("service.settled")
        _log.info(
            "delivery.attempt_ended", session_id=claim.session_id, turn_id=turn.id, attempt=number,
            reason=str(result.get("failure_reason") or ""), retried=due is not None,
        )  # fmt: skip
        if claim.turn_key is not None:  # the store did not take its last step
            self._stuck[turn.id] = (policy.reason_of(_store_reason(result)), str(result.get("error") or ""))
            return _STUCK_SECONDS
        self._stuck.pop(turn.id, None)
        return None if due is None else max(due - time.time(), 0.0)

    def _result(
        self, claim: SessionWriter, turn: TurnRecord, live: _Live, number: int, *, crashed: bool
    ) -> runner.Result:
        """What an agent that was made for it makes of a turn."""
        ask = self.questions.asker(claim, turn.id)
        listener = Listener(self.hub, live.session_id, ask, lambda agent: self._pass_stop(turn.id, agent))
        agent: Any = self._make_agent(Order(live.session_id, turn, number, listener))
        live.agent = agent
        self._pass_stop(turn.id, agent)
        self.hub.begin(live.session_id, turn.id, number)
        if not crashed:
            user_seq = turn.user_seq or claim.last_seq
            return runner.attempt(claim, agent, user_seq, again=True, attempts=number)
        agent.adopt(claim)
        agent.leave_open = runner.leaves_open(number)
        results: list[runner.Result] = agent.recover()
        if not results:
            raise UsageError("the agent cannot go on with a turn that another process began")
        return results[-1]

    def _release(self, claim: SessionWriter) -> None:
        """Give a lease back, now or as soon as the store takes it."""
        try:
            claim.release()
        except HermesError as error:
            _log.warning("delivery.release_failed", session_id=claim.session_id, reason=str(error.reason))
            self.clock.after(_STUCK_SECONDS, lambda: self._pool.put(lambda: self._release(claim)))

    # -- ends -------------------------------------------------------------------------

    def _ended(self, session_id: str, turn_id: str) -> None:
        """A turn is over, or has left this process's hands."""
        self._lines.leave(session_id, turn_id)
        with self._lock:
            waiters = self._open.pop(turn_id, [])
            self._stops.pop(turn_id, None)
        self._call(waiters, turn_id, self._observer)

    def _stop(self, turn_id: str, why: str, reason: FailureReason) -> None:
        """Ask a turn of this process to stop, now if it runs, else as soon as it does."""
        with self._lock:
            if turn_id not in self._open:
                return
            self._stops.setdefault(turn_id, (why, reason))
        live = self._live.get(turn_id)
        if live is not None and live.agent is not None:
            self._pass_stop(turn_id, live.agent)
            self.questions.give_up(turn_id)

    def _pass_stop(self, turn_id: str, agent: Any) -> None:
        """Tell an agent that its turn was asked to stop, if it was; a turn that begins forgets what it was told."""
        why, reason = self._stops.get(turn_id, ("", None))
        if reason is FailureReason.INTERRUPTED:
            agent.interrupt(why)
        elif reason is not None:
            agent.control.interrupt(why, reason)

    def _tell(self, turn_id: str) -> None:
        """Tell those who wait for a turn how it stands, although it has not ended."""
        with self._lock:
            waiters = self._open.get(turn_id, [])
            self._open[turn_id] = []
        self._call(waiters, turn_id)

    def _call(self, waiters: list[Told], turn_id: str, observer: Callable[[Receipt], None] | None = None) -> None:
        try:
            receipt = self.get(turn_id)
        except HermesError as error:  # whoever waits must hear something
            _log.error("delivery.unreadable", turn_id=turn_id, error=str(error))
            receipt = None
        if observer is not None and receipt is not None and receipt.is_final:
            observer(receipt)
        for call in waiters:
            call(receipt)

    def _end_waiting(self, view: TurnView, state: TurnState, reason: FailureReason, prose: str) -> bool:
        """End a turn that waits, for its turn or for another attempt; False if it does not."""
        turn = view.turn
        if turn.state is TurnState.ACCEPTED:
            ended = self.intake.withdraw(turn, state, reason, prose)
        elif turn.state is TurnState.WAITING_RETRY:
            ended = self.intake.end_waiting(turn, state, reason, prose)
        else:
            return False
        if ended:
            self._ended(view.session_id, turn.id)
            self.hub.touch(view.session_id)
        return ended

    def _expire_at(self, turn: TurnRecord) -> None:
        if turn.deadline is not None:
            self.clock.after(
                max(turn.deadline - time.time(), 0.0), lambda: self._pool.put(lambda: self._expire(turn.id))
            )

    def _expire(self, turn_id: str) -> None:
        view = self.intake.find(turn_id)
        if view is None or view.turn.state.is_end or self._end_waiting(view, *_LATE):
            return
        self._stop(turn_id, "its time was over", FailureReason.DEADLINE)

    @staticmethod
    def _is_late(turn: TurnRecord) -> bool:
        return turn.deadline is not None and turn.deadline <= time.time()

    def _forget_line(self, session_id: str) -> None:
        """Nothing is left to run in a session: whoever still waits for one of its turns may look."""
        for turn_id in self._lines.of(session_id):
            self._ended(session_id, turn_id)

    def _view(self, turn_id: str) -> TurnView:
        view = self.intake.find(turn_id)
        if view is None:
            raise UsageError(f"there is no turn {turn_id!r}")
        return view

    def _tidy(self) -> None:
        if not self._draining:
            self.intake.forget_old(time.time())
            self.clock.after(_FORGET_SECONDS, lambda: self._pool.put(self._tidy))


def _no_result(reason: FailureReason, error: str) -> runner.Result:
    """The result of a turn that no agent ran."""
    prose = f"{error} {FAILURES[reason].advice}"
    return {"failed": True, "completed": False, "failure_reason": str(reason), "error": error, "final_response": prose}


def _store_reason(result: dict[str, Any]) -> str:
    """The reason behind `session_persistence_failed:<detail>`."""
    detail = str(result.get("failure_reason") or "").partition(":")[2]
    return f"store_{detail}" if detail and detail != "unknown" else str(FailureReason.STORE_IO)


def _stopped(why: str, reason: FailureReason = FailureReason.INTERRUPTED) -> tuple[TurnState, FailureReason, str]:
    return _LATE if reason is FailureReason.DEADLINE else (TurnState.CANCELLED, reason, f"[{why}]")


_LATE = (TurnState.EXPIRED, FailureReason.DEADLINE, "[it was not answered in time]")


__all__ = ["Bounds", "DeliveryService", "Listener", "MakeAgent", "Order", "QueueFull", "Receipt"]
