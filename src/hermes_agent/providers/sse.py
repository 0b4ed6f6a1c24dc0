"""Decode a server-sent event stream from bytes that come in any pieces."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LINE = 32 * 1024 * 1024
_STATUS = "HTTP_STATUS/"


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `status` is an HTTP status that the server hid in a comment of it, else 0."""

    name: str
    data: str
    status: int = 0


class Decoder:
    """Turns bytes into events, whatever the line ends and wherever the pieces are cut.

    A line that begins with a brace is taken as data: servers put bare JSON errors
    into a stream. Raises `ValueError` when a line grows beyond `MAX_LINE` bytes.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._name = ""
        self._data: list[str] = []
        self._status = 0

    def feed(self, piece: bytes) -> list[Event]:
        """Take the next bytes; return the events that they complete."""
        searched = len(self._rest)
        self._rest += piece
        if self._rest.find(b"\n", searched) < 0 and b"\r" not in self._rest:
            if len(self._rest) > MAX_LINE:
                raise ValueError("a line of the stream is too long")
            return []
        block = bytes(self._rest)
        if b"\r" in block:
            # A carriage return at the very end may be the first half of a line end.
            held = block.endswith(b"\r")
            block = (block[:-1] if held else block).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        else:
            held = False
        lines = block.split(b"\n")
        self._rest = bytearray(lines.pop())
        if held:
            self._rest += b"\r"
        return self._take(lines)

    def finish(self) -> list[Event]:
        """The stream has ended: return what stood before the end without its blank line."""
        rest, self._rest = bytes(self._rest).rstrip(b"\r"), bytearray()
        return self._take([rest, b""])

    def _take(self, lines: list[bytes]) -> list[Event]:
        events: list[Event] = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(Event(self._name, "\n".join(self._data), self._status))
                self._name, self._data, self._status = "", [], 0
            else:
                self._field(line.decode("utf-8", "replace"))
        return events

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._name = value
        elif not name:
            status = value.removeprefix(_STATUS)
            if status != value and status.isdecimal():
                self._status = int(status)
        elif line.startswith("{"):
            self._data.append(line)
