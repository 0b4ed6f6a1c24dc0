"""Who may call what, for every operation that the table of routes has, and that each is described."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections import Counter

import pytest

from hermes_agent.gateway import app, guard, openapi
from hermes_agent.gateway.app import ROUTES
from hermes_agent.gateway.keys import EVERY_SCOPE, Principal, Scope
from tests.integration.gateway import neighbours
from tests.integration.gateway.conftest import KEY
from tests.integration.gateway.neighbours import TEAM_KEY

OPEN = {"/health", "/v1/health"}
"""The only paths that want no key."""
ALLOWED = 200
WRONG_KEY = (401, "gateway_auth_failed")
NO_SCOPE = (403, "insufficient_scope")
OTHER_PROFILE = (403, "profile_not_allowed")
NO_PROFILE = (404, "profile_not_found")
REFUSALS = {WRONG_KEY, NO_SCOPE, OTHER_PROFILE, NO_PROFILE, (429, "too_many_bad_keys")}
PLACES = ("", "/p/default", "/p/team", "/p/nobody")


@pytest.fixture
async def callers(site, fake, monkeypatch):
    """Every kind of key, by name."""
    monkeypatch.setattr(guard, "_MINUTE", 0.0)  # so many wrong keys are tried here
    neighbours.make(site.home, fake.base_url)
    ring = site.gateway.own_keys
    return {
        "nobody": None,
        "wrong": "wrong-key-d41c72",
        "owner": KEY,
        "team's own": TEAM_KEY,
        "for team": ring.issue("for team", EVERY_SCOPE, ["team"]),
        **{scope.value: ring.issue(scope.value, [scope]) for scope in Scope},
    }


def expected(route, caller, place):
    """How that caller is answered there."""
    if route.scope is None:
        return ALLOWED
    if caller in ("nobody", "wrong") or (caller == "team's own" and place != "/p/team"):
        return WRONG_KEY
    if caller in set(Scope) and not Principal(caller, frozenset({Scope(caller)})).may(route.scope):
        return NO_SCOPE
    if caller == "for team" and place != "/p/team":
        return NO_PROFILE if place else OTHER_PROFILE
    return NO_PROFILE if place == "/p/nobody" else ALLOWED


async def answered(site, route, key, place):
    """How a caller is answered: why it was refused, or that it was let in."""
    path = place + re.sub(r"{(\w+)}", "missing", route.path)
    answer = await site.ask(route.method, path, {} if route.method in ("POST", "PATCH") else None, key=key)
    assert answer.status < 500, (path, answer.text)
    code = (answer.json["error"] or {}).get("code") if answer.status >= 400 else None
    return (answer.status, code) if (answer.status, code) in REFUSALS else ALLOWED


async def test_every_operation_lets_in_exactly_whom_it_should(site, callers):
    for route in ROUTES:
        cases = [(caller, place) for caller in callers for place in PLACES]
        found = await asyncio.gather(*(answered(site, route, callers[caller], place) for caller, place in cases))
        wanted = {case: expected(route, *case) for case in cases}
        assert dict(zip(cases, found, strict=True)) == wanted, route.name
    assert site.fake.requests == []


def test_every_operation_demands_a_scope_but_the_two_that_say_the_server_lives():
    assert {route.path for route in ROUTES if route.scope is None} == OPEN


async def test_the_application_has_the_operations_of_the_table_and_no_others(site):
    made = app.build(site.gateway)
    wanted = {(route.method, base + route.path) for route in ROUTES for base in ("", app.PROFILE_PATH)}
    assert {(route.method, route.resource.canonical) for route in made.router.routes()} == wanted
    assert len(wanted) == 2 * len(ROUTES)


# -- the OpenAPI document -------------------------------------------------------------------


async def test_the_document_is_served_and_has_every_operation_once(site):
    document = (await site.ask("GET", "/openapi.json")).json
    found = {
        (method.upper(), path): operation["operationId"]
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert found == {(route.method, route.path): route.name for route in ROUTES}
    assert [name for name, count in Counter(found.values()).items() if count > 1] == []


def walk(value, at="$"):
    """Every object in the document and where it stands."""
    if isinstance(value, dict):
        yield at, value
        for key, item in value.items():
            yield from walk(item, f"{at}.{key}")
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from walk(item, f"{at}[{number}]")


def resolve(document, reference):
    assert reference.startswith("#/")
    for part in reference[2:].split("/"):
        document = document[part]
    return document


def test_the_document_holds_together():
    document = openapi.document(ROUTES)
    assert document["openapi"] == "3.1.0"
    assert set(document["info"]) >= {"title", "version"}
    for at, value in walk(document):
        if "$ref" in value:
            assert isinstance(resolve(document, value["$ref"]), dict), at
    used = {value["$ref"] for _, value in walk(document) if "$ref" in value}
    assert used == {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_an_operation_is_described_as_the_standard_wants(route):
    document = openapi.document(ROUTES)
    operation = document["paths"][route.path][route.method.lower()]
    assert set(operation) <= {
        "operationId", "summary", "parameters", "responses", "security", "requestBody", "x-hermes-scope",
    }  # fmt: skip
    assert re.fullmatch(r"[A-Z].*\.", operation["summary"])
    places = [(each["in"], each["name"].lower()) for each in operation["parameters"]]
    assert len(places) == len(set(places))
    assert {name for where, name in places if where == "path"} == set(re.findall(r"{(\w+)}", route.path))
    for each in operation["parameters"]:
        assert each["in"] in ("path", "query", "header")
        assert each["required"] is (each["in"] == "path")
        assert each["schema"]["type"] in ("string", "integer", "number", "boolean")
    assert str(route.status) in operation["responses"]
    for status, response in operation["responses"].items():
        assert re.fullmatch(r"[1-5](\d\d|XX)", status)
        assert response["description"]
        assert all(re.fullmatch(r"[a-z]+/[a-z0-9.+-]+", media) for media in response["content"])
    schemes = document["components"]["securitySchemes"]
    assert [name for each in operation["security"] for name in each] == ([] if route.path in OPEN else list(schemes))
    assert operation.get("x-hermes-scope") == (None if route.scope is None else str(route.scope))
    body = operation.get("requestBody")
    assert (body is None) == (route.body is None)
    if body is not None:
        schema = resolve(document, body["content"]["application/json"]["schema"]["$ref"])
        assert schema["type"] == "object"
        assert body["required"] is bool(schema["required"])


def test_a_get_has_no_body_and_every_message_can_be_named():
    for route in ROUTES:
        assert route.method not in ("GET", "DELETE") or route.body is None, route.name
        if route.name in ("sessionChat", "sessionChatStream", "createChatCompletion", "createResponse", "startRun"):
            assert "Idempotency-Key" in {each.name for each in route.parameters}, route.name


def test_the_page_about_the_api_has_every_operation(project):
    done = subprocess.run(
        [sys.executable, project / "scripts" / "api_docs.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    page = (project / "docs" / "api.md").read_text(encoding="utf-8")
    assert all(f"`{route.method} {route.path}`" in page for route in ROUTES)
