"""Following a session: its durable events from any place on, and the provisional words of the model between them.

A durable event has a number and is read from the store, so it can be read again, by anybody,
at any time. A provisional one has none: it is what a model call has said so far, void as
soon as the row behind it is stored, and a reader that comes late gets it in one piece.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hermes_agent.store import messages
from hermes_agent.store.events import StoredEvent
from hermes_agent.store.intake import Intake, Place

Wake = Callable[[], None]

LAST = messages.MAX_SEQ
"""Stands for a session's last event, whatever its number."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    `number` is its place in the session, None for a provisional one. Kinds: `message` (data:
    the row), `tool.started` (data: call_id), `approval.requested` and `approval.decided` (data:
    call_id, approval_id), `turn.<state>` and `turn.resumed`; provisional:
    `delta` and `reasoning` (data: text, attempt), `void` (what was said since the last
    message does not count), `status` (data: kind, text).
    """

    number: int | None
    kind: str
    turn_id: str
    at: float = 0.0
    data: dict[str, Any] = field(default_factory=dict[str, Any])


_calls = itertools.count(1)


class Words:
    """What one model call has said, piece by piece; no two have the same number."""

    def __init__(self) -> None:
        self.call = next(_calls)
        self.pieces: list[tuple[str, str]] = []

    def become(self, row: tuple[str, str]) -> bool:
        """Whether they are just the text and the reasoning of a row."""
        said = {kind: "".join(piece for its, piece in self.pieces if its == kind) for kind in ("delta", "reasoning")}
        return (said["delta"], said["reasoning"]) == row


class Speech:
    """What the model says in a turn that runs in this process."""

    def __init__(self, turn_id: str, attempt: int) -> None:
        self.turn_id = turn_id
        self.attempt = attempt
        self.words = Words()
        """Others each time that what was said is void or has become a row."""


class Hub:
    """Wakes who follows a session of this process, and keeps what its model says."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followers: dict[str, set[Follower]] = {}
        self._speeches: dict[str, Speech] = {}

    def begin(self, session_id: str, turn_id: str, attempt: int) -> None:
        """A turn begins to run."""
        self._speeches[session_id] = Speech(turn_id, attempt)
        self.touch(session_id)

    def end(self, session_id: str) -> None:
        """It has ended."""
        self._speeches.pop(session_id, None)
        self.touch(session_id)

    def touch(self, session_id: str) -> None:
        """Something durable happened."""
        for follower in tuple(self._followers.get(session_id, ())):
            follower.stale = True
            follower.wake()

    def say(self, session_id: str, kind: str, text: str) -> None:
        """The model said something, or its words are void (`void`)."""
        speech = self._speeches.get(session_id)
        if speech is None:
            return
        if kind == "void":
            speech.words = Words()
        else:
            speech.words.pieces.append((kind, text))
        for follower in tuple(self._followers.get(session_id, ())):
            follower.wake()

    def settle(self, session_id: str) -> None:
        """What the model said has become a row."""
        speech = self._speeches.get(session_id)
        if speech is not None:
            speech.words = Words()
        self.touch(session_id)

    def speech(self, session_id: str) -> Speech | None:
        """What is being said in a session."""
        return self._speeches.get(session_id)

    def is_followed(self, session_id: str) -> bool:
        return session_id in self._followers

    def add(self, follower: Follower) -> None:
        with self._lock:
            self._followers.setdefault(follower.session_id, set()).add(follower)

    def remove(self, follower: Follower) -> None:
        with self._lock:
            rest = self._followers.get(follower.session_id)
            if rest is not None:
                rest.discard(follower)
                if not rest:
                    del self._followers[follower.session_id]


class Follower:
    """One reader of a session's events. `wake` is called, on any thread, when there may be something to take."""

    def __init__(self, hub: Hub, intake: Intake, session_id: str, place: Place, wake: Wake) -> None:
        self.session_id = session_id
        self.stale = True
        """Something durable may have happened since the last reading."""
        self.wake = wake
        self._hub = hub
        self._intake = intake
        self._place = place
        self._heard = (0, 0)
        self._spoken = False
        """Words were taken that are no row yet."""
        self._row: tuple[int, tuple[str, str]] = (0, ("", ""))
        """Text and reasoning of the last row of the model, and the number of the words that were being said then."""
        self._turns: dict[int, str] = {}
        hub.add(self)

    def close(self) -> None:
        """Follow no longer."""
        self._hub.remove(self)

    @property
    def number(self) -> int:
        """Number of the last event that was taken."""
        return self._place.position.event

    def take(self) -> list[Event]:
        """What happened since the last call; durable events first, then what the model is saying."""
        speech = self._hub.speech(self.session_id)
        words = speech.words if speech is not None else None
        # what the model says from here on may stand behind events that the reading below misses
        said = len(words.pieces) if words is not None else 0
        found: list[Event] = []
        while self.stale:
            self.stale = False
            stored, self._place = self._intake.events(self._place)
            found += [self._event(item) for item in stored]
            self.stale = self.stale or bool(stored)
        if speech is not None and words is not None and speech.words is words:
            rows = [event.data for event in found if event.data.get("role") == "assistant"]
            if rows:
                told = (str(rows[-1].get("content") or ""), str(rows[-1].get("reasoning") or ""))
                self._row = (words.call, told)
            # a row can be read before the turn says that its words are one
            if self._row[0] != words.call or not words.become(self._row[1]):
                self._row = (0, ("", ""))
                found += self._hear(speech, words.call, words.pieces[:said])
        return found

    def _hear(self, speech: Speech, number: int, pieces: list[tuple[str, str]]) -> list[Event]:
        call, heard = self._heard
        found: list[Event] = []
        if call != number:
            heard = 0
            if self._spoken:
                found.append(Event(None, "void", speech.turn_id, data={"attempt": speech.attempt}))
        self._heard = (number, len(pieces))
        self._spoken = len(pieces) > 0 and (len(pieces) > heard or (self._spoken and call == number))
        for kind, group in itertools.groupby(pieces[heard:], key=operator.itemgetter(0)):
            text = "".join(piece for _, piece in group)
            found.append(Event(None, kind, speech.turn_id, data={"text": text, "attempt": speech.attempt}))
        return found

    def _event(self, stored: StoredEvent) -> Event:
        row = stored.row
        if row is not None:
            data = {**row.fields(), "seq": row.seq, "id": row.id}
            if row.role == "assistant":
                self._spoken = False
            return Event(stored.number, stored.kind, self._turn_of(row.turn_key), stored.at, data)
        ref = stored.ref or ""
        turn_id = ref.partition(".")[0]
        data: dict[str, Any] = {}
        if stored.kind.startswith("tool."):
            data = {"call_id": ref}
        elif stored.kind.startswith("approval."):
            call_id, _, approval_id = ref.rpartition(".")
            data = {"call_id": "" if call_id == turn_id else call_id, "approval_id": approval_id}
        return Event(stored.number, stored.kind, turn_id, stored.at, data)

    def _turn_of(self, turn_key: int | None) -> str:
        if turn_key is None:
            return ""
        if turn_key not in self._turns:
            self._turns[turn_key] = self._intake.turn_by_key(turn_key).turn.id
        return self._turns[turn_key]
