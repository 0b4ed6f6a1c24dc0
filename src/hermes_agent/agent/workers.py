"""A few daemon threads that run tool calls for one agent.

Daemon, because a wedged tool must not keep the process from ending; few, because a batch
of forty calls must not become forty threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]

MAX_WORKERS = 8
_IDLE_SECONDS = 30.0


class Workers:
    """Runs jobs, at most `MAX_WORKERS` at a time; threads end after a while without work."""

    def __init__(self, limit: int = MAX_WORKERS) -> None:
        self._limit = limit
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._count = 0
        self._generation = 0

    def submit(self, job: Job) -> None:
        """Run `job` soon. A job must not raise."""
        with self._changed:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._changed.notify()
            elif self._count < self._limit:
                self._count += 1
                threading.Thread(target=self._run, args=(self._generation,), name="hermes-tool", daemon=True).start()

    def abandon(self) -> None:
        """Write off the present threads, wedged as they may be; waiting and new jobs get new ones."""
        with self._changed:
            self._generation += 1
            self._count = self._idle = 0
            self._changed.notify_all()

    def _run(self, generation: int) -> None:
        while True:
            with self._changed:
                job = self._next(generation)
            if job is None:
                return
            job()

    def _next(self, generation: int) -> Job | None:
        """The next job for a thread of that generation; None ends the thread."""
        if generation != self._generation:
            return None
        self._idle += 1
        while not self._jobs:
            woken = self._changed.wait(_IDLE_SECONDS)
            if generation != self._generation:
                return None
            if not woken and not self._jobs:
                self._idle -= 1
                self._count -= 1
                return None
        self._idle -= 1
        return self._jobs.popleft()
