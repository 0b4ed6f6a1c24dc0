"""The approval question on a terminal: what would run, why it needs a yes, and the three answers."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hermes_agent.cli.interrupts import Interrupts
from hermes_agent.cli.screen import Stream
from hermes_agent.cli.surface import Surface
from hermes_agent.tools.context import ApprovalRequest, Decision

_ANSWERS = {
    "o": Decision.ONCE, "once": Decision.ONCE, "y": Decision.ONCE, "yes": Decision.ONCE,
    "s": Decision.SESSION, "session": Decision.SESSION,
    "n": Decision.DENY, "no": Decision.DENY,
}  # fmt: skip
_TRIES = 3


class Questions:
    """Puts questions, one at a time, to the person at the terminal.

    Ctrl-C, an end of input, `timeout` seconds of silence and three answers that are none mean
    no. What was typed before the question stood there is thrown away: it cannot be an answer.
    """

    def __init__(self, err: Stream, surface: Surface, interrupts: Interrupts, timeout: float) -> None:
        self._err = err
        self._surface = surface
        self._interrupts = interrupts
        self._timeout = timeout
        self._one = threading.Lock()

    def ask(self, request: ApprovalRequest) -> Decision:
        """The person's decision; raises nothing."""
        with self._one, self._surface.asking():
            self._err.raw(_question(request, styled=self._err.styled, columns=self._err.columns()))
            try:
                decision = self._decide()
            except (OSError, termios.error):  # the terminal is gone
                return Decision.DENY
            if decision is None:
                self._err.raw("\n  no\n")
            return decision or Decision.DENY

    def _decide(self) -> Decision | None:
        reader, writer = os.pipe()
        outer = self._interrupts.stop

        def no(number: int) -> None:
            os.write(writer, b"n")
            if number != signal.SIGINT and outer is not None:
                outer(number)

        try:
            with self._interrupts.stopping(no), _line_mode(sys.stdin.fileno()):
                until = time.monotonic() + self._timeout
                for _ in range(_TRIES):
                    self._err.raw("  [o]nce, [s]ession, [n]o? ")
                    line = _read_line(sys.stdin.fileno(), reader, until)
                    if line is None:
                        return None
                    answer = _ANSWERS.get(line.strip().lower())
                    if answer is not None:
                        return answer
                return None
        finally:
            os.close(reader)
            os.close(writer)


def _question(request: ApprovalRequest, *, styled: bool, columns: int) -> str:
    import textwrap  # noqa: PLC0415 - start-up time

    from hermes_agent.tools.approval import gate  # noqa: PLC0415 - loaded already where there is something to ask

    bold, plain = ("\x1b[1m", "\x1b[0m") if styled else ("", "")
    command = "\n".join(f"      {bold}{line}{plain}" for line in gate.visible(request.command).split("\n"))
    why = textwrap.fill(gate.visible(request.why), max(columns - 2, 20), initial_indent="  ", subsequent_indent="  ")
    return f"  {request.tool} wants to run\n{command}\n{why}\n"


def _read_line(source: int, wake: int, until: float) -> str | None:
    """One line; None at the end of input, when `wake` is readable, or when the time is up."""
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([source, wake], [], [], max(until - time.monotonic(), 0))
        if source not in ready or wake in ready:
            return None
        piece = os.read(source, 1024)
        if not piece:
            return None
        line += piece
    return line.decode("utf-8", "replace")


@contextmanager
def _line_mode(source: int) -> Iterator[None]:
    """The terminal reads and echoes lines; what was typed before is gone."""
    before = termios.tcgetattr(source)
    wanted = termios.tcgetattr(source)
    wanted[0] |= termios.ICRNL
    wanted[3] |= termios.ICANON | termios.ECHO | termios.ISIG
    termios.tcsetattr(source, termios.TCSAFLUSH, wanted)
    try:
        yield
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
