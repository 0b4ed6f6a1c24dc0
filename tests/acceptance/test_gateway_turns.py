"""Turns of a gateway that is killed, stopped or left by its clients: what was taken is answered, once."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from hermes_agent.store.approvals import ApprovalState
from hermes_agent.store.deliveries import Limits
from hermes_agent.store.intake import Intake
from hermes_agent.store.session_db import SessionDB
from hermes_agent.testing import replies
from tests.acceptance.hermes import wait_for
from tests.acceptance.world import Run, World, contents, roles

KEY = "7Jq2vT9xPz4LmW8sRk3N"
PATIENT = 30


class Gateway:
    """A gateway process over the world's home; `start` again after it ended."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.run: Run
        self._url = ""

    def start(self, **env: str) -> None:
        self.run = self.world.start("gateway", "run", env=env)
        self._url = self.run.line().split()[-1]
        assert self._url.startswith("http://"), self._url

    def kill(self) -> None:
        """SIGKILL, and nothing of it is left."""
        self.run.kill()
        self.run.end()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.run.signal(number)
        return self.run.end().code

    def connect(self) -> http.client.HTTPConnection:
        place = urlsplit(self._url)
        return http.client.HTTPConnection(str(place.hostname), place.port, timeout=PATIENT)

    @contextlib.contextmanager
    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Iterator[http.client.HTTPResponse]:
        """Send a request; the answer is not read yet."""
        sent = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **headers}
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            with connection.getresponse() as answer:
                yield answer

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        with self.send(method, path, body, **headers) as answer:
            return answer.status, json.loads(answer.read())

    def begin(self, text: str = "go", session: str = "s", **headers: str) -> str:
        """Begin a run; returns its id."""
        status, fields = self.ask("POST", "/v1/runs", {"input": text, "session_id": session}, **headers)
        assert status == 202, fields
        return fields["run_id"]

    def look(self, run_id: str) -> dict[str, Any]:
        return self.ask("GET", f"/v1/runs/{run_id}")[1]

    def events(self, run_id: str, after: int | None = None) -> Iterator[dict[str, Any]]:
        """The events of a run as they come."""
        query = "" if after is None else f"?after={after}"
        with self.send("GET", f"/v1/runs/{run_id}/events{query}") as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

    def until(self, run_id: str, name: str) -> dict[str, Any]:
        """The first event of that name."""
        with contextlib.closing(self.events(run_id)) as events:
            return next(event for event in events if event["event"] == name)

    def ended(self, run_id: str) -> dict[str, Any]:
        """The run when it has ended."""
        assert list(self.events(run_id))
        return self.look(run_id)

    def rows(self, session: str = "s") -> list[dict[str, Any]]:
        return self.ask("GET", f"/api/sessions/{session}/messages")[1]["data"]


@pytest.fixture
def gateway(world: World) -> Iterator[Gateway]:
    world.hermes.variables |= {"API_SERVER_PORT": "0", "API_SERVER_KEY": KEY}
    world.hermes.config("agent: {api_max_retries: 1}\n")
    made = Gateway(world)
    made.start()
    yield made
    with made.run:
        pass


@contextlib.contextmanager
def intake(world: World) -> Iterator[Intake]:
    """The store, from another process than the gateway's."""
    with SessionDB(world.hermes.home / "state.db") as db:
        yield Intake(db, Limits(1, 1))


