"""The process is killed at any instant: what was shown is kept, nothing runs twice, and the session goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_agent.testing.fake_openai import call, calls, hold, raw_sse, text
from tests.acceptance.hermes import Done, wait_for
from tests.acceptance.world import Run, World, contents, roles

AT_ONCE = 15.0
"""Seconds, on a busy machine too; a lease that must run out lasts twice as long."""
WAYS = ["query", "continue", "finish"]
"""How a killed session is used again: a new message by id, a new message to the latest, only finishing it."""


def go_on(world: World, session: str, way: str) -> Done:
    """Use the session again; the model's next answers are `finished` and, to a new message, `continued`."""
    world.fake.extend([text("finished")])
    if way == "finish":
        done = world.run("chat", "-r", session, "-Q", "--yolo")
        assert done.out == "finished\n"
    else:
        world.fake.extend([text("continued")])
        flags = ("-r", session) if way == "query" else ("-c",)
        done = world.run("chat", *flags, "-Q", "-q", "continue", "--yolo")
        assert done.out == "continued\n"
    assert done.code == 0, done.err
    assert "interrupted" in done.err
    return done


def session_of(world: World) -> str:
    return world.hermes.session()


# -- in a model call -------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_kill_in_a_held_answer_loses_no_turn_that_was_finished(world: World, way: str):
    held = hold("half an ans")
    for number in (1, 2, 3):
        world.fake.extend([world.witness(f"w{number}", content=f"step {number}"), text(f"answer {number}")])
    world.fake.extend([held])
    with world.start("chat", "--yolo") as run:
        run.send("ask 1", "ask 2", "ask 3", "ask 4")
        assert held.reached.wait(30)
        run.kill()
        assert run.end().out == "answer 1\nanswer 2\nanswer 3\n"
    session = session_of(world)
    before = world.show(session)["messages"]
    assert roles(before) == "ucta" * 3 + "u"

    go_on(world, session, way)
    if way == "finish":
        again = world.run("chat", "-r", session, "-Q")
        assert (again.code, again.out) == (0, "")
    stored = world.check(session)
    assert stored[: len(before)] == before
    assert contents(stored, "user") == [f"ask {number}" for number in (1, 2, 3, 4)] + ["continue"] * (way != "finish")
    assert [row["content"] for row in stored if row.get("tool_calls")] == ["step 1", "step 2", "step 3"]
    assert "half an ans" not in str(stored)
    assert [world.times(f"w{number}") for number in (1, 2, 3)] == [1, 1, 1]


def test_a_turn_that_is_killed_again_and_again_is_given_up_and_the_session_goes_on(world: World):
    """Three crashes in one turn are enough; its message stays, and the next one gets its answer."""
    holds = [hold() for _ in range(4)]
    world.fake.extend(holds)
    for number, held in enumerate(holds):
        flags = ("-z", "poison") if number == 0 else ("chat", "-c", "-Q")
        with world.start(*flags) as run:
            assert held.reached.wait(30)
            run.kill()
    gave_up = world.run("chat", "-c", "-Q")
    assert (gave_up.code, gave_up.out) == (1, "")
    assert len(world.fake.requests) == 4
    assert roles(world.check()) == "u"


@pytest.mark.parametrize(("number", "form"), [(signal.SIGKILL, "text"), (signal.SIGTERM, "stream-json")])
def test_an_answer_that_was_printed_is_kept(world: World, number: signal.Signals, form: str):
    """The end comes right after the client has the whole answer, five times in one session."""
    for cycle in range(5):
        world.fake.extend([text(f"answer {cycle}", chunks=3)])
        flags = ("-c",) if cycle else ()
        with world.start("chat", "-Q", "-q", f"ask {cycle}", "--format", form, *flags) as run:
            if form == "text":
                assert run.line() == f"answer {cycle}\n"
            else:
                assert run.event("message")["text"] == f"answer {cycle}"
            run.signal(number)
            assert run.end().code in ({-number} if number == signal.SIGKILL else {0, 130, -number})
        assert len(world.fake.requests) == cycle + 1
    stored = world.check()
    assert contents(stored, "user") == [f"ask {cycle}" for cycle in range(5)]
    assert contents(stored, "assistant") == [f"answer {cycle}" for cycle in range(5)]


# -- in a tool ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "effect", "how"),
    [("query", 0, {"before": 60}), *((way, 1, {"after": 60}) for way in WAYS)],
    ids=["query before", *(f"{way} after" for way in WAYS)],
)
def test_a_kill_in_a_command_never_runs_it_again_and_says_that_its_effect_is_unknown(
    world: World, way: str, effect: int, how: dict[str, float]
):
    world.fake.extend([world.witness("w", content="I begin", **how)])
    with world.start("-z", "do it", "--yolo") as run:
        world.wait_for_command("w")
        wait_for(lambda: world.times("w") == effect)
        run.kill()
    session = session_of(world)
    assert roles(world.show(session)["messages"]) == "uc"

    go_on(world, session, way)
    told = world.fake.requests[1].body["messages"]
    assert told[-1]["role"] == "tool"
    assert "may have taken effect" in told[-1]["content"]
    assert "inspect" in told[-1]["content"]
    stored = world.check(session)
    assert roles(stored) == ("ucta" if way == "finish" else "uctaua")
    assert stored[2]["effect_disposition"] == "unknown"
    assert world.times("w") == effect
    assert world.look()["calls"] == [["unknown", "terminal", "unsafe"]]


