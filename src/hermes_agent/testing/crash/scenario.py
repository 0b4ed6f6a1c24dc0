"""The conversation that is killed: its messages, its script, its tools, and the witnesses outside the store.

The witnesses are append-only files that the product never reads: `acks` (messages that were
acknowledged), `seen` (what became visible), `effects` (what tools did), `requests` (what the
model was asked), `deaths` (where a life was ended). Each record is one write of one line.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from hermes_agent import failpoints
from hermes_agent.tools.context import ToolContext
from hermes_agent.tools.registry import Arguments, Effect, ToolEntry, registry

SESSION = "crash"
TOOLSET = "witness"
CANARY = "sk-canary-5f1d6e0c9b7a4832"
"""A key in the environment of every life; it must never be found under the home."""

QUEUED = "q0: taken by a process that dies before it can run it"
"""The message that waits on a busy session when its process is killed."""
SENT = (
    "t1: one step that must not be repeated",
    "t2: several things at once",
    "t3: one after the other",
    "t4: ask a server that stumbles",
    "t5: a long answer",
    "t6: many steps that must not be repeated",
    "t7: ask a server that refuses",
    "t8: two rounds",
)
MESSAGES = (QUEUED, *SENT)

_LONG = "\n".join(f"line {number} of a long result" for number in range(200))


class Outside:
    """The witness files of one trial, and the things in the world that its tools touch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}

    def note(self, witness: str, **record: Any) -> None:
        """Append one record to the file `witness`, in one write."""
        if witness not in self._files:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._files[witness] = os.open(self._folder / witness, flags, 0o600)
        os.write(self._files[witness], json.dumps(record).encode() + b"\n")

    def read(self, witness: str) -> list[dict[str, Any]]:
        """The records of the file `witness`, oldest first."""
        return [json.loads(line) for line in self.lines(witness)]

    def lines(self, witness: str) -> list[bytes]:
        """The same, not decoded."""
        path = self._folder / witness
        return path.read_bytes().splitlines() if path.exists() else []

    def put(self, key: str, value: str) -> None:
        """Set a thing in the world to a value; doing it again changes nothing."""
        path = self._folder / f"thing-{key}"
        partial = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
        partial.write_text(value, encoding="utf-8")
        partial.replace(path)


def digest(content: Any) -> str:
    """A short name of a result's content."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


# -- tools ------------------------------------------------------------------------------


def register_tools(outside: Outside) -> None:
    """Add the witness tools, which act on the world outside."""

    def act(kind: str, args: Arguments, context: ToolContext) -> str:
        name = str(args.get("name"))
        time.sleep(float(args.get("ms", 0)) / 1000)
        failpoints.hit("tool.before_effect")
        if kind == "put":
            outside.put(name, name)
        outside.note("effects", kind=kind, call=context.call_id, name=name)
        failpoints.hit("tool.after_effect")
        return json.dumps({kind: name})

    def append(args: Arguments, *, context: ToolContext) -> str:
        return act("append", args, context)

    def put(args: Arguments, *, context: ToolContext) -> str:
        return act("put", args, context)

    def read(args: Arguments, *, context: ToolContext) -> str:  # noqa: ARG001 - a handler's signature
        time.sleep(float(args.get("ms", 0)) / 1000)
        return _LONG if args.get("long") else json.dumps({"read": args.get("name")})

    schema: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}}
    for name, effect, parallel, handler in (
        ("witness_append", Effect.UNSAFE, False, append),
        ("witness_send", Effect.UNSAFE, True, append),
        ("witness_put", Effect.IDEMPOTENT, True, put),
        ("witness_read", Effect.PURE, True, read),
    ):
        registry.register(
            ToolEntry(
                name=name,
                toolset=TOOLSET,
                description=f"A witness of the crash self-test ({effect}).",
                parameters=schema,
                handler=handler,
                effect=effect,
                parallel=parallel,
                max_result_chars=2500,
            )
        )


# -- the script ---------------------------------------------------------------------------


def _call(tool: str, name: str, **more: Any) -> dict[str, Any]:
    call: dict[str, Any] = {"name": f"witness_{tool}", "arguments": {"name": name, **more}}
    return call


SCRIPT: dict[str, Any] = {
    "model": "scripted",
    "replies": [
        # q0
        {"text": "It waited, now it runs.", "tool_calls": [_call("append", "q0.a")]},
        {"text": "q0 is done."},
        # t1
        {"tool_calls": [_call("append", "t1.a")]},
        {"text": "t1 is done.", "stream": 3},
        # t2: results come in another order than the calls
        {
            "text": "All at once.",
            "tool_calls": [
                _call("put", "t2.a", ms=30),
                _call("read", "t2.b"),
                _call("send", "t2.c", ms=4),
                _call("put", "t2.d"),
                _call("read", "t2.e", ms=8),
            ],
        },
        {"text": "t2 is done; the last result was {{last_result}}."},
        # t3
        {"tool_calls": [_call("append", "t3.a"), _call("read", "t3.b"), _call("append", "t3.c")]},
        {"text": "t3 is done."},
        # t4
        {
            "error": {"reason": "server_error", "message": "stumbled", "times": 1, "retry_after": 0.001},
            "text": "Second try.",
            "tool_calls": [_call("put", "t4.a")],
        },
        {"text": "t4 is done."},
        # t5
        {"tool_calls": [_call("read", "t5.a", long=True)]},
        {"text": "t5 is done."},
        # t6: a repeated id, arguments that are no JSON, a tool that does not exist, what a child process inherits
        {
            "text": "One by one.",
            "tool_calls": [
                _call("append", "t6.a") | {"id": "call_0_0"},
                _call("append", "t6.b"),
                {"name": "witness_append", "arguments": '{"name": "t6.bad"'},
                {"name": "no_such_tool", "arguments": {}},
                _call("append", "t6.c"),
                {"name": "terminal", "arguments": {"command": "printenv OPENAI_API_KEY HERMES_CALL_ID"}},
                _call("append", "t6.d"),
            ],
        },
        {"text": "t6 is done."},
        # t7
        {"match": "^t7:", "error": {"reason": "auth", "message": "refused"}},
        # t8
        {"text": "First round.", "tool_calls": [_call("put", "t8.a"), _call("put", "t8.b", ms=2)]},
        {"text": "Second round.", "tool_calls": [_call("append", "t8.c")]},
        {"text": "t8 is done."},
    ],
}
