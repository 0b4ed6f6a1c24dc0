"""Several processes write one session at the same time: whole turns alternate, nothing is lost, doubled or mixed."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import pytest

from hermes_agent.testing.fake_openai import call, calls, delay, error, hold, text
from hermes_agent.testing.replies import Item
from tests.acceptance.world import Row, World, contents, matches_wire, roles, spoken

SECONDS = 0.1
"""How long the model takes."""


def echo(body: dict[str, Any]) -> Item:
    """Answer the last message; a message that says `use a tool` gets a call first."""
    last = body["messages"][-1]
    if last["role"] == "user" and "use a tool" in last["content"]:
        return delay(SECONDS, calls(call("terminal", {"command": f"echo '{last['content']}' >> witness"})))
    asked = contents(body["messages"], "user")[-1]
    return delay(SECONDS, text(f"re: {asked}"))


def turns(stored: Iterable[Row]) -> list[list[Row]]:
    """The rows, cut before each user row."""
    found: list[list[Row]] = []
    for row in stored:
        if row["role"] == "user":
            found.append([])
        found[-1].append(row)
    return found


def check_whole_turns(world: World, stored: list[Row], said: Iterable[list[str]]) -> None:
    """Each message is one whole turn with its own answer, and each sender's messages are in its order."""
    cut = turns(stored)
    for turn in cut:
        asked = turn[0]["content"]
        assert turn[-1]["content"] == f"re: {asked}"
        assert roles(turn) == ("ucta" if "use a tool" in asked else "ua")
    order = [turn[0]["content"] for turn in cut]
    for messages in said:
        assert [asked for asked in order if asked in messages] == messages
    assert sorted(order) == sorted(asked for messages in said for asked in messages)
    # One turn's requests came without another one's between them, each with all the turns before it.
    users = [contents(request.body["messages"], "user") for request in world.fake.requests[:-1]]
    assert users == sorted(users, key=len)
    for request in world.fake.requests[:-1]:
        wire = spoken(request.body["messages"])
        assert matches_wire(stored[: len(wire)], wire)


def test_two_conversations_in_one_session_take_turns(world: World):
    world.fake.extend([echo] * 25)
    assert world.run("-z", "begin").code == 0
    said = [[f"{name}{number}" + " use a tool" * (number % 5 == 4) for number in range(10)] for name in "ab"]
    with ExitStack() as stack:
        runs = [stack.enter_context(world.start("chat", "-c", "--yolo")) for _ in said]
        for run, messages in zip(runs, said, strict=True):
            run.send(*messages)
        for run, messages in zip(runs, said, strict=True):
            done = run.end()
            assert (done.code, done.out.splitlines()) == (0, [f"re: {asked}" for asked in messages]), done.err
    assert len(world.fake.requests) == 1 + 20 + 4
    stored = world.check()
    check_whole_turns(world, stored, [["begin"], *said])
    assert sorted((world.hermes.cwd / "witness").read_text().splitlines()) == sorted(
        asked for messages in said for asked in messages if "use a tool" in asked
    )
    assert len(world.hermes.sessions()) == 1


def test_one_shots_to_one_session_at_the_same_time_are_whole_turns(world: World):
    world.fake.extend([echo] * 9)
    assert world.run("-z", "begin").code == 0
    said = [f"{number}" + " use a tool" * (number % 3 == 2) for number in range(6)]
    with ExitStack() as stack:
        runs = [stack.enter_context(world.start("-z", asked, "-c", "--yolo")) for asked in said]
        for run, asked in zip(runs, said, strict=True):
            done = run.end()
            assert (done.code, done.out) == (0, f"re: {asked}\n"), done.err
    check_whole_turns(world, world.check(), [["begin"], *([asked] for asked in said)])
    assert len(world.hermes.sessions()) == 1


def test_lines_that_come_while_a_turn_runs_reach_the_model_once_each_in_order(world: World):
    held = hold("", text("re: m1"))
    world.fake.extend([held, echo, echo, echo, echo])
    said = [f"m{number}" for number in range(1, 6)]
    with world.start("chat") as run:
        run.send("m1")
        assert held.reached.wait(30)
        run.send(*said[1:])
        held.release()
        done = run.end()
        assert (done.code, done.out.splitlines()) == (0, [f"re: {asked}" for asked in said])
    check_whole_turns(world, world.check(), [said])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_message_whose_sender_dies_while_it_waits_is_run_once_and_one_that_was_withdrawn_never(
    world: World, number: signal.Signals
):
    held = hold("", text("re: first"))
    world.fake.extend([held, echo] if number == signal.SIGINT else [held, echo, echo])
    with world.start("-z", "first") as first:
        assert held.reached.wait(30)
        with world.start("-z", "second", "-c") as second, world.start("-z", "third", "-c") as third:
            second.complaint("waits")
            third.complaint("waits")
            second.signal(number)
            assert second.end().code == (130 if number == signal.SIGINT else -number)
            held.release()
            assert first.end().out == "re: first\n"
            assert third.end().out == "re: third\n"
    said = ["first", "second", "third"] if number == signal.SIGKILL else ["first", "third"]
    check_whole_turns(world, world.check(), [[asked] for asked in said])


def test_finishing_a_session_that_a_live_process_uses_is_refused_and_changes_nothing(world: World):
    held = hold("", text("re: first"))
    world.fake.extend([held])
    with world.start("-z", "first") as first:
        assert held.reached.wait(30)
        done = world.run("chat", "-c", "-Q")
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
        assert f"process {first.pid}" in done.err
        held.release()
        assert first.end().code == 0
    check_whole_turns(world, world.check(), [["first"]])


# -- the same message again ----------------------------------------------------------------


def test_the_same_message_after_failed_turns_stands_alone_at_the_end_of_the_wire(world: World):
    """Two turns fail; between user rows stands a note in the assistant's name, and store and wire agree."""
    world.hermes.config("agent: {api_max_retries: 1}\n")
    world.fake.extend([text("one"), error(500), error(401), text("better")])
    for asked, code in (("begin", 0), ("try this", 1), ("try this", 1), ("try this", 0)):
        flags = ("-c",) if world.fake.requests else ()
        assert world.run("-z", asked, *flags).code == code
    tail = world.wire[2:]
    assert roles(tail) in ("u", "uauau")
    assert tail[-1]["content"] == "try this"
    assert all(re.fullmatch(r"\[no answer was given here: .*\]", note) for note in contents(tail, "assistant"))
    stored = world.check()
    assert roles(stored) == "ua" + "u" * len(contents(tail, "user")) + "a"


def test_a_turn_that_succeeds_after_retries_asks_once(world: World):
    world.fake.extend([error(500, headers={"Retry-After": "0.05"}, times=2), text("here")])
    done = world.run("-z", "try this")
    assert (done.code, done.out) == (0, "here\n")
    assert {str(spoken(request.body["messages"])) for request in world.fake.requests} == {str(world.wire)}
    assert roles(world.check()) == "ua"
