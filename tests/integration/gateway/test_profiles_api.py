"""Profiles over HTTP: each has its own keys, sessions and settings, and one gateway serves them side by side."""

from __future__ import annotations

import shutil

import pytest

from hermes_agent import settings
from hermes_agent.gateway import app
from hermes_agent.gateway.keys import EVERY_SCOPE, Scope
from hermes_agent.testing import replies
from hermes_agent.testing.fake_openai import FakeOpenAI
from tests.integration.gateway import neighbours
from tests.integration.gateway.conftest import KEY, Site, reached
from tests.integration.gateway.neighbours import TEAM_KEY

UNKNOWN = "Unknown or unconfigured profile"


@pytest.fixture
def other_model():
    with FakeOpenAI() as server:
        yield server
        assert server.violations == []


@pytest.fixture
def team(site, other_model, monkeypatch):
    """The home of the profile `team`, with a model and a key of its own; changes in it count at once."""
    monkeypatch.setattr(app, "_LOOK_EVERY", 0.0)
    return neighbours.make(site.home, other_model.base_url)


def refused(answer):
    """How a request was refused, in short."""
    return answer.status, answer.json["error"]["code"]


async def talk(site, profile, text, *, key=KEY, session="s", **more):
    base = f"/p/{profile}" if profile else ""
    await site.ask("POST", f"{base}/api/sessions", {"id": session}, key=key)
    return await site.ask("POST", f"{base}/api/sessions/{session}/chat", {"message": text}, key=key, **more)


class TestApart:
    async def test_the_same_session_id_is_two_conversations(self, site, team, other_model):
        site.fake.extend([replies.text("at home"), replies.text("at home again")])
        other_model.extend([replies.text("from the team")])
        assert (await talk(site, "", "private")).json["message"]["content"] == "at home"
        assert (await talk(site, "team", "business", key=TEAM_KEY)).json["message"]["content"] == "from the team"
        assert (await talk(site, "default", "more")).json["message"]["content"] == "at home again"
        assert "private" not in str(other_model.requests)
        assert "business" not in str([request.body for request in site.fake.requests])
        (request,) = other_model.requests
        assert request.headers["authorization"] == "Bearer sk-team-model"
        assert (team / "state.db").exists()
        assert b"business" not in b"".join(file.read_bytes() for file in site.home.glob("state.db*"))

    async def test_nothing_of_one_is_found_in_the_other(self, site, team, other_model):
        site.fake.extend([replies.text("alpha")])
        other_model.extend([replies.text("beta")])
        mine = (await talk(site, "", "first", session="mine")).json
        theirs = (await talk(site, "team", "second", session="theirs")).json
        for base, session, delivery, words in (
            ("", "theirs", theirs["delivery_id"], "beta"),
            ("/p/team", "mine", mine["delivery_id"], "alpha"),
        ):
            run = delivery.replace("turn", "run")
            for path in (
                f"/api/sessions/{session}",
                f"/api/sessions/{session}/messages",
                f"/api/deliveries/{delivery}",
                f"/v1/runs/{run}",
            ):
                assert (await site.ask("GET", base + path)).status == 404, path
            assert (await site.ask("DELETE", f"{base}/api/sessions/{session}")).status == 404
            assert (await site.ask("GET", f"{base}/api/sessions/search?q={words}")).json["data"] == []
        listed = {base: (await site.ask("GET", f"{base}/api/sessions")).json["data"] for base in ("", "/p/team")}
        assert {base: [row["id"] for row in rows] for base, rows in listed.items()} == {
            "": ["mine"],
            "/p/team": ["theirs"],
        }

    async def test_one_idempotency_key_is_two_messages(self, site, team, other_model):
        site.fake.extend([replies.text("at home")])
        other_model.extend([replies.text("from the team")])
        named = {"Idempotency-Key": "k1"}
        assert (await talk(site, "", "hi", headers=named)).json["message"]["content"] == "at home"
        assert (await talk(site, "team", "hi", headers=named)).json["message"]["content"] == "from the team"
        again = await talk(site, "team", "hi", headers=named)
        assert (again.json["message"]["content"], again.headers["Idempotency-Replayed"]) == ("from the team", "true")

    async def test_keys_of_one_name_in_two_profiles_are_two_senders(self, site, team, other_model):
        ours = site.gateway.own_keys.issue("rex", [Scope.RUN], ["team"])
        theirs = neighbours.ring(team).issue("rex", [Scope.RUN])
        other_model.extend([replies.text("one"), replies.text("two")])
        named = {"Idempotency-Key": "k1"}
        first = await talk(site, "team", "hi", key=ours, headers=named)
        second = await talk(site, "team", "hi", key=theirs, headers=named)
        assert [first.json["message"]["content"], second.json["message"]["content"]] == ["one", "two"]
        seen = await site.ask("GET", f"/p/team/api/deliveries/{first.json['delivery_id']}", key=theirs)
        assert refused(seen) == (404, "delivery_not_found")

    async def test_a_model_is_called_as_its_profile(self, site, team):
        assert (await site.ask("GET", "/p/team/v1/models")).json["data"][0]["id"] == "team"
        assert (await site.ask("GET", "/v1/models")).json["data"][0]["id"] == "hermes-agent"


