"""The command that is stopped, killed or made to wait: it ends in time, and its session goes on."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hermes_agent.cli import conversation, options
from hermes_agent.cli.conversation import Conversation
from hermes_agent.cli.interrupts import Interrupts
from hermes_agent.cli.screen import Stream
from hermes_agent.cli.surface import Quiet
from hermes_agent.testing.fake_openai import FakeOpenAI, call, calls, delay, hold, text
from tests.acceptance.hermes import Hermes, finish, wait_for


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


def test_a_signal_before_the_turn_has_begun_is_not_lost(
    hermes: Hermes, fake: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
):
    for name, value in hermes.variables.items():
        monkeypatch.setenv(name, value)
    surface = Quiet(Stream(sys.stdout), Stream(sys.stderr))
    with (
        Interrupts() as interrupts,
        Conversation(options.Request(), conversation.load_settings(hermes.home), surface, interrupts) as talk,
    ):
        run_turn = talk.agent.run_conversation

        def stop_and_run(*arguments: Any, **fields: Any) -> Any:
            assert interrupts.stop is not None
            interrupts.stop(signal.SIGINT)
            return run_turn(*arguments, **fields)

        monkeypatch.setattr(talk.agent, "run_conversation", stop_and_run)
        result = talk.ask("hi")
    assert result["interrupted"]
    assert fake.requests == []


def test_a_signal_while_an_earlier_turn_is_finished_keeps_the_new_message_back(hermes: Hermes, fake: FakeOpenAI):
    first, second = hold(), hold()
    fake.extend([first, second, text("never")])
    process = hermes.start("-z", "old")
    assert first.reached.wait(30)
    process.kill()
    finish(process)
    process = hermes.start("-z", "new", "-c")
    assert second.reached.wait(30)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.code, done.out) == (130, "")
    assert "before the message was taken" in done.err
    assert [row["content"] for row in hermes.messages(hermes.session()) if row["role"] == "user"] == ["old"]


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


def test_a_signal_stops_the_finishing_of_an_earlier_turn(hermes: Hermes, fake: FakeOpenAI):
    first, second = hold(), hold()
    fake.extend([first, second])
    process = hermes.start("-z", "old")
    assert first.reached.wait(30)
    process.kill()
    finish(process)
    process = hermes.start("chat", "-c", "-Q")
    assert second.reached.wait(30)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.code, done.out) == (130, "")
    assert "stopped; resume with: hermes -r " in done.err
