"""Where the command writes: streams that survive their reader, and text that cannot steer a terminal."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Protocol

_STEERING = re.compile(r"\r\n?|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """`text` without control characters and direction marks; line breaks and tabs stay."""
    return _STEERING.sub(lambda found: "\n" if found.group().startswith("\r") else "\ufffd", text)


def one_line(text: str) -> str:
    """`text` as one harmless line."""
    return harmless(" ".join(text.split()))


def clip(text: str, columns: int) -> str:
    """The beginning of one line that fits into so many columns, with `…` where it was cut."""
    if text.isascii():
        return text if len(text) <= columns else text[: max(columns - 1, 0)] + "…"
    used = cut = 0
    for at, char in enumerate(text):
        used += _width(char)
        if used <= columns - 1:
            cut = at + 1
        if used > columns:
            return text[:cut] + "…"
    return text


@cache
def _width(char: str) -> int:
    import unicodedata  # noqa: PLC0415 - only for text beyond ASCII

    if unicodedata.combining(char) or unicodedata.category(char) in {"Cf", "Me", "Mn"}:
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


class File(Protocol):
    """What is needed of a text file to write to it."""

    def write(self, text: str, /) -> int: ...
    def flush(self) -> None: ...
    def isatty(self) -> bool: ...
    def fileno(self) -> int: ...


class Stream:
    """Standard output or error. Writing never raises; what went wrong first stays in `error`."""

    def __init__(self, file: File | None) -> None:
        self._file = file
        self.error: OSError | None = None if file is not None else OSError("it is closed")
        self.terminal = file is not None and file.isatty()
        self.styled = self.terminal and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
        """Colours and lines that change are shown."""

    def write(self, text: str) -> None:
        """Write at once; on a terminal nothing in `text` can steer it."""
        self.raw(harmless(text) if self.terminal else text)

    def raw(self, text: str) -> None:
        """Write at once, as it is."""
        if self._file is None or self.error is not None:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self.error = error
            self.hush()

    def fresh_line(self) -> None:
        """Leave the line on which a terminal has echoed a key."""
        if self.terminal:
            self.raw("\r\x1b[K" if self.styled else "\n")

    def hush(self) -> None:
        """Drop what is still in the buffer: it must not fail once more when the process ends."""
        if self._file is not None:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._file.fileno())

    def columns(self) -> int:
        """How wide the terminal is now."""
        try:
            return os.get_terminal_size(self._file.fileno()).columns if self._file is not None else 80
        except OSError:
            return 80
