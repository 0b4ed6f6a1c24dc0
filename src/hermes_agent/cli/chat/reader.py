"""Where messages come from: an editing prompt on a terminal, else one line after the other."""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from hermes_agent import home as home_module
from hermes_agent.cli.screen import Stream
from hermes_agent.errors import HermesError


class Reader(Protocol):
    """Gives one message after the other."""

    interactive: bool
    """A person sits there."""

    def read(self) -> str | None:
        """The next message, None at the end; Ctrl-C raises `KeyboardInterrupt`."""
        ...

    def resting(self) -> Any:
        """A context in which a turn runs and nothing is read."""
        ...

    def restore(self) -> None:
        """Leave the terminal as it was found; for an end at once."""
        ...


def choose(out: Stream, err: Stream, home: Path) -> Reader:
    """The reader that fits what standard input and output are."""
    if sys.stdin is not None and sys.stdin.isatty() and out.terminal and err.styled:
        return Prompt(home)
    return Lines(err)


class Lines:
    """Each line is a message, whatever bytes it is made of."""

    def __init__(self, err: Stream) -> None:
        self._source = sys.stdin.buffer if sys.stdin is not None else None
        self._err = err
        self.interactive = sys.stdin is not None and sys.stdin.isatty()

    def read(self) -> str | None:
        if self.interactive:
            self._err.raw("> ")
        line = self._source.readline() if self._source is not None else b""
        return line.decode("utf-8", "replace").rstrip("\r\n") if line else None

    @contextmanager
    def resting(self) -> Iterator[None]:
        yield

    def restore(self) -> None:
        """Nothing was changed."""


class Prompt:
    """A prompt that edits several lines and remembers what was typed, in `history` in the home.

    While a turn runs what is typed is not echoed into its output; it is read afterwards, line by line.
    """

    interactive = True

    def __init__(self, home: Path) -> None:
        from prompt_toolkit import PromptSession  # noqa: PLC0415 - start-up time
        from prompt_toolkit.history import FileHistory, InMemoryHistory  # noqa: PLC0415 - start-up time
        from prompt_toolkit.key_binding import KeyBindings  # noqa: PLC0415 - start-up time

        path = home / "history"
        try:
            home_module.ensure_home(home)
            home_module.create_private_file(path)
            history: Any = FileHistory(str(path))
        except (OSError, HermesError):
            history = InMemoryHistory()
        keys = KeyBindings()

        @keys.add("enter")
        def _send(event: Any) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def _new_line(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        self._session: Any = PromptSession(history=history, key_bindings=keys, multiline=True)
        self._before = termios.tcgetattr(sys.stdin.fileno())

    def read(self) -> str | None:
        try:
            return self._session.prompt("> ", prompt_continuation="  ")
        except EOFError:
            return None

    @contextmanager
    def resting(self) -> Iterator[None]:
        source = sys.stdin.fileno()
        quiet = termios.tcgetattr(source)
        quiet[3] &= ~termios.ECHO
        termios.tcsetattr(source, termios.TCSADRAIN, quiet)
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)
