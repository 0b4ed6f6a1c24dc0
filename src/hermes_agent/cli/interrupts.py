"""What Ctrl-C and a request to end do: the first stops the turn at a safe point, the second ends the process.

A signal handler runs between any two instructions of the main thread, also while that
thread holds a lock. So the handler only writes a byte; a thread of its own does the rest.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self

INTERRUPTED = 130

Stop = Callable[[int], None]
"""Called, on a thread of its own, with the signal's number."""


class Interrupts:
    """The process's handlers of SIGINT, SIGTERM and SIGHUP while the context is open.

    Where no turn runs (outside `stopping`) Ctrl-C raises `KeyboardInterrupt` and a request to end
    `SystemExit`. A signal that the process was started to ignore stays ignored.
    """

    def __init__(self, farewell: Callable[[], None] | None = None) -> None:
        self.farewell = farewell
        """Called before the second signal ends the process; must not block."""
        self._stop: Stop | None = None
        self._count = 0
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="interrupts", daemon=True).start()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        os.close(self._writer)

    @property
    def stop(self) -> Stop | None:
        """What the next signal calls."""
        return self._stop

    @contextmanager
    def stopping(self, stop: Stop) -> Iterator[None]:
        """While the block runs, the first signal calls `stop`; blocks may lie inside each other."""
        outer = self._stop, self._count
        self._count = 0
        self._stop = stop
        try:
            yield
        finally:
            self._stop, self._count = outer

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._stop is None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(INTERRUPTED)
        self._count += 1
        if self._count > 1:
            self._leave()
        try:
            os.write(self._writer, bytes([number]))
        except BlockingIOError:
            return

    def _watch(self) -> None:
        while True:
            number = os.read(self._reader, 1)
            if not number:
                os.close(self._reader)
                return
            stop = self._stop
            if stop is not None:
                stop(number[0])

    def _leave(self) -> None:
        """End at once, with what our commands started; the turn is found and finished when the session is next used."""
        if self.farewell is not None:
            self.farewell()
        if "psutil" in sys.modules:  # a command ran
            import psutil  # noqa: PLC0415 - loaded already, or not needed

            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
        os._exit(INTERRUPTED)
