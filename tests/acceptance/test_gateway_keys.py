"""`hermes gateway keys` against a gateway that runs: a key counts, and ends, while it serves."""

from __future__ import annotations

import json
import re
import stat
import urllib.error
import urllib.request

import pytest

from tests.acceptance.hermes import Hermes, wait_for

CONFIGURED = "7Jq2vT9xPz4LmW8sRk3N"


@pytest.fixture
def served(hermes: Hermes):
    """The command, and the address and the owner's key of a gateway in its home."""
    hermes.run("profile", "create", "team")
    hermes.variables["API_SERVER_PORT"] = "0"
    started = hermes.run("gateway", "start")
    assert started.code == 0, started.err
    found = re.search(r"owner key, shown only now: (\S+)\n[^$]*listening on (\S+) ", started.out)
    assert found is not None
    yield hermes, found.group(2), found.group(1)
    assert hermes.run("gateway", "stop").code == 0


def status(url: str, path: str, key: str, method: str = "GET") -> int:
    wanted = urllib.request.Request(url + path, method=method, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(wanted, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def add(hermes: Hermes, *arguments: str) -> str:
    """Make a key; it is all that stands on standard output."""
    done = hermes.run("gateway", "keys", "add", *arguments)
    assert done.code == 0, done.err
    assert re.fullmatch(r"[\w-]{43}\n", done.out)
    assert done.out.strip() not in done.err
    return done.out.strip()


def test_a_key_is_made_counts_for_what_it_is_for_and_ends_when_it_is_revoked(served):
    hermes, url, owner = served
    key = add(hermes, "rex", "--scope", "read")
    assert status(url, "/api/sessions", key) == 200
    assert status(url, "/metrics", key) == 403
    assert status(url, "/p/team/api/sessions", key) == 404
    assert status(url, "/p/team/api/sessions", owner) == 200
    both = add(hermes, "both", "--scope", "read", "--scope", "admin", "--for", "team", "--for", "default")
    assert status(url, "/p/team/metrics", both) == 200
    assert status(url, "/metrics", both) == 200
    every = add(hermes, "every", "--scope", "dm", "--for-all")
    assert status(url, "/p/team/api/deliveries", every) == 200

    listed = hermes.run("gateway", "keys", "list")
    assert [line.split()[0] for line in listed.out.splitlines()] == ["NAME", "owner", "rex", "both", "every"]
    assert re.search(r"(?m)^rex +read +default +just now$", listed.out)
    assert re.search(r"(?m)^both +read, admin +team, default +just now$", listed.out)
    assert re.search(r"(?m)^every +dm +every +just now$", listed.out)
    facts = json.loads(hermes.run("gateway", "keys", "list", "--json").out)
    assert facts["owner_configured"] is False
    assert [(entry["name"], entry["profiles"]) for entry in facts["keys"]] == [
        ("owner", None),
        ("rex", ["default"]),
        ("both", ["team", "default"]),
        ("every", None),
    ]

    assert hermes.run("gateway", "keys", "revoke", "rex").code == 0
    wait_for(lambda: status(url, "/api/sessions", key) == 401)
    assert status(url, "/api/sessions", owner) == 200
    kept = "".join(file.read_text() for file in hermes.home.rglob("*") if file.suffix in (".json", ".log", ".out"))
    assert not [each for each in (owner, key, both, every) if each in kept]
    assert stat.S_IMODE((hermes.home / "gateway" / "keys.json").stat().st_mode) == 0o600


def test_the_owners_key_is_replaced_while_the_gateway_runs(served):
    hermes, url, owner = served
    assert status(url, "/metrics", owner) == 200
    done = hermes.run("gateway", "keys", "rotate")
    assert (done.code, done.out.count("\n")) == (0, 1)
    wait_for(lambda: status(url, "/metrics", owner) == 401)
    assert status(url, "/metrics", done.out.strip()) == 200


def test_a_profiles_keys_are_its_own(served):
    hermes, url, _ = served
    done = hermes.run("-p", "team", "gateway", "keys", "add", "rex", "--scope", "read")
    assert done.code == 0
    key = done.out.strip()
    assert status(url, "/p/team/api/sessions", key) == 200
    assert status(url, "/api/sessions", key) == 401
    assert re.search(r"(?m)^rex +read +team +", hermes.run("-p", "team", "gateway", "keys", "list").out)
    assert "rex" not in hermes.run("gateway", "keys", "list").out


def test_with_a_configured_key_the_owners_is_that_one(hermes: Hermes):
    hermes.config(f"platforms: {{api_server: {{key: {CONFIGURED}}}}}\n")
    listed = hermes.run("gateway", "keys", "list")
    assert (listed.code, listed.out.startswith("API_SERVER_KEY is in charge")) == (0, True)
    assert json.loads(hermes.run("gateway", "keys", "list", "--json").out) == {"owner_configured": True, "keys": []}
    done = hermes.run("gateway", "keys", "rotate")
    assert (done.code, done.out) == (2, "")
    assert "change it where it is set and restart the gateway" in done.err
    assert not (hermes.home / "gateway" / "keys.json").exists()
    add(hermes, "rex", "--scope", "run")
    assert CONFIGURED not in hermes.run("gateway", "keys", "list").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "rex"), "--scope"),
        (("add", "rex", "--scope", "all"), "'all' is not one of"),
        (("add", "owner", "--scope", "run"), "'owner' cannot be the name of a key"),
        (("add", "a/b", "--scope", "run"), "'a/b' cannot be the name of a key"),
        (("add", "rex", "--scope", "run", "--for", "wrk"), "there is no profile 'wrk'"),
        (("add", "rex", "--scope", "run", "--for", "default", "--for-all"), "exclude each other"),
        (("revoke", "rex"), "there is no key named 'rex'"),
        (("revoke", "owner"), "hermes gateway keys rotate"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_changes_nothing(hermes: Hermes, arguments, said):
    done = hermes.run("gateway", "keys", *arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert said in done.err
    assert not (hermes.home / "gateway" / "keys.json").exists()


def test_a_name_is_taken_once(hermes: Hermes):
    add(hermes, "rex", "--scope", "run")
    done = hermes.run("gateway", "keys", "add", "rex", "--scope", "read")
    assert (done.code, done.out) == (2, "")
    assert "there is a key named 'rex' already" in done.err
    assert json.loads(hermes.run("gateway", "keys", "list", "--json").out)["keys"][0]["scopes"] == ["run"]
