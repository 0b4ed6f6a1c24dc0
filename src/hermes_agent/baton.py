"""Among threads that run turns side by side one computes at a time, and who waits hands the baton on.

Threads that only share the interpreter's lock change places at each call into SQLite, some
eighty times a turn when thirty turns are under way. With a baton they change places when
one of them waits: for the model, a tool, or a commit.

The baton is a courtesy. Who does not get it in `PATIENCE` seconds goes on without it, so
nothing can come to a stop over it.
"""

from __future__ import annotations

import threading
from types import TracebackType

PATIENCE = 0.05


class Baton:
    """The baton of one crowd of threads; `with baton:` is what one of them computes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        _mine.baton, _mine.waits = self, 0
        self.pick_up()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.put_down()
        _mine.baton = None

    def pick_up(self) -> None:
        _mine.holds = self._lock.acquire(timeout=PATIENCE)

    def put_down(self) -> None:
        if _mine.holds:
            _mine.holds = False
            self._lock.release()


class _Mine(threading.local):
    """What a thread knows of its baton."""

    baton: Baton | None = None
    holds = False
    waits = 0
    """How many waits it is in, one inside another."""


class _Waiting:
    """`with waiting:` is where a thread waits for others; it costs next to nothing outside a crowd."""

    __slots__ = ()

    def __enter__(self) -> None:
        baton = _mine.baton
        if baton is not None:
            _mine.waits += 1
            if _mine.waits == 1:
                baton.put_down()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        baton = _mine.baton
        if baton is not None:
            _mine.waits -= 1
            if _mine.waits == 0:
                baton.pick_up()


_mine = _Mine()
waiting = _Waiting()
