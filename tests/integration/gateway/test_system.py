"""What the server says of itself: that it is well, what it counts, what it can do, and that it is about to stop."""

from __future__ import annotations

import asyncio
import json
import math
import re

from hermes_agent.errors import StoreLocked
from hermes_agent.gateway.app import ROUTES
from hermes_agent.gateway.routes import system
from hermes_agent.store.database import Database
from hermes_agent.testing import replies
from tests.integration.gateway import neighbours
from tests.integration.gateway.conftest import KEY, PATIENT, Site, reached

SECRETS = (KEY, neighbours.TEAM_KEY, "sk-test-model", "sk-team-model")

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')
_SAMPLE = re.compile(rf"({_NAME})(?:{{(.*)}})? (\S+)")


class Metrics:
    """The text format of Prometheus, read as strictly as its description is written."""

    def __init__(self, text):
        assert text.endswith("\n")
        self.kinds: dict[str, str] = {}
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self._helped: set[str] = set()
        self._order: list[str] = []
        for line in text[:-1].split("\n"):
            if line.startswith("#"):
                self._describe(line)
            else:
                self._take(line)
        for name, kind in self.kinds.items():
            if kind == "histogram":
                self._check_histogram(name)

    def _describe(self, line):
        _, word, name, about = line.split(" ", 3)
        assert re.fullmatch(_NAME, name)
        assert about
        if word == "HELP":
            assert name not in self._helped
            self._helped.add(name)
        else:
            assert word == "TYPE"
            assert about in ("counter", "gauge", "histogram")
            assert name in self._helped
            assert name not in self.kinds
            self.kinds[name] = about

    def _take(self, line):
        found = _SAMPLE.fullmatch(line)
        assert found, line
        name, inside, value = found.groups()
        labels = _LABEL.findall(inside or "")
        assert ",".join(f'{key}="{text}"' for key, text in labels) == (inside or ""), line
        assert len({key for key, _ in labels}) == len(labels)
        family = name if name in self.kinds else re.sub(r"_(bucket|sum|count)$", "", name)
        assert family in self.kinds, f"{name} was not described before"
        assert (self.kinds[family] == "histogram") == (family != name)
        assert self.kinds[family] != "counter" or name.endswith("_total")
        if family not in self._order:
            self._order.append(family)
        assert self._order[-1] == family, f"the lines of {family} do not stand together"
        key = (name, frozenset(labels))
        assert key not in self.samples
        assert value != "NaN"
        self.samples[key] = float(value)

    def _check_histogram(self, name):
        series: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
        for (sample, labels), value in self.samples.items():
            if sample == f"{name}_bucket":
                bound = dict(labels)["le"]
                series.setdefault(labels - {("le", bound)}, []).append((float(bound), value))
        assert series
        for labels, buckets in series.items():
            bounds, counts = zip(*buckets, strict=True)
            assert list(bounds) == sorted(set(bounds))
            assert list(counts) == sorted(counts)
            assert bounds[-1] == math.inf
            assert self.samples[f"{name}_count", labels] == counts[-1]
            assert self.samples[f"{name}_sum", labels] >= 0

    def value(self, name, **labels):
        return self.samples.get((name, frozenset({"profile": "default", **labels}.items())), 0.0)


