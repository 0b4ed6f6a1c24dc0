"""The command when something fails: one line for a person, one object for a machine, nothing lost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from hermes_agent.testing.fake_openai import FakeOpenAI, call, calls, error, raw_sse, text
from tests.acceptance.hermes import COMMAND, Hermes


def test_without_a_model_one_screen_says_how_to_name_one(hermes_home: Path):
    hermes = Hermes(hermes_home)
    for command in (("-z", "hi"), ("chat", "-q", "hi"), ()):
        done = hermes.run(*command)
        assert (done.code, done.out) == (1, "")
        for way in ("--base-url", "OPENAI_BASE_URL", "OPENAI_API_KEY", "config.yaml", "hermes demo"):
            assert way in done.err
        assert done.err.count("\n") < 24
        assert max(map(len, done.err.splitlines())) <= 100
    assert not hermes_home.exists()


def test_a_place_without_a_model_name_is_one_line(hermes: Hermes):
    done = hermes.run("-z", "hi", env={"HERMES_MODEL": ""})
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "-m" in done.err


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (
            error(401, "Incorrect API key provided: sk-test-CANARY12345*****890", code="invalid_api_key"),
            "Check the API key",
        ),
        (error(429, "too many"), "again"),
        (error(500, "broken"), "again"),
        (error(404, "no such model", code="model_not_found"), "-m"),
        (raw_sse(["data: {not json}\n\n"]), ""),
    ],
)
def test_a_failure_of_the_model_is_one_line_without_the_key(hermes: Hermes, fake: FakeOpenAI, reply, says: str):
    hermes.config("agent: {api_max_retries: 1}\nlogging: {level: debug}\n")
    fake.extend([reply])
    done = hermes.run("-z", "hi", "--usage-file", "usage.json")
    assert (done.code, done.out) == (1, "")
    assert done.err.count("\n") == 1
    assert says in done.err
    assert "fake-model" in done.err
    written = done.err.encode() + (hermes.cwd / "usage.json").read_bytes()
    for file in hermes.home.rglob("*"):
        if file.is_file():
            assert file.stat().st_mode & 0o077 == 0 or file.name == "config.yaml"
            written += file.read_bytes()
    assert b"CANARY" not in written
    assert json.loads((hermes.cwd / "usage.json").read_text())["exit_code"] == 1


def test_an_unreachable_address_is_one_line(hermes: Hermes):
    hermes.config("agent: {api_max_retries: 1}\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        done = hermes.run("-z", "hi", env={"OPENAI_BASE_URL": f"http://127.0.0.1:{taken.getsockname()[1]}/v1"})
    assert (done.code, done.out) == (1, "")
    assert done.err.count("\n") == 1
    assert "127.0.0.1" in done.err
    assert "base URL" in done.err


def test_a_folder_that_is_gone_is_one_line(hermes: Hermes):
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *COMMAND, "-z", "hi"],
        capture_output=True,
        cwd=hermes.cwd,
        env=hermes.environment(),
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"folder" in done.stderr


def test_a_wrong_setting_is_one_line_and_an_unknown_one_is_told_once(hermes: Hermes, fake: FakeOpenAI):
    hermes.config("agent: {max_turns: many}\n")
    wrong = hermes.run("-z", "hi")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert "agent.max_turns" in wrong.err
    hermes.config("agnet: {max_turns: 3}\n")
    fake.extend([text("fine")])
    unknown = hermes.run("-z", "hi")
    assert (unknown.code, unknown.out, unknown.err.count("\n")) == (0, "fine\n", 1)
    assert "agnet" in unknown.err


def test_a_damaged_store_is_one_line_and_stays_as_it_is(hermes: Hermes):
    hermes.home.mkdir(mode=0o700)
    store = hermes.home / "state.db"
    store.write_bytes(b"this is no database" * 500)
    for command in (("-z", "hi"), ("chat", "-q", "hi"), ("sessions", "list"), ("sessions", "show", "x")):
        done = hermes.run(*command)
        assert (done.code, done.out) == (1, "")
        assert done.err.count("\n") == 1
        assert "state.db" in done.err
    assert store.read_bytes() == b"this is no database" * 500


@pytest.mark.usefixtures("unmeasured")
def test_a_full_disk_is_one_line_and_the_session_goes_on_when_there_is_room(hermes: Hermes, fake: FakeOpenAI):
    """A limit on the size of files stands for the full disk: the next row cannot be written."""
    fake.extend([text("noted"), text("x" * 1_000_000), text("there is room again")])
    assert hermes.run("-z", "remember 42").code == 0
    session = hermes.session()
    used = max(file.stat().st_size for file in hermes.home.iterdir())
    limited = ["bash", "-c", f'ulimit -f {used // 1024 + 40}; exec "$@"', "bash", *COMMAND, "-z", "more", "-c"]
    done = subprocess.run(
        limited, capture_output=True, text=True, cwd=hermes.cwd, env=hermes.environment(), check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "disk is full" in done.stderr
    assert hermes.run("chat", "-c", "-Q").out == "there is room again\n"
    contents = [row["content"] for row in hermes.messages(session)]
    assert contents == ["remember 42", "noted", "more", "there is room again"]


def test_an_answer_that_nobody_reads_is_stored_and_makes_no_noise(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([text("unread"), text("unwritten")])
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        done = subprocess.run(
            [*COMMAND, "-z", "hi"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            cwd=hermes.cwd,
            env=hermes.environment(),
            check=False,
        )
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, "-z", "hi"],
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=hermes.cwd,
            env=hermes.environment(),
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert b"sessions show" in done.stderr
    assert [hermes.messages(session["id"])[-1]["content"] for session in hermes.sessions()] == ["unwritten", "unread"]


def test_closed_streams_are_no_reason_to_fail(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([text("unread")])
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *COMMAND, "-z", "hi"],
        cwd=hermes.cwd,
        env=hermes.environment(),
        check=False,
    )
    assert done.returncode == 1
    assert len(hermes.messages(hermes.session())) == 2


# -- machines ------------------------------------------------------------------------------


def test_stream_json_is_one_object_a_line_and_says_what_is_provisional(hermes: Hermes, fake: FakeOpenAI):
    fake.extend(
        [
            calls(call("read_file", {"path": "a\u2028b"}, id="c1"), content="let me see"),
            raw_sse(['data: {"choices":[{"index":0,"delta":{"content":"cut"}}]}\n\n'], cut=True),
            text("the answer", chunks=2),
        ]
    )
    done = hermes.run("chat", "-q", "hi", "--format", "stream-json")
    assert done.code == 0, done.err
    events = [json.loads(line) for line in done.out.split("\n")[:-1]]
    kinds = [event["type"] for event in events]
    assert kinds == [
        "session", "delta", "message", "tool_started", "tool_completed",
        "delta", "retry", "delta", "delta", "message", "result",
    ]  # fmt: skip
    assert events[0]["session_id"] == hermes.session()
    assert all(event["provisional"] for event in events if event["type"] == "delta")
    assert events[4]["id"] == events[3]["id"]
    assert (events[4]["name"], events[4]["is_error"]) == ("read_file", True)
    assert (events[5]["step"], events[5]["attempt"]) == (2, 1)
    assert [(event["step"], event["attempt"]) for event in events[6:9]] == [(2, 2)] * 3
    assert events[-2]["text"] == "the answer"
    assert (events[-1]["final_response"], events[-1]["completed"], events[-1]["exit_code"]) == ("the answer", True, 0)


def test_stream_json_tells_of_failures_in_its_last_line(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([error(401, "bad key")])
    failed = hermes.run("chat", "-q", "hi", "--format", "stream-json")
    last = json.loads(failed.out.splitlines()[-1])
    assert (failed.code, last["type"], last["exit_code"], last["failure_reason"]) == (1, "result", 1, "auth")
    unknown = hermes.run("chat", "-q", "hi", "--format", "stream-json", "-r", "nope")
    assert json.loads(unknown.out)["type"] == "error"
    assert unknown.code == 2


def test_the_usage_file_is_written_whatever_happens(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([text("fine")])
    usage = hermes.cwd / "usage.json"
    assert hermes.run("-z", "hi", "--usage-file", "usage.json").code == 0
    report = json.loads(usage.read_text())
    assert (report["completed"], report["input_tokens"], report["output_tokens"]) == (True, 100, 10)
    assert report["session_id"] == hermes.session()
    assert hermes.run("-z", "hi", "-r", "nope", "--usage-file", "usage.json").code == 2
    assert json.loads(usage.read_text())["exit_code"] == 2
    fake.extend([text("fine")])
    done = hermes.run("-z", "hi", "--usage-file", "/no/such/folder/usage.json")
    assert (done.code, done.out) == (0, "fine\n")
    assert "usage.json" in done.err


def test_a_store_that_a_kill_left_empty_is_no_store_yet(hermes: Hermes, fake: FakeOpenAI):
    """The file stands before the first byte of it: a process that dies there has lost nothing."""
    fake.extend([text("begun")])
    hermes.home.mkdir(mode=0o700, parents=True)
    (hermes.home / "state.db").touch(mode=0o600)
    assert "No session is stored yet" in hermes.run("sessions", "list").out
    assert hermes.run("-z", "begin").out == "begun\n"
    assert "begin" in hermes.run("sessions", "list").out


@pytest.mark.parametrize("url", ["http://host:port/v1", "http://[::1/v1", "not a url"])
def test_a_base_url_that_is_none_is_one_line(hermes_home: Path, url: str):
    done = Hermes(hermes_home).run("-z", "hi", "--base-url", url, "-m", "m")
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert "base URL" in done.err
