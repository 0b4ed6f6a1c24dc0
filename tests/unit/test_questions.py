"""Questions to a person in the store: asked once, used once, and only by whoever holds the session."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hermes_agent.errors import StaleLease, StoreError
from hermes_agent.store.approvals import ApprovalState
from hermes_agent.store.deliveries import Incoming, Limits
from hermes_agent.store.intake import Intake, Taken
from hermes_agent.store.session_db import SessionDB
from hermes_agent.store.turns import TurnState
from hermes_agent.store.writer import Batch, SessionWriter, TurnEnd

SHOWN = {"tool": "terminal", "command": "make", "why": "it writes"}


@pytest.fixture
def db(tmp_path: Path):
    with SessionDB(tmp_path / "state.db") as opened:
        yield opened


@pytest.fixture
def intake(db: SessionDB) -> Intake:
    return Intake(db, Limits(10, 10))


@pytest.fixture
def taken(intake: Intake) -> Taken:
    user = {"role": "user", "content": "hi", "timestamp": time.time()}
    return intake.take("s", Incoming("me", "hi"), user, at_once=True, create={"source": "test"})


@pytest.fixture
def writer(taken: Taken) -> SessionWriter:
    assert taken.claim is not None
    return taken.claim


def ask(writer: SessionWriter, call: str = "1.0", seconds: float = 60.0, **more: str):
    return writer.ask(f"{writer.turn_id}.{call}", "approval", {**SHOWN, **more}, seconds)


def state(intake: Intake, writer: SessionWriter) -> TurnState:
    found = intake.find(writer.turn_id)
    assert found is not None
    return found.turn.state


def kinds(intake: Intake) -> list[tuple[str, str | None]]:
    events, _ = intake.events(intake.place("s", 0))
    return [(event.kind, event.ref) for event in events if event.kind.startswith("approval.")]


def test_a_question_is_an_event_and_its_turn_waits(intake, writer):
    record = ask(writer)
    assert state(intake, writer) is TurnState.WAITING_APPROVAL
    assert kinds(intake) == [("approval.requested", f"{writer.turn_id}.1.0.{record.id}")]


def test_asked_again_in_the_same_words_it_is_the_same_question(intake, writer):
    first = ask(writer)
    assert ask(writer).id == first.id
    assert ask(writer, command="make all").id != first.id
    assert len(kinds(intake)) == 2


def test_a_decision_is_used_once(intake, writer):
    record = ask(writer)
    with pytest.raises(StoreError, match="is open"):
        writer.settle_question(record)
    assert intake.decide(record.id, ApprovalState.APPROVED, "once", "me")[0]
    assert not intake.decide(record.id, ApprovalState.DENIED, "deny", "you")[0]
    assert state(intake, writer) is TurnState.WAITING_APPROVAL
    used = writer.settle_question(record)
    assert (used.state, used.answer, used.decided_by) == (ApprovalState.APPROVED, "once", "me")
    assert state(intake, writer) is TurnState.RUNNING
    with pytest.raises(StoreError, match="used up"):
        writer.settle_question(record)
    assert [kind for kind, _ in kinds(intake)] == ["approval.requested", "approval.decided"]


def test_a_turn_with_two_questions_waits_for_both(intake, writer):
    first, second = ask(writer), ask(writer, "1.1")
    for record, then in ((first, TurnState.WAITING_APPROVAL), (second, TurnState.RUNNING)):
        intake.decide(record.id, ApprovalState.DENIED, "deny", "me")
        writer.settle_question(record)
        assert state(intake, writer) is then


def test_what_nobody_decided_is_closed_by_time_or_with_its_turn(intake, writer):
    late = ask(writer, seconds=-1.0)
    assert writer.settle_question(late).state is ApprovalState.EXPIRED
    assert not intake.decide(late.id, ApprovalState.APPROVED, "once", "me")[0]
    left = ask(writer, "1.1")
    assert writer.settle_question(left, given_up=True).state is ApprovalState.CANCELLED
    open_ = ask(writer, "1.2")
    writer.commit(Batch(end=TurnEnd(TurnState.CANCELLED, "interrupted")))
    found = intake.approval(open_.id)
    assert found is not None
    assert found.state is ApprovalState.CANCELLED


def test_who_lost_the_session_can_neither_ask_nor_use(db, intake, writer):
    record = ask(writer)
    intake.decide(record.id, ApprovalState.APPROVED, "once", "me")
    writer.release()
    with pytest.raises(StoreError):
        writer.settle_question(record)
    other = db.claim("s")
    writer.released = False  # as one that does not know
    for use in (lambda: writer.settle_question(record), lambda: ask(writer, "1.1")):
        with pytest.raises(StaleLease):
            use()
    [turn] = other.open_turns()
    other.take_over(turn)
    again = ask(other)
    assert (again.id, again.state) == (record.id, ApprovalState.APPROVED)
    assert other.settle_question(again).answer == "once"
    other.release()
