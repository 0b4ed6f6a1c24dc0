"""A home, a strict fake server and everything that must hold in them after whatever was done."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from hermes_agent.testing.fake_openai import FakeOpenAI, call, calls, text
from hermes_agent.testing.replies import Answer
from tests.acceptance import with_tools
from tests.acceptance.hermes import COMMAND, Done, Hermes, wait_for

Row = dict[str, Any]

LONGEST = 60.0
"""Seconds that a started process may live."""
WIRE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
DERIVED = re.compile(r"\[no (answer was given|reply was recorded) here.*\]")
"""Assistant notes that stand on the wire between two turns and in no store."""

_LOOK = """
import apsw, json, sys
file = apsw.Connection(sys.argv[1], flags=apsw.SQLITE_OPEN_READONLY)
copy = apsw.Connection(":memory:")
with copy.backup("main", file, "main") as backup:
    while not backup.done:
        backup.step()
copy.execute("INSERT INTO messages_fts(messages_fts) VALUES('integrity-check')")
print(json.dumps({
    "integrity": copy.execute("PRAGMA integrity_check").get,
    "calls": copy.execute("SELECT state, name, effect FROM tool_calls ORDER BY turn_key, step, idx").fetchall(),
    "turns": [state for (state,) in copy.execute("SELECT state FROM turns ORDER BY key")],
    "leases": copy.execute("SELECT count(*) FROM session_leases").get,
    "sessions": {name: [seq, answers, asked] for name, seq, answers, asked in copy.execute(
        "SELECT s.id, s.last_seq, (SELECT count(*) FROM messages WHERE id >> 24 = s.key AND role = 'assistant'),"
        " (SELECT coalesce(sum(api_calls), 0) FROM usage WHERE session_key = s.key) FROM sessions s")},
}))
"""


class Run:
    """A started process in a process group of its own, with pipes."""

    def __init__(
        self,
        hermes: Hermes,
        arguments: Sequence[str | bytes],
        *,
        command: Sequence[str] = COMMAND,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=hermes.cwd,
            env=hermes.environment(env),
            start_new_session=True,
        )
        # What it never says must not be waited for.
        self._guard = threading.Timer(LONGEST, self._process.kill)
        self._guard.daemon = True
        self._guard.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.cancel()
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, *lines: str | bytes) -> None:
        """Write lines to its standard input."""
        pipe = self._process.stdin
        assert pipe is not None
        for line in lines:
            pipe.write((line.encode() if isinstance(line, str) else line) + b"\n")
        pipe.flush()

    def line(self) -> str:
        """The next line of its standard output."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode()

    def complaint(self, pattern: str) -> str:
        """The next line of its standard error that holds `pattern`."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if re.search(pattern, line.decode()):
                return line.decode()
        raise AssertionError(f"{pattern!r} was never said")

    def event(self, kind: str) -> dict[str, Any]:
        """The next line of that type, of a run with `--format stream-json`."""
        while line := self.line():
            event = json.loads(line)
            if event["type"] == kind:
                return event
        raise AssertionError(f"no {kind!r} came")

    def signal(self, number: signal.Signals) -> None:
        """Send it to the whole process group."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to the whole process group; the process stays a zombie until `end`."""
        self.signal(signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def peak(self) -> float:
        """Megabytes of memory it held at most so far."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024

    def end(self) -> Done:
        """Close its standard input and wait for it."""
        out, err = self._process.communicate(timeout=LONGEST)
        return Done(self._process.returncode, out.decode(), err.decode())


class World:
    """The command in a home, its model, and witnesses of what its tools really did."""

    def __init__(self, home: Path, fake: FakeOpenAI) -> None:
        self.hermes = Hermes(home, fake)
        self.fake = fake
        self._witnesses = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the commands that outlived their killed hermes."""
        for file in self.hermes.cwd.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.killpg(int(file.read_text()), signal.SIGKILL)

    def start(self, *arguments: str | bytes, env: Mapping[str, str] | None = None) -> Run:
        return Run(self.hermes, arguments, env=env)

    def start_with_tools(self, *arguments: str | bytes) -> Run:
        """The same with the tools of `with_tools`."""
        return Run(self.hermes, arguments, command=[sys.executable, with_tools.__file__])

    def run(self, *arguments: str | bytes, env: Mapping[str, str] | None = None, stdin: bytes = b"") -> Done:
        return self.hermes.run(*arguments, env=env, stdin=stdin)

    @property
    def wire(self) -> list[Row]:
        """The messages of the last request, without the system message."""
        return spoken(self.fake.wire)

    # -- witnesses ------------------------------------------------------------------

    def command(self, name: str, *, before: float = 0, after: float = 0, output: str = "") -> str:
        """A shell command that leaves a line in the file `name` each time it runs; it may sleep before and after."""
        steps = [f"echo $$ > {name}.pid"]
        steps += [f"sleep {before}"] if before else []
        steps += [f"echo line >> {name}"]
        steps += [f"sleep {after}"] if after else []
        return "; ".join([*steps, f"echo {output or 'did ' + name}"])

    def witness(self, name: str, *, content: str = "", **how: Any) -> Answer:
        """The model asks for that command."""
        return calls(call("terminal", {"command": self.command(name, **how)}), content=content)

    def times(self, name: str) -> int:
        """How often the command really ran."""
        file = self.hermes.cwd / name
        return file.read_text().count("line\n") if file.exists() else 0

    def wait_for_command(self, name: str) -> None:
        """Return once that command runs."""
        file = self.hermes.cwd / f"{name}.pid"
        wait_for(lambda: file.exists() and file.read_text().endswith("\n"))

    # -- what must hold --------------------------------------------------------------

    def show(self, session: str = "latest") -> dict[str, Any]:
        """The session as the command shows it."""
        done = self.run("sessions", "show", session, "--format", "json")
        assert done.code == 0, done.err
        return json.loads(done.out)

    def look(self) -> dict[str, Any]:
        """What the store's tables say, seen from another process."""
        store = str(self.hermes.home / "state.db")
        done = subprocess.run([sys.executable, "-c", _LOOK, store], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def check(self, session: str = "latest") -> list[Row]:
        """A plain turn works in the session, and wire and store tell one story; returns the rows before that turn."""
        self.fake.extend([text("pong")])
        before = len(self.fake.requests)
        done = self.run("-z", "ping", "-r", session)
        assert (done.code, done.out) == (0, "pong\n"), done.err
        assert len(self.fake.requests) == before + 1
        shown = self.show(session)
        assert shown["open_turns"] == []
        stored = shown["messages"]
        assert [row["seq"] for row in stored] == list(range(1, len(stored) + 1))
        assert [row["content"] for row in stored[-2:]] == ["ping", "pong"]
        assert matches_wire(stored[:-1], self.wire)
        answered_once(stored)
        self.requests_grow()
        seen = self.look()
        assert seen["integrity"] == "ok"
        assert seen["leases"] == 0
        assert {state for state, *_ in seen["calls"]} <= {"done", "unknown"}
        last, answers, asked = seen["sessions"][shown["id"]]
        assert last == len(stored)
        assert asked >= answers - sum(row.get("finish_reason") == "incomplete" for row in stored)
        return stored[:-2]

    def requests_grow(self) -> None:
        """No request was refused, and each begins with all that the one before it held."""
        assert self.fake.violations == []
        for earlier, later in zip(self.fake.requests, self.fake.requests[1:], strict=False):
            old, new = earlier.body["messages"], later.body["messages"]
            assert new[: len(old)] == old


def spoken(messages: Iterable[Row]) -> list[Row]:
    """Without the system messages."""
    return [row for row in messages if row["role"] != "system"]


def sent(row: Row) -> Row:
    """The part of a stored row that is sent."""
    return {key: row[key] for key in WIRE_KEYS if key in row and (key == "content" or row[key] is not None)}


def matches_wire(stored: Iterable[Row], wire: Iterable[Row]) -> bool:
    """The rows that were sent are the stored ones, in their order, and between turns perhaps a derived note."""
    left = [sent(row) for row in stored]
    for row in wire:
        if left and row == left[0]:
            del left[0]
        elif not (row["role"] == "assistant" and DERIVED.fullmatch(row["content"] or "")):
            return False
    return not left


def answered_once(stored: Iterable[Row]) -> None:
    """Every call has exactly one result row, and no result is without its call."""
    asked = [wanted["id"] for row in stored for wanted in row.get("tool_calls") or ()]
    answers = [row["tool_call_id"] for row in stored if row["role"] == "tool"]
    assert answers == asked
    assert len(set(asked)) == len(asked)


def roles(rows: Iterable[Row]) -> str:
    """The roles of rows as one letter each: u, a, t; c is an assistant row with calls."""
    return "".join("c" if row.get("tool_calls") else row["role"][0] for row in rows)


def contents(rows: Iterable[Row], role: str) -> list[Any]:
    """What the rows of that role hold."""
    return [row["content"] for row in rows if row["role"] == role]
