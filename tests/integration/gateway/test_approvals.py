"""Questions of running turns: shown wherever the turn is told, decided once, and what was allowed runs once."""

from __future__ import annotations

import asyncio
import time

import pytest

from hermes_agent.gateway.keys import Scope
from hermes_agent.testing import replies
from tests.integration.gateway.conftest import Site
from tests.integration.gateway.listening import Ear, listen, names


class Witness:
    """A command that leaves a line each time it runs."""

    def __init__(self, site: Site) -> None:
        self.file = site.home / "witness"
        self.command = f"echo line >> {self.file}"

    def ask(self, more: str = "") -> replies.Answer:
        return replies.calls(replies.call("terminal", {"command": self.command + more}))

    @property
    def times(self) -> int:
        return self.file.read_text().count("line\n") if self.file.exists() else 0


@pytest.fixture
def witness(site: Site) -> Witness:
    return Witness(site)


async def begin(site, **more):
    key = {"key": more.pop("key")} if "key" in more else {}
    answer = await site.ask("POST", "/v1/runs", {"input": "do it", **more}, **key)
    assert answer.status == 202, answer.text
    return answer.json["run_id"]


async def asked(site, run_id, count=1):
    """The questions of a run, once there are so many."""
    async with Ear(site, "GET", f"/v1/runs/{run_id}/events") as ear:
        return [(await ear.until("approval.request")).data for _ in range(count)]


async def decide(site, approval_id, choice="once", **more):
    key = {"key": more.pop("key")} if "key" in more else {}
    return await site.ask("POST", f"/api/approvals/{approval_id}", {"choice": choice, **more}, **key)


async def ended(site, run_id):
    heard = await listen(site, "GET", f"/v1/runs/{run_id}/events")
    return heard, (await site.ask("GET", f"/v1/runs/{run_id}")).json


class TestDeciding:
    async def test_a_question_is_shown_decided_and_its_command_runs(self, site, witness):
        site.fake.extend([witness.ask(), replies.text("done")])
        run_id = await begin(site)
        [question] = await asked(site, run_id)
        assert question["command"] == witness.command
        assert question["choices"] == ["once", "session", "deny"]
        assert question["why"]
        assert question["expires_at"] > time.time()
        run = (await site.ask("GET", f"/v1/runs/{run_id}")).json
        assert (run["status"], run["approval"]["request_id"]) == ("waiting_for_approval", question["request_id"])
        [row] = (await site.ask("GET", "/api/approvals")).json["data"]
        assert (row["id"], row["run_id"], row["state"]) == (question["request_id"], run_id, "pending")
        assert witness.times == 0

        answer = await decide(site, row["id"], request_hash=row["request_hash"])
        assert (answer.status, answer.json["state"], answer.json["decided_by"]) == (200, "approved", "owner")
        heard, run = await ended(site, run_id)
        assert (run["status"], witness.times) == ("completed", 1)
        assert [name for name in names(heard) if name.startswith(("approval", "tool"))] == [
            "tool.started", "approval.request", "approval.responded", "tool.completed",
        ]  # fmt: skip
        responded = next(frame.data for frame in heard if frame.name == "approval.responded")
        assert (responded["choice"], responded["request_id"], responded["resolved"]) == ("once", row["id"], 1)
        assert (await site.ask("GET", "/api/approvals")).json["data"] == []
        assert (await site.ask("GET", f"/api/approvals/{row['id']}")).json["state"] == "approved"

    async def test_a_no_is_told_to_the_model_and_nothing_runs(self, site, witness):
        site.fake.extend([witness.ask(), replies.text("then not")])
        run_id = await begin(site)
        [question] = await asked(site, run_id)
        assert (await decide(site, question["request_id"], "deny")).json["state"] == "denied"
        _, run = await ended(site, run_id)
        assert (run["output"], witness.times) == ("then not", 0)
        assert "said no" in site.fake.wire[-1]["content"]

    async def test_of_many_decisions_at_once_one_counts(self, site, witness):
        site.fake.extend([witness.ask(), replies.text("done")])
        run_id = await begin(site)
        [question] = await asked(site, run_id)
        found = await asyncio.gather(*(decide(site, question["request_id"]) for _ in range(8)))
        assert sorted(answer.status for answer in found) == [200] + [409] * 7
        late = next(answer.json for answer in found if answer.status == 409)
        assert late["error"]["code"] == "approval_not_pending"
        assert (late["approval"]["decided_by"], late["approval"]["choice"]) == ("owner", "once")
        await ended(site, run_id)
        assert witness.times == 1

    async def test_allowed_for_the_session_means_exactly_this_command_in_this_session(self, site, witness):
        other = " # and more"
        site.fake.extend([witness.ask(), witness.ask(), witness.ask(other), replies.text("done")])
        run_id = await begin(site)
        async with Ear(site, "GET", f"/v1/runs/{run_id}/events") as ear:
            await decide(site, (await ear.until("approval.request")).data["request_id"], "session")
            second = (await ear.until("approval.request")).data
            assert second["command"].endswith(other)
            assert witness.times == 2
            await decide(site, second["request_id"], "deny")
            await ear.rest()
        assert witness.times == 2

    async def test_a_decision_about_something_else_does_not_count(self, site, witness):
        site.fake.extend([witness.ask(), replies.text("done")])
        run_id = await begin(site)
        [question] = await asked(site, run_id)
        wrong = await decide(site, question["request_id"], request_hash="0" * 64)
        assert (wrong.status, wrong.json["error"]["code"]) == (409, "approval_request_mismatch")
        for choice in ("", "yes", "ONCE!"):
            bad = await decide(site, question["request_id"], choice)
            assert (bad.status, bad.json["error"]["code"]) == (400, "invalid_approval_choice")
        assert (await site.ask("GET", f"/api/approvals/{question['request_id']}")).json["state"] == "pending"
        await decide(site, question["request_id"], "deny")
        await ended(site, run_id)
        assert witness.times == 0

    async def test_what_nobody_decides_in_time_is_a_no(self, hermes_home, fake):
        site = Site(hermes_home, fake)
        await site.open("approvals: {timeout: 0.2}")
        witness = Witness(site)
        fake.extend([witness.ask(), replies.text("done")])
        run_id = await begin(site)
        heard, run = await ended(site, run_id)
        assert (run["status"], witness.times) == ("completed", 0)
        responded = next(frame.data for frame in heard if frame.name == "approval.responded")
        assert (responded["choice"], responded["state"]) == ("deny", "expired")
        late = await decide(site, responded["request_id"])
        assert (late.status, late.json["error"]["code"]) == (409, "approval_expired")
        await site.close()

    async def test_the_command_is_shown_as_it_is_but_for_secrets(self, site, witness):
        secret = "sk-CANARY00112233445566"
        site.fake.extend([witness.ask(f" # {secret} \u200b"), replies.text("done")])
        run_id = await begin(site)
        [question] = await asked(site, run_id)
        assert secret not in str(question)
        assert question["command"].endswith("*** <U+200B>")
        [row] = (await site.ask("GET", "/api/approvals")).json["data"]
        assert row["command"] == question["command"]
        await decide(site, question["request_id"], "deny")
        await ended(site, run_id)


