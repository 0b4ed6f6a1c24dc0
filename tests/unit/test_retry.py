"""The retry loop: which failures, how long, and how it ends."""

from __future__ import annotations

import threading

import pytest

from hermes_agent.cancellation import Cancellation
from hermes_agent.errors import FailureReason, ProviderError, TurnInterrupted
from hermes_agent.providers.base import AttemptFailed, Reply, Request, TextDelta
from hermes_agent.providers.retry import Retrying

ASK = Request(model="m", messages=[])
R = FailureReason


class Clock(Cancellation):
    """Notes the waits instead of sleeping."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.waits = []
        self._stop_at = stop_at

    def wait(self, seconds):
        self.waits.append(seconds)
        if len(self.waits) == self._stop_at:
            self.cancel("enough")
        return self.requested


class Plays:
    """A provider that raises or returns what it is given, in order."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)

    def complete(self, request, on_event, cancellation):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        if on_event is not None:
            on_event(TextDelta(outcome.content))
        return outcome


def failure(reason=R.SERVER_ERROR, **rest):
    return ProviderError("it failed", reason=reason, **rest)


def run(*outcomes, clock=None, on_event=None, **options):
    clock = clock or Clock()
    provider = Retrying(Plays(*outcomes), rng=lambda: 0.0, **options)
    return provider.complete(ASK, on_event, clock), clock


def test_a_passing_failure_is_retried_with_doubled_waits():
    reply, clock = run(failure(), failure(), Reply("ok"))
    assert (reply.content, clock.waits) == ("ok", [2.0, 4.0])


def test_waits_stay_under_the_limit_and_get_up_to_half_more():
    clock = Clock()
    provider = Retrying(Plays(*[failure()] * 6, Reply("ok")), attempts=7, max_delay=10, rng=lambda: 1.0)
    provider.complete(ASK, None, clock)
    assert clock.waits == [3.0, 6.0, 12.0, 15.0, 15.0, 15.0]


@pytest.mark.parametrize(("asked", "waited"), [(7.0, 7.0), (9000.0, 600.0), (None, 2.0), (0.0, 2.0)])
def test_the_wait_that_the_server_asked_for_wins(asked, waited):
    assert run(failure(R.RATE_LIMIT, retry_after=asked), Reply("ok"))[1].waits == [waited]


@pytest.mark.parametrize("reason", [R.AUTH, R.BILLING, R.BAD_REQUEST, R.CONTEXT_OVERFLOW, R.MODEL_NOT_FOUND, R.UNKNOWN])
def test_a_lasting_failure_is_raised_at_once_as_it_is(reason):
    error = failure(reason)
    clock = Clock()
    with pytest.raises(ProviderError) as caught:
        run(error, clock=clock)
    assert caught.value is error
    assert clock.waits == []


def test_the_last_failure_says_how_often_and_keeps_the_longest_text():
    with pytest.raises(ProviderError) as caught:
        run(failure(partial="long text"), failure(partial="x"), failure(R.TIMEOUT, status=504, retry_after=3))
    error = caught.value
    assert str(error) == "it failed (after 3 attempts)"
    assert (error.reason, error.status, error.retry_after, error.partial) == (R.TIMEOUT, 504, 3, "long text")


def test_a_lasting_failure_after_a_passing_one_ends_the_loop():
    with pytest.raises(ProviderError, match="after 2 attempts") as caught:
        run(failure(), failure(R.AUTH))
    assert caught.value.reason is R.AUTH


def test_the_listener_learns_of_a_failed_try_before_the_wait():
    events = []
    error = failure(partial="half")
    run(error, Reply("whole"), on_event=events.append)
    assert events == [AttemptFailed(error, 2.0), TextDelta("whole")]


def test_a_stop_during_the_wait_interrupts():
    with pytest.raises(TurnInterrupted, match="enough"):
        run(failure(), Reply("never"), clock=Clock(stop_at=1))


def test_a_long_wait_ends_when_another_thread_cancels():
    cancellation = Cancellation()
    waiting = threading.Event()
    provider = Retrying(Plays(failure(R.RATE_LIMIT, retry_after=500), Reply("never")))
    thread = threading.Thread(target=lambda: (waiting.wait(), cancellation.cancel()))
    thread.start()
    with pytest.raises(TurnInterrupted):
        provider.complete(ASK, lambda event: waiting.set(), cancellation)
    thread.join()


def test_other_exceptions_are_not_touched():
    with pytest.raises(LookupError):
        run(LookupError())
