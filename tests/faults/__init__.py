"""Child processes for tests of the store, and a library that makes their disk fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Self

_PRELUDE = """
import os, sys, threading, time
import apsw
from hermes_agent import errors
from hermes_agent.store import database, leases, messages, migrate, sessions, turns
from hermes_agent.store.database import StoreOptions, open_database
from hermes_agent.store.session_db import SessionDB, encode_row
from hermes_agent.store.writer import Batch, TurnEnd

def say(*words):
    print(*words, flush=True)

def hear():
    line = sys.stdin.readline()
    if not line:
        os._exit(3)  # the test is gone
    return line.strip()

"""
_ARMED = """
import ctypes, errno
_shim = ctypes.CDLL(None)
WRITE, SYNC, TRUNCATE = 1, 2, 4

def arm(part, kinds, skip=0, times=1, code=errno.EIO, partly=False):
    _shim.fault_arm(part.encode(), kinds, skip, times, code, int(partly))

def hits():
    return _shim.fault_hits()

"""


class Child:
    """A Python process that runs `code` with the store's names at hand; it talks over `say` and `hear`."""

    def __init__(self, code: str, *arguments: object, shim: Path | None = None) -> None:
        environment = dict(os.environ)
        if shim is not None:
            environment["LD_PRELOAD"] = str(shim)
        script = _PRELUDE + (_ARMED if shim is not None else "") + code
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> str:
        """The next line that the child says; fails with its traceback when it says nothing more."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the child ended:\n{self.process.communicate(timeout=30)[1]}")
        return line.strip()

    def say(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self, *, code: int = 0) -> list[str]:
        """Wait until the child ends with `code`; returns the lines that were not heard yet."""
        try:
            out, err = self.process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        assert self.process.returncode == code, err
        return out.splitlines()

    def kill(self) -> None:
        """SIGKILL, and take the corpse away."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()


def run(code: str, *arguments: object, shim: Path | None = None) -> list[str]:
    """Run a child to its end and return what it said."""
    with Child(code, *arguments, shim=shim) as child:
        return child.end()


def look(path: Path, sql: str) -> list[list[str]]:
    """What a query finds in a file, asked in another process, which leaves nothing behind."""
    code = """
conn = apsw.Connection(sys.argv[1], flags=apsw.SQLITE_OPEN_READWRITE)
conn.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
for row in conn.execute(sys.argv[2]):
    say("\\x1f".join(map(str, row)))
conn.close()
"""
    return [line.split("\x1f") for line in run(code, path, sql)]


def build_shim(folder: Path) -> Path:
    """Compile the fault library into `folder`; fails, saying why, where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the fault tests need a C compiler (Debian, Ubuntu: apt-get install gcc)"
    library = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library
