"""Run one command in a shell of its own: bounded in time, and ended with everything it started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hermes_agent import failpoints
from hermes_agent.cancellation import Cancellation
from hermes_agent.tools import process_tree
from hermes_agent.tools.shell_output import ShellOutput

_REPORT_FD = 199
"""Lowest number for the descriptor on which the shell tells its last folder: out of the way of a script's own."""
_TICK = 0.05
"""Seconds between two looks at the clock, the stop signal and the shell while nothing is printed."""
_IDLE = 0.1
_DRAIN = 1.0
"""After the shell has ended, output may come for so long, and pause for at most `_IDLE`."""
_CHUNK = 65_536
_FOLDER_MAX = 8_192


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    exit_code: int
    """As a shell reports it: 128 + n after signal n."""
    folder: Path | None = None
    """The folder the shell was in at its end, if it told."""
    timed_out: bool = False
    interrupted: bool = False
    left_running: bool = False
    """Something that the command started still runs and holds the output open."""


def run(
    command: str,
    cwd: Path,
    env: Mapping[str, str],
    output: ShellOutput,
    timeout: float,
    cancellation: Cancellation,
) -> Ended:
    """Run `command`; both its outputs go to `output` in the order they come.

    After `timeout` seconds, on cancellation, and when an exception leaves this
    function, the whole process tree is ended. What a command leaves in the background
    after ending by itself is left alone. Raises OSError when the shell cannot be started.
    """
    # Finds those who left the tree: no other process has it.
    marker = ("HERMES_SHELL_ID", os.urandom(8).hex())
    env = {**env, marker[0]: marker[1]}
    read_end, write_end = os.pipe()
    report_read, report_write = os.pipe()
    try:
        try:
            child = _start(command, cwd, env, write_end, report_write)
        finally:
            os.close(write_end)
            os.close(report_write)
        try:
            failpoints.hit("terminal.spawned")
            ended = _follow(child, read_end, output, time.monotonic() + timeout, cancellation)
            if ended.timed_out or ended.interrupted:
                _end(child, marker)
        except BaseException:
            _end(child, marker)
            raise
        failpoints.hit("terminal.exited")
        folder = None if ended.timed_out or ended.interrupted else _reported(report_read)
    finally:
        os.close(read_end)
        os.close(report_read)
    return Ended(ended.exit_code, folder, ended.timed_out, ended.interrupted, ended.left_running)


def _start(command: str, cwd: Path, env: dict[str, str], stdout: int, report: int) -> subprocess.Popen[bytes]:
    try:
        high = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, _REPORT_FD)
    except OSError:
        high = os.dup(report)  # so few descriptors are allowed that there is no such number
    # One line with the command, so that the shell's messages count its lines right. The trap cannot
    # change the exit code, and a command that sets its own only loses the report.
    script = f"trap '{{ command pwd >/dev/fd/{high} || :; }} 2>/dev/null' EXIT; {command}"
    try:
        for shell in (("bash", "--norc"), ("sh",)):
            with contextlib.suppress(FileNotFoundError):
                return subprocess.Popen(
                    [*shell, "-c", script],
                    cwd=cwd,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=subprocess.STDOUT,
                    pass_fds=(high,),
                    start_new_session=True,
                )
    finally:
        os.close(high)
    if not cwd.is_dir():
        raise NotADirectoryError(f"the folder {cwd} does not exist")
    raise FileNotFoundError("neither bash nor sh was found on the PATH")


def _follow(
    child: subprocess.Popen[bytes], pipe: int, output: ShellOutput, deadline: float, cancellation: Cancellation
) -> Ended:
    """Read until the shell has ended and its output with it, or until time or the person ends it."""
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    reading = True
    ended_at = last_data = 0.0
    while True:
        if reading and poller.poll(_TICK * 1000):
            data = os.read(pipe, _CHUNK)
            output.add(data)
            reading = bool(data)
            last_data = time.monotonic()
        elif not reading:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_TICK)
        now = time.monotonic()
        code = child.poll()
        if code is not None:
            ended_at = ended_at or now
            last_data = max(last_data, ended_at)
            if not reading or now - last_data >= _IDLE or now - ended_at >= _DRAIN:
                return Ended(128 - code if code < 0 else code, left_running=reading)
        elif cancellation.requested:
            return Ended(130, interrupted=True)
        elif now >= deadline:
            return Ended(124, timed_out=True)


def _end(child: subprocess.Popen[bytes], marker: tuple[str, str]) -> None:
    if child.returncode is None:
        process_tree.end(child.pid, marker)
        # A process that hangs in the kernel does not die of a kill; the call does not wait for it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_DRAIN)


def _reported(pipe: int) -> Path | None:
    """The folder on the report pipe; None when the shell did not tell one that exists."""
    os.set_blocking(pipe, False)
    try:
        told = os.read(pipe, _FOLDER_MAX)
    except BlockingIOError:
        return None
    folder = os.fsdecode(told.removesuffix(b"\n"))
    return Path(folder) if os.path.isabs(folder) and os.path.isdir(folder) else None