class TestKilled:
    def test_a_turn_that_was_cut_off_is_gone_on_with_and_answered_once(self, gateway: Gateway, world: World):
        held = replies.hold("half")
        world.fake.extend([held, replies.text("whole")])
        run_id = gateway.begin()
        assert held.reached.wait(PATIENT)
        gateway.kill()
        held.release()
        gateway.start()
        run = gateway.ended(run_id)
        assert (run["status"], run["output"]) == ("completed", "whole")
        assert [row["content"] for row in gateway.rows()] == ["go", "whole"]
        names = [event["event"] for event in gateway.events(run_id)]
        assert (names[0], names[-1]) == ("run.started", "run.completed")
        assert "run.resumed" in names
        assert gateway.end() == 0
        world.check("s")

    def test_messages_that_wait_survive_and_are_answered_in_order(self, gateway: Gateway, world: World):
        held = replies.hold()
        world.fake.extend([held, *(replies.text(f"r{i}") for i in range(4))])
        runs = [gateway.begin("m0")]
        assert held.reached.wait(PATIENT)
        runs += [gateway.begin(f"m{i}", **{"Idempotency-Key": f"k{i}"}) for i in range(1, 4)]
        gateway.kill()
        held.release()
        gateway.start()
        assert [gateway.ended(run)["output"] for run in runs] == ["r0", "r1", "r2", "r3"]
        assert contents(gateway.rows(), "user") == ["m0", "m1", "m2", "m3"]
        assert gateway.begin("m2", **{"Idempotency-Key": "k2"}) == runs[2]
        assert len(world.fake.requests) == 5

    def test_the_same_key_is_one_run_before_and_after(self, gateway: Gateway, world: World):
        held = replies.hold()
        world.fake.extend([held, replies.text("once")])
        found: list[str] = []

        def send() -> None:
            found.append(gateway.begin(**{"Idempotency-Key": "k"}))

        threads = [threading.Thread(target=send) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENT)
        assert held.reached.wait(PATIENT)
        gateway.kill()
        held.release()
        gateway.start()
        send()
        assert len(found) == 6
        assert len(set(found)) == 1
        assert gateway.ended(found[0])["output"] == "once"
        assert contents(gateway.rows(), "user") == ["go"]
        body = {"input": "other", "session_id": "s"}
        assert gateway.ask("POST", "/v1/runs", body, **{"Idempotency-Key": "k"})[0] == 409

    def test_a_command_that_had_begun_is_told_as_unknown_and_not_run_again(self, gateway: Gateway, world: World):
        gateway.end()
        gateway.start(HERMES_YOLO_MODE="1")
        world.fake.extend([world.witness("w", after=60), replies.text("I looked")])
        run_id = gateway.begin()
        wait_for(lambda: world.times("w") == 1)
        gateway.kill()
        gateway.start(HERMES_YOLO_MODE="1")
        assert gateway.ended(run_id)["output"] == "I looked"
        events = {event["event"]: event for event in gateway.events(run_id)}
        assert events["tool.failed"]["unknown"] is True
        assert "tool.completed" not in events
        assert world.times("w") == 1
        assert "may have taken effect" in world.wire[-1]["content"]

    def test_a_stop_that_was_asked_for_counts_after_the_kill(self, gateway: Gateway, world: World):
        held = replies.hold()
        world.fake.extend([held])
        run_id = gateway.begin()
        assert held.reached.wait(PATIENT)
        with intake(world) as store:  # what a stop stores before it reaches the turn
            found = store.find(run_id.replace("run_", "turn_"))
            assert found is not None
            store.ask_to_stop(found.turn)
        assert gateway.look(run_id)["status"] == "stopping"
        gateway.kill()
        held.release()
        gateway.start()
        assert gateway.ended(run_id)["status"] == "cancelled"
        assert len(world.fake.requests) == 1

    def test_the_time_that_a_message_had_counts_on_after_the_kill(self, gateway: Gateway, world: World):
        held, again = replies.hold(), replies.hold()
        world.fake.extend([held, again])
        body = {"input": "go", "session_id": "s", "deadline_s": 3}
        run_id = gateway.ask("POST", "/v1/runs", body)[1]["run_id"]
        assert held.reached.wait(PATIENT)
        gateway.kill()
        held.release()
        gateway.start()
        run = gateway.ended(run_id)
        again.release()
        assert (run["status"], run["failure"]["reason"]) == ("failed", "deadline")


