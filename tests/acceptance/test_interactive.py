"""The conversation at a terminal, and the one that reads lines from a pipe."""

from __future__ import annotations

import signal
import termios
import time

import pytest

from hermes_agent.testing.fake_openai import FakeOpenAI, call, calls, error, hold, text
from tests.acceptance.hermes import PROMPT, Hermes, Terminal, wait_for

UNSAFE = calls(call("terminal", {"command": "touch made"}))
UP = "\x1b[A"
ALT_ENTER = "\x1b\r"
CTRL_C, CTRL_D = "\x03", "\x04"


def users(fake: FakeOpenAI) -> list[str]:
    """The user messages on the wire of the last request."""
    return [row["content"] for row in fake.wire if row["role"] == "user"]


def leave(terminal: Terminal) -> None:
    terminal.expect(PROMPT)
    terminal.type(CTRL_D)
    assert terminal.end() == 0


# -- at a terminal -------------------------------------------------------------------


def test_a_conversation_streams_its_answers_and_says_how_to_come_back(hermes: Hermes, fake: FakeOpenAI):
    held = hold("the beginning ", text("and the end"))
    fake.extend([held, text("second answer")])
    with hermes.terminal() as terminal:
        terminal.expect("fake-model · session ")
        terminal.expect(PROMPT)
        terminal.type("hello\r")
        terminal.expect("the beginning ")
        held.release()
        terminal.expect("and the end\n")
        terminal.expect(PROMPT)
        terminal.type("more\r")
        terminal.expect("second answer\n")
        leave(terminal)
        assert terminal.text.count("second answer") == 1
        assert f"resume with: hermes -r {hermes.session()}" in terminal.text
    assert users(fake) == ["hello", "more"]
    assert len(hermes.sessions()) == 1


def test_nothing_is_stored_before_the_first_message(hermes: Hermes):
    with hermes.terminal() as terminal:
        leave(terminal)
        assert "resume with" not in terminal.text
    assert hermes.sessions() == []