def test_of_three_calls_each_is_settled_by_what_is_known_of_it(world: World):
    """The first has its result, the second may have run, the third has not: it runs now, the others never again."""
    commands = [world.command("a"), world.command("b", after=60), world.command("c")]
    world.fake.extend([calls(*(call("terminal", {"command": command}) for command in commands))])
    with world.start("-z", "all three", "--yolo") as run:
        wait_for(lambda: world.times("b") == 1)
        run.kill()
    go_on(world, session_of(world), "finish")
    results = contents(world.wire, "tool")
    assert ["did a" in results[0], "may have taken effect" in results[1], "did c" in results[2]] == [True] * 3
    assert roles(world.check()) == "ucttta"
    assert [world.times(name) for name in "abc"] == [1, 1, 1]


def test_a_kill_while_a_killed_turn_is_finished_is_a_kill_like_any_other(world: World):
    commands = [world.command("a", after=60), world.command("b", after=60), world.command("c")]
    world.fake.extend([calls(*(call("terminal", {"command": command}) for command in commands))])
    with world.start("-z", "all three", "--yolo") as run:
        wait_for(lambda: world.times("a") == 1)
        run.kill()
    with world.start("chat", "-c", "-Q", "--yolo") as run:
        wait_for(lambda: world.times("b") == 1)
        run.kill()
    go_on(world, session_of(world), "query")
    results = contents(world.wire, "tool")
    assert ["may have taken effect" in result for result in results] == [True, True, False]
    assert roles(world.check()) == "uctttaua"
    assert [world.times(name) for name in "abc"] == [1, 1, 1]


def test_a_call_that_had_not_begun_needs_its_permission_after_the_restart_too(world: World):
    commands = [world.command("a", after=60), world.command("b")]
    world.fake.extend([calls(*(call("terminal", {"command": command}) for command in commands)), text("finished")])
    with world.start("-z", "both", "--yolo") as run:
        wait_for(lambda: world.times("a") == 1)
        run.kill()
    done = world.run("chat", "-c", "-Q")
    assert (done.code, done.out) == (0, "finished\n")
    world.check()
    assert [world.times(name) for name in "ab"] == [1, 0]


def test_a_call_that_only_reads_runs_again(world: World):
    pipe = world.hermes.cwd / "pipe"
    os.mkfifo(pipe)
    world.fake.extend([calls(call("terminal", {"command": "cat pipe"})), text("finished")])
    with world.start("-z", "read it") as run:
        writer = wait_for_reader(pipe)
        run.kill()
        os.close(writer)
        wait_for(lambda: not is_read(pipe))  # the command, which outlived the kill, has seen the end
    with world.start("chat", "-c", "-Q") as run:
        writer = wait_for_reader(pipe)
        os.write(writer, b"what is in the pipe")
        os.close(writer)
        assert run.line() == "finished\n"
        assert run.end().code == 0
    assert "what is in the pipe" in world.wire[-1]["content"]
    assert roles(world.check()) == "ucta"
    assert world.look()["calls"] == [["done", "terminal", "pure"]]


def open_for_reader(pipe: Path) -> int | None:
    """Open a named pipe for writing, if somebody reads it."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def is_read(pipe: Path) -> bool:
    writer = open_for_reader(pipe)
    if writer is not None:
        os.close(writer)
    return writer is not None


def wait_for_reader(pipe: Path) -> int:
    """Open a named pipe for writing as soon as somebody reads it."""
    opened: list[int | None] = [None]

    def tried() -> bool:
        opened[0] = open_for_reader(pipe)
        return opened[0] is not None

    wait_for(tried)
    assert opened[0] is not None
    return opened[0]


# -- between tools -----------------------------------------------------------------------


@pytest.mark.parametrize(("way", "together"), [("query", False), ("continue", True), ("finish", False)])
def test_results_that_were_saved_are_on_the_wire_after_the_restart(world: World, way: str, together: bool):
    held = hold("so far so")
    wanted = [call("terminal", {"command": world.command(name, output=f"secret {name}")}) for name in "abc"]
    world.fake.extend([calls(*wanted)] if together else [calls(one) for one in wanted])
    world.fake.extend([held])
    with world.start("-z", "three steps", "--yolo") as run:
        assert held.reached.wait(30)
        run.kill()
    go_on(world, session_of(world), way)
    before = world.fake.requests[-1].body["messages"]
    results = contents(before, "tool")
    assert len(results) == 3
    assert all(f"secret {name}" in result for name, result in zip("abc", results, strict=True))
    stored = world.check()
    assert roles(stored).startswith("ucttta" if together else "uctctcta")
    assert {state for state, *_ in world.look()["calls"]} == {"done"}
    assert [world.times(name) for name in "abc"] == [1, 1, 1]


def test_a_kill_in_an_answer_that_broke_off_before_asks_again(world: World):
    """A call that the killed process never received whole has left nothing."""
    begun = {"index": 0, "id": "c", "function": {"name": "terminal", "arguments": '{"comm'}}
    deltas = [{"content": "I do"}, {"tool_calls": [begun]}]
    half = ["data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}) + "\n\n" for delta in deltas]
    held = hold()
    world.fake.extend([raw_sse(half, cut=True), held])
    with world.start("-z", "do it", "--yolo") as run:
        assert held.reached.wait(30)
        run.kill()
    go_on(world, session_of(world), "finish")
    assert roles(world.check()) == "ua"


# -- the dead owner ------------------------------------------------------------------------

_GIVE_AWAY = """
import apsw, sys
path, pid, start = sys.argv[1:]
conn = apsw.Connection(path)
conn.set_busy_timeout(10_000)
for table in ("session_leases", "turns"):
    for (owner,) in conn.execute(f"SELECT owner FROM {table}").fetchall():
        boot, namespace, old, began = owner.split("|")
        conn.execute(f"UPDATE {table} SET owner = ?", ("|".join((boot, namespace, pid, start or began)),))
