"""The stop signal of a turn."""

from __future__ import annotations

import subprocess
import sys
import threading

from hermes_agent.cancellation import Cancellation

_SIGNALS = """
import os, signal, threading
from hermes_agent.cancellation import Cancellation

current = Cancellation()
signal.signal(signal.SIGUSR1, lambda *_: current.cancel())
done = threading.Event()


def disturb():
    while not done.is_set():
        os.kill(os.getpid(), signal.SIGUSR1)


threading.Thread(target=disturb, daemon=True).start()
for _ in range(3000):
    current = Cancellation()
    while not current.wait(0.0001):
        pass
done.set()
print("through")
"""


def test_a_wait_ends_when_the_stop_comes() -> None:
    stop = Cancellation()
    threading.Timer(0.02, stop.cancel).start()
    assert stop.wait(30) is True
    assert stop.requested


def test_a_wait_without_a_stop_ends_by_itself() -> None:
    stop = Cancellation()
    assert stop.wait(0) is False
    assert stop.wait(-1) is False


def test_the_first_reason_wins_and_aborts_run_once() -> None:
    ran: list[str] = []
    stop = Cancellation()
    with stop.aborting(lambda: ran.append("inside")):
        stop.cancel("one")
        stop.cancel("two")
    with stop.aborting(lambda: ran.append("late")):
        pass
    assert stop.reason == "one"
    assert ran == ["inside", "late"]


def test_an_abort_is_forgotten_when_its_block_ends() -> None:
    ran: list[str] = []
    stop = Cancellation()
    with stop.aborting(lambda: ran.append("gone")):
        pass
    stop.cancel()
    assert ran == []


def test_a_stop_from_a_signal_handler_never_hangs_the_waiting_thread() -> None:
    """Thousands of stops that land inside `wait` of the thread that runs the handler."""
    child = subprocess.run([sys.executable, "-c", _SIGNALS], capture_output=True, text=True, timeout=60, check=True)
    assert child.stdout == "through\n"
