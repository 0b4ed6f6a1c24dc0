"""The delivery service over a real store with real agents: taken once, answered once, in order, whatever happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_agent import errors, settings
from hermes_agent.errors import FailureReason
from hermes_agent.gateway.profile import Profile
from hermes_agent.store.deliveries import Incoming
from hermes_agent.store.opening import open_store
from hermes_agent.store.turns import TurnState
from hermes_agent.testing import replies
from hermes_agent.testing.fake_openai import FakeOpenAI
from tests import faults

PATIENT = 30.0


class Office:
    """A home whose model is a strict fake server, and its delivery service."""

    def __init__(self, home: Path, fake: FakeOpenAI, more: str = "") -> None:
        self.home = home
        self.fake = fake
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.yaml").write_text(
            f"model: {{default: fake, provider: custom, base_url: '{fake.base_url}', api_key: sk-test}}\n"
            f"agent: {{api_max_retries: 1}}\n{more}",
            encoding="utf-8",
        )
        chosen = settings.load(home)
        self.profile = Profile("default", chosen, open_store(chosen))
        self.service = self.profile.service
        self.db = self.profile.db

    def send(self, text: str, session: str = "s", **more: Any) -> str:
        message = Incoming(more.pop("sender", "me"), text, **more)
        return self.service.submit(session, message, {"source": "test"}).turn_id

    def answer(self, turn_id: str) -> Any:
        receipt = self.service.wait(turn_id, PATIENT)
        assert receipt is not None
        assert receipt.is_final, receipt
        return receipt

    def rows(self, session: str = "s") -> list[tuple[str, Any]]:
        return [(row["role"], row["content"]) for row in self.db.get_messages(session)]

    def close(self) -> None:
        assert self.service.drain(PATIENT)
        self.profile.close()


@pytest.fixture
def fake() -> Iterator[FakeOpenAI]:
    with FakeOpenAI() as server:
        yield server
        assert server.violations == []


@pytest.fixture
def office(hermes_home: Path, fake: FakeOpenAI) -> Iterator[Office]:
    made = Office(hermes_home, fake)
    yield made
    made.close()


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(6000):
        if true():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it did not come to that")


class TestTaking:
    def test_a_message_is_answered_once(self, office):
        office.fake.extend([replies.text("hello")])
        receipt = office.answer(office.send("hi"))
        assert (receipt.state, receipt.reply, receipt.attempts) == (TurnState.DONE, "hello", 1)
        assert receipt.usage["input_tokens"] == 100
        assert receipt.usage["api_calls"] == 1
        assert office.rows() == [("user", "hi"), ("assistant", "hello")]

    def test_a_repeat_under_its_id_is_the_same_turn_however_many_come_at_once(self, office):
        office.fake.extend([replies.text("once")])
        found: list[str] = []
        threads = [threading.Thread(target=lambda: found.append(office.send("hi", message_id="m1"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENT)
        assert len(set(found)) == 1
        assert office.answer(found[0]).reply == "once"
        assert office.send("hi", message_id="m1") == found[0]
        assert office.rows() == [("user", "hi"), ("assistant", "once")]

    def test_another_message_under_the_same_id_is_refused(self, office):
        office.fake.extend([replies.text("a"), replies.text("b")])
        office.answer(office.send("hi", message_id="m1"))
        with pytest.raises(errors.MessageConflict):
            office.send("other", message_id="m1")
        office.answer(office.send("other", message_id="m1", sender="you"))
        assert [text for role, text in office.rows() if role == "user"] == ["hi", "other"]

    def test_messages_of_a_session_run_in_the_order_in_which_they_were_taken(self, office):
        held = replies.hold()
        office.fake.extend([held, *[replies.text(f"r{i}") for i in range(1, 6)]])
        turns = [office.send("m0")]
        assert held.reached.wait(PATIENT)
        turns += [office.send(f"m{i}") for i in range(1, 6)]
        assert {office.service.get(turn).state for turn in turns[1:]} == {TurnState.ACCEPTED}
        held.release()
        assert [office.answer(turn).reply for turn in turns] == ["released", "r1", "r2", "r3", "r4", "r5"]
        assert [text for role, text in office.rows() if role == "user"] == [f"m{i}" for i in range(6)]

    def test_sessions_run_beside_each_other(self, office):
        first, second = replies.hold(), replies.hold()
        office.fake.extend([first, second])
        turns = [office.send("hi", "a"), office.send("hi", "b")]
        assert first.reached.wait(PATIENT)
        assert second.reached.wait(PATIENT)
        first.release()
        second.release()
        assert {office.answer(turn).state for turn in turns} == {TurnState.DONE}

    def test_a_full_queue_refuses_and_stores_nothing(self, hermes_home, fake):
        office = Office(hermes_home, fake, "gateway: {session_queue: 2}\n")
        held = replies.hold()
        fake.extend([held, replies.text("1"), replies.text("2")])
        office.send("m0")
        assert held.reached.wait(PATIENT)
        waiting = [office.send("m1"), office.send("m2")]
        with pytest.raises(errors.QueueFull):
            office.send("m3", message_id="k")
        assert office.service.find_message("me", "k") is None
        held.release()
        assert [office.answer(turn).reply for turn in waiting] == ["1", "2"]
        office.close()

    def test_more_sessions_than_places_wait_without_a_thread(self, hermes_home, fake):
        office = Office(hermes_home, fake, "gateway: {max_concurrent_runs: 2}\n")
        held = [replies.hold(), replies.hold()]
        fake.extend([*held, *[replies.text("ok") for _ in range(20)]])
        turns = [office.send("hi", f"s{i}") for i in range(2)]
        assert all(item.reached.wait(PATIENT) for item in held)
        before = threading.active_count()
        turns += [office.send("hi", f"s{i}") for i in range(2, 22)]
        assert threading.active_count() == before
        assert office.service.load["running"] == 2
        for item in held:
            item.release()
        assert {office.answer(turn).state for turn in turns} == {TurnState.DONE}
        office.close()

    def test_a_row_without_a_turn_is_adopted_and_not_stored_again(self, office):
        office.db.create_session("s", "test")
        office.db.append_message("s", "user", content="disk status?")
        office.fake.extend([replies.text("fine"), replies.text("still")])
        assert office.answer(office.send("disk status?")).reply == "fine"
        assert office.rows() == [("user", "disk status?"), ("assistant", "fine")]
        office.answer(office.send("disk status?"))
        assert [role for role, _ in office.rows()] == ["user", "assistant"] * 2


class TestFailures:
    def test_a_failure_that_passes_is_tried_once_more_on_the_same_row(self, office):
        office.fake.extend([replies.error(500), replies.text("recovered")])
        receipt = office.answer(office.send("hi"))
        assert (receipt.state, receipt.reply, receipt.attempts) == (TurnState.DONE, "recovered", 2)
        assert office.rows() == [("user", "hi"), ("assistant", "recovered")]

    def test_it_is_tried_no_third_time(self, office):
        office.fake.extend([replies.error(500, times=2)])
        receipt = office.answer(office.send("hi"))
        assert (receipt.state, receipt.reason, receipt.attempts) == (TurnState.FAILED, FailureReason.SERVER_ERROR, 2)
        assert receipt.is_retryable
        assert "server" in receipt.reply
        assert office.rows() == [("user", "hi")]

    def test_a_wall_is_not_tried_again(self, office):
        office.fake.extend([replies.error(401, "bad key")])
        receipt = office.answer(office.send("hi"))
        assert (receipt.state, receipt.reason, receipt.attempts) == (TurnState.FAILED, FailureReason.AUTH, 1)
        assert len(office.fake.requests) == 1

    def test_the_second_attempt_goes_on_behind_what_the_first_one_did(self, office):
        """A command that ran is not run again; its row is there, and the model sees it."""
        witness = office.home / "witness"
        office.fake.extend(
            [
                replies.calls(replies.call("write_file", {"path": str(witness), "content": "once"})),
                replies.error(503),
                replies.text("done"),
            ]
        )
        receipt = office.answer(office.send("write it"))
        assert (receipt.state, receipt.attempts) == (TurnState.DONE, 2)
        assert [role for role, _ in office.rows()] == ["user", "assistant", "tool", "assistant"]
        assert office.fake.requests[1].body["messages"] == office.fake.requests[2].body["messages"]
        assert receipt.usage["api_calls"] == 2

    def test_a_message_whose_time_is_over_while_it_waits_expires(self, office):
        held = replies.hold()
        office.fake.extend([held])
        first = office.send("m0")
        assert held.reached.wait(PATIENT)
        late = office.send("late", deadline=time.time() + 0.05)
        receipt = office.answer(late)
        assert (receipt.state, receipt.reason) == (TurnState.EXPIRED, FailureReason.DEADLINE)
        held.release()
        office.answer(first)
        assert office.rows() == [("user", "m0"), ("assistant", "released")]

    def test_a_running_turn_ends_at_its_deadline(self, office):
        held = replies.hold()
        office.fake.extend([held])
        receipt = office.answer(office.send("hi", deadline=time.time() + 0.3))
        assert (receipt.state, receipt.reason) == (TurnState.EXPIRED, FailureReason.DEADLINE)
        held.release()

    def test_a_turn_that_no_agent_can_be_made_for_fails_with_the_reason(self, office):
        def no_model(_: Any) -> Any:
            raise errors.SettingsError("no model is configured", reason=FailureReason.NOT_CONFIGURED)

        office.service._make_agent = no_model
        receipt = office.answer(office.send("hi"))
        assert (receipt.state, receipt.reason) == (TurnState.FAILED, FailureReason.NOT_CONFIGURED)
        assert "no model is configured" in receipt.reply

    def test_a_fault_of_the_program_ends_the_turn_and_not_the_service(self, office):
        whole = office.service._make_agent

        def broken(_: Any) -> Any:
            raise ZeroDivisionError

        office.service._make_agent = broken
        receipt = office.answer(office.send("hi"))
        assert (receipt.state, receipt.reason) == (TurnState.FAILED, FailureReason.UNKNOWN)
        office.service._make_agent = whole
        office.fake.extend([replies.text("well again")])
        assert office.answer(office.send("and now?")).reply == "well again"


class TestStopping:
    def test_a_waiting_message_is_withdrawn(self, office):
        held = replies.hold()
        office.fake.extend([held])
        first = office.send("m0")
        assert held.reached.wait(PATIENT)
        second = office.send("m1")
        assert office.service.cancel(second).state is TurnState.CANCELLED
        held.release()
        office.answer(first)
        assert office.rows() == [("user", "m0"), ("assistant", "released")]

    def test_a_running_turn_stops_at_a_safe_point(self, office):
        held = replies.hold()
        office.fake.extend([held, replies.text("next")])
        turn = office.send("m0")
        assert held.reached.wait(PATIENT)
        office.service.cancel(turn)
        assert office.answer(turn).state is TurnState.CANCELLED
        held.release()
        assert office.answer(office.send("m1")).reply == "next"

    def test_a_draining_service_refuses_and_still_tells(self, office):
        held = replies.hold()
        office.fake.extend([held])
        turn = office.send("hi", message_id="k")
        assert held.reached.wait(PATIENT)
        drained: list[bool] = []
        drain = threading.Thread(target=lambda: drained.append(office.service.drain(PATIENT)))
        drain.start()
        wait_until(lambda: office.service.is_draining)
        with pytest.raises(errors.Draining):
            office.send("other")
        assert office.send("hi", message_id="k") == turn
        held.release()
        drain.join(PATIENT)
        assert drained == [True]
        assert office.answer(turn).reply == "released"


class TestRestart:
    CODE = """
