"""The key is in the request and nowhere else: not in a file, not on a stream, not in a child's environment."""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest

from hermes_agent.testing.fake_openai import FakeOpenAI, call, calls, error, raw_sse, text
from hermes_agent.testing.replies import Item
from tests.acceptance.hermes import COMMAND, Hermes
from tests.acceptance.world import World, contents

SHAPES = ["sk-test-{}", "{}", "gsk_{}.x/y+z=="]
"""Keys of services that mark theirs, and of some that do not."""


def a_key(shape: str) -> str:
    """A fresh key, so that no rule can know it."""
    return shape.format(secrets.token_hex(16))


def traces(key: str) -> list[bytes]:
    """What must be nowhere: the key, its middle part, and forms in which it is easily overlooked."""
    middle = key[len(key) // 4 : -(len(key) // 4)]
    return [form.encode() for form in (key, middle, quote(key, safe=""), base64.b64encode(key.encode()).decode())]


def failures(key: str) -> list[Item]:
    """Every kind of failure, many of them with the key in what the server says."""
    say = f"Incorrect API key provided: {key}. You can find yours at https://example.org"
    return [
        error(401, "bad key"),
        error(401, say, code="invalid_api_key"),
        error(429, f"Rate limit reached for key {key} in organization x"),
        error(500, f"internal: Authorization: Bearer {key}"),
        error(400, f'headers: {{"authorization": "Bearer {key}", "x-api-key": "{key}"}}'),
        error(502, body=f"<html><body>upstream sent {key}</body></html>".encode()),
        error(500, body=f'{{"error": {{"message": "broken {key}'.encode()),
        error(403, body=json.dumps({"detail": [{"msg": say, "input": {"key": key}}]}).encode()),
        error(401, headers={"WWW-Authenticate": f"Bearer error={key}"}),
        raw_sse([f"data: {{not json {key}}}\n\n"]),
        raw_sse([f'data: {{"error": {{"message": "{say}", "code": 500}}}}\n\n']),
        raw_sse([f'data: {{"choices": "{key}"}}\n\n', f": {key}\n\n"], cut=True),
    ]


def written(home: Path) -> bytes:
    """All that lies in the home, names included."""
    found = b""
    for path in home.rglob("*"):
        found += str(path).encode() + (path.read_bytes() if path.is_file() else b"")
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_failure_shows_the_key_nowhere(hermes_home: Path, shape: str):
    key = a_key(shape)
    with FakeOpenAI(failures(key)) as fake:
        hermes = Hermes(hermes_home, fake, key=key)
        hermes.config("agent: {api_max_retries: 1}\nlogging: {level: debug}\n")
        count = len(failures(key))
        plain = hermes.run("chat", stdin=b"go\n" * (count - 1))
        assert (plain.code, plain.out, plain.err.count("✗")) == (1, "", count - 1)
        usage = str(hermes.home / "usage.json")
        events = hermes.run("chat", "-c", "-q", "go", "--format", "stream-json", "--usage-file", usage)
        assert json.loads(events.out.splitlines()[-1])["exit_code"] == events.code == 1
        said = plain.out + plain.err + events.out + events.err
        shown = hermes.run("sessions", "show", "latest", "--format", "json")
        everything = said.encode() + (shown.out + shown.err).encode() + written(hermes.home)
        assert [request.headers["authorization"] for request in fake.requests] == [f"Bearer {key}"] * count
    assert [trace for trace in traces(key) if trace in everything] == []


def test_a_key_from_the_env_file_is_kept_like_any_other(hermes_home: Path):
    key = a_key("{}")
    with FakeOpenAI(failures(key)[:4]) as fake:
        hermes = Hermes(hermes_home, fake)
        del hermes.variables["OPENAI_API_KEY"]
        hermes.config("agent: {api_max_retries: 1}\nlogging: {level: debug}\n")
        env = hermes.home / ".env"
        env.write_text(f"OPENAI_API_KEY={key}\n")
        env.chmod(0o600)
        done = hermes.run("chat", stdin=b"go\n" * 4)
        assert done.code == 1
        assert fake.requests[0].headers["authorization"] == f"Bearer {key}"
    env.unlink()
    everything = (done.out + done.err).encode() + written(hermes.home)
    assert [trace for trace in traces(key) if trace in everything] == []


def test_commands_do_not_inherit_the_key_and_its_file_is_not_read(world: World):
    key = a_key("sk-test-{}")
    world.hermes.variables["OPENAI_API_KEY"] = key
    other = a_key("{}")
    world.hermes.config("")
    (world.hermes.home / ".env").write_text(f"OTHER_KEY={other}\n")
    wanted = [
        call("terminal", {"command": "env; export -p; set"}),
        call("terminal", {"command": "bash -c env; python3 -c 'import os; print(dict(os.environ))'"}),
        call("read_file", {"path": str(world.hermes.home / ".env")}),
        call("search_files", {"pattern": "KEY", "path": str(world.hermes.home)}),
    ]
    world.fake.extend([calls(*wanted), text("done")])
    assert world.run("-z", "go", "--yolo").out == "done\n"
    results = contents(world.wire, "tool")
    assert "PATH=" in results[0]
    for trace in (*traces(key), *traces(other)):
        assert trace not in "".join(results).encode()
    (world.hermes.home / ".env").unlink()
    world.check()
    assert key.encode() not in written(world.hermes.home)


def test_everything_in_the_home_is_private_whatever_the_umask(world: World):
    long = "seq 30000"
    world.fake.extend([calls(call("terminal", {"command": long}), call("todo", {})), text("done"), error(401)])
    world.hermes.variables["PYTHONPYCACHEPREFIX"] = str(world.hermes.cwd)
    for arguments in (
        ("-z", "go", "--yolo"),
        ("-z", "again", "-c", "--usage-file", str(world.hermes.home / "usage.json")),
    ):
        line = 'umask 000; exec "$@"'
        subprocess.run(
            ["sh", "-c", line, "sh", *COMMAND, *arguments],
            cwd=world.hermes.cwd,
            env=world.hermes.environment(),
            capture_output=True,
            check=False,
        )
    found = {path.relative_to(world.hermes.home).as_posix(): path for path in world.hermes.home.rglob("*")}
    assert {"state.db", "cache/spillover", "usage.json"} <= set(found)
    modes = {name: oct(path.stat().st_mode & 0o777) for name, path in found.items()}
    assert modes == {name: "0o700" if path.is_dir() else "0o600" for name, path in found.items()}
    assert world.hermes.home.stat().st_mode & 0o777 == 0o700
    world.check()


def test_hundreds_of_failures_do_not_fill_the_disk(hermes_home: Path):
    key = a_key("sk-test-{}")
    with FakeOpenAI([error(500, f"broken {key} " + "x" * 5000)], repeat=True) as fake:
        hermes = Hermes(hermes_home, fake, key=key)
        hermes.config("agent: {api_max_retries: 1}\nlogging: {level: debug, max_size_mb: 0.02, backup_count: 2}\n")
        done = hermes.run("chat", stdin=b"go\n" * 200)
        assert (done.code, done.out, done.err.count("✗")) == (1, "", 200)
        assert len(fake.requests) == 200
        assert fake.violations == []
    logs = list((hermes.home / "logs").glob("*"))
    assert sum(path.stat().st_size for path in logs) <= 3 * 0.02 * 1024 * 1024
    others = [path for path in hermes.home.rglob("*") if path.is_file() and path not in logs]
    assert len(others) <= 6
    assert sum(path.stat().st_size for path in others) < 8_000_000
    assert [trace for trace in traces(key) if trace in written(hermes.home)] == []
