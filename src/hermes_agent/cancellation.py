"""The stop signal of one turn, shared by the model call, the waits and the tools."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hermes_agent.baton import waiting

Abort = Callable[[], None]


class Cancellation:
    """A one-way switch that wakes whatever the turn is waiting for.

    Safe to set from a signal handler or any thread. Once set it stays set; a new turn
    gets a new object.
    """

    def __init__(self) -> None:
        # Bare locks, not an Event: a handler that sets an Event while the same thread waits
        # on it can meet the Event's own lock and never return.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._first = threading.Lock()
        self._requested = False
        self._aborts: dict[int, Abort] = {}
        self._next = 0
        self._reason = ""

    @property
    def requested(self) -> bool:
        return self._requested

    @property
    def reason(self) -> str:
        """Why the turn was stopped; empty while it was not."""
        return self._reason

    def cancel(self, reason: str = "stopped by the user") -> None:
        """Ask the turn to stop; the first reason wins. Runs every registered abort once."""
        if not self._first.acquire(blocking=False):
            return
        self._reason = reason
        self._requested = True
        self._gate.release()
        for abort in list(self._aborts.values()):
            abort()

    def wait(self, seconds: float) -> bool:
        """Sleep at most `seconds`; True as soon as the turn is asked to stop."""
        with waiting:
            stopped = self._gate.acquire(timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX)))
        if stopped:
            self._gate.release()
            return True
        return self._requested

    @contextmanager
    def aborting(self, abort: Abort) -> Iterator[None]:
        """Call `abort` if the stop comes while the block runs (at once if it already came).

        `abort` must not block and must not raise: it may run in a signal handler.
        """
        token = self._next
        self._next += 1
        self._aborts[token] = abort
        try:
            if self._requested:
                abort()
            yield
        finally:
            self._aborts.pop(token, None)