"""


def give_away(world: World, pid: int, start: str = "") -> None:
    """Write the lease to the process `pid`; without `start` it keeps the start time of the one that held it."""
    store = str(world.hermes.home / "state.db")
    subprocess.run([sys.executable, "-c", _GIVE_AWAY, store, str(pid), start], check=True)


def killed(world: World) -> Run:
    """A process that was killed in a turn, and is still a zombie."""
    held = hold()
    world.fake.extend([held])
    run = world.start("-z", "first")
    assert held.reached.wait(30)
    run.kill()
    return run


@contextlib.contextmanager
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A live process that has nothing to do with hermes."""
    with subprocess.Popen(["sleep", "300"]) as process:
        try:
            yield process
        finally:
            process.kill()


def start_time(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
        return stat.read().rpartition(")")[2].split()[19]


def test_the_session_of_a_killed_process_is_free_at_once_even_while_it_is_a_zombie(world: World):
    with killed(world):
        begun = time.monotonic()
        go_on(world, "latest", "query")
        assert time.monotonic() - begun < AT_ONCE
        assert contents(world.check(), "user") == ["first", "continue"]


def test_an_unrelated_process_that_got_the_pid_of_a_dead_owner_holds_nothing(world: World):
    with killed(world), stranger() as other:
        give_away(world, other.pid)
        begun = time.monotonic()
        go_on(world, "latest", "continue")
        assert time.monotonic() - begun < AT_ONCE
    assert contents(world.check(), "user") == ["first", "continue"]


def test_a_live_owner_is_waited_for_and_its_death_is_noticed(world: World):
    with killed(world), stranger() as other:
        give_away(world, other.pid, start_time(other.pid))
        world.fake.extend([text("finished"), text("continued")])
        with world.start("chat", "-c", "-Q", "-q", "continue") as waiting:
            assert f"process {other.pid}" in waiting.complaint("waits")
            assert len(world.fake.requests) == 1
            other.kill()
            other.wait()
            begun = time.monotonic()
            assert waiting.line() == "continued\n"
            assert time.monotonic() - begun < AT_ONCE
            assert waiting.end().code == 0
    assert contents(world.check(), "user") == ["first", "continue"]


# -- going on without a crash ----------------------------------------------------------------


def test_a_message_to_a_resumed_session_is_on_the_wire_once(world: World):
    world.fake.extend([text("one"), text("two"), text("three")])
    world.run("-z", "remember 42", "-m", "first-model")
    session = session_of(world)
    for flags in (("-r", session), ("-c",)):
        before = world.show(session)["messages"]
        assert world.run("-z", "hi", *flags).code == 0
        assert contents(world.wire, "user").count("hi") == len(before) // 2
        assert len(world.show(session)["messages"]) == len(before) + 2
    assert {request.body["model"] for request in world.fake.requests} == {"first-model"}
    assert contents(world.check(session), "user") == ["remember 42", "hi", "hi"]
    assert len(world.hermes.sessions()) == 1


def test_a_session_that_is_not_there_is_a_mistake_and_makes_none(world: World):
    for flags in (("-r", "nope"), ("-c",)):
        done = world.run("-z", "hi", *flags)
        assert (done.code, done.out) == (2, "")
        assert not world.hermes.home.exists()
    world.fake.extend([text("one")])
    assert world.run("-z", "hi").code == 0
    for flags in (("-r", "nope"), ("-c", "nope")):
        done = world.run("-z", "again", *flags)
        assert (done.code, done.out) == (2, "")
        assert "nope" in done.err
    assert len(world.fake.requests) == len(world.hermes.sessions()) == 1
    assert roles(world.check()) == "ua"