class TestKeys:
    async def test_a_profiles_own_key_opens_it_and_nothing_else(self, site, team):
        assert (await site.ask("GET", "/p/team/api/sessions", key=TEAM_KEY)).status == 200
        for path in ("/api/sessions", "/p/default/api/sessions", "/p/nobody/api/sessions"):
            assert refused(await site.ask("GET", path, key=TEAM_KEY)) == (401, "gateway_auth_failed"), path

    async def test_keys_from_its_file_have_their_scopes(self, site, team):
        key = neighbours.ring(team).issue("viewer", [Scope.READ])
        assert (await site.ask("GET", "/p/team/api/sessions", key=key)).status == 200
        assert refused(await site.ask("POST", "/p/team/api/sessions", {}, key=key)) == (403, "insufficient_scope")

    async def test_the_owner_may_use_all_and_others_what_their_key_is_for(self, site, team):
        ring = site.gateway.own_keys
        own = ring.issue("own", EVERY_SCOPE, [])
        one = ring.issue("one", EVERY_SCOPE, ["team"])
        every = ring.issue("every", EVERY_SCOPE)
        for key, here, there in ((KEY, 200, 200), (own, 200, 404), (one, 403, 200), (every, 200, 200)):
            assert (await site.ask("GET", "/api/sessions", key=key)).status == here
            assert (await site.ask("GET", "/p/team/api/sessions", key=key)).status == there
        assert refused(await site.ask("GET", "/api/sessions", key=one)) == (403, "profile_not_allowed")
        assert refused(await site.ask("GET", "/p/default/api/sessions", key=one)) == (404, "profile_not_found")

    async def test_an_unknown_profile_looks_like_one_that_the_key_is_not_for(self, site, team):
        own = site.gateway.own_keys.issue("own", EVERY_SCOPE, [])
        answers = [
            await site.ask("GET", f"/p/{name}/api/sessions", key=key)
            for name, key in (("nobody", KEY), ("team", own), ("nobody", own), ("A", KEY), ("a%2Fb", KEY))
        ]
        assert {(a.status, a.text) for a in answers[:3]} == {(404, answers[0].text)}
        assert answers[0].json["error"]["message"] == UNKNOWN
        assert {answer.status for answer in answers[3:]} == {404}

    async def test_without_a_key_nobody_learns_which_profiles_there_are(self, site, team):
        for key in (None, "wrong-key-17"):
            seen = [await site.ask("GET", f"/p/{name}/v1/models", key=key) for name in ("team", "nobody", "default")]
            assert {(answer.status, answer.text) for answer in seen} == {(401, seen[0].text)}
        seen = [await site.ask("GET", f"{base}/health", key=None) for base in ("", "/p/team", "/p/nobody")]
        assert {(answer.status, answer.text) for answer in seen} == {(200, seen[0].text)}
        assert not (team / "state.db").exists()

    async def test_what_is_nowhere_is_404_for_whoever_may_be_there(self, site, team):
        assert refused(await site.ask("GET", "/p/team/nowhere", key=TEAM_KEY)) == (404, "not_found")
        assert refused(await site.ask("PUT", "/p/team/api/sessions", {}, key=TEAM_KEY)) == (405, "method_not_allowed")
        assert refused(await site.ask("GET", "/nowhere", key=TEAM_KEY)) == (401, "gateway_auth_failed")

    async def test_a_key_that_is_changed_or_revoked_ends_at_once(self, site, team, other_model):
        key = neighbours.ring(team).issue("viewer", [Scope.READ])
        for each in (key, TEAM_KEY):
            assert (await site.ask("GET", "/p/team/v1/models", key=each)).status == 200
        fresh = "fresh-key-51f7a2c90d3b8e64"
        neighbours.write(team, neighbours.config(other_model.base_url, key=fresh))
        neighbours.ring(team).revoke("viewer")
        assert (await site.ask("GET", "/p/team/v1/models", key=fresh)).status == 200
        for each in (key, TEAM_KEY):
            assert (await site.ask("GET", "/p/team/v1/models", key=each)).status == 401

    async def test_its_files_are_not_read_for_each_request(self, site, team, monkeypatch):
        read: list[object] = []
        load = settings.load
        monkeypatch.setattr(settings, "load", lambda *given: read.append(given[0]) or load(*given))
        for _ in range(5):
            assert (await site.ask("GET", "/p/team/v1/models", key=TEAM_KEY)).status == 200
        assert read == [team, team]  # for the keys, and when the store was opened