async def metrics(site, base=""):
    answer = await site.ask("GET", f"{base}/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Metrics(answer.text)


async def health(site, base=""):
    answer = await site.ask("GET", f"{base}/health/detailed")
    assert answer.status == 200
    return answer.json


class TestMetrics:
    async def test_a_turn_moves_the_counts(self, site):
        before = await metrics(site)
        site.fake.extend([replies.text("ok"), replies.error(401)])
        session = await site.session()
        await site.chat(session, "hi")
        await site.chat(session, "and again")
        async with asyncio.timeout(PATIENT):  # a client hears of the end a moment before it is counted
            while (after := await metrics(site)).value("hermes_turn_seconds_count") < 2:
                pass

        def moved(name, **labels):
            return after.value(name, **labels) - before.value(name, **labels)

        assert (moved("hermes_turns_total", state="done"), moved("hermes_turns_total", state="failed")) == (1, 1)
        assert moved("hermes_turn_failures_total", reason="auth") == 1
        assert (moved("hermes_accept_seconds_count"), moved("hermes_turn_seconds_count")) == (2, 2)
        assert moved("hermes_turn_seconds_sum") > 0
        assert moved("hermes_store_commits_total") >= 2
        assert after.value("hermes_wal_bytes") > 0
        assert (after.value("hermes_turns_running"), after.value("hermes_turns_waiting")) == (0, 0)

    async def test_what_runs_and_waits_is_seen_while_it_does(self, site):
        held = replies.hold()
        site.fake.extend([held, replies.text("b")])
        session = await site.session()
        later = {"Prefer": "respond-async"}
        for text in ("a", "b"):
            assert (await site.chat(session, text, headers=later)).status == 202
        await reached(held.reached)
        now = await metrics(site)
        assert (now.value("hermes_turns_running"), now.value("hermes_turns_waiting")) == (1, 1)
        seen = await health(site)
        assert (seen["active_agents"], seen["gateway_busy"], seen["gateway_drainable"]) == (1, True, False)
        held.release()

    async def test_each_profile_counts_its_own(self, site):
        neighbours.make(site.home, site.fake.base_url)
        site.fake.extend([replies.text("ok")])
        await site.chat(await site.session(), "hi")
        theirs = await metrics(site, "/p/team")
        assert {dict(labels)["profile"] for _, labels in theirs.samples} == {"team"}
        assert theirs.value("hermes_turns_total", profile="team", state="done") == 0

    def test_large_counts_are_exact_and_labels_escaped(self):
        line = system.metrics.sample("n_total", (("l", 'a"b\\c\nd'),), 123456789)
        assert line == 'n_total{l="a\\"b\\\\c\\nd"} 123456789'
        assert system.metrics.sample("n", (), 123456789) == "n 123456789"
        assert system.metrics.sample("n", (), 0.1) == "n 0.1"


class TestHealth:
    async def test_all_is_well(self, site):
        seen = await health(site)
        assert (seen["status"], seen["gateway_state"]) == ("ok", "running")
        assert {check["status"] for check in seen["checks"].values()} == {"ok"}
        assert set(seen["checks"]) == {"state_db", "config", "model", "disk", "gateway", "queue"}
        assert seen["checks"]["model"]["model"] == "fake"
        for path in ("/health", "/v1/health"):
            answer = await site.ask("GET", path, key=None)
            assert (answer.status, answer.json["status"], answer.json["platform"]) == (200, "ok", "hermes-agent")

    async def test_a_full_disk_shows(self, site, monkeypatch):
        monkeypatch.setattr(system, "LEAST_FREE_BYTES", 1 << 62)
        seen = await health(site)
        assert (seen["status"], seen["checks"]["disk"]["status"]) == ("degraded", "low")
        assert seen["checks"]["disk"]["free_bytes"] > 0

    async def test_a_store_that_fails_shows_and_does_not_hide_the_rest(self, site, monkeypatch):
        def broken(*_):
            raise StoreLocked

        with monkeypatch.context() as patch:
            patch.setattr(Database, "read", broken)
            seen = await health(site)
        assert (seen["status"], seen["checks"]["state_db"]["status"]) == ("degraded", "failed")
        assert seen["checks"]["state_db"]["reason"] == "store_locked"
        assert seen["checks"]["disk"]["status"] == "ok"

    async def test_a_missing_model_shows(self, site):
        neighbours.make(site.home, site.fake.base_url)
        neighbours.write(site.home / "profiles" / "team", "{}\n")
        seen = await health(site, "/p/team")
        assert (seen["status"], seen["profile"]) == ("degraded", "team")
        assert seen["checks"]["model"] == {"status": "missing", "model": None}
        assert (await health(site))["status"] == "ok"

    async def test_a_full_queue_shows(self, hermes_home, fake):
        made = Site(hermes_home, fake)
        await made.open("gateway: {max_queue: 1, max_concurrent_runs: 1}")
        held = replies.hold()
        fake.extend([held, replies.text("b")])
        session = await made.session()
        for text in ("a", "b"):
            await made.chat(session, text, headers={"Prefer": "respond-async"})
        await reached(held.reached)
        seen = await health(made)
        held.release()
        await made.close()
        assert (seen["status"], seen["checks"]["queue"]["status"]) == ("degraded", "full")
        assert (seen["checks"]["queue"]["running"], seen["checks"]["queue"]["waiting"]) == (1, 1)


async def test_nothing_that_the_server_says_of_itself_holds_a_secret(site):
    neighbours.make(site.home, site.fake.base_url)
    for route in ROUTES:
        if "{" in route.path or route.method != "GET":
            continue
        for base in ("", "/p/team"):
            answer = await site.ask("GET", base + route.path)
            assert not [secret for secret in SECRETS if secret in answer.text], route.path


async def test_an_error_message_holds_no_registered_secret(site):
    answer = await site.ask("POST", "/api/sessions", {"id": f"{KEY}/x", "title": KEY, "unknown": KEY})
    assert answer.status == 400
    assert KEY not in answer.text
    answer = await site.ask("GET", f"/api/sessions/{KEY}")
    assert answer.status == 404
    assert KEY not in answer.text


# -- what it can do -------------------------------------------------------------------------


async def test_the_capabilities_have_the_shape_that_typed_clients_demand(site):
    found = (await site.ask("GET", "/v1/capabilities")).json
    assert (found["object"], found["platform"]) == ("hermes.api_server.capabilities", "hermes-agent")
    assert 0 < len(found["model"].strip()) <= 255
    assert found["auth"] == {"type": "bearer", "required": True}
    features = found["features"]
    assert features["chat_completions"] is features["chat_completions_streaming"] is True
    assert features["cors"] is False
    assert features["runs_idempotency"]["durable"] is True
    assert len(json.dumps(found)) < 65_536
    assert found["endpoints"] == {route.name: {"method": route.method, "path": route.path} for route in ROUTES}


def test_a_feature_is_true_exactly_where_its_operation_is_in_the_table():
    whole, bare = system.features(ROUTES), system.features(system.ROUTES)
    for feature, name in {**system._BY_ROUTE, **system._BY_STREAM}.items():
        assert name in {route.name for route in ROUTES}, f"{feature}: there is no {name}"
        assert (whole[feature], bare[feature]) == (True, False), feature
    without = tuple(route for route in ROUTES if route.name != "steerRun")
    assert system.features(without) == {**whole, "run_steer": False}


async def test_cors_is_said_where_pages_may_call(hermes_home, fake, monkeypatch):
    monkeypatch.setenv("API_SERVER_CORS_ORIGINS", "https://app.example")
    neighbours.make(hermes_home, fake.base_url)
    made = Site(hermes_home, fake)
    await made.open()
    seen = [(await made.ask("GET", f"{base}/v1/capabilities")).json["features"]["cors"] for base in ("", "/p/team")]
    await made.close()
    assert seen == [True, True]


async def test_the_place_of_a_page_is_free(site):
    """There is no page at `/` yet: nothing to see without a key, nothing there with one."""
    without, answer = await site.ask("GET", "/", key=None), await site.ask("GET", "/")
    assert (without.status, without.json["error"]["code"]) == (401, "gateway_auth_failed")
    assert (answer.status, answer.json["error"]["code"]) == (404, "not_found")
    assert answer.headers["Content-Type"] == "application/json"


# -- stopping -------------------------------------------------------------------------------

WORK = (
    ("POST", "/api/sessions/s/chat", {"message": "more"}),
    ("POST", "/api/sessions/s/chat/stream", {"message": "more"}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "more"}]}),
    ("POST", "/v1/responses", {"input": "more"}),
    ("POST", "/v1/runs", {"input": "more"}),
)


