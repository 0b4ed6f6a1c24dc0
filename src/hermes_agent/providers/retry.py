"""The one retry loop around a model call: back-off, Retry-After, and a stop at any moment."""

from __future__ import annotations

import random
from collections.abc import Callable

from hermes_agent.cancellation import Cancellation
from hermes_agent.errors import ProviderError, TurnInterrupted
from hermes_agent.providers.base import AttemptFailed, OnEvent, Provider, Reply, Request


class Retrying:
    """Asks `inner` again while its failures are of a kind that may pass.

    Waits `base_delay` doubled each time, at most `max_delay`, plus up to half of it; a wait that
    the server asked for wins, up to `max_retry_after`. Every try begins from scratch: what an
    earlier one streamed is void, as `AttemptFailed` tells the listener before the wait.
    """

    def __init__(
        self,
        inner: Provider,
        *,
        attempts: int = 3,
        base_delay: float = 2.0,
        max_delay: float = 60.0,
        max_retry_after: float = 600.0,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._inner = inner
        self._attempts = max(1, attempts)
        self._base_delay = base_delay
        self._max_delay = max_delay
        self._max_retry_after = max_retry_after
        self._rng = rng

    def complete(self, request: Request, on_event: OnEvent | None, cancellation: Cancellation) -> Reply:
        """Return the first whole reply, or raise the last failure with the longest partial text."""
        partial = ""
        attempt = 1
        while True:
            try:
                return self._inner.complete(request, on_event, cancellation)
            except ProviderError as error:
                partial = max(partial, error.partial, key=len)
                if attempt >= self._attempts or not error.failure.retry:
                    if attempt == 1:
                        raise
                    raise _last(error, attempt, partial) from error
                wait = self._wait(error, attempt)
                if on_event is not None:
                    on_event(AttemptFailed(error, wait))
            if cancellation.wait(wait):
                raise TurnInterrupted(cancellation.reason)
            attempt += 1

    def _wait(self, error: ProviderError, attempt: int) -> float:
        if error.retry_after is not None and error.retry_after > 0:
            return min(error.retry_after, self._max_retry_after)
        delay = min(self._base_delay * 2 ** (attempt - 1), self._max_delay)
        return delay * (1 + self._rng() / 2)


def _last(error: ProviderError, attempts: int, partial: str) -> ProviderError:
    return ProviderError(
        f"{error} (after {attempts} attempts)",
        reason=error.reason,
        status=error.status,
        retry_after=error.retry_after,
        partial=partial,
    )
