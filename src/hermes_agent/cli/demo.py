"""`hermes demo`: the main job offline, with a process that is killed in the middle of it.

Everything happens in a temporary folder and with a temporary home. The model is a script,
all else is real: the processes, the store, the files and the commands.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import click

from hermes_agent.cli.screen import Stream
from hermes_agent.providers.scripted import Script, load_script
from hermes_agent.store.session_db import SessionDB
from hermes_agent.transcript import rules

SCRIPT = Path(__file__).with_name("demo_script.json")
MESSAGE = "The tests of this project fail. Find out why and mend it. Then make the release 1.1, exactly once."
WITNESS = "released.txt"
PATIENCE = 30.0
"""Seconds that a part of the demo may take before it counts as failed."""

PROJECT = {
    "prices.py": '''\
"""Prices in cents."""


def total(prices, discount=0):
    """The sum of all prices, less a discount in per cent."""
    return sum(prices) * discount // 100
''',
    "test_prices.py": """\
import unittest

from prices import total


class Total(unittest.TestCase):
    def test_without_discount(self):
        self.assertEqual(total([500, 250]), 750)

    def test_with_discount(self):
        self.assertEqual(total([1000], discount=20), 800)
""",
    "release.sh": f"""\
# Publishes a version. Running it twice would publish it twice.
echo "released $1" >> {WITNESS}
sleep 3  # the upload takes its time
echo "version $1 is out"
""",
}

_HIDDEN = ("HERMES_", "OPENAI_")
"""Beginnings of the variables that the demo's processes do not inherit."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one demo happens."""

    project: Path
    home: Path
    script: Path

    @property
    def witness(self) -> Path:
        return self.project / WITNESS


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold at the end."""

    what: str
    holds: bool
    found: str = ""


def _run() -> int:
    out = Stream(sys.stdout)
    with tempfile.TemporaryDirectory(prefix="hermes-demo-", ignore_cleanup_errors=True) as folder:
        return play(build(Path(folder)), out)


def build(folder: Path) -> Place:
    """Lay out the project, an empty home's place and the script in `folder`."""
    place = Place(folder / "project", folder / "home", folder / "script.json")
    place.project.mkdir()
    for name, text in PROJECT.items():
        (place.project / name).write_text(text, encoding="utf-8")
    script = SCRIPT.read_text(encoding="utf-8")
    if shutil.which("python3") is None:
        script = script.replace("python3 ", shlex.quote(sys.executable).replace("\\", "\\\\").replace('"', '\\"') + " ")
    place.script.write_text(script, encoding="utf-8")
    return place


def play(place: Place, out: Stream) -> int:
    """Show the demo and return its exit code: 0 only if everything that it promises holds."""
    out.write(
        "This is hermes at work without a model and without a key: a script stands in\n"
        "for the model, the rest is real. A small project has a failing test. The agent\n"
        "mends it and makes a release. In the middle of the release its process is killed\n"
        "with SIGKILL; started again, it must finish, and must not release twice.\n"
        f"It works in {place.project.parent}, which is deleted at the end;\n"
        "--yolo lets it run commands there without asking.\n\n"
    )
    first = ["chat", "-q", MESSAGE, "--yolo", "--script", str(place.script)]
    out.write(f"$ hermes chat -q {shlex.quote(MESSAGE)} --yolo --script script.json\n")
    if not _run_until_witness(first, place):
        out.write("\nThe release was never begun: the demo failed.\n")
        return 1
    session, steps = _where(place)
    out.write(f"\n— killed the process with SIGKILL in the middle of step {steps} —\n\n")
    again = ["chat", "-r", session, "--yolo"]
    out.write(f"$ hermes {shlex.join(again)}\n")
    code = _finish(again, place)
    out.write("\n")
    checks = [Check("the second process ends well", code == 0, f"exit code {code}"), *verify(place, session)]
    for check in checks:
        out.write(f"{'✓' if check.holds else '✗'} {check.what}" + ("\n" if check.holds else f": {check.found}\n"))
    good = all(check.holds for check in checks)
    out.write("\nNothing was lost and nothing was done twice.\n" if good else "\nThe demo failed.\n")
    return 0 if good else 1


def verify(place: Place, session: str) -> list[Check]:
    """Look at the store, the project and the outside world: what must hold after the demo."""
    with SessionDB(place.home / "state.db", read_only=True) as db:
        messages = db.get_messages_as_conversation(session)
        unfinished = db.open_turns(session)
    return [*_stored_once(messages, load_script(place.script), len(unfinished)), *_outside(place)]


def _stored_once(messages: list[dict[str, object]], script: Script, unfinished: int) -> Iterator[Check]:
    said = [(row.get("content") or "", len(_calls(row))) for row in messages if row["role"] == "assistant"]
    wanted = [(reply.text, len(reply.tool_calls)) for reply in script.replies]
    yield Check(f"each of the {len(wanted)} steps is stored once, in order", said == wanted, f"{len(said)} are stored")
    called = [call["id"] for row in messages for call in _calls(row)]
    answered = [row.get("tool_call_id") for row in messages if row["role"] == "tool"]
    right = called == answered and len(set(called)) == len(called)
    yield Check(f"each of the {len(called)} tool calls has one result", right, f"{len(answered)} results")
    unknown = sum(row.get("effect_disposition") == "unknown" for row in messages)
    yield Check("the call that was cut off, and no other, is marked as unknown", unknown == 1, f"{unknown} are")
    asked = sum(row["role"] == "user" for row in messages)
    yield Check("the message is stored once and its turn is over", asked == 1 and not unfinished, f"{asked} messages")
    fault = rules.check_strict([{key: row[key] for key in row if not key.startswith("_")} for row in messages])
    yield Check("a strict model provider would accept the conversation", fault is None, str(fault))


def _calls(row: dict[str, object]) -> list[dict[str, str]]:
    return cast("list[dict[str, str]]", row.get("tool_calls") or [])


def _outside(place: Place) -> Iterator[Check]:
    lines = place.witness.read_text(encoding="utf-8").splitlines()
    yield Check(f"the release happened once ({WITNESS} has one line)", len(lines) == 1, f"{len(lines)} lines")
    tests = subprocess.run(
        [sys.executable, "-m", "unittest", "-q"], cwd=place.project, capture_output=True, check=False, timeout=PATIENCE
    )
    yield Check("the project's tests pass", tests.returncode == 0, tests.stderr.decode("utf-8", "replace").strip())


# -- the two processes -----------------------------------------------------------


def _start(arguments: list[str], place: Place) -> subprocess.Popen[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_HIDDEN)}
    return subprocess.Popen(
        [sys.executable, "-m", "hermes_agent", *arguments],
        cwd=place.project,
        env={**kept, "HERMES_HOME": str(place.home)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )


def _run_until_witness(arguments: list[str], place: Place) -> bool:
    """Kill the process as soon as the release has left its line; False if it never did."""
    process = _start(arguments, place)
    try:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and process.poll() is None:
            if place.witness.exists() and place.witness.stat().st_size:
                time.sleep(0.5)  # to be seen in the middle of it
                return process.poll() is None
            time.sleep(0.02)
        return False
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _where(place: Place) -> tuple[str, int]:
    """The session that the killed process left, and how many steps of it are stored."""
    with SessionDB(place.home / "state.db", read_only=True) as db:
        session = db.resolve_session("latest")
        return session, sum(row["role"] == "assistant" for row in db.get_messages(session))


def _finish(arguments: list[str], place: Place) -> int:
    process = _start(arguments, place)
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


command = click.Command(
    "demo", callback=_run, help="Watch the agent work, be killed and go on; needs no model and no key."
)
