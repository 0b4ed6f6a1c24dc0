"""Following a session's events from the event loop, with a sign of life when nothing happens."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable
from typing import Self

from hermes_agent.delivery.events import Event, Follower, Wake
from hermes_agent.gateway.profile import Profile
from hermes_agent.store.turns import TurnState

_LOOK_SECONDS = 0.5
"""How often events that another process stores, which wakes nobody here, are looked for."""

_ENDS = frozenset(f"turn.{state}" for state in TurnState if state.is_end)


class Following:
    """One reader of a session's events; an async context manager, which closes it."""

    def __init__(self, profile: Profile, begin: Callable[[Wake], Follower]) -> None:
        self._profile = profile
        self._begin = begin
        self._woken = asyncio.Event()
        self._heartbeat = profile.settings.gateway.heartbeat

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        wake = functools.partial(_wake, self._loop, self._woken)
        self._follower = await self._profile.read(self._begin, wake)
        self._beat = self._loop.time() + self._heartbeat
        return self

    async def __aexit__(self, *_: object) -> None:
        self._follower.close()

    async def take(self) -> list[Event]:
        """What has happened since the last call, maybe nothing."""
        self._woken.clear()
        follower = self._follower
        found = await self._profile.read(follower.take) if follower.stale else follower.take()
        if found:
            self._beat = self._loop.time() + self._heartbeat
        return found

    async def wait(self, *, elsewhere: bool) -> bool:
        """Wait until there may be something to take; False when a heartbeat is due instead.

        With `elsewhere` another process may be the one that stores it.
        """
        wait = max(self._beat - self._loop.time(), 0.0)
        try:
            async with asyncio.timeout(min(wait, _LOOK_SECONDS) if elsewhere else wait):
                await self._woken.wait()
        except TimeoutError:
            if self._loop.time() >= self._beat:
                self._beat = self._loop.time() + self._heartbeat
                return False
        if elsewhere:
            self._follower.stale = True
        return True

    def look_again(self) -> None:
        """Read the store at the next `take`, whether anybody woke us or not."""
        self._follower.stale = True


async def follow_turn(profile: Profile, turn_id: str, after: int | None = None) -> AsyncGenerator[Event | None]:
    """The events of one turn, from its beginning or behind event `after`, until its end; None for a heartbeat.

    The last one is `turn.<state>` with a last state; it has no number when it is told a
    second time, or when the turn ended without having run. Close the generator to stop
    following (`contextlib.aclosing`).
    """
    service = profile.service

    async with Following(profile, lambda wake: service.follow_turn(turn_id, wake, after)) as following:
        over = False
        while True:
            for event in await following.take():
                if event.turn_id == turn_id:
                    yield event
                    if event.kind in _ENDS:
                        return
            here = service.is_here(turn_id)
            if over:
                receipt = await profile.read(service.get, turn_id)
                yield Event(None, f"turn.{receipt.state if receipt else TurnState.FAILED}", turn_id)
                return
            if not here:
                receipt = await profile.read(service.get, turn_id)
                over = receipt is None or receipt.is_final
                following.look_again()
                if over:
                    continue
            if not await following.wait(elsewhere=not here):
                yield None


async def follow_session(profile: Profile, session_id: str, after: int | None = None) -> AsyncGenerator[Event | None]:
    """The events of a session behind event `after`, by default from now on, until the process stops.

    None for a heartbeat.
    """
    service = profile.service

    async with Following(profile, lambda wake: service.follow(session_id, wake, after)) as following:
        while not (service.is_draining and not service.load["running"]):
            for event in await following.take():
                yield event
            if not await following.wait(elsewhere=True):
                yield None


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)
