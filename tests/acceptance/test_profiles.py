"""Profiles at the command line: made, copied, chosen, renamed and deleted, and what they keep apart."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_agent.gateway import pid_file
from hermes_agent.store.session_db import SessionDB
from hermes_agent.testing.fake_openai import FakeOpenAI, call, calls, text
from tests.acceptance.hermes import Hermes

CONFIG = """\
# how I like it
model:
  default: fake-model   # the good one
  api_key: sk-written-out-1234567890
providers:
  lab: {base_url: http://lab/v1, api_key: "${LAB_KEY}", key_env: LAB_KEY}
platforms:
  api_server:
    key: 7Jq2vT9xPz4LmW8sRk3N
    extra: {webhook_secret: abcdefgh}
agent: {max_turns: 7}
custom: [{token: abc, max_tokens: 5}]
"""


def create(hermes: Hermes, name: str, *more: str) -> Path:
    done = hermes.run("profile", "create", name, *more)
    assert done.code == 0, done.err
    return hermes.home / "profiles" / name


def contents(home: Path) -> list[str]:
    with SessionDB(home / "state.db", read_only=True) as db:
        return [row["content"] for row in db.get_messages_as_conversation(db.list_sessions()[0]["id"])]


def test_a_profile_has_sessions_and_settings_of_its_own(hermes: Hermes, fake: FakeOpenAI):
    work = create(hermes, "work")
    (work / "config.yaml").write_text("model: {default: other-model}")
    del hermes.variables["HERMES_MODEL"]
    fake.extend([text("one"), text("two"), text("three")])
    assert hermes.run("-p", "work", "-z", "first").out == "one\n"
    assert hermes.run("chat", "-Q", "-q", "second", "--profile", "work", "-c").out == "two\n"
    assert not (hermes.home / "state.db").exists()
    assert contents(work) == ["first", "one", "second", "two"]
    assert fake.requests[0].body["model"] == "other-model"
    assert hermes.run("-z", "third", "-m", "fake-model").out == "three\n"
    assert contents(hermes.home) == ["third", "three"]
    assert hermes.run("sessions", "list", "-p", "work").out.count("first") == 1
    assert (work / "logs").is_dir() == (hermes.home / "logs").is_dir()


def test_commands_of_the_model_stay_in_the_profile(hermes: Hermes, fake: FakeOpenAI):
    work = create(hermes, "work")
    fake.extend([calls(call("terminal", {"command": "echo home=$HERMES_HOME"})), text("done")])
    assert hermes.run("-p", "work", "-z", "go", "--yolo").out == "done\n"
    assert f"home={work}" in fake.wire[-1]["content"]


def test_a_profile_is_private_and_empty(hermes: Hermes):
    work = create(hermes, "work")
    assert stat.S_IMODE(work.stat().st_mode) == 0o700
    assert list(work.iterdir()) == []
    assert sorted(path.name for path in work.parent.iterdir()) == ["work"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-p", "wrok", "-z", "hi"), "there is no profile 'wrok'; there is: work."),
        (("gateway", "run", "-p", "../x"), "there is no profile '../x'"),
        (("-p",), "-p needs the name of a profile"),
        (("chat", "-Qpwork"), "-p stands by itself"),
        (("profile", "use", "nope"), "there is no profile 'nope'"),
        (("profile", "show", "nope"), "there is no profile 'nope'"),
        (("profile", "create", "work"), "there is a profile 'work' already"),
        (("profile", "create", "default"), "there is a profile 'default' already"),
        (("profile", "create", "No Way"), "'No Way' is no name for a profile"),
        (("profile", "rename", "default", "x"), "the profile 'default' is"),
        (("profile", "rename", "work", "default"), "there is a profile 'default' already"),
        (("profile", "rename", "work", "../up"), "'../up' is no name for a profile"),
        (("profile", "delete", "default", "--yes"), "the profile 'default' is"),
        (("profile", "delete", "work"), "say so with --yes"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_2(hermes: Hermes, arguments: tuple[str, ...], says: str):
    work = create(hermes, "work")
    done = hermes.run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert says in done.err
    assert work.is_dir()


def test_the_chosen_profile_is_used_without_p_and_survives_a_new_name(hermes: Hermes, fake: FakeOpenAI):
    create(hermes, "work")
    assert hermes.run("profile", "use", "work").code == 0
    fake.extend([text("one")])
    assert hermes.run("-z", "hi").out == "one\n"
    assert hermes.run("profile", "rename", "work", "job").code == 0
    assert contents(hermes.home / "profiles" / "job") == ["hi", "one"]
    assert hermes.run("sessions", "list").out.count("hi") == 1
    assert json.loads(hermes.run("profile", "show", "--json").out)["name"] == "job"
    assert json.loads(hermes.run("profile", "show", "--json", "-p", "default").out)["name"] == "default"


def test_a_chosen_profile_that_is_gone_stops_everything_but_the_choice_of_another(hermes: Hermes):
    work = create(hermes, "work")
    hermes.run("profile", "use", "work")
    work.rmdir()
    done = hermes.run("-z", "hi")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "hermes profile use default" in done.err
    assert not (hermes.home / "state.db").exists()
    assert hermes.run("profile", "list").code == 0
    assert hermes.run("profile", "use", "default").code == 0
    assert hermes.run("sessions", "list").code == 0


def test_a_copy_has_the_settings_and_neither_keys_nor_sessions(hermes: Hermes, fake: FakeOpenAI):
    hermes.config(CONFIG)
    (hermes.home / ".env").write_text("LAB_KEY=lab-key-1234567890\n")
    (hermes.home / ".env").chmod(0o600)
    (hermes.home / "SOUL.md").write_text("You are kind.\n")
    fake.extend([text("one")])
    hermes.run("-z", "hi", "--base-url", fake.base_url)
    done = hermes.run("profile", "create", "copy", "--clone")
    copy = hermes.home / "profiles" / "copy"
    assert done.code == 0
    assert sorted(path.name for path in copy.iterdir()) == ["SOUL.md", "config.yaml"]
    assert (copy / "SOUL.md").read_text() == "You are kind.\n"
    config = (copy / "config.yaml").read_text()
    assert not any(key in config for key in ("sk-written-out", "7Jq2vT9xPz4LmW8sRk3N", "abcdefgh", "abc"))
    for kept in ("# how I like it", "# the good one", 'api_key: "${LAB_KEY}"', "max_turns: 7", "max_tokens: 5"):
        assert kept in config
    left = "keys were not copied: .env, model.api_key, platforms.api_server.key, "
    assert left + "platforms.api_server.extra.webhook_secret, custom[0].token\n" in done.out
    assert {stat.S_IMODE(path.stat().st_mode) for path in copy.iterdir()} == {0o600}


def test_a_copy_of_settings_that_cannot_be_read_makes_nothing(hermes: Hermes):
    hermes.config("model: [")
    done = hermes.run("profile", "create", "copy", "--clone")
    assert (done.code, "not valid YAML" in done.err) == (2, True)
    assert list((hermes.home / "profiles").iterdir()) == []


def test_the_list_marks_the_chosen_one(hermes: Hermes):
    assert hermes.run("profile", "list").out == f"* default  {hermes.home}\n"
    work = create(hermes, "work")
    hermes.run("profile", "use", "work")
    assert hermes.run("profile", "list").out == f"  default  {hermes.home}\n* work     {work}\n"
    assert json.loads(hermes.run("profile", "list", "--json").out)[1] == {
        "name": "work",
        "home": str(work),
        "chosen": True,
        "gateway": None,
    }


def test_show_says_what_it_uses(hermes: Hermes):
    work = create(hermes, "work")
    (work / "config.yaml").write_text("model: {default: m, provider: openai}")
    out = hermes.run("profile", "show", "work").out.splitlines()
    assert [line.split() for line in out] == [
        ["name", "work"],
        ["home", str(work)],
        ["chosen", "no"],
        ["gateway", "-"],
        ["model", "fake-model"],
        ["provider", "openai"],
    ]


def test_deleting_takes_all_of_it_and_the_choice(hermes: Hermes):
    work = create(hermes, "work")
    (work / "state.db").touch()
    hermes.run("profile", "use", "work")
    assert hermes.run("profile", "delete", "work", "--yes").code == 0
    assert list((hermes.home / "profiles").iterdir()) == []
    assert hermes.run("profile", "list").out == f"* default  {hermes.home}\n"


def test_a_profile_that_is_a_link_is_only_unlinked(hermes: Hermes, tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").touch()
    create(hermes, "other")
    (hermes.home / "profiles" / "work").symlink_to(tmp_path / "real")
    assert hermes.run("profile", "delete", "work", "--yes").code == 0
    assert sorted(path.name for path in (hermes.home / "profiles").iterdir()) == ["other"]
    assert (tmp_path / "real" / "file").exists()


@pytest.mark.parametrize(("answer", "code", "stays"), [("y\r", 0, False), ("n\r", 1, True), ("\r", 1, True)])
def test_deleting_asks_at_a_terminal(hermes: Hermes, answer: str, code: int, stays: bool):
    work = create(hermes, "work")
    with hermes.terminal("profile", "delete", "work") as terminal:
        terminal.expect(r"Delete all of .*\[y/N\]:")
        terminal.type(answer)
        assert terminal.end() == code
    assert work.is_dir() == stays


@pytest.mark.parametrize("arguments", [("delete", "work", "--yes"), ("rename", "work", "job")])
def test_a_profile_whose_gateway_runs_stays(hermes: Hermes, arguments: tuple[str, ...]):
    work = create(hermes, "work")
    with pid_file.held(work) as file:
        file.write("127.0.0.1", 1)
        done = hermes.run("profile", *arguments)
    assert (done.code, done.out) == (1, "")
    assert f"a gateway runs for {work} already (pid {os.getpid()}, " in done.err
    assert work.is_dir()


@pytest.mark.usefixtures("unmeasured")
def test_a_run_in_a_profile_imports_nothing_more(hermes: Hermes, tmp_path: Path):
    create(hermes, "work")
    script = tmp_path / "script.json"
    script.write_text('{"replies": [{"text": "hello"}]}')
    code = "import sys; from hermes_agent.cli.main import main; main(sys.argv[1:]); print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, "-p", "work", "-z", "hi", "--script", str(script)],
        capture_output=True,
        text=True,
        check=True,
    )
    answer, modules = done.stdout.splitlines()
    assert answer == "hello"
    assert not {"click", "aiohttp", "asyncio", "ruamel.yaml", "difflib", "shutil"} & set(eval(modules))
