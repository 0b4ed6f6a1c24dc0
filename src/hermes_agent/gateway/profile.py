"""One profile as the gateway serves it: its store, its delivery service, and the agents that run its turns."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from hermes_agent.agent.run import AIAgent
from hermes_agent.delivery.runner import Agent
from hermes_agent.delivery.service import Bounds, DeliveryService, Order, Receipt
from hermes_agent.errors import FailureReason, HermesError, UnknownSession
from hermes_agent.gateway import metrics
from hermes_agent.settings import Settings
from hermes_agent.store import removal
from hermes_agent.store.deliveries import Incoming
from hermes_agent.store.session_db import SessionDB
from hermes_agent.tools.results import erase_spilled, spill_folder

P = ParamSpec("P")
T = TypeVar("T")

CreateAgent = Callable[..., Agent]
"""Makes an agent from keyword arguments; those of `AIAgent`."""

_READERS = 4
"""Threads for reads of the store, which never wait for a writer."""
_SCRUB_SECONDS = 30.0
"""How long after a removal the file is rewritten, which holds up other writes; several removals share it."""
_LOOK_SECONDS = 0.25
"""How often a turn that another process runs is looked at."""


class Profile:
    """Serves one home. `start` and `close` are called once each, by whoever made it; the rest from an event loop."""

    def __init__(self, name: str, settings: Settings, db: SessionDB, agents: CreateAgent | None = None) -> None:
        self.name = name
        self.settings = settings
        self.db = db
        self.started_at = time.time()
        chosen = settings.gateway
        bounds = Bounds(
            running=chosen.running_turns,
            waiting=chosen.max_queue,
            waiting_per_session=chosen.session_queue,
            approval_seconds=settings.approvals.timeout,
        )
        self._create_agent = agents or create_agent
        self.turns = metrics.Counts()
        """Turns that ended, by state."""
        self.failures = metrics.Counts()
        """Those that ended without an answer, by reason."""
        self.turn_seconds = metrics.Histogram()
        self.accept_seconds = metrics.Histogram()
        self.service = DeliveryService(db, self._agent_for, bounds, self._count)
        self._scrubs = False
        """The file will be wiped soon."""
        self._readers = ThreadPoolExecutor(_READERS, "hermes-read")

    @property
    def home(self) -> Path:
        return self.settings.home

    @property
    def model_name(self) -> str:
        """What the agent is called towards clients."""
        named = self.settings.api_server.model_name
        return named or (self.name if self.name != "default" else "hermes-agent")

    def close(self) -> None:
        """Let go of the store; turns that run are left to their threads."""
        self.service.close()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self.db.close()

    # -- from the event loop ------------------------------------------------------

    async def read(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that reads or writes the store on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, lambda: function(*args, **kwargs))

    async def submit(self, session_id: str, message: Incoming, create: Mapping[str, Any] | None = None) -> Receipt:
        """`DeliveryService.submit`; the message is durable when this returns, whether anybody waits for it or not."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Receipt] = loop.create_future()

        began = time.monotonic()

        def taken(result: Receipt | Exception) -> None:
            self.accept_seconds.add(time.monotonic() - began)
            loop.call_soon_threadsafe(_set, outcome, result)

        self.service.submit_soon(session_id, message, create, taken)
        return await outcome

    async def ended(self, turn_id: str, seconds: float) -> Receipt:
        """What is known of a turn when it has ended, or after so many seconds, or when this process stops."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            told: asyncio.Future[Receipt | None] = loop.create_future()
            here = self.service.when_ended(turn_id, functools.partial(_tell, loop, told))
            receipt = await _within(told, deadline - loop.time()) if here else None
            if receipt is None:
                receipt = await self.read(self.service.get, turn_id)
            if receipt is None:
                raise UnknownSession("the session of this turn was deleted")
            over = receipt.is_final or receipt.reason is not None or self.service.is_draining
            left = deadline - loop.time()
            if over or left <= 0:
                return receipt
            if not here:
                await asyncio.sleep(min(left, _LOOK_SECONDS))

    def finish_removals(self) -> None:
        """Go on, on a thread, with removals of sessions that a dead process had begun."""
        self._readers.submit(removal.finish, self.db.database, self._erase_files)

    async def delete_session(self, session_id: str) -> None:
        """Remove a session; its last traces in the file are wiped a little later.

        Raises `UnknownSession`, or `SessionBusy` while a turn runs or waits in it.
        """
        await self.read(self.db.delete_session, session_id, erase_files=self._erase_files, scrub=False)
        if not self._scrubs:
            self._scrubs = True
            self.service.clock.after(_SCRUB_SECONDS, lambda: self._readers.submit(self._scrub) and None)

    # -- inside -------------------------------------------------------------------

    def _scrub(self) -> None:
        self._scrubs = False
        removal.scrub(self.db.database)

    def _erase_files(self, turn_ids: Sequence[str]) -> None:
        erase_spilled(spill_folder(self.home), turn_ids)

    def _count(self, receipt: Receipt) -> None:
        self.turns.add(str(receipt.state))
        if receipt.reason is not None:
            self.failures.add(str(receipt.reason))
        if receipt.ended_at is not None:
            self.turn_seconds.add(receipt.ended_at - receipt.accepted_at)

    # -- agents -------------------------------------------------------------------

    def _agent_for(self, order: Order) -> Agent:
        listener, options = order.listener, order.turn.options
        agent = self._create_agent(
            session_id=order.session_id,
            session_db=self.db,
            settings=self.settings,
            platform="api_server",
            quiet_mode=True,
            model=options.get("model") or None,
            provider=options.get("provider") or None,
            ephemeral_system_prompt=options.get("system") or None,
            ask=listener.ask,
            reasoning_callback=None,
            status_callback=listener.status,
            interim_assistant_callback=listener.stored,
            tool_start_callback=listener.moved,
            tool_complete_callback=listener.moved,
        )
        listener.attach(agent, always=bool(options.get("stream")))
        return agent


def create_agent(settings: Settings, **options: Any) -> Agent:
    """An `AIAgent`; raises `HermesError` when nothing says where its model is."""
    model, provider = str(options.get("model") or ""), str(options.get("provider") or "")
    if settings.endpoint(model=model, provider=provider, base_url="", api_key="") is None:
        raise HermesError("no model is configured.", reason=FailureReason.NOT_CONFIGURED)
    return AIAgent(settings=settings, **options)


def _tell(loop: asyncio.AbstractEventLoop, told: asyncio.Future[Receipt | None], receipt: Receipt | None) -> None:
    loop.call_soon_threadsafe(_hand_over, told, receipt)


def _hand_over(told: asyncio.Future[Receipt | None], receipt: Receipt | None) -> None:
    if not told.done():
        told.set_result(receipt)


def _set(outcome: asyncio.Future[Receipt], result: Receipt | Exception) -> None:
    if outcome.done():
        return
    if isinstance(result, Exception):
        outcome.set_exception(result)
    else:
        outcome.set_result(result)


async def _within(told: asyncio.Future[Receipt | None], seconds: float) -> Receipt | None:
    try:
        async with asyncio.timeout(max(seconds, 0)):
            return await told
    except TimeoutError:
        return None
