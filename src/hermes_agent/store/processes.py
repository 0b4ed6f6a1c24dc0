"""Who owns a lease, and whether that owner still lives.

An owner is boot id, pid namespace, pid and start time: enough to tell a dead
process from a live one and from an unrelated one that was given its pid.
"""

from __future__ import annotations

import os
import sys
import time
from functools import lru_cache
from pathlib import Path

_PROC = Path("/proc")
_HIDDEN = "?"
"""Stands for the start time of a process that is there but does not show itself to us."""


def boot_seconds() -> float:
    """Seconds since the machine booted, sleep included; no wall-clock step moves it."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.clock_gettime(time.CLOCK_MONOTONIC)


@lru_cache(maxsize=1)
def boot_id() -> str:
    """A name of this boot: times of another boot say nothing about this one."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return _boot_id_elsewhere()


def _boot_id_elsewhere() -> str:
    import subprocess  # noqa: PLC0415 - only where /proc is absent

    import psutil  # noqa: PLC0415 - only where /proc is absent

    try:
        asked = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return str(int(psutil.boot_time()))
    return asked.stdout.strip()


def _namespace() -> str:
    try:
        return os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return "-"


def _start_time(pid: int) -> str | None:
    """The start time of a running process, None when it is gone or a zombie."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        if not _PROC.joinpath("self/stat").exists():
            return _start_time_psutil(pid)
        return _HIDDEN if _is_hidden(pid) else None
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in {b"Z", b"X"} else fields[19].decode()


def _is_hidden(pid: int) -> bool:
    """Whether a process of another user is there although /proc does not list it."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _start_time_psutil(pid: int) -> str | None:
    import psutil  # noqa: PLC0415 - only where /proc is absent

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.AccessDenied:
        return _HIDDEN
    except psutil.Error:
        return None


_own: tuple[int, str] | None = None


def identity() -> str:
    """This process, as it stands in lease and turn rows."""
    global _own  # noqa: PLW0603 - cached per process, made anew after a fork
    pid = os.getpid()
    if _own is None or _own[0] != pid:
        _own = (pid, f"{boot_id()}|{_namespace()}|{pid}|{_start_time(pid)}")
    return _own[1]


def is_alive(owner: str) -> bool | None:
    """Whether the owner's process runs; None when that cannot be told from here."""
    boot, namespace, pid, start = _parts(owner)
    if boot != boot_id():
        return False
    if namespace != _namespace():
        return None
    found = _start_time(int(pid)) if pid.isdecimal() else None
    return None if found == _HIDDEN else found is not None and found == start


def pid_of(owner: str) -> str:
    """The owner's process id, for people."""
    return _parts(owner)[2]


def _parts(owner: str) -> tuple[str, str, str, str]:
    boot, namespace, pid, start = (*owner.split("|"), "", "", "", "")[:4]
    return boot, namespace, pid, start
