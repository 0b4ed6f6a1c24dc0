"""The command as a process: what it prints where, how it ends, and what it leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_agent.cli import app as click_app
from hermes_agent.cli import options, screen, start
from hermes_agent.store.session_db import SessionDB
from hermes_agent.testing.fake_openai import FakeOpenAI, call, calls, error, text
from hermes_agent.version import VERSION
from tests.acceptance.hermes import KEY, Hermes

# -- what it costs to start -------------------------------------------------------


@pytest.mark.usefixtures("unmeasured")
def test_the_version_is_printed_before_anything_is_imported():
    code = "import sys; from hermes_agent.cli.main import main; main(['--version']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    first, modules = done.stdout.splitlines()
    assert first == f"hermes {VERSION}"
    ours = {name for name in eval(modules) if name.startswith("hermes_agent")}
    assert ours == {"hermes_agent", "hermes_agent.cli", "hermes_agent.cli.main", "hermes_agent.version"}
    assert not {"click", "rich", "ruamel", "apsw", "re", "dataclasses", "json"} & set(eval(modules))


@pytest.mark.usefixtures("unmeasured")
def test_an_offline_run_imports_no_library_of_the_terminal_or_the_network(hermes_home: Path, tmp_path: Path):
    script = tmp_path / "script.json"
    script.write_text('{"replies": [{"text": "hello"}]}')
    code = "import sys; from hermes_agent.cli.main import main; main(sys.argv[1:]); print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, "-z", "hi", "--script", str(script)], capture_output=True, text=True, check=True
    )
    answer, modules = done.stdout.splitlines()
    assert answer == "hello"
    heavy = {
        "click",
        "rich",
        "prompt_toolkit",
        "asyncio",
        "aiohttp",
        "ruamel.yaml",
        "argparse",
        "termios",
        "tree_sitter",
    }
    assert not heavy & set(eval(modules))


def test_a_line_is_cut_to_columns_not_to_characters():
    assert screen.clip("plain", 5) == "plain"
    assert screen.clip("plainly", 5) == "plai…"
    assert screen.clip("日本語", 6) == "日本語"
    assert screen.clip("日本語です", 6) == "日本…"
    assert screen.clip("e\u0301te\u0301", 3) == "e\u0301te\u0301"


def test_text_for_a_terminal_keeps_its_lines_and_loses_what_steers():
    assert screen.harmless("a\tb\r\nc\rd\ne") == "a\tb\nc\nd\ne"
    assert screen.harmless("\x1b[31m\x9bred\x07\u202e") == "\ufffd[31m\ufffdred\ufffd\ufffd"


# -- options ---------------------------------------------------------------------

COMMAND_LINES = [
    "",
    "-z hi",
    "-z -c",
    "-z hi -c",
    "-c -z hi",
    "-c name -z hi",
    "-z hi --continue=name",
    "-z hi -r latest -m model --provider openai --max-turns 3 --yolo",
    "-z hi --base-url=http://x/v1 --usage-file u.json",
    "chat -q hi -Q --format stream-json",
    "-m model chat -q hi",
    "-m model chat -m other --query-file -",
    "chat --script s.json",
    "-r id",
]


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_the_fast_reading_and_click_read_a_command_line_alike(line: str, monkeypatch: pytest.MonkeyPatch):
    asked: list[options.Request] = []
    monkeypatch.setattr(start, "converse", lambda request: asked.append(request) or 0)
    click_app.run(line.split())
    assert asked == [options.parse(line.split())]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("-z", "requires an argument"),
        ("--max-turns 0 -z hi", "x>=1"),
        ("--bogus", "No such option"),
        ("bogus", "No such command"),
        ("-z hi -r a -c", "-r and -c"),
        ("chat -q a --query-file b", "-q and --query-file"),
        ("chat -q a --format xml", "xml"),
        ("chat --format stream-json", "needs a message"),
        ("chat -Q", "-Q needs"),
        ("-z hi --script s --base-url http://x", "--script"),
        ("-z hi --provider nowhere", "nowhere"),
        ("--yolo sessions list", "--yolo"),
        ("-r= ", "empty"),
        ("--usage-file f", "--usage-file needs"),
        ("chat --query-file /no/such/file", "/no/such/file"),
        ("sessions show", "Missing argument"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(hermes: Hermes, line: str, says: str):
    done = hermes.run(*line.replace("-r= ", "--resume=").split(" "))
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert says in done.err
    assert hermes.sessions() == []


def test_an_empty_message_is_refused(hermes: Hermes):
    assert hermes.run("-z", " ").code == 2
    assert hermes.run("chat", "--query-file", "-", stdin=b"\n").code == 2
    assert hermes.sessions() == []


# -- one message -------------------------------------------------------------------


def test_a_one_shot_prints_only_the_final_text(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([calls(call("todo", {}), content="let me see"), text("the answer", chunks=3)])
    done = hermes.run("-z", "the question")
    assert (done.code, done.out, done.err) == (0, "the answer\n", "")
    assert fake.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert fake.requests[0].body["model"] == "fake-model"
    assert fake.requests[0].body["messages"][-1] == {"role": "user", "content": "the question"}


def test_a_query_shows_the_work_on_standard_error_and_the_answer_on_standard_output(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([calls(call("read_file", {"path": "nothing.txt"}), content="let me see"), text("the answer")])
    done = hermes.run("chat", "-q", "the question")
    assert (done.code, done.out) == (0, "the answer\n")
    assert "let me see\n" in done.err
    assert "✗ read_file  nothing.txt" in done.err
    assert f"resume with: hermes -r {hermes.session()}" in done.err
    assert "\x1b" not in done.err + done.out


def test_the_message_may_come_from_a_file_or_from_standard_input(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([text("one"), text("two")])
    (hermes.cwd / "message.txt").write_text("$HOME `id`\nsecond line\n")
    assert hermes.run("chat", "-Q", "--query-file", "message.txt").out == "one\n"
    assert fake.wire[-1]["content"] == "$HOME `id`\nsecond line"
    assert hermes.run("chat", "-Q", "--query-file", "-", stdin="grüße\n".encode()).out == "two\n"
    assert fake.wire[-1]["content"] == "grüße"


def test_any_bytes_may_be_asked_and_any_locale_may_be_answered(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([text("wörld ✓ \ud800")])
    done = hermes.run("-z", b"caf\xe9 \xff", env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    assert done.out.startswith("w\\xf6rld")


def test_a_retry_is_a_notice_and_not_part_of_the_answer(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([error(429, "slow down", headers={"Retry-After": "0.1"}), text("here")])
    done = hermes.run("-z", "hi")
    assert (done.code, done.out) == (0, "here\n")
    assert "slow down" in done.err


def test_what_nobody_allowed_is_told_on_standard_error(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([calls(call("terminal", {"command": "touch made"})), text("I could not")])
    done = hermes.run("-z", "make it")
    assert (done.code, done.out) == (0, "I could not\n")
    assert done.err.count("\n") == 1
    assert "touch made" in done.err
    assert "approval" in done.err
    assert not (hermes.cwd / "made").exists()


def test_yolo_runs_commands_without_asking(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([calls(call("terminal", {"command": "touch made"})), text("made")])
    assert hermes.run("-z", "make it", "--yolo").out == "made\n"
    assert (hermes.cwd / "made").exists()


def test_max_turns_ends_the_turn_with_a_reason(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([calls(call("todo", {})) for _ in range(3)])
    done = hermes.run("-z", "hi", "--max-turns", "2")
    assert (done.code, done.out) == (1, "")
    assert "--max-turns" in done.err
    assert len(fake.requests) == 2


# -- sessions ------------------------------------------------------------------------


def test_a_resumed_session_puts_its_first_turn_on_the_wire_with_its_own_model(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([text("noted"), text("42"), text("again 42")])
    assert hermes.run("-z", "remember 42", "-m", "first-model").code == 0
    session = hermes.session()
    assert hermes.run("-z", "what number?", "-r", session).out == "42\n"
    assert fake.requests[1].body["model"] == "first-model"
    said = [(row["role"], row["content"]) for row in fake.wire if row["role"] != "system"]
    assert said == [("user", "remember 42"), ("assistant", "noted"), ("user", "what number?")]
    assert len(hermes.messages(session)) == 4
    assert hermes.run("-z", "and now?", "-c", "-m", "other-model").code == 0
    assert fake.requests[2].body["model"] == "other-model"
    assert len(hermes.sessions()) == 1


def test_a_session_goes_on_where_its_command_line_had_put_it(hermes: Hermes, fake: FakeOpenAI, tmp_path: Path):
    """The endpoint and the folder of the first run hold for `-r` alone, typed elsewhere."""
    url = hermes.variables.pop("OPENAI_BASE_URL")
    fake.extend([text("one"), calls(call("terminal", {"command": "pwd"})), text("two")])
    assert hermes.run("-z", "hi", "--base-url", url).code == 0
    folder, hermes.cwd = hermes.cwd, tmp_path
    done = hermes.run("-z", "where?", "-r", "latest")
    assert (done.code, done.out) == (0, "two\n")
    assert str(folder) in done.err
    assert json.loads(fake.wire[-1]["content"])["output"] == f"{folder}\n"
    assert fake.wire[0] == fake.requests[0].body["messages"][0]


def test_a_session_answers_to_its_title_and_to_the_beginning_of_its_id(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([text("one"), text("two"), text("three")])
    hermes.run("-z", "hi")
    session = hermes.session()
    with SessionDB(hermes.home / "state.db") as db:
        db.set_session_title(session, "My Work")
    assert hermes.run("-z", "a", "-c", "My Work").code == 0
    assert hermes.run("-z", "b", "-r", session[:-2]).code == 0
    assert len(hermes.messages(session)) == 6


@pytest.mark.parametrize("flags", [("-r", "nope"), ("-r", "latest"), ("-c",), ("-c", "nope")])
def test_an_unknown_session_fails_and_makes_nothing(hermes: Hermes, fake: FakeOpenAI, flags: tuple[str, ...]):
    for command in (("-z", "hi"), ("chat", "-q", "hi"), ("chat",), ("chat", "-Q")):
        done = hermes.run(*command, *flags)
        assert (done.code, done.out) == (2, "")
        assert done.err.count("\n") == 1
    assert not (hermes.home / "state.db").exists()
    assert fake.requests == []


def test_an_unknown_or_ambiguous_name_leaves_a_filled_store_as_it_is(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([text("one"), text("two")])
    hermes.run("-z", "a")
    hermes.run("-z", "b")
    before = hermes.sessions()
    unknown, ambiguous = hermes.run("-z", "hi", "-r", "nope"), hermes.run("-z", "hi", "-r", hermes.session()[:4])
    assert (unknown.code, ambiguous.code) == (2, 2)
    assert "nope" in unknown.err
    assert all(session["id"] in ambiguous.err for session in before)
    assert hermes.sessions() == before


def test_the_same_message_after_a_failed_turn_is_on_the_wire_once_more_only(hermes: Hermes, fake: FakeOpenAI):
    hermes.config("agent: {api_max_retries: 1}\n")
    fake.extend([error(500), text("better")])
    assert hermes.run("-z", "try this").code == 1
    assert hermes.run("-z", "try this", "-c").out == "better\n"
    roles = [row["role"] for row in fake.wire if row["role"] != "system"]
    assert roles in (["user"], ["user", "assistant", "user"])


def test_the_list_and_the_transcript_say_what_happened(hermes: Hermes, fake: FakeOpenAI):
    empty = hermes.run("sessions", "list")
    assert (empty.code, empty.out.count("\n")) == (0, 1)
    assert json.loads(hermes.run("sessions", "list", "--format", "json").out) == []
    assert hermes.run("sessions", "show", "latest").code == 2
    assert not hermes.home.exists()

    fake.extend(
        [calls(call("read_file", {"path": "nothing.txt"}), content="I look"), text("no file"), error(401, "bad key")]
    )
    hermes.run("-z", "read it")
    hermes.run("-z", "and now?", "-c")
    session = hermes.session()
    listed = hermes.run("sessions", "list").out
    assert session in listed
    assert "read it" in listed
    shown = hermes.run("sessions", "show", session[:-1]).out
    places = [
        shown.index(part)
        for part in ("read it", "I look", "→ read_file  nothing.txt", "[read_file]", "no file", "and now?")
    ]
    assert places == sorted(places)
    assert shown.rstrip().endswith("— the turn ended without an answer: auth. Check the API key.")
    document = json.loads(hermes.run("sessions", "show", "latest", "--format", "json").out)
    assert [row["role"] for row in document["messages"]] == ["user", "assistant", "tool", "assistant", "user"]
    assert document["messages"][-1]["turn_outcome"] == "auth"
    assert hermes.run("sessions", "show", "nope").code == 2