from pathlib import Path
from hermes_agent import settings
from hermes_agent.gateway.profile import Profile
from hermes_agent.store.opening import open_store
from hermes_agent.store.deliveries import Incoming
chosen = settings.load(Path(sys.argv[1]))
service = Profile("default", chosen, open_store(chosen)).service
for text in sys.argv[2:]:
    say(service.submit("s", Incoming("me", text, message_id=text), {"source": "test"}).turn_id)
threading.Event().wait(60)
"""

    def test_what_a_killed_process_took_is_answered_by_the_next_one(self, hermes_home, fake):
        """One message in the middle of its model call, two that wait."""
        held = replies.hold()
        fake.extend([held, replies.text("r0"), replies.text("r1"), replies.text("r2")])
        Office(hermes_home, fake).close()
        with faults.Child(self.CODE, hermes_home, "m0", "m1", "m2") as child:
            turns = [child.hear() for _ in range(3)]
            assert held.reached.wait(PATIENT)
            child.kill()
        held.release()
        office = Office(hermes_home, fake)
        assert office.service.recover() == 3
        assert [office.answer(turn).reply for turn in turns] == ["r0", "r1", "r2"]
        assert office.send("m1", message_id="m1") == turns[1]
        pair = (("user", "m"), ("assistant", "r"))
        assert office.rows() == [(role, f"{text}{i}") for i in range(3) for role, text in pair]
        office.close()

    def test_a_turn_that_is_parked_again_and_again_is_no_poison(self, hermes_home, fake):
        """A stop in good order is no crash, however often it happens to one turn."""
        turn = ""
        for number in range(5):
            held = replies.hold(then=replies.calls(replies.call("todo", {"todos": []})))
            fake.extend([held])
            office = Office(hermes_home, fake)
            assert office.service.recover() == (1 if number else 0)
            turn = turn or office.send("a long piece of work")
            assert held.reached.wait(PATIENT)
            drained: list[bool] = []
            drain = threading.Thread(
                target=lambda office=office, drained=drained: drained.append(office.service.drain(0))
            )
            drain.start()
            wait_until(lambda office=office: all(live.agent.control.parked for live in office.service._live.values()))
            held.release()
            drain.join(PATIENT)
            assert drained == [True]
            office.profile.close()
        fake.extend([replies.text("done at last")])
        office = Office(hermes_home, fake)
        assert office.service.recover() == 1
        receipt = office.answer(turn)
        assert (receipt.state, receipt.reply, receipt.attempts) == (TurnState.DONE, "done at last", 1)
        office.close()
