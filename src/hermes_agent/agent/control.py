"""What may reach a turn while it runs: a stop, a word to steer by, and its budget of model calls."""

from __future__ import annotations

import sys
import threading
from collections import deque

from hermes_agent.cancellation import Cancellation
from hermes_agent.errors import FailureReason

DEFAULT_ITERATIONS = 90


class TurnParked(BaseException):
    """The process is about to stop: the turn leaves at a safe point and stays open for the next one."""


class IterationBudget:
    """Counts model calls of one turn; `max_total` None means no limit."""

    def __init__(self, max_total: int | None) -> None:
        self.max_total = sys.maxsize if max_total is None else max_total
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return self._used

    @property
    def remaining(self) -> int:
        return max(self.max_total - self._used, 0)

    def consume(self) -> bool:
        """Take one; False when none is left."""
        with self._lock:
            if self._used >= self.max_total:
                return False
            self._used += 1
            return True

    def refund(self) -> None:
        """Give one back."""
        with self._lock:
            self._used = max(self._used - 1, 0)


class TurnControl:
    """The handle by which other threads reach a running turn."""

    def __init__(self) -> None:
        self.cancellation = Cancellation()
        self.why = FailureReason.INTERRUPTED
        """What a stopped turn is said to have ended by."""
        self.parked = False
        self._steering: deque[str] = deque()

    def begin_turn(self) -> None:
        """Forget the last turn's stop; words that came too late for it stay queued."""
        self.cancellation = Cancellation()
        self.why = FailureReason.INTERRUPTED

    def interrupt(self, reason: str = "", why: FailureReason = FailureReason.INTERRUPTED) -> None:
        """Ask the turn to stop at the next safe point."""
        self.why = why
        self.cancellation.cancel(reason or "stopped by the user")

    def park(self) -> None:
        """Ask the turn to leave, unfinished, before its next model call."""
        self.parked = True

    def steer(self, text: str) -> None:
        """Queue a word for the running turn; it reaches the model with its next call."""
        self._steering.append(text)

    def take_steering(self) -> str:
        """All queued words, joined; "" when there are none."""
        words: list[str] = []
        while self._steering:
            words.append(self._steering.popleft())
        return "\n".join(words)