async def test_while_it_drains_new_work_is_refused_and_all_else_goes_on(site):
    held = replies.hold("half", replies.text("of an answer"))
    site.fake.extend([held])
    await site.session(id="s")
    waiting = asyncio.create_task(site.chat("s", "hi", headers={"Idempotency-Key": "k"}))
    await reached(held.reached)
    drain = asyncio.create_task(site.gateway.drain(PATIENT))
    while (await health(site))["gateway_state"] != "draining":
        pass
    for method, path, body in WORK:
        answer = await site.ask(method, path, body)
        assert (answer.status, answer.json["error"]["code"]) == (503, "gateway_draining"), path
        assert int(answer.headers["Retry-After"]) > 0
        assert answer.json["error"]["failure"]["retryable"] is True
    seen = await health(site)
    assert (seen["status"], seen["checks"]["gateway"]["status"]) == ("draining", "draining")
    for path in ("/health", "/v1/models", "/api/sessions", "/api/sessions/s/messages", "/api/deliveries", "/metrics"):
        assert (await site.ask("GET", path)).status == 200, path
    assert not drain.done()
    held.release()
    answer = await waiting
    assert (answer.status, answer.json["completed"]) == (200, True)
    assert await drain
    again = await site.chat("s", "hi", headers={"Idempotency-Key": "k"})
    assert (again.status, again.headers["Idempotency-Replayed"]) == (200, "true")
    assert len(site.fake.requests) == 1
