"""End a child process and everything that came from it, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

import psutil

_GRACE = 0.5
"""Seconds between the request to end and the kill."""
_ROUNDS = 5


def end(leader: int, marker: tuple[str, str]) -> None:
    """End the session that `leader` started: its group, its descendants, and who carries `marker` in its environment.

    `leader` must be a child of this process that was started in its own session and
    has not been waited for: so neither its number nor its group's can be someone
    else's. Other members are known by number and start time. Returns when nothing of
    it runs any more, at the latest after about a second.
    """
    tree = _members(leader, marker)
    _signal(leader, tree, signal.SIGTERM)
    give_up = time.monotonic() + _GRACE
    while time.monotonic() < give_up and _running(tree):
        time.sleep(0.02)
    for _ in range(_ROUNDS):
        # What was forked in the meantime is found anew.
        tree = _running({*tree, *_members(leader, marker)})
        _signal(leader, tree, signal.SIGKILL)
        if not tree:
            return
        time.sleep(0.02)


def _members(leader: int, marker: tuple[str, str]) -> set[psutil.Process]:
    """Every living process of the tree; also those that left the group, or whose parent has died."""
    own = os.getpid()
    found: set[psutil.Process] = set()
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(leader)
        found = {root, *root.children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid == own or process in found:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == leader or process.environ().get(marker[0]) == marker[1]:
                found.add(process)
    return found


def _running(tree: Iterable[psutil.Process]) -> set[psutil.Process]:
    alive: set[psutil.Process] = set()
    for process in tree:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.add(process)
    return alive


def _signal(leader: int, tree: Iterable[psutil.Process], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
    for process in tree:
        with contextlib.suppress(psutil.Error):
            # psutil compares the start time first: a reused number is never signalled.
            process.send_signal(number)
