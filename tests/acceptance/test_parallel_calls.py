"""Calls of one reply: each has its own result, in call order, whichever ends first and whatever ids the model gives."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from hermes_agent.store.session_db import SessionDB
from hermes_agent.testing.fake_openai import call, calls, hold, text
from tests.acceptance.hermes import wait_for
from tests.acceptance.world import World, answered_once, contents, roles, sent, spoken

NAMES = ["a", "b", "c"]


def lines(world: World, file: str) -> list[str]:
    """The names of the calls that have begun or ended, in that order."""
    path = world.hermes.cwd / file
    return path.read_text().split() if path.exists() else []


def gates(world: World, names: Iterable[str]) -> dict[str, Path]:
    """Files that hold the calls of these names back as long as they are there."""
    found = {name: world.hermes.cwd / f"{name}.wait" for name in names}
    for gate in found.values():
        gate.touch()
    return found


@pytest.mark.parametrize("tool", ["look", "act"])
def test_the_order_in_which_calls_end_is_nowhere_to_be_seen(world: World, tool: str):
    """They run side by side and end in every possible order; each run sends and stores the same bytes."""
    orders = list(itertools.permutations(NAMES))
    sessions: list[list[str]] = []
    with world.start_with_tools("chat") as run:
        for order in orders:
            held = gates(world, NAMES)
            wanted = calls(*(call(tool, {"name": name}, id=f"call_{name}") for name in NAMES))
            world.fake.extend([wanted, text("done")])
            run.send("go", "/new")
            wait_for(lambda: len(lines(world, "begun")) == 3)
            for number, name in enumerate(order, 1):
                held[name].unlink()
                wait_for(lambda number=number: len(lines(world, "ended")) == number)
            assert run.line() == "done\n"
            assert tuple(lines(world, "ended")) == order
            (world.hermes.cwd / "begun").unlink()
            (world.hermes.cwd / "ended").unlink()
            sessions.append([json.dumps(row) for row in spoken(world.fake.wire)])
        run.end()
    assert sessions == [sessions[0]] * len(orders)
    rows = [json.loads(row) for row in sessions[0]]
    found = [(row["tool_call_id"], row["content"]) for row in rows[2:]]
    assert found == [(f"call_{name}", f"result of {name}") for name in NAMES]
    stored = world.hermes.sessions()
    assert len(stored) == len(orders)
    for session in stored:
        assert [sent(row) for row in world.hermes.messages(session["id"])[:-1]] == rows
    world.fake.requests.clear()
    world.check()


def test_a_result_behind_a_slower_call_survives_the_kill(world: World):
    """The first call runs when the process is killed, the second and third have ended: those are never run again."""
    held = gates(world, ["a"])
    world.fake.extend([calls(*(call("act", {"name": name}) for name in NAMES)), text("finished")])
    with world.start_with_tools("-z", "go") as run:
        wait_for(lambda: len(lines(world, "ended")) == 2)
        wait_for(lambda: [state for state, *_ in world.look()["calls"]] == ["started", "finished", "finished"])
        run.kill()
    held["a"].unlink()
    with world.start_with_tools("chat", "-c", "-Q") as run:
        assert run.line() == "finished\n"
        assert run.end().code == 0
    results = contents(world.wire, "tool")
    assert "may have taken effect" in results[0]
    assert results[1:] == ["result of b", "result of c"]
    assert sorted(lines(world, "begun")) == NAMES
    assert roles(world.check()) == "ucttta"


def test_any_number_of_calls_gets_as_many_results(world: World):
    """One fails and one returns nothing; both say so, and no other result is lost."""
    counts = [1, 3, 4, 8, 16, 40]
    expected: list[tuple[str, str]] = []
    with world.start_with_tools("chat") as run:
        for count in counts:
            names = [f"n{number}" for number in range(count)]
            names[count // 2] = "fails"
            names[-1] = "silent" if count > 1 else "fails"
            wanted = [call("act" if at % 3 else "look", {"name": name}) for at, name in enumerate(names)]
            world.fake.extend([calls(*wanted), text("done")])
            run.send(f"{count} calls")
            assert run.line() == "done\n"
            special = {"fails": "it failed", "silent": "no output"}
            expected += [(name, special.get(name, f"result of {name}")) for name in names]
        assert run.end().code == 0
    stored = world.check()
    assert roles(stored) == "".join("uc" + "t" * count + "a" for count in counts)
    results = contents(stored, "tool")
    assert len(results) == sum(counts)
    assert all(part in result for (_, part), result in zip(expected, results, strict=True))
    assert json.loads(results[0])["error"] == "it failed"
    assert sorted(lines(world, "begun")) == sorted(name for name, _ in expected)


def test_built_in_tools_run_side_by_side_and_give_every_result(world: World):
    files = [f"file{number}" for number in range(8)]
    for file in files[:-1]:
        (world.hermes.cwd / file).write_text(f"text of {file}\n")
    wanted = [
        *(call("read_file", {"path": file}) for file in files),
        call("terminal", {"command": "true"}),
        call("write_file", {"path": "made", "content": "x"}),
        call("read_file", {"path": "made"}),
        call("search_files", {"pattern": "text of file3"}),
    ]
    world.fake.extend([calls(*wanted), text("done")])
    assert world.run("-z", "go", "--yolo").out == "done\n"
    results = contents(world.wire, "tool")
    assert len(results) == len(wanted)
    assert all(f"text of {file}" in result for file, result in zip(files[:-1], results, strict=False))
    assert "error" in json.loads(results[7])
    assert json.loads(results[8])["exit_code"] == 0
    assert "1|x" in json.loads(results[10])["content"]
    assert "file3" in results[11]
    world.check()


@pytest.mark.parametrize("call_id", ["X", "", "no legal id/\u00e9"])
def test_a_model_that_gives_every_call_the_same_id_loses_no_result(world: World, call_id: str):
    """One after the other and twice in one reply; ids are made unique before anything runs."""
    wanted = [
        [call("write_file", {"path": "a", "content": "text a"}, id=call_id)],
        [call("write_file", {"path": "b", "content": "text b"}, id=call_id)],
        [call("read_file", {"path": "a"}, id=call_id)],
        [call("read_file", {"path": "b"}, id=call_id), call("read_file", {"path": "a"}, id=call_id)],
    ]
    held = hold()
    world.fake.extend([*(calls(*each) for each in wanted), held])
    with world.start("-z", "go", "--yolo") as run:
        assert held.reached.wait(30)
        run.kill()
    world.fake.extend([calls(call("read_file", {"path": "b"}, id=call_id)), text("done")])
    assert world.run("chat", "-c", "-Q", "--yolo").out == "done\n"
    results = contents(world.wire, "tool")
    assert ["text" in result and "error" not in result for result in results[2:]] == [True] * 4
    assert ["text b" in result for result in results[2:]] == [False, True, False, True]
    stored = world.check()
    answered_once(stored)
    assert roles(stored) == "uctctctcttcta"


def test_a_result_that_is_there_twice_is_sent_once(world: World):
    """Another program has added results of calls that were answered, and of calls that nobody made."""
    wanted = [call("todo", {}, id="c1"), call("todo", {}, id="c2")]
    world.fake.extend([calls(*wanted), text("done"), text("fine"), text("good")])
    world.run("-z", "go")
    session = world.hermes.session()
    answer = world.hermes.messages(session)[2]["content"]
    with SessionDB(world.hermes.home / "state.db") as db:
        for call_id in ("c1", "c2", "c1", "nobody"):
            db.append_message(session, "tool", "replayed", tool_call_id=call_id, tool_name="todo")
    assert world.run("-z", "and?", "-c").out == "fine\n"
    assert roles(world.wire) == "uctta" + "u"
    assert contents(world.wire, "tool") == [answer, answer]
    assert world.run("-z", "and now?", "-c").out == "good\n"
    assert contents(world.wire, "tool") == [answer, answer]
    world.requests_grow()
    assert len(world.show()["messages"]) == 5 + 4 + 4
