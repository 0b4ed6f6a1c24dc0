"""Runs `hermes` as a process of its own: with pipes, or at a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hermes_agent.store.session_db import SessionDB
from hermes_agent.testing.fake_openai import FakeOpenAI

KEY = "sk-test-CANARY1234567890"
COMMAND = [sys.executable, "-m", "hermes_agent"]
PATIENCE = 30.0

PROMPT = r"(?m)^>"
"""The prompt as `Terminal.expect` sees it: its space is a movement of the cursor."""
_WHERE = b"\x1b[6n"
"""A program asks its terminal where the cursor is."""

_AT_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True)
class Done:
    """How a process ended and what it said."""

    code: int
    out: str
    err: str


class Hermes:
    """The command in one home, with the fake server as its model if one is given."""

    def __init__(
        self, home: Path, fake: FakeOpenAI | None = None, *, model: str = "fake-model", key: str = KEY
    ) -> None:
        self.home = home
        self.cwd = home.parent / "work"
        self.cwd.mkdir(exist_ok=True)
        self.variables: dict[str, str] = {}
        if fake is not None:
            self.variables = {"OPENAI_BASE_URL": fake.base_url, "OPENAI_API_KEY": key, "HERMES_MODEL": model}

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        # The command is started so often that compiling it each time would be most of the test.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {**kept, "HERMES_HOME": str(self.home), **self.variables, **(more or {})}

    def config(self, text: str) -> None:
        """Write config.yaml."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.home / "config.yaml").write_text(text, encoding="utf-8")

    def run(self, *arguments: str | bytes, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> Done:
        """Run to the end."""
        done = subprocess.run(
            [*COMMAND, *arguments],
            input=stdin,
            capture_output=True,
            cwd=self.cwd,
            env=self.environment(env),
            timeout=PATIENCE,
            check=False,
        )
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start with pipes; end it with `finish`."""
        return subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.cwd,
            env=self.environment(env),
        )

    def terminal(self, *arguments: str, env: Mapping[str, str] | None = None) -> Terminal:
        """Start at a terminal of its own."""
        return Terminal([*COMMAND, *arguments], self.cwd, self.environment({"TERM": "xterm", **(env or {})}))

    # -- what is stored ---------------------------------------------------------

    def sessions(self) -> list[dict[str, Any]]:
        """The stored sessions, the last used first; none without a store."""
        if not (self.home / "state.db").exists():
            return []
        with SessionDB(self.home / "state.db", read_only=True) as db:
            return db.list_sessions()

    def session(self) -> str:
        """The id of the session used last."""
        return self.sessions()[0]["id"]

    def messages(self, session: str) -> list[dict[str, Any]]:
        with SessionDB(self.home / "state.db", read_only=True) as db:
            return db.get_messages_as_conversation(session)


def finish(process: subprocess.Popen[bytes]) -> Done:
    """Wait for a started process."""
    out, err = process.communicate(timeout=PATIENCE)
    return Done(process.returncode, out.decode(), err.decode())


def wait_for(what: Any, seconds: float = PATIENCE) -> None:
    """Return as soon as `what()` is true."""
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until:
            raise AssertionError("it never happened")
        time.sleep(0.01)


class Terminal:
    """A process whose standard streams are a terminal; use it as a context manager."""

    def __init__(
        self, command: list[str], cwd: Path, env: dict[str, str], *, columns: int = 100, lines: int = 40
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _AT_A_TERMINAL, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
        os.close(slave)
        self._raw = b""
        self._seen = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._master)

    @property
    def text(self) -> str:
        """All that was printed so far, without the escape sequences."""
        return re.sub(
            r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07|\r", "", self._raw.decode("utf-8", "replace")
        )

    @property
    def raw(self) -> bytes:
        return self._raw

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, pattern: str, seconds: float = PATIENCE) -> str:
        """Read until `pattern` is printed behind what was expected last; returns the matching text."""
        until = time.monotonic() + seconds
        while True:
            found = re.compile(pattern).search(self.text, self._seen)
            if found:
                self._seen = found.end()
                return found.group()
            if not self._read(until):
                raise AssertionError(f"{pattern!r} was not printed after:\n{self.text[self._seen :]}")

    def end(self, seconds: float = PATIENCE) -> int:
        """Read until the process ends; returns its exit code."""
        until = time.monotonic() + seconds
        while self._read(until):
            pass
        return self._process.wait(max(until - time.monotonic(), 0.1))

    @property
    def runs(self) -> bool:
        """The process has not ended."""
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def settings(self) -> list[Any]:
        """The terminal's settings as they are now."""
        return termios.tcgetattr(self._master)

    def _read(self, until: float) -> bool:
        """Take what comes; False at the end or when the time is up."""
        ready, _, _ = select.select([self._master], [], [], max(until - time.monotonic(), 0))
        if not ready:
            return False
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # the other side is closed
            return False
        self._raw += piece
        for _ in range(piece.count(_WHERE)):
            os.write(self._master, b"\x1b[1;1R")
        return bool(piece)
