"""Threads that run what they are given, and a clock that does so later."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from hermes_agent import log
from hermes_agent.baton import Baton

Job = Callable[[], None]

_log = log.get("delivery")


class Pool:
    """At most `limit` daemon threads, made when they are needed; jobs begin in the order in which they came.

    One of them computes at a time (`baton`).
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._baton = Baton()
        self._lock = threading.Lock()
        self._threads = 0
        self._free = 0

    def put(self, job: Job) -> None:
        """Run `job` on a thread; what it raises is logged."""
        with self._lock:
            grow = self._free <= 0 and self._threads < self._limit
            self._threads += grow
            self._free += 0 if grow else -1
        self._jobs.put(job)
        if grow:
            threading.Thread(target=self._run, name=f"{self._name}-{self._threads}", daemon=True).start()

    def close(self) -> None:
        """Let every thread end after the jobs that wait."""
        with self._lock:
            threads, self._limit = self._threads, 0
        for _ in range(threads):
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                with self._baton:
                    job()
            except Exception as error:  # noqa: BLE001 - a thread's boundary
                _log.failure("delivery.job_failed", error)
            del job
            with self._lock:
                self._free += 1


class Clock:
    """Calls functions at their time on one daemon thread, which lives while any wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def after(self, seconds: float, job: Job) -> None:
        """Call `job` in so many seconds; it must be quick."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hermes-clock", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Call nothing any more."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._due and (wait := self._due[0][0] - time.monotonic()) > 0:
                    self._changed.wait(wait)
                if not self._due:
                    self._thread = None
                    return
                job = heapq.heappop(self._due)[2]
            try:
                job()
            except Exception as error:  # noqa: BLE001 - a thread's boundary
                _log.failure("delivery.timer_failed", error)
