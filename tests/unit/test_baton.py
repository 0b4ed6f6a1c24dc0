"""One of a crowd computes at a time; who waits hands the baton on; nobody is stopped by it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from hermes_agent import baton
from hermes_agent.baton import Baton, waiting

PATIENT = 30.0


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton, "PATIENCE", PATIENT)


def on_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.usefixtures("patient")
class TestTheBaton:
    def test_one_computes_at_a_time(self):
        crowd, inside, most, lock = Baton(), 0, 0, threading.Lock()

        def work() -> None:
            nonlocal inside, most
            for _ in range(50):
                with crowd:
                    with lock:
                        inside += 1
                        most = max(most, inside)
                    threading.Event().wait(0.0001)
                    with lock:
                        inside -= 1

        threads = [on_thread(work) for _ in range(6)]
        for thread in threads:
            thread.join(PATIENT)
        assert most == 1

    def test_who_waits_lets_another_one_compute(self):
        crowd, arrived, go_on = Baton(), threading.Event(), threading.Event()

        def waiter() -> None:
            with crowd, waiting, waiting:  # a wait within a wait is one wait
                arrived.set()
                go_on.wait(PATIENT)

        first = on_thread(waiter)
        assert arrived.wait(PATIENT)
        second = on_thread(lambda: _once(crowd, go_on))
        second.join(PATIENT)
        first.join(PATIENT)
        assert not first.is_alive()
        assert not crowd._lock.locked()

    def test_an_error_in_a_wait_leaves_the_baton_where_it_belongs(self):
        crowd = Baton()
        with pytest.raises(ValueError, match="x"), crowd, waiting:
            raise ValueError("x")
        assert not crowd._lock.locked()
        with crowd:
            with pytest.raises(ValueError, match="y"), waiting:
                raise ValueError("y")
            assert crowd._lock.locked()


def _once(crowd: Baton, done: threading.Event) -> None:
    with crowd:
        done.set()


def test_who_does_not_get_it_goes_on_without(monkeypatch: pytest.MonkeyPatch):
    """A thread that keeps it for ever stops nobody, and what was not taken is not given back."""
    monkeypatch.setattr(baton, "PATIENCE", 0.01)
    crowd, holds, end = Baton(), threading.Event(), threading.Event()

    def hog() -> None:
        with crowd:
            holds.set()
            end.wait(PATIENT)

    thread = on_thread(hog)
    assert holds.wait(PATIENT)
    with crowd, waiting:
        pass
    assert crowd._lock.locked()
    end.set()
    thread.join(PATIENT)
    assert not crowd._lock.locked()


def test_outside_a_crowd_waiting_is_nothing():
    with waiting, waiting:
        pass
