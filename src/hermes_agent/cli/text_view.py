"""A conversation as text: the answer as it comes, a line for each tool call, and one line that moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hermes_agent.cli.screen import Stream, clip, harmless, one_line
from hermes_agent.cli.surface import Call, Outcome, Result, failure_of, text_of

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_BEAT = 0.1
_GREEN, _RED, _DIM, _PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[2m", "\x1b[0m"


class TextView:
    """Answers go to `out`, all else to `err`.

    On a terminal answers are shown while they are streamed, and a line at the bottom says what
    runs. Elsewhere an answer is printed once it is stored.
    """

    def __init__(self, out: Stream, err: Stream) -> None:
        self._out = out
        self._err = err
        self._lock = threading.RLock()
        self._running: dict[str, tuple[str, float]] = {}
        """What runs now, and since when."""
        self._drawn = False
        self._still = False
        """A question stands on the terminal."""
        self._streamed = ""
        """Text of this model call that is on the screen."""
        self._beating = threading.Event()
        self._model = ""

    # -- Surface ------------------------------------------------------------------

    def opened(self, session_id: str, model: str) -> None:  # noqa: ARG002 - the interactive banner says it
        self._model = one_line(model)

    def step(self) -> None:
        self._streamed = ""
        self._run("model", f"waiting for {self._model}")

    def delta(self, text: str) -> None:
        if not self._out.terminal:
            return
        with self._lock:
            self._done("model")
            if not self._streamed:
                text = text.lstrip("\n")
            self._streamed += text
            self._out.write(text)

    def void(self, why: str) -> None:
        with self._lock:
            self._end_text()
            self._streamed = ""
            self.notice(why)

    def message(self, text: str) -> None:
        with self._lock:
            self._done("model")
            if self._streamed.strip() == text.strip():
                self._end_text()
            else:
                self._clear()
                (self._out if self._out.terminal else self._err).write(text.strip("\n") + "\n")
            self._streamed = ""

    def tool_started(self, call: Call) -> None:
        with self._lock:
            self._done("model")
            self._end_text()
            about = f"{call.name}  {one_line(call.about)}"
            if self._err.styled:
                self._run(call.id, about)
            else:
                self._say(f"  … {harmless(about)}\n")

    def tool_completed(self, call: Call, outcome: Outcome) -> None:
        mark, colour = _mark(outcome)
        tail = f"  {_seconds(outcome.seconds)}" if outcome.seconds else ""
        note = f"  {outcome.note}" if outcome.note else ""
        line = harmless(f"{call.name}  {one_line(call.about)}")
        with self._lock:
            self._done(call.id)
            if self._err.styled:
                room = self._err.columns() - 5
                note = clip(note, max(room - len(line) - len(tail), min(len(note), room // 3)))
                line = clip(line, max(room - len(tail) - len(note), 12))
                self._say(f"  {colour}{mark}{_PLAIN} {line}{_DIM}{tail}{note}{_PLAIN}\n")
            else:
                self._say(f"  {mark} {line}{tail}{note}\n")

    def notice(self, text: str) -> None:
        with self._lock:
            self._end_text()
            line = one_line(text)
            self._say(f"  {_DIM}{line}{_PLAIN}\n" if self._err.styled else f"  {line}\n")

    def ended(self, result: Result, *, earlier: bool = False) -> None:  # noqa: ARG002 - an earlier turn is shown like any other
        with self._lock:
            self._running.clear()
            self._clear()
            text = text_of(result)
            self._end_text()
            if not result["completed"]:
                if not result["interrupted"]:
                    self.failure(failure_of(result))
            elif not text.strip() or self._streamed.strip() != text.strip():
                self._out.write(text + "\n")
            self._streamed = ""

    @contextmanager
    def asking(self) -> Iterator[None]:
        with self._lock:
            self._end_text()
            self._clear()
            self._still = True
        try:
            yield
        finally:
            self._still = False

    # -- for the loop around it -----------------------------------------------------

    def failure(self, line: str) -> None:
        """Say in one line that something could not be done."""
        with self._lock:
            self._running.clear()
            self._end_text()
            mark = f"{_RED}✗{_PLAIN}" if self._err.styled else "✗"
            self._say(f"{mark} {harmless(line)}\n")

    def say(self, text: str) -> None:
        """Print lines of the program itself."""
        with self._lock:
            self._say(harmless(text) + "\n")

    # -- the line at the bottom -------------------------------------------------------

    def _run(self, key: str, what: str) -> None:
        if not self._err.styled:
            return
        with self._lock:
            self._running[key] = (harmless(what), time.monotonic())
            if not self._beating.is_set():
                self._beating.set()
                threading.Thread(target=self._beat, name="spinner", daemon=True).start()

    def _done(self, key: str) -> None:
        self._running.pop(key, None)
        if not self._running:
            self._clear()

    def _beat(self) -> None:
        count = 0
        while True:
            with self._lock:
                if not self._running:
                    self._clear()
                    self._beating.clear()
                    return
                if not self._still:
                    self._draw(_FRAMES[count % len(_FRAMES)])
            count += 1
            time.sleep(_BEAT)

    def _draw(self, frame: str) -> None:
        what, since = next(iter(self._running.values()))
        seconds = int(time.monotonic() - since)
        tail = f"  {seconds} s" if seconds else ""
        tail += f"  and {len(self._running) - 1} more" if len(self._running) > 1 else ""
        line = clip(what, max(self._err.columns() - 5 - len(tail), 12))
        self._err.raw(f"\r\x1b[K  {frame} {line}{_DIM}{tail}{_PLAIN}")
        self._drawn = True

    def _clear(self) -> None:
        if self._drawn:
            self._err.raw("\r\x1b[K")
            self._drawn = False

    def _end_text(self) -> None:
        """Streamed text ends its line before anything else is printed."""
        self._clear()
        if self._streamed and not self._streamed.endswith("\n"):
            self._out.raw("\n")
            self._streamed += "\n"

    def _say(self, line: str) -> None:
        """Print a line of our own making; what came from elsewhere in it is harmless already."""
        self._clear()
        self._err.raw(line)


def _mark(outcome: Outcome) -> tuple[str, str]:
    if outcome.unknown:
        return "?", _RED
    return ("✗", _RED) if outcome.failed or outcome.note else ("✓", _GREEN)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60} s"