class TestQuestions:
    def begin(self, gateway: Gateway, world: World) -> tuple[str, dict[str, Any]]:
        """A run that waits for a person."""
        world.fake.extend([world.witness("w"), replies.text("done")])
        run_id = gateway.begin()
        return run_id, gateway.until(run_id, "approval.request")

    def check(self, gateway: Gateway, world: World, run_id: str) -> None:
        """The command ran once, and everything tells the same."""
        assert gateway.ended(run_id)["output"] == "done"
        assert world.times("w") == 1
        names = [event["event"] for event in gateway.events(run_id)]
        assert [name for name in names if name.startswith(("approval", "tool"))] == [
            "tool.started", "approval.request", "approval.responded", "tool.completed",
        ]  # fmt: skip
        assert roles(gateway.rows()) == "ucta"
        gateway.end()
        world.check("s")

    def test_a_question_stays_open_over_a_kill_and_is_decided_afterwards(self, gateway: Gateway, world: World):
        run_id, question = self.begin(gateway, world)
        gateway.kill()
        gateway.start()
        wait_for(lambda: gateway.look(run_id)["status"] == "waiting_for_approval")
        [again] = gateway.ask("GET", "/api/approvals")[1]["data"]
        assert (again["id"], again["command"]) == (question["request_id"], question["command"])
        assert world.times("w") == 0
        status, _ = gateway.ask("POST", f"/api/approvals/{again['id']}", {"choice": "once"})
        assert status == 200
        self.check(gateway, world, run_id)

    def test_a_decision_that_was_stored_before_the_kill_is_used_once(self, gateway: Gateway, world: World):
        run_id, question = self.begin(gateway, world)
        gateway.kill()
        with intake(world) as store:  # as if the kill had come just behind it
            counts, _ = store.decide(question["request_id"], ApprovalState.APPROVED, "once", "owner")
            assert counts
        gateway.start()
        self.check(gateway, world, run_id)

    def test_a_drain_leaves_a_question_open_for_the_next_start(self, gateway: Gateway, world: World):
        world.hermes.config("agent: {api_max_retries: 1}\ngateway: {drain_timeout: 0.2}\n")
        gateway.end()
        gateway.start()
        run_id, question = self.begin(gateway, world)
        assert gateway.end() == 0
        gateway.start()
        wait_for(lambda: gateway.look(run_id)["status"] == "waiting_for_approval")
        path = f"/v1/runs/{run_id}/approval"
        assert gateway.ask("POST", path, {"choice": "once", "request_id": question["request_id"]})[0] == 200
        self.check(gateway, world, run_id)


class TestStopped:
    def test_a_drain_lets_what_runs_end_and_takes_nothing_new(self, gateway: Gateway, world: World):
        held = replies.hold(then=replies.text("in time"))
        world.fake.extend([held, *[lambda body: replies.text(f"re {body['messages'][-1]['content']}")] * 500])
        gateway.ask("POST", "/api/sessions", {"id": "s"})
        found: list[Any] = []
        path = "/api/sessions/s/chat"
        client = threading.Thread(target=lambda: found.append(gateway.ask("POST", path, {"message": "go"})))
        client.start()
        assert held.reached.wait(PATIENT)
        waiting = gateway.begin("next")
        gateway.run.signal(signal.SIGTERM)
        wait_for(lambda: gateway.ask("POST", "/v1/runs", {"input": "new"})[0] == 503)
        held.release()
        client.join(PATIENT)
        assert [(status, body.get("message", body)) for status, body in found] == [
            (200, {"role": "assistant", "content": "in time"})
        ]
        assert gateway.run.end().code == 0
        gateway.start()
        assert gateway.ended(waiting)["output"] == "re next"
        assert [row["content"] for row in gateway.rows()] == ["go", "in time", "next", "re next"]

    def test_a_reply_that_a_client_has_is_stored_whatever_comes_next(self, gateway: Gateway, world: World):
        gateway.ask("POST", "/api/sessions", {"id": "s"})
        for count in range(4):
            world.fake.extend([replies.text(f"r{count}")])
            with gateway.send("POST", "/api/sessions/s/chat/stream", {"message": f"m{count}"}) as answer:
                assert any(b"event: assistant.completed" in line for line in answer)
                if count % 2:
                    gateway.kill()
                else:
                    gateway.run.signal(signal.SIGTERM)
            gateway.run.end()
            gateway.start()
        expected = [text for count in range(4) for text in (f"m{count}", f"r{count}")]
        assert [row["content"] for row in gateway.rows()] == expected


class TestLeft:
    @pytest.mark.parametrize("path", ["/api/sessions/s/chat", "/api/sessions/s/chat/stream"])
    def test_a_turn_ends_although_its_client_went_away(self, gateway: Gateway, world: World, path: str):
        held = replies.hold()
        world.fake.extend([replies.calls(replies.call("todo", {"todos": []})), held, replies.text("all well")])
        gateway.ask("POST", "/api/sessions", {"id": "s"})
        connection = gateway.connect()
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        connection.request("POST", path, json.dumps({"message": "go", "message_id": "m1"}), headers)
        assert held.reached.wait(PATIENT)
        connection.close()
        held.release()
        status, delivery = gateway.ask("GET", "/api/deliveries/m1?wait=20")
        assert (status, delivery["reply"]) == (200, "released")
        status, answer = gateway.ask("POST", "/api/sessions/s/chat", {"message": "status?"})
        assert (status, answer["message"]["content"]) == (200, "all well")
        assert roles(gateway.rows()) == "uctaua"
        assert gateway.end() == 0
        world.check("s")
