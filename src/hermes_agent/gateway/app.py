"""The gateway: the profiles that it serves, and the application that puts the table of routes before them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from hermes_agent import home as home_module
from hermes_agent import log
from hermes_agent import settings as settings_module
from hermes_agent.gateway import keys
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.guard import Guard, principal
from hermes_agent.gateway.keys import KeyRing, Principal, Scope
from hermes_agent.gateway.profile import CreateAgent, Profile, open_store
from hermes_agent.gateway.replies import ApiError
from hermes_agent.gateway.routes import chat, sessions, system
from hermes_agent.gateway.table import Route
from hermes_agent.settings import Settings

PROFILE_PATH = "/p/{profile}"
"""Every route stands a second time behind it, for a named profile."""

ROUTES: tuple[Route, ...] = (*system.ROUTES, *sessions.ROUTES, *chat.ROUTES)
"""Every operation of the API."""

_log = log.get("gateway")


class Gateway:
    """What one process serves: its own profile, and the others of the same root when they are asked for."""

    def __init__(self, home: Path, settings: Settings, create_agent: CreateAgent | None = None) -> None:
        self.settings = settings
        self.started_at = time.time()
        self._root = home_module.root_of(home)
        self._own = home_module.profile_of(home)
        self._create_agent = create_agent
        self._profiles: dict[str, Profile] = {}
        self._rings = {self._own: KeyRing(home, settings.api_server.key)}
        self._opening = asyncio.Lock()
        self._draining = False

    @property
    def own(self) -> Profile:
        """The profile whose home the gateway runs in."""
        return self._profiles[self._own]

    @property
    def own_keys(self) -> KeyRing:
        return self._rings[self._own]

    @property
    def is_draining(self) -> bool:
        return self._draining

    async def start(self) -> None:
        """Open the store and go on with what a dead process left."""
        await self._open(self._own, self.settings)

    async def drain(self, timeout: float) -> bool:  # noqa: ASYNC109 - the turns are told how long they have
        """Admit nothing new and let running turns end; False if some had not after `timeout` seconds."""
        self._draining = True
        services = [profile.service for profile in self._profiles.values()]
        return all(await asyncio.gather(*(asyncio.to_thread(service.drain, timeout) for service in services)))

    async def close(self) -> None:
        """Close the stores; turns that still run are left to their threads."""
        for profile in self._profiles.values():
            await asyncio.to_thread(profile.close)

    async def profile(self, name: str | None) -> Profile:
        """A profile by its name, None for our own; raises `ApiError` 404 when there is none of that name."""
        wanted = name or self._own
        found = self._profiles.get(wanted)
        if found is not None:
            return found
        home = home_module.find_profile(self._root, wanted)
        if home is None:
            raise ApiError(404, "profile_not_found", "Unknown or unconfigured profile")
        async with self._opening:
            if wanted not in self._profiles:
                environ = settings_module.shared_environment()
                await self._open(wanted, await asyncio.to_thread(settings_module.load, home, environ))
            return self._profiles[wanted]

    def ring(self, name: str) -> KeyRing | None:
        """The keys of a named profile; None when there is none of that name."""
        if name not in self._rings:
            home = home_module.find_profile(self._root, name)
            if home is None:
                return None
            chosen = settings_module.load(home, settings_module.shared_environment())
            self._rings[name] = KeyRing(home, chosen.api_server.key)
        return self._rings[name]

    async def _open(self, name: str, settings: Settings) -> None:
        log.add_secrets(secret.reveal() for secret in settings.secrets)
        db = await asyncio.to_thread(open_store, settings)
        profile = Profile(name, settings, db, self._create_agent)
        found = await asyncio.to_thread(profile.service.recover)
        self._profiles[name] = profile
        _log.info("gateway.profile_opened", profile=name, turns_resumed=found)


GATEWAY = web.AppKey("gateway", Gateway)


def build(gateway: Gateway) -> web.Application:
    """The application: every route of the table, bare and behind `/p/{profile}`, with the guard in front of it."""
    app = web.Application()
    app[GATEWAY] = gateway
    system.describe(ROUTES)
    scopes: dict[tuple[str, str], Scope | None] = {}
    for route in ROUTES:
        handler = _handler(gateway, route)
        for path in (route.path, PROFILE_PATH + route.path):
            app.router.add_route(route.method, path, handler)
            scopes[route.method, path] = route.scope

    def scope_of(request: web.Request) -> Scope | None:
        resource = request.match_info.route.resource
        method = "GET" if request.method == "HEAD" else request.method
        return scopes.get((method, resource.canonical if resource is not None else ""), Scope.ADMIN)

    server = gateway.settings.api_server
    Guard(
        gateway.own_keys,
        scope_of=scope_of,
        bind_host=server.host,
        allowed_hosts=server.allowed_hosts,
        allowed_origins=server.cors_origins,
    ).install(app)
    return app


def _handler(gateway: Gateway, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        who = principal(request) if route.scope is not None else keys.OPEN
        name = request.match_info.get("profile")
        if route.scope is not None:
            _check_profile(who, name)
        return await route.handler(Call(request, await gateway.profile(name), who))

    return handle


def _check_profile(who: Principal, name: str | None) -> None:
    if name is not None and not who.may_use(name):
        raise ApiError(404, "profile_not_found", "Unknown or unconfigured profile")
