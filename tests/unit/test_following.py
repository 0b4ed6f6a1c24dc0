"""A follower hears what is stored, in order, and what the model says: each piece once, behind what came before it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_agent.delivery.events import Event, Follower, Hub
from hermes_agent.store.deliveries import Limits
from hermes_agent.store.events import StoredEvent
from hermes_agent.store.intake import Intake, Place
from hermes_agent.store.session_db import SessionDB


class Reading(Intake):
    """A store that lets something happen just behind each reading."""

    def __init__(self, db: SessionDB) -> None:
        super().__init__(db, Limits(1, 1))
        self.then: Callable[[], Any] = lambda: None

    def events(self, place: Place, limit: int = 200) -> tuple[list[StoredEvent], Place]:
        found = super().events(place, limit)
        then, self.then = self.then, lambda: None
        then()
        return found


class Desk:
    def __init__(self, db: SessionDB) -> None:
        self.db = db
        self.hub = Hub()
        self.intake = Reading(db)
        db.create_session("s", "test")
        self.follower = Follower(self.hub, self.intake, "s", self.intake.place("s", 0), lambda: None)

    def store(self, text: str) -> None:
        self.db.append_message("s", "assistant", text, timestamp=time.time())
        self.hub.touch("s")

    def take(self) -> list[tuple[str, Any]]:
        return [(event.kind, _what(event)) for event in self.follower.take()]


def _what(event: Event) -> Any:
    return event.data.get("content") or event.data.get("text")


@pytest.fixture
def desk(tmp_path: Path):
    with SessionDB(tmp_path / "state.db") as db:
        yield Desk(db)


def test_pieces_are_heard_once_and_joined(desk: Desk):
    desk.hub.begin("s", "turn_1", 1)
    desk.hub.say("s", "reasoning", "hm")
    desk.hub.say("s", "delta", "a")
    desk.hub.say("s", "delta", "b")
    assert desk.take() == [("reasoning", "hm"), ("delta", "ab")]
    desk.hub.say("s", "delta", "c")
    assert desk.take() == [("delta", "c")]
    assert desk.take() == []


def test_what_became_a_row_is_not_void_and_what_did_not_is(desk: Desk):
    desk.hub.begin("s", "turn_1", 1)
    desk.hub.say("s", "delta", "a")
    assert desk.take() == [("delta", "a")]
    desk.store("a")
    desk.hub.settle("s")
    assert desk.take() == [("message", "a")]
    desk.hub.say("s", "delta", "b")
    assert desk.take() == [("delta", "b")]
    desk.hub.say("s", "void", "")
    desk.hub.say("s", "delta", "c")
    assert desk.take() == [("void", None), ("delta", "c")]


def test_the_next_attempt_and_the_next_turn_are_heard_from_their_first_word(desk: Desk):
    for attempt in (1, 2, 3):
        desk.hub.begin("s", "turn_1", attempt)
        desk.hub.say("s", "delta", "a")
        desk.hub.say("s", "delta", f"b{attempt}")
        assert desk.take()[-1] == ("delta", f"ab{attempt}")
        desk.hub.end("s")


def test_who_comes_late_hears_what_was_said_in_one_piece(desk: Desk):
    desk.hub.begin("s", "turn_1", 1)
    for piece in "abc":
        desk.hub.say("s", "delta", piece)
    late = Follower(desk.hub, desk.intake, "s", desk.intake.place("s", 0), lambda: None)
    assert [_what(event) for event in late.take()] == ["abc"]
    late.close()


def test_words_never_come_before_what_was_stored_before_them(desk: Desk):
    class Interrupted(Follower):
        def _hear(self, *words: Any) -> list[Event]:
            desk.store("row")
            desk.hub.say("s", "delta", "word")
            return super()._hear(*words)

    desk.hub.begin("s", "turn_1", 1)
    follower = Interrupted(desk.hub, desk.intake, "s", desk.intake.place("s", 0), lambda: None)
    assert follower.take() == []
    assert [_what(event) for event in follower.take()][:2] == ["row", "word"]
    follower.close()


def test_the_words_of_one_call_are_not_taken_for_those_of_the_next(desk: Desk):
    desk.hub.begin("s", "turn_1", 1)
    desk.hub.say("s", "delta", "a")

    def meanwhile() -> None:
        desk.hub.settle("s")
        desk.hub.say("s", "delta", "b")

    desk.intake.then = meanwhile
    assert desk.take() + desk.take() == [("delta", "b")]
