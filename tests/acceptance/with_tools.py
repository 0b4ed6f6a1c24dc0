"""`hermes` with a few more tools, as an embedder adds them: `python with_tools.py ARGUMENTS`.

`give` returns the value of that name; `act` leaves a line in a file when it begins, waits for as
long as the file `NAME.wait` is there, and returns its own name.
"""

from __future__ import annotations

import time
from typing import Any

from hermes_agent.cli.main import main
from hermes_agent.tools.context import ToolContext
from hermes_agent.tools.registry import Effect, ToolEntry, registry

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

VALUES: dict[str, Any] = {
    "two texts": [{"type": "text", "text": "first part"}, {"type": "text", "text": "second part"}],
    "text and image": [
        {"type": "text", "text": "a picture"},
        {"type": "image", "data": PIXEL, "mimeType": "image/png"},
        {"type": "text", "text": "of one pixel"},
    ],
    "envelope": {
        "content": [{"type": "text", "text": "in an"}, {"type": "text", "text": "envelope"}],
        "isError": False,
    },
    "reported error": {"content": [{"type": "text", "text": "the tool says no"}], "isError": True},
    "empty envelope": {"content": []},
    "nothing": [],
    "none": None,
    "empty text": "",
    "blanks": " \n\t ",
    "blank parts": [{"type": "text", "text": ""}],
    "error object": {"jsonrpc": "2.0", "id": 1, "error": {"code": -32603, "message": "Internal error"}},
    "number": 42.5,
    "yes": True,
    "object": {"deep": [{"er": None}]},
    "mixed list": ["one", 2, {"three": 3}],
    "bytes": b"caf\xe9 \x00 \xff",
    "half a pair": "caf\ud83d! \udc00",
    "half a pair inside": {"text": "caf\ud83d!", "\udc00key": ["\ud800"]},
    "half a pair in a part": [{"type": "text", "text": "caf\ud83d!"}],
    "NUL": "before\0after",
    "NUL inside": {"text": "before\0after"},
    "a set": {"x"},
}


def give(args: dict[str, Any], *, context: ToolContext) -> Any:
    if args["what"] == "failure":
        raise RuntimeError("caf\ud83d! it broke\0off")
    return VALUES[args["what"]]


def act(args: dict[str, Any], *, context: ToolContext) -> str:
    """Begin, wait for the test to let it end, and end."""
    name = args["name"]
    with (context.cwd / "begun").open("a") as witness:
        witness.write(f"{name}\n")
    gate = context.cwd / f"{name}.wait"
    until = time.monotonic() + 30
    while gate.exists() and time.monotonic() < until and not context.cancellation.requested:
        time.sleep(0.005)
    with (context.cwd / "ended").open("a") as witness:
        witness.write(f"{name}\n")
    if name == "fails":
        raise ValueError("it failed")
    return "" if name == "silent" else f"result of {name}"


OBJECT: dict[str, Any] = {"type": "object", "properties": {}}

if __name__ == "__main__":
    registry.register(ToolEntry("give", "test", "gives", OBJECT, give, effect=Effect.PURE, parallel=True))
    registry.register(ToolEntry("act", "test", "acts", OBJECT, act, effect=Effect.UNSAFE, parallel=True))
    registry.register(ToolEntry("look", "test", "looks", OBJECT, act, effect=Effect.PURE, parallel=True))
    raise SystemExit(main())