class TestChanges:
    async def test_a_deleted_profile_is_gone_and_one_of_its_name_begins_anew(self, site, team, other_model):
        other_model.extend([replies.text("old")])
        await talk(site, "team", "hi")
        shutil.rmtree(team)
        assert refused(await site.ask("GET", "/p/team/api/sessions")) == (404, "profile_not_found")
        assert refused(await site.ask("GET", "/p/team/api/sessions", key=TEAM_KEY)) == (401, "gateway_auth_failed")
        neighbours.write(
            neighbours.make(site.home, other_model.base_url),
            neighbours.config(other_model.base_url, key="fresh-key-51f7a2c90d3b8e64"),
        )
        assert refused(await site.ask("GET", "/p/team/api/sessions", key=TEAM_KEY)) == (401, "gateway_auth_failed")
        assert (await site.ask("GET", "/p/team/api/sessions")).json["data"] == []

    async def test_a_profile_whose_api_is_switched_off_is_not_there(self, site, team):
        neighbours.write(team, f"platforms: {{api_server: {{enabled: false, key: {TEAM_KEY}}}}}\n")
        assert refused(await site.ask("GET", "/p/team/v1/models")) == (404, "profile_not_found")
        assert refused(await site.ask("GET", "/p/team/v1/models", key=TEAM_KEY)) == (401, "gateway_auth_failed")

    async def test_settings_that_cannot_be_used_let_nobody_in_and_show_nothing(self, site, team):
        neighbours.write(team, neighbours.config("http://127.0.0.1", key="short-key") + "agent: [sk-CANARY12345678]\n")
        assert refused(await site.ask("GET", "/p/team/v1/models", key=TEAM_KEY)) == (401, "gateway_auth_failed")
        answer = await site.ask("GET", "/p/team/v1/models")
        assert refused(answer) == (500, "settings_error")
        assert "CANARY" not in answer.text
        assert "CANARY" not in (site.home / "logs" / "agent.log").read_text()

    async def test_a_gateway_that_stops_opens_no_other_profile(self, site, team):
        held = replies.hold()
        site.fake.extend([held])
        await site.session(id="s")
        await site.ask("POST", "/api/sessions/s/chat", {"message": "hi"}, headers={"Prefer": "respond-async"})
        await reached(held.reached)
        site.gateway._draining = True
        answer = await site.ask("GET", "/p/team/api/sessions")
        assert refused(answer) == (503, "gateway_draining")
        assert answer.headers["Retry-After"] == "1"
        assert not (team / "state.db").exists()
        held.release()


async def test_a_named_profiles_gateway_serves_the_root_as_default(site, team, other_model):
    named = Site(team, other_model)
    await named.open()
    try:
        assert (await named.ask("GET", "/v1/models")).json["data"][0]["id"] == "team"
        assert (await named.ask("GET", "/p/default/v1/models")).json["data"][0]["id"] == "hermes-agent"
        key = named.gateway.own_keys.issue("own", EVERY_SCOPE, [])
        assert (await named.ask("GET", "/p/team/v1/models", key=key)).status == 200
        assert (await named.ask("GET", "/p/default/v1/models", key=key)).status == 404
    finally:
        await named.close()
