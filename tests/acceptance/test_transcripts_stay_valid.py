"""Whatever ends or spoils a turn: the next message is a request that a strict provider takes, nothing left out."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

from hermes_agent.testing.fake_openai import call, calls, delay, error, hold, raw_sse, text
from hermes_agent.testing.replies import Reply
from tests.acceptance import with_tools
from tests.acceptance.hermes import wait_for
from tests.acceptance.world import DERIVED, Row, World, contents, roles

TODO = calls(call("todo", {}))


def sse(delta: dict[str, Any], finish: str | None = None) -> str:
    """One streamed chunk."""
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}) + "\n\n"


def piece(arguments: str, **head: Any) -> dict[str, Any]:
    """A delta that goes on with the arguments of the first call."""
    function = {"arguments": arguments, **({"name": "terminal"} if head else {})}
    return {"tool_calls": [{"index": 0, **head, "function": function}]}


def one_retry(world: World) -> None:
    world.hermes.config("agent: {api_max_retries: 1}\n")


def after(world: World, message: str) -> list[Row]:
    """Send a message after a turn without an answer; returns the wire, which was accepted and ends with it."""
    world.fake.extend([text("all right")])
    done = world.run("-z", message, "-c")
    assert (done.code, done.out) == (0, "all right\n"), done.err
    assert world.wire[-1] == {"role": "user", "content": message}
    return world.wire


# -- answers that break off ----------------------------------------------------------------

WHOLE = '{"command": "touch made"}'
BROKEN = {
    "in the arguments": [
        sse({"content": "Let me "}),
        sse({"content": "see"}),
        sse(piece(WHOLE[:9], id="b")),
        sse(piece(WHOLE[9:15])),
    ],
    "behind the name": [sse({"content": "Let me see"}), sse(piece("", id="b"))],
    "behind the arguments": [sse({"content": "Let me see"}), sse(piece(WHOLE, id="b"))],
    "in the second call": [
        sse({"content": "Let me see"}),
        sse(piece(WHOLE, id="a")),
        sse({"tool_calls": [{"index": 1, "id": "b", "function": {"name": "terminal", "arguments": '{"com'}}]}),
    ],
    "in a text": [sse({"content": "Let me "}), sse({"content": "see"})],
    "in half a character": [sse({"content": "Let me see"}), sse({"content": "\ud83d"})],
    "in a chunk": [sse({"content": "Let me see"}), sse(piece(WHOLE, id="b"))[:60]],
}


@pytest.mark.parametrize("cut", [True, False], ids=["dropped", "ended"])
def test_an_answer_that_breaks_off_runs_nothing_and_can_be_tried_again(world: World, cut: bool):
    """Wherever the connection drops, and also where the stream ends without saying why."""
    one_retry(world)
    broken = [raw_sse(frames, cut=cut) for frames in BROKEN.values()]
    for item in broken:
        world.fake.extend([item, text("again")])
    with world.start("chat", "--yolo") as run:
        for _ in broken:
            run.send("do it", "try again")
        done = run.end()
    assert (done.code, done.out) == (1, "again\n" * len(broken)), done.err
    assert done.err.count("✗") == len(broken)
    stored = world.check()
    assert len(world.fake.requests) == 2 * len(broken) + 1
    assert contents(stored, "user") == ["do it", "try again"] * len(broken)
    assert set(contents(stored, "assistant")) <= {"again", "Let me ", "Let me see", "Let me see\ufffd"}
    assert not any(row.get("tool_calls") for row in stored)
    assert not (world.hermes.cwd / "made").exists()


def test_an_answer_that_breaks_off_is_asked_for_again_from_scratch(world: World):
    once_more = [calls(call("terminal", {"command": "touch made"}, id="b")), text("made")]
    world.fake.extend([raw_sse(BROKEN["in the arguments"], cut=True), *once_more])
    with world.start("chat", "-q", "do it", "--yolo", "--format", "stream-json") as run:
        assert run.event("retry")["attempt"] == 2
        assert run.event("result")["final_response"] == "made"
    assert roles(world.check()) == "ucta"
    assert (world.hermes.cwd / "made").exists()


# -- a stop ----------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", ["", "half an answer"])
def test_a_stop_after_a_tool_and_before_its_answer(world: World, begin: str):
    held = hold(begin)
    world.fake.extend([calls(call("terminal", {"command": "echo one"}), call("todo", {}), content="I look"), held])
    with world.start("chat", "-q", "work", "--format", "stream-json") as run:
        if begin:
            run.event("delta")
            assert run.event("delta")["text"] == begin
        assert held.reached.wait(30)
        run.signal(signal.SIGINT)
        assert run.event("result")["interrupted"] is True
        assert run.end().code == 130
    wire = after(world, "forget it")
    assert roles(wire) == "uctta" + "u"
    assert wire[-2]["content"] == begin or DERIVED.fullmatch(wire[-2]["content"])
    assert "one" in wire[2]["content"]
    assert roles(world.check()) == ("ucttaua" if begin else "ucttua")


@pytest.mark.parametrize("first", [[], [TODO]], ids=["at once", "after a tool"])
def test_a_stop_in_the_wait_before_a_retry(world: World, first: list[Reply]):
    world.fake.extend([*first, error(503, "overloaded", headers={"Retry-After": "30"})])
    with world.start("-z", "work") as run:
        run.complaint("overloaded")
        run.signal(signal.SIGINT)
        assert run.end().code == 130
    wire = after(world, "forget it")
    assert roles(wire) == ("uctau" if first else "uau")
    assert DERIVED.fullmatch(wire[-2]["content"])
    assert len(world.fake.requests) == len(first) + 2
    world.check()


def test_a_stop_in_a_command_answers_every_call_of_the_reply(world: World):
    """What ran has its result, what ran when the stop came says so, what had not begun was skipped."""
    commands = [world.command("a"), world.command("b", after=60), world.command("c")]
    world.fake.extend([calls(*(call("terminal", {"command": command}) for command in commands))])
    with world.start("-z", "all three", "--yolo") as run:
        wait_for(lambda: world.times("b") == 1)
        run.signal(signal.SIGINT)
        assert run.end().code == 130
    wire = after(world, "forget it")
    assert roles(wire) == "uctttau"
    results = contents(wire, "tool")
    assert ["did a" in results[0], "interrupted" in results[1], "skipped" in results[2]] == [True] * 3
    world.check()
    assert [world.times(name) for name in "abc"] == [1, 1, 0]


def test_a_stop_before_the_first_byte_of_an_answer(world: World):
    world.fake.extend([text("one"), delay(20, text("late"))])
    world.run("-z", "begin")
    with world.start("-z", "work", "-c") as run:
        wait_for(lambda: len(world.fake.requests) == 2)
        run.signal(signal.SIGTERM)
        assert run.end().code == 130
    assert roles(after(world, "forget it")) == "uauau"
    world.check()


# -- failures --------------------------------------------------------------------------------

UNKNOWN_TOOL = calls(call("no_such_tool", {}), content="I try")
NO_JSON = calls(call("terminal", '{"command": '), content="I try")
NO_OBJECT = calls(call("terminal", "[1]"))
CUT_CALL = calls(call("terminal", '{"command": "touch ma'), finish_reason="length")
ENDINGS: dict[str, list[Reply]] = {
    "an error after a tool": [TODO, error(401)],
    "an error after a text and tools": [
        calls(call("todo", {}), call("read_file", {"path": "x"}), content="I look"),
        error(400),
    ],
    "an error without a body": [error(502, body=b"")],
    "an error page": [error(403, body=b"<html>no</html>")],
    "an error in the stream": [
        raw_sse([sse({"content": "Let me"}), 'data: {"error": {"message": "overloaded", "code": 503}}\n\n'])
    ],
    "an answer of nothing": [text("")],
    "an answer that was blocked": [text("", finish_reason="content_filter")],
    "three unknown tools": [UNKNOWN_TOOL] * 3,
    "calls cut by the output limit": [CUT_CALL] * 3,
}


def test_after_every_failure_the_conversation_goes_on(world: World):
    """Each failure ends its turn with one line; the message after it is answered."""
    one_retry(world)
    world.fake.extend([text("hello")])
    for replies in ENDINGS.values():
        world.fake.extend([*replies, text("all right")])
    with world.start("chat", "--yolo") as run:
        run.send("begin")
        assert run.line() == "hello\n"
        for name in ENDINGS:
            run.send(name, f"after {name}")
            failure = run.complaint("✗ (?!no_such_tool|terminal|read_file)")
            assert "internal error" not in failure
            assert run.line() == "all right\n", name
        assert run.end().code == 1
    stored = world.check()
    said = contents(stored, "user")
    assert said == ["begin", *(message for name in ENDINGS for message in (name, f"after {name}"))]
    assert not (world.hermes.cwd / "ma").exists()


def test_a_model_is_told_what_is_wrong_with_its_calls_and_may_mend_them(world: World):
    unusable = [NO_JSON, NO_OBJECT, calls(call("terminal", {})), calls(call("", {}))]
    world.fake.extend([*unusable, UNKNOWN_TOOL, text("sorry")])
    assert world.run("-z", "work", "--yolo").out == "sorry\n"
    assert roles(world.wire) == "u" + "ct" * 5
    assert all(json.loads(result)["error"] for result in contents(world.wire, "tool"))
    world.check()


def test_the_limit_of_model_calls_leaves_a_valid_session(world: World):
    world.fake.extend([TODO, TODO])
    done = world.run("-z", "work", "--max-turns", "2")
    assert done.code == 1
    assert roles(after(world, "go on")) == "uctctau"
    world.check()


# -- characters that no JSON, no UTF-8 or no database can carry -----------------------------------

HALF = "\ud83d"


def test_characters_that_cannot_be_stored_stop_neither_the_turn_nor_the_ones_after_it(world: World):
    """NUL and halves of a surrogate pair, in whatever a model sends and a command prints."""
    wanted = [
        call("sh\0ell", '{"cmd": "a\\u0000b"}'),
        call(f"terminal{HALF}", {}),
        call("terminal", {"command": f"echo 'caf{HALF}!'"}, id=f"id{HALF}\0"),
        call("terminal", '{"command": "echo \\ud83d half"}'),
        call("terminal", {"command": "echo a\0b"}),
        call("terminal", {"command": r"printf 'caf\xed\xa0\xbd! \0 \xff\xfe\n'"}, id="a b/c"),
        call("todo", {"todos": [{"id": f"{HALF}", "content": f"x{HALF}\0y", "status": "pending"}]}),
        call("write_file", {"path": "made", "content": f"x{HALF}y"}),
    ]
    answers = [text(answer) for answer in (f"done {HALF}\0!", "two", "three", "four")]
    world.fake.extend([calls(*wanted, content=f"I try caf{HALF}! and \0."), *answers])
    with world.start("chat", "--yolo") as run:
        run.send(b"caf\xe9 \x00 \xed\xa0\xbd", "two", "three", "four")
        done = run.end()
    assert (done.code, done.out.count("\n")) == (0, 4), done.err
    assert done.out.endswith("two\nthree\nfour\n")
    assert "Traceback" not in done.err
    stored = world.check()
    assert roles(stored) == "uc" + "t" * len(wanted) + "a" + "uauaua"
    assert [row["content"] for row in stored[-6:]] == ["two", "two", "three", "three", "four", "four"]
    results = contents(stored, "tool")
    assert "Unknown tool" in results[0]
    assert "caf" in results[5]
    assert "caf" in stored[1]["content"]
    assert str(stored).encode().count(b"\0") == 0
    shown = world.run("sessions", "show", "latest")
    assert shown.code == 0
    assert all(part in shown.out for part in ("caf", "done", "three", "four"))
    names = [wanted["function"]["name"] for row in stored for wanted in row.get("tool_calls") or ()]
    assert all(name.isascii() and name.replace("_", "").isalnum() for name in names)
    listed = world.run("sessions", "list")
    assert (listed.code, listed.out.count("\n")) == (0, 2)


@pytest.mark.parametrize("way", ["argument", "file", "standard input"])
def test_a_message_of_any_bytes_is_stored_or_refused_as_a_whole(world: World, way: str):
    said = {"argument": b"caf\xed\xa0\xbd!", "file": "grüße\0".encode(), "standard input": b"caf\xed\xa0\xbd!"}[way]
    (world.hermes.cwd / "message").write_bytes(said)
    flags: dict[str, tuple[str | bytes, ...]] = {
        "argument": ("-z", said),
        "file": ("chat", "-Q", "--query-file", "message"),
        "standard input": ("chat", "-Q", "--query-file", "-"),
    }
    world.fake.extend([text("one"), text("two")])
    done = world.run(*flags[way], stdin=said)
    if done.code == 2:
        assert done.err.count("\n") == 1
        assert world.hermes.sessions() == []
        assert world.run("-z", "plain").out == "one\n"
        assert world.run("-z", "again", "-c").out == "two\n"
    else:
        assert (done.code, done.out) == (0, "one\n"), done.err
        assert world.run("-z", "again", "-c").out == "two\n"
    stored = world.check()
    assert roles(stored) == "uaua"
    assert done.code == 2 or ("caf" if way == "argument" else "grüße") in stored[0]["content"]


# -- results of any shape ------------------------------------------------------------------------

SHOWN: dict[str, Callable[[Any], bool]] = {
    "two texts": lambda content: content.index("first part") < content.index("second part"),
    "text and image": lambda content: (
        [part["type"] for part in content] == ["text", "image_url", "text"] and content[2]["text"] == "of one pixel"
    ),
    "envelope": lambda content: content.index("in an") < content.index("envelope"),
    "reported error": lambda content: json.loads(content) == {"error": "the tool says no"},
    "error object": lambda content: json.loads(content)["error"]["code"] == -32603,
    "number": lambda content: content == "42.5",
    "yes": lambda content: content == "true",
    "object": lambda content: json.loads(content) == {"deep": [{"er": None}]},
    "mixed list": lambda content: "one" in str(content) and "three" in str(content),
    "bytes": lambda content: content.startswith("caf"),
    "half a pair": lambda content: content == "caf\ufffd! \ufffd",
    "half a pair inside": lambda content: json.loads(content)["text"] == "caf\ufffd!",
    "half a pair in a part": lambda content: "caf\ufffd!" in str(content),
    "NUL": lambda content: content.startswith("before") and content.endswith("after"),
    "failure": lambda content: "it broke" in json.loads(content)["error"],
}


@pytest.mark.parametrize("together", [True, False], ids=["in one reply", "one by one"])
def test_a_result_of_any_shape_is_one_tool_message_with_all_of_its_text(world: World, together: bool):
    names = [*with_tools.VALUES, "failure"]
    wanted = [call("give", {"what": name}) for name in names]
    world.fake.extend([calls(*wanted)] if together else [calls(one) for one in wanted])
    world.fake.extend([text("seen")])
    with world.start_with_tools("-z", "give me all", "--max-turns", "50") as run:
        assert run.end().out == "seen\n"
    assert roles(world.wire) == "u" + ("c" + "t" * len(names) if together else "ct" * len(names))
    results = dict(zip(names, contents(world.wire, "tool"), strict=True))
    for name, content in results.items():
        assert content, name
        assert SHOWN.get(name, lambda _: True)(content), (name, content)
        if name in ("nothing", "none", "empty text", "blanks", "blank parts", "empty envelope"):
            assert "no output" in str(content), (name, content)
    world.check()
