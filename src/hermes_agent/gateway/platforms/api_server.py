"""`APIServerAdapter`: the API's handlers for applications that mount them themselves.

It needs no gateway, no key and no event loop of its own. `_session_db` may be assigned, and
`_create_agent` is the one place at which an agent is made, called with keywords only.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from hermes_agent import home, settings
from hermes_agent.delivery.runner import Agent
from hermes_agent.errors import HermesError
from hermes_agent.gateway import keys, replies
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.config import PlatformConfig
from hermes_agent.gateway.profile import Profile, create_agent
from hermes_agent.gateway.replies import ApiError
from hermes_agent.gateway.routes import chat
from hermes_agent.gateway.table import Handler
from hermes_agent.store.opening import open_store
from hermes_agent.store.session_db import SessionDB


class APIServerAdapter:
    """The API server as a platform adapter; making one has no side effects."""

    def __init__(self, config: PlatformConfig) -> None:
        self.config = config
        self._session_db: SessionDB | None = None
        self._served: Profile | None = None

    def close(self) -> None:
        """Stop what serves the store that was used last; the store itself stays its owner's."""
        if self._served is not None:
            self._served.service.close()
            self._served = None

    def _create_agent(self, **options: Any) -> Agent:
        return create_agent(**options)

    def _make_agent(self, **options: Any) -> Agent:
        """Look the maker up at each turn: it may be replaced meanwhile."""
        return self._create_agent(**options)

    async def _handle_session_chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat.chat)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(Call(request, self._profile(), keys.OPEN))
        except ApiError as error:
            return error.to_response()
        except HermesError as error:
            return replies.from_error(error).to_response()

    def _profile(self) -> Profile:
        served = self._served
        if served is None or (self._session_db is not None and served.db is not self._session_db):
            self.close()
            chosen = settings.load(home.hermes_home())
            db = self._session_db or open_store(chosen)
            served = self._served = Profile("default", chosen, db, self._make_agent)
        return served
