"""The command as a process: what it prints where, how it ends, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hermes_agent.cli import app as click_app
from hermes_agent.cli import options, screen, start
from hermes_agent.store.session_db import SessionDB
from hermes_agent.testing.fake_openai import FakeOpenAI, call, calls, delay, error, hold, raw_sse, text
from hermes_agent.version import VERSION
from tests.acceptance.hermes import COMMAND, KEY, Hermes, finish, wait_for


@pytest.fixture
def fake():
    with FakeOpenAI() as server:
        yield server
        assert server.violations == []


@pytest.fixture
def hermes(hermes_home: Path, fake: FakeOpenAI) -> Hermes:
    return Hermes(hermes_home, fake)


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


# -- stopping and going on -------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_slow_model_call_ends_the_turn_within_two_seconds(
    hermes: Hermes, fake: FakeOpenAI, number: signal.Signals
):
    held = hold("partial ")
    fake.extend([held, text("hello again")])
    process = hermes.start("-z", "hi")
    assert held.reached.wait(30)
    begun = time.monotonic()
    process.send_signal(number)
    done = finish(process)
    assert time.monotonic() - begun < 2
    assert done.code == 130
    assert done.err == f"stopped; resume with: hermes -r {hermes.session()}\n"
    assert hermes.run("-z", "go on", "-c").out == "hello again\n"
    assert fake.wire[-1]["content"] == "go on"


def test_a_signal_before_the_first_byte_of_the_answer_ends_the_turn_too(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([delay(5, text("late")), text("hello again")])
    process = hermes.start("-z", "hi")
    wait_for(lambda: fake.requests)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 130
    assert time.monotonic() - begun < 2
    assert hermes.run("-z", "go on", "-c").out == "hello again\n"


def test_a_signal_during_a_command_ends_it_and_the_turn_within_two_seconds(hermes: Hermes, fake: FakeOpenAI):
    fake.extend(
        [calls(call("terminal", {"command": "echo $$ > pid; sleep 300"}), content="running"), text("hello again")]
    )
    process = hermes.start("-z", "hi", "--yolo")
    pid = hermes.cwd / "pid"
    wait_for(lambda: pid.exists() and pid.read_text())
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert time.monotonic() - begun < 2
    assert done.code == 130
    assert "resume with: hermes -r " in done.err
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()
    assert hermes.run("-z", "go on", "-c").out == "hello again\n"


def test_a_second_signal_ends_the_process_at_once(hermes: Hermes, fake: FakeOpenAI):
    stubborn = "trap '' TERM; echo $$ > pid; sleep 300; sleep 300"
    fake.extend([calls(call("terminal", {"command": stubborn})), text("looked"), text("hello again")])
    process = hermes.start("-z", "hi", "--yolo")
    pid = hermes.cwd / "pid"
    wait_for(lambda: pid.exists() and pid.read_text())
    while process.poll() is None:  # signals of a kind that come together are one
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    done = finish(process)
    assert done.code == 130
    assert "ended at once; resume with: hermes -r " in done.err
    again = hermes.run("chat", "-c", "-Q")
    assert (again.code, again.out) == (0, "looked\n")
    assert "effect" in fake.wire[-1]["content"]


def test_a_killed_run_is_finished_when_its_session_is_next_used(hermes: Hermes, fake: FakeOpenAI):
    held = hold()
    fake.extend([calls(call("todo", {})), held, text("finished"), text("new answer")])
    process = hermes.start("-z", "long work")
    assert held.reached.wait(30)
    process.kill()
    finish(process)
    session = hermes.session()
    assert "hermes -r" in hermes.run("sessions", "show", session).out
    done = hermes.run("chat", "-r", session, "-Q")
    assert (done.code, done.out) == (0, "finished\n")
    assert "was interrupted" in done.err
    nothing = hermes.run("chat", "-r", session, "-Q")
    assert (nothing.code, nothing.out) == (0, "")
    assert "nothing is left to finish" in nothing.err
    assert [row["role"] for row in hermes.messages(session)] == ["user", "assistant", "tool", "assistant"]


def test_a_new_message_to_a_killed_session_comes_after_the_old_turn(hermes: Hermes, fake: FakeOpenAI):
    held = hold()
    fake.extend([held, text("finished"), text("new answer")])
    process = hermes.start("-z", "old")
    assert held.reached.wait(30)
    process.kill()
    finish(process)
    done = hermes.run("-z", "new", "-c")
    assert (done.code, done.out) == (0, "new answer\n")
    assert "is finished" in done.err
    contents = [row["content"] for row in hermes.messages(hermes.session())]
    assert contents == ["old", "finished", "new", "new answer"]


def test_a_message_to_a_busy_session_waits_and_says_so(hermes: Hermes, fake: FakeOpenAI):
    held = hold("first ", text("answer"))
    fake.extend([held, text("second answer")])
    one = hermes.start("-z", "first")
    assert held.reached.wait(30)
    two = hermes.start("-z", "second", "-c")
    assert two.stderr is not None
    notice = two.stderr.readline().decode()
    assert "waits" in notice
    held.release()
    assert finish(one).code == 0
    assert finish(two).out == "second answer\n"
    assert [row["content"] for row in hermes.messages(hermes.session())][::2] == ["first", "second"]


def test_a_message_that_waits_is_withdrawn_by_a_signal(hermes: Hermes, fake: FakeOpenAI):
    held = hold("first ", text("answer"))
    fake.extend([held])
    one = hermes.start("-z", "first")
    assert held.reached.wait(30)
    two = hermes.start("-z", "second", "-c")
    assert two.stderr is not None
    two.stderr.readline()
    two.send_signal(signal.SIGINT)
    assert finish(two).code == 130
    held.release()
    assert finish(one).code == 0
    assert len(hermes.messages(hermes.session())) == 2
    assert len(fake.requests) == 1


# -- failures ------------------------------------------------------------------------------


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


def test_a_full_disk_is_one_line_and_the_session_goes_on_when_there_is_room(hermes: Hermes, fake: FakeOpenAI):
    """A limit on the size of files stands for the full disk: the next row cannot be written."""
    fake.extend([text("noted"), text("x" * 50_000), text("there is room again")])
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