class TestByTheRun:
    async def test_the_run_is_told_the_decision(self, site, witness):
        site.fake.extend([witness.ask(), replies.text("done")])
        run_id = await begin(site)
        [question] = await asked(site, run_id)
        path = f"/v1/runs/{run_id}/approval"
        lost = await site.ask("POST", path, {"choice": "once", "request_id": "appr_0"})
        assert (lost.status, lost.json["error"]["code"]) == (404, "approval_not_found")
        answer = await site.ask("POST", path, {"choice": "approve"})
        assert (answer.status, answer.json) == (
            200,
            {
                "object": "hermes.run.approval_response", "run_id": run_id, "choice": "once", "resolved": 1,
                "request_id": question["request_id"],
            },
        )  # fmt: skip
        await ended(site, run_id)
        late = await site.ask("POST", path, {"choice": "once"})
        assert (late.status, late.json["error"]["code"]) == (409, "approval_not_active")
        named = await site.ask("POST", path, {"choice": "once", "request_id": question["request_id"]})
        assert (named.status, named.json["error"]["code"]) == (409, "approval_not_pending")
        assert witness.times == 1


class TestStopping:
    async def test_a_turn_that_waits_for_a_person_can_be_stopped(self, site, witness):
        site.fake.extend([witness.ask(), replies.text("never")])
        run_id = await begin(site)
        [question] = await asked(site, run_id)
        began = time.monotonic()
        await site.ask("POST", f"/v1/runs/{run_id}/stop")
        _, run = await ended(site, run_id)
        assert time.monotonic() - began < 2
        assert run["status"] == "cancelled"
        late = await decide(site, question["request_id"])
        assert (late.status, late.json["error"]["code"]) == (409, "approval_not_pending")
        assert witness.times == 0
        assert len(site.fake.requests) == 1

    async def test_nobody_waits_for_a_person_longer_than_the_work_may_take(self, site, witness):
        site.fake.extend([witness.ask(), replies.text("never")])
        run_id = await begin(site, deadline_s=0.3)
        _, run = await ended(site, run_id)
        assert (run["status"], run["failure"]["reason"], witness.times) == ("failed", "deadline", 0)


class TestWhoMayDecide:
    async def test_it_needs_the_scope_and_the_work_must_be_ones_own(self, site, witness):
        site.fake.extend([witness.ask(), replies.text("done")])
        ring = site.gateway.own_keys
        one, two = ring.issue("one", [Scope.RUN, Scope.APPROVE]), ring.issue("two", [Scope.RUN, Scope.APPROVE])
        worker = ring.issue("worker", [Scope.RUN])
        run_id = await begin(site, key=one)
        [question] = await asked(site, run_id)
        path = f"/api/approvals/{question['request_id']}"
        for method, place in (("GET", path), ("POST", path), ("POST", f"/v1/runs/{run_id}/approval")):
            body = {"choice": "once"} if method == "POST" else None
            assert (await site.ask(method, place, body, key=worker)).status == 403, place
            assert (await site.ask(method, place, body, key=two)).status == 404, place
        assert (await site.ask("GET", "/api/approvals", key=two)).json["data"] == []
        assert len((await site.ask("GET", "/api/approvals", key=one)).json["data"]) == 1
        answer = await decide(site, question["request_id"], key=one)
        assert (answer.status, answer.json["decided_by"]) == (200, "one")
        await ended(site, run_id)
        assert witness.times == 1
