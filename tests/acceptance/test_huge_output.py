"""Output without bounds: the model gets its head and tail and the way to the rest, in bounded memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_agent.testing.fake_openai import call, calls, hold, text
from hermes_agent.testing.replies import Item
from tests.acceptance.world import World, contents, roles

CAP = 60_000
"""Characters of a tool message: the documented 50,000 bytes of output and what is said about the rest."""
MEMORY = 70.0
"""Megabytes."""

PLACE = re.compile(r"\[([\d,]+) of ([\d,]+) bytes left out here\. The whole output is in (\S+?);")


TOLD = re.compile(r'"whole_output": ?"([^"]+)"')


def spill(result: str) -> Path:
    """Where the whole output is, as the model is told; where the note stands, it tells the same."""
    told = Path(TOLD.findall(result)[0])
    assert [found[2] for found in PLACE.findall(result)] in ([], [str(told)])
    return told


def read_on(offset: int, **more: Any) -> Callable[[dict[str, Any]], Item]:
    """The model reads the file that the first result names."""

    def reply(body: dict[str, Any]) -> Item:
        path = spill(contents(body["messages"], "tool")[0])
        return calls(call("read_file", {"path": str(path), "offset": offset, **more}))

    return reply


def run(world: World, command: str, *reads: Callable[[dict[str, Any]], Item]) -> list[str]:
    """Run one command and what follows; checks memory and bounds, returns the results."""
    held = hold("", text("done"))
    world.fake.extend([calls(call("terminal", {"command": command})), *reads, held])
    with world.start("-z", "go", "--yolo") as process:
        assert held.reached.wait(60)
        assert process.peak() < MEMORY
        held.release()
        assert process.line() == "done\n"
        assert process.end().code == 0
    results = contents(world.wire, "tool")
    assert max(map(len, results)) < 2 * CAP
    assert len(results[0]) < CAP
    return results


@pytest.mark.usefixtures("unmeasured")
def test_a_hundred_thousand_characters(world: World):
    first, page = run(world, "seq -f 'line %05.0f' 10000", read_on(5000, limit=3))
    result = json.loads(first)
    output = result["output"]
    assert result["exit_code"] == 0
    assert output.startswith("line 00001\nline 00002\n")
    assert output.endswith("line 09999\nline 10000\n")
    left_out, total, _ = PLACE.findall(output)[0]
    assert total == "110,000"
    assert int(left_out.replace(",", "")) + len(PLACE.sub("", output)) == pytest.approx(110_000, abs=200)
    whole = spill(first)
    assert whole.read_text() == "".join(f"line {number:05}\n" for number in range(1, 10001))
    assert whole.is_relative_to(world.hermes.home)
    assert (whole.stat().st_mode & 0o777, whole.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert json.loads(page)["content"] == "5000|line 05000\n5001|line 05001\n5002|line 05002"
    assert roles(world.check()) == "uctcta"


@pytest.mark.usefixtures("unmeasured")
def test_fifty_megabytes(world: World):
    first, page = run(world, "seq 1000000 7249999; echo the end", read_on(3_000_000, limit=2))
    output = json.loads(first)["output"]
    assert output.startswith("1000000\n1000001\n")
    assert output.endswith("7249999\nthe end\n")
    assert PLACE.findall(output)[0][1] == "50,000,008"
    assert spill(first).stat().st_size == 50_000_008
    assert json.loads(page)["content"] == "3000000|3999999\n3000001|4000000"
    world.check()


@pytest.mark.usefixtures("unmeasured")
def test_one_line_of_five_megabytes(world: World):
    command = "printf begin; head -c 5000000 /dev/zero | tr '\\0' x; printf end"
    first, *pages = run(world, command, read_on(1), read_on(1, column=4_999_990))
    output = json.loads(first)["output"]
    assert output.startswith("beginxxx")
    assert output.endswith("xxxend")
    assert PLACE.findall(output)[0][1] == "5,000,008"
    page, inside = map(json.loads, pages)
    assert page["content"].startswith("1|beginxxx")
    assert page["truncated"] is True
    assert inside["content"].endswith("xxxend")
    world.check()


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("times", [1, 8000])
def test_every_byte_there_is(world: World, times: int):
    (world.hermes.cwd / "bytes").write_bytes(b"begin " + bytes(range(256)) * times + " grüße end\n".encode())
    reads = [read_on(2, limit=2)] if times > 1 else []
    first, *pages = run(world, "cat bytes", *reads)
    assert "begin " in first
    assert " grüße end" in first
    assert "\ufffd" in first
    assert all("ABCDEFG" in result for result in (first, *pages))
    if times > 1:
        assert "left out" in first
        assert spill(first).read_text().count("ABCDEFG") == times
    world.check()


@pytest.mark.usefixtures("unmeasured")
def test_many_long_outputs_in_one_reply_stay_together_within_bounds(world: World):
    """Each is kept whole in a file of its own; the reply's results leave room for the conversation."""
    held = hold("", text("done"))
    commands = [f"seq -f 'call {number} line %g' 20000" for number in range(12)]
    world.fake.extend([calls(*(call("terminal", {"command": command}) for command in commands)), held])
    with world.start("-z", "go", "--yolo") as process:
        assert held.reached.wait(60)
        assert process.peak() < MEMORY
        held.release()
        assert process.end().code == 0
    results = contents(world.wire, "tool")
    assert sum(map(len, results)) < 300_000
    for number, result in enumerate(results):
        assert f"call {number} line 1" in result
        assert f"call {number} line 20000" in result
        assert f"call {number} line 10000\n" in spill(result).read_text()
    world.check()


@pytest.mark.usefixtures("unmeasured")
def test_a_reading_tool_is_bounded_too(world: World):
    (world.hermes.cwd / "big").write_text("".join(f"line {number} of the file\n" for number in range(500_000)))
    held = hold("", text("done"))
    wanted = [
        call("read_file", {"path": "big"}),
        call("search_files", {"pattern": "line"}),
        call("read_file", {"path": "big", "offset": 499_999}),
    ]
    world.fake.extend([calls(*wanted), held])
    with world.start("-z", "go") as process:
        assert held.reached.wait(60)
        assert process.peak() < MEMORY
        held.release()
        assert process.end().code == 0
    results = contents(world.wire, "tool")
    assert all(len(result) < 110_000 for result in results)
    assert "line 0 of the file" in results[0]
    assert "line 499999 of the file" in results[2]
    world.check()