def test_a_resumed_conversation_goes_on_in_its_session(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([text("noted"), text("42")])
    hermes.run("-z", "remember 42")
    with hermes.terminal("-c") as terminal:
        terminal.expect("2 messages")
        terminal.expect(PROMPT)
        terminal.type("what number?\r")
        terminal.expect("42\n")
        leave(terminal)
    assert users(fake) == ["remember 42", "what number?"]


def test_tools_show_what_runs_and_how_it_ended(hermes: Hermes, fake: FakeOpenAI):
    go = hermes.cwd / "go"
    waits = calls(call("terminal", {"command": "until test -e go; do sleep 0.05; done; echo ok"}), content="I wait")
    fails = calls(call("terminal", {"command": "exit 3"}))
    fake.extend([waits, fails, text("done")])
    with hermes.terminal("--yolo") as terminal:
        terminal.expect(PROMPT)
        terminal.type("work\r")
        terminal.expect("I wait\n")
        terminal.expect("[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏] terminal  until test -e go")
        go.touch()
        terminal.expect(r"✓ terminal  until test -e go.*  \d+\.\d s\n")
        terminal.expect(r"✗ terminal  exit 3  \d+\.\d s  exit 3\n")
        terminal.expect("done\n")
        leave(terminal)


def test_a_message_of_several_lines_is_one_message(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([text("one"), text("two")])
    with hermes.terminal() as terminal:
        terminal.expect(PROMPT)
        terminal.type(f"first{ALT_ENTER}second\r")
        terminal.expect("one\n")
        terminal.expect(PROMPT)
        terminal.type("\x1b[200~pasted\nlines\x1b[201~\r")
        terminal.expect("two\n")
        leave(terminal)
    assert users(fake) == ["first\nsecond", "pasted\nlines"]


def test_what_was_typed_is_remembered_privately(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([text("one"), text("two")])
    with hermes.terminal() as terminal:
        terminal.expect(PROMPT)
        terminal.type("again please\r")
        terminal.expect("one\n")
        leave(terminal)
    assert (hermes.home / "history").stat().st_mode & 0o777 == 0o600
    with hermes.terminal() as terminal:
        terminal.expect(PROMPT)
        terminal.type(UP)
        terminal.expect("again please")
        terminal.type("\r")
        terminal.expect("two\n")
        leave(terminal)
    assert users(fake) == ["again please"]


def test_messages_typed_while_a_turn_runs_are_run_afterwards_each_once_in_order(hermes: Hermes, fake: FakeOpenAI):
    held = hold("wait ", text("for it"))
    fake.extend([held, text("answer 2"), text("answer 3"), text("answer 4")])
    with hermes.terminal() as terminal:
        terminal.expect(PROMPT)
        terminal.type("m1\r")
        terminal.expect("wait ")
        for message in ("m2", "m3", "m4"):
            terminal.type(f"{message}\r")
        held.release()
        for number in (2, 3, 4):
            terminal.expect(f"answer {number}\n")
        leave(terminal)
        assert "m2" not in terminal.text[: terminal.text.index("for it")]
    assert users(fake) == ["m1", "m2", "m3", "m4"]
    assert [row["content"] for row in hermes.messages(hermes.session())][::2] == ["m1", "m2", "m3", "m4"]


def test_ctrl_c_stops_the_turn_and_the_conversation_goes_on(hermes: Hermes, fake: FakeOpenAI):
    held = hold("half an answer")
    fake.extend([held, text("a new answer")])
    with hermes.terminal() as terminal:
        terminal.expect(PROMPT)
        terminal.type("hello\r")
        terminal.expect("half an answer")
        begun = time.monotonic()
        terminal.type(CTRL_C)
        terminal.expect("stopped; resume with: hermes -r ")
        assert time.monotonic() - begun < 2
        terminal.expect(PROMPT)
        terminal.type("go on\r")
        terminal.expect("a new answer\n")
        leave(terminal)
    assert users(fake)[-1] == "go on"


def test_ctrl_c_at_the_prompt_is_a_hint_and_no_end(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([text("fine")])
    with hermes.terminal() as terminal:
        terminal.expect(PROMPT)
        terminal.type(f"half{CTRL_C}")
        terminal.expect("Ctrl-D or /quit")
        terminal.expect(PROMPT)
        terminal.type("whole\r")
        terminal.expect("fine\n")
        leave(terminal)
    assert users(fake) == ["whole"]


def test_a_second_ctrl_c_ends_the_process_and_leaves_the_terminal_as_it_was(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([calls(call("terminal", {"command": "trap '' TERM; echo $$ > pid; sleep 300; sleep 300"}))])
    pid = hermes.cwd / "pid"
    with hermes.terminal("--yolo") as terminal:
        before = terminal.settings()
        terminal.expect(PROMPT)
        terminal.type("work\r")
        wait_for(lambda: pid.exists() and pid.read_text())
        while terminal.runs:  # signals of a kind that come together are one
            terminal.signal(signal.SIGINT)
            time.sleep(0.02)
        terminal.expect("ended at once; resume with: hermes -r ")
        assert terminal.end() == 130
        assert terminal.settings() == before
        assert before[3] & termios.ECHO


def test_a_request_to_end_at_the_prompt_ends_the_process(hermes: Hermes):
    with hermes.terminal() as terminal:
        terminal.expect(PROMPT)
        before = terminal.settings()
        terminal.signal(signal.SIGTERM)
        assert terminal.end() == 130
        assert "Traceback" not in terminal.text
        assert before[3] & termios.ECHO == 0
        assert terminal.settings()[3] & termios.ECHO


@pytest.mark.parametrize(
    ("keys", "runs"),
    [("o\r", True), ("yes\r", True), ("n\r", False), (CTRL_C, False), (CTRL_D, False), ("what\ro\r", True)],
)
def test_an_unsafe_command_runs_only_after_a_yes_to_exactly_it(hermes: Hermes, fake: FakeOpenAI, keys: str, runs: bool):
    fake.extend([UNSAFE, text("so be it")])
    with hermes.terminal() as terminal:
        terminal.expect(PROMPT)
        terminal.type("make it\r")
        terminal.expect("terminal wants to run\n")
        terminal.expect("      touch made\n")
        terminal.expect(r"\[o\]nce, \[s\]ession, \[n\]o\?")
        assert not (hermes.cwd / "made").exists()
        terminal.type(keys)
        terminal.expect("so be it\n")
        leave(terminal)
    assert (hermes.cwd / "made").exists() == runs


def test_silence_is_a_no(hermes: Hermes, fake: FakeOpenAI):
    hermes.config("approvals: {timeout: 0.3}\n")
    fake.extend([UNSAFE, text("so be it")])
    with hermes.terminal() as terminal:
        terminal.expect(PROMPT)
        terminal.type("make it\r")
        terminal.expect(r"\[n\]o\?")
        terminal.expect("so be it\n")
        leave(terminal)
    assert not (hermes.cwd / "made").exists()


def test_a_yes_for_the_session_is_not_asked_again(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([UNSAFE, UNSAFE, text("twice")])
    with hermes.terminal() as terminal:
        terminal.expect(PROMPT)
        terminal.type("make it\r")
        terminal.expect(r"\[n\]o\?")
        terminal.type("s\r")
        terminal.expect("twice\n")
        leave(terminal)
        assert terminal.text.count("wants to run") == 1


def test_what_was_typed_before_the_question_is_no_answer(hermes: Hermes, fake: FakeOpenAI):
    held = hold("", UNSAFE)
    fake.extend([held, text("refused")])
    with hermes.terminal() as terminal:
        terminal.expect(PROMPT)
        terminal.type("make it\r")
        terminal.expect("waiting for fake-model")
        terminal.type("o\r")
        held.release()
        terminal.expect(r"\[n\]o\?")
        terminal.type("n\r")
        terminal.expect("refused\n")
        leave(terminal)
    assert not (hermes.cwd / "made").exists()


def test_a_one_shot_at_a_terminal_may_ask(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([UNSAFE, text("made it")])
    with hermes.terminal("-z", "make it") as terminal:
        terminal.expect(r"\[n\]o\?")
        terminal.type("o\r")
        terminal.expect("made it\n")
        assert terminal.end() == 0
    assert (hermes.cwd / "made").exists()


def test_nothing_that_a_model_writes_steers_the_terminal(hermes: Hermes, fake: FakeOpenAI):
    evil = "\x1b]0;title\x07\x1b[2Jred\u202e"
    fake.extend([calls(call("terminal", {"command": f"touch made {evil}"}), content=evil), text(f"{evil} done")])
    with hermes.terminal() as terminal:
        terminal.expect(PROMPT)
        terminal.type("go\r")
        terminal.expect("<U\\+001B>")
        terminal.expect(r"\[n\]o\?")
        terminal.type("n\r")
        terminal.expect("done\n")
        leave(terminal)
        for forbidden in (b"\x1b]0", b"\x1b[2J", b"\x07", "\u202e".encode()):
            assert forbidden not in terminal.raw


def test_a_failure_is_a_line_and_the_conversation_goes_on(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([error(401, "bad key"), text("better")])
    with hermes.terminal() as terminal:
        terminal.expect(PROMPT)
        terminal.type("one\r")
        terminal.expect("✗ .*Check the API key")
        terminal.expect(PROMPT)
        terminal.type("two\r")
        terminal.expect("better\n")
        leave(terminal)


def test_commands_of_the_conversation_do_not_reach_the_model(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([text("one"), text("two"), text("a file")])
    with hermes.terminal() as terminal:
        terminal.expect(PROMPT)
        terminal.type("hello\r")
        terminal.expect("one\n")
        terminal.type("/help\r")
        terminal.expect("/new, /reset")
        terminal.type("/sessions\r")
        terminal.expect("just now .* hello")
        terminal.type("/bogus\r")
        terminal.expect("no command /bogus")
        terminal.type("/new\r")
        terminal.expect("session ")
        terminal.type("anew\r")
        terminal.expect("two\n")
        terminal.type("/etc/hosts is what?\r")
        terminal.expect("a file\n")
        terminal.type("/quit\r")
        assert terminal.end() == 0
    assert users(fake) == ["anew", "/etc/hosts is what?"]
    assert len(hermes.sessions()) == 2


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_plain_terminal_gets_plain_text(hermes: Hermes, fake: FakeOpenAI, env: dict[str, str]):
    fake.extend([calls(call("todo", {})), text("plain answer")])
    with hermes.terminal(env=env) as terminal:
        terminal.expect(PROMPT)
        terminal.type("hello\r")
        terminal.expect("✓ todo")
        terminal.expect("plain answer\n")
        leave(terminal)
        assert b"\x1b" not in terminal.raw


# -- lines from a pipe ------------------------------------------------------------------


def test_lines_from_a_pipe_are_run_one_after_the_other_each_once(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([text(f"answer {number}") for number in range(1, 5)])
    done = hermes.run(stdin=b"m1\n\nm2\nm3 \xff\nm4")
    assert (done.code, done.out) == (0, "answer 1\nanswer 2\nanswer 3\nanswer 4\n")
    assert users(fake) == ["m1", "m2", "m3 \ufffd", "m4"]
    assert len(hermes.sessions()) == 1


def test_a_line_that_fails_does_not_stop_the_next_ones_but_shows_in_the_exit_code(hermes: Hermes, fake: FakeOpenAI):
    fake.extend([error(401, "bad key"), text("better")])
    done = hermes.run("chat", stdin=b"m1\nm2\n")
    assert (done.code, done.out) == (1, "better\n")
    assert "Check the API key" in done.err


def test_a_killed_conversation_is_finished_as_soon_as_it_is_opened_again(hermes: Hermes, fake: FakeOpenAI):
    held = hold()
    fake.extend([held, text("finished")])
    process = hermes.start("-z", "long work")
    assert held.reached.wait(30)
    process.kill()
    process.communicate()
    done = hermes.run("-c")
    assert (done.code, done.out) == (0, "finished\n")
    assert "was interrupted" in done.err
