"""Who may run: one turn a session, so many in the process; the rest stands in line, and no thread waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

Start = Callable[[str], None]
"""Has a thread work on a session, which then holds the session and a place."""


@dataclass(slots=True)
class _Line:
    """One session in this process."""

    busy: bool = False
    """A thread works on it, or it waits for a place."""
    waiting: deque[str] = field(default_factory=deque[str])
    """Turns that wait, by id."""


class Lines:
    """The lines of all sessions of one process, and its places; any thread may call it."""

    def __init__(self, places: int, start: Start) -> None:
        self._places = places
        self._start = start
        self._changed = threading.Condition()
        self._lines: dict[str, _Line] = {}
        self._ready: deque[str] = deque()
        """Sessions that have something to run and wait for a place."""
        self._running = 0
        self._closed = False

    @property
    def running(self) -> int:
        """Places that are taken."""
        return self._running

    @property
    def waiting(self) -> int:
        """Turns that stand in line."""
        with self._changed:
            return sum(len(line.waiting) for line in self._lines.values())

    def sessions(self) -> list[str]:
        """Sessions that have a line."""
        with self._changed:
            return list(self._lines)

    def of(self, session_id: str) -> list[str]:
        """Who stands in a session's line."""
        with self._changed:
            line = self._lines.get(session_id)
            return list(line.waiting) if line is not None else []

    def take(self, session_id: str) -> bool:
        """Take the session and a place, if both are free and nobody stands in line; `give` gives them back."""
        with self._changed:
            line = self._lines.setdefault(session_id, _Line())
            if line.busy or line.waiting or self._running >= self._places:
                return False
            line.busy = True
            self._running += 1
            return True

    def give(self, session_id: str, *, call: bool = True) -> None:
        """Give session and place back; the next session that waits for a place gets it. With `call`, see `call`."""
        with self._changed:
            line = self._lines[session_id]
            line.busy = False
            self._running -= 1
            if not line.waiting:
                del self._lines[session_id]
            following = self._ready.popleft() if self._ready else None
            if following is not None:
                self._lines[following].busy = False
            self._changed.notify_all()
        if following is not None:
            self.call(following)
        if call:
            self.call(session_id)

    def put(self, session_id: str, turn_id: str, *, first: bool = False) -> None:
        """Put a turn at the end of its session's line, or at its head."""
        with self._changed:
            line = self._lines.setdefault(session_id, _Line())
            if turn_id not in line.waiting:
                (line.waiting.appendleft if first else line.waiting.append)(turn_id)

    def leave(self, session_id: str, turn_id: str) -> None:
        """Take a turn out of its line."""
        with self._changed:
            line = self._lines.get(session_id)
            if line is not None and turn_id in line.waiting:
                line.waiting.remove(turn_id)

    def call(self, session_id: str) -> None:
        """Let a session run what stands in its line, now or when a place is free."""
        with self._changed:
            line = self._lines.get(session_id)
            if line is not None and not line.busy and not line.waiting:
                del self._lines[session_id]
            if line is None or line.busy or not line.waiting or self._closed:
                return
            line.busy = True
            if self._running >= self._places:
                self._ready.append(session_id)
                return
            self._running += 1
        self._start(session_id)

    def close(self) -> None:
        """Start nothing any more."""
        with self._changed:
            self._closed = True

    def settled(self, seconds: float) -> bool:
        """Wait until no place is taken; False when that did not come in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, seconds)
