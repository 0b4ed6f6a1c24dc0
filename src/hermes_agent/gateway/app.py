"""The gateway: the profiles that it serves, and the application that puts the table of routes before them."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from hermes_agent import home as home_module
from hermes_agent import log
from hermes_agent import settings as settings_module
from hermes_agent.errors import Draining, SettingsError
from hermes_agent.gateway import keys
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.guard import Guard, principal
from hermes_agent.gateway.keys import KeyRing, Principal, Scope
from hermes_agent.gateway.profile import CreateAgent, Profile
from hermes_agent.gateway.replies import ApiError
from hermes_agent.gateway.routes import (
    approvals,
    chat,
    chat_stream,
    completions,
    deliveries,
    responses,
    runs,
    sessions,
    system,
)
from hermes_agent.gateway.table import Route
from hermes_agent.settings import Settings
from hermes_agent.store.opening import open_store

PROFILE_PATH = "/p/{profile}"
"""Every route stands a second time behind it, for a named profile."""

ROUTES: tuple[Route, ...] = (
    *system.ROUTES,
    *sessions.ROUTES,
    *chat.ROUTES,
    *completions.ROUTES,
    *responses.ROUTES,
    *chat_stream.ROUTES,
    *runs.ROUTES,
    *deliveries.ROUTES,
    *approvals.ROUTES,
)
"""Every operation of the API."""

_LOOK_EVERY = 0.5
"""Seconds between two looks at what another profile's folder holds."""
_PROFILE = re.compile(r"/p/([^/]+)(?:/|$)")

_log = log.get("gateway")


class Gateway:
    """What one process serves: its own profile, and the others of the same root when they are asked for."""

    def __init__(self, home: Path, settings: Settings, create_agent: CreateAgent | None = None) -> None:
        self.settings = settings
        self.started_at = time.time()
        self.own_name = home_module.profile_of(home)
        self.own_keys = KeyRing(home, settings.api_server.key)
        self._root = home_module.root_of(home)
        self._create_agent = create_agent
        self._profiles: dict[str, Profile] = {}
        self._others: dict[str, _Other] = {}
        self._looking = asyncio.Lock()
        self._opening = asyncio.Lock()
        self._draining = False

    @property
    def own(self) -> Profile:
        """The profile whose home the gateway runs in."""
        return self._profiles[self.own_name]

    @property
    def is_draining(self) -> bool:
        return self._draining

    async def start(self) -> None:
        """Open the store and go on with what a dead process left."""
        await self._open(self.own_name, self.settings)

    async def drain(self, timeout: float) -> bool:  # noqa: ASYNC109 - the turns are told how long they have
        """Admit nothing new and let running turns end; False if some had not after `timeout` seconds."""
        self._draining = True
        async with self._opening:
            services = [profile.service for profile in self._profiles.values()]
        return all(await asyncio.gather(*(asyncio.to_thread(service.drain, timeout) for service in services)))

    async def close(self) -> None:
        """Close the stores; turns that still run are left to their threads."""
        for profile in self._profiles.values():
            await asyncio.to_thread(profile.close)

    async def profile(self, name: str | None) -> Profile:
        """A profile by its name, None for our own; raises `ApiError` 404 when there is none of that name."""
        if name is None or name == self.own_name:
            return self.own
        other = await self._other(name)
        if other is None:
            raise unknown_profile()
        found = self._profiles.get(name)
        if found is not None:
            return found
        async with self._opening:
            if name not in self._profiles:
                if self._draining:
                    raise Draining
                await self._open(name, await asyncio.to_thread(_settings_of, other.home))
            return self._profiles[name]

    async def whom(self, name: str | None, who: Principal | None, header: str) -> Principal | None:
        """Who asks something of a named profile, where our own keys say that it is `who`; None for nobody.

        Another profile's own keys count too, for itself alone.
        """
        if name is None or name == self.own_name:
            return who
        if who is not None:
            return who.within(name, self.own_name) if who.may_use(name) else who
        other = await self._other(name)
        found = other.keys.authenticate(header) if other is not None and other.keys is not None else None
        return found.within(name, name) if found is not None and found.may_use(name) else None

    async def _other(self, name: str) -> _Other | None:
        """Another profile as its folder is now; None when there is none that is to be served."""
        now = time.monotonic()
        known = self._others.get(name)
        if known is None or now >= known.look_at:
            async with self._looking:
                known = self._others.get(name)
                if known is None or now >= known.look_at:
                    known = await self._look(name, known)
        return known if known is not None and known.served else None

    async def _look(self, name: str, known: _Other | None) -> _Other | None:
        seen = await asyncio.to_thread(_look, self._root, name, known)
        if known is not None and (seen is None or seen.mark[0] != known.mark[0]):
            # That folder is gone, and with it whatever a profile of this name had.
            del self._others[name]
            gone = self._profiles.pop(name, None)
            if gone is not None:
                _log.warning("gateway.profile_gone", profile=name)
                await asyncio.to_thread(gone.close)
        if seen is not None:
            self._others[name] = seen
        return seen

    async def _open(self, name: str, settings: Settings) -> None:
        log.add_secrets(secret.reveal() for secret in settings.secrets)
        db = await asyncio.to_thread(open_store, settings)
        profile = Profile(name, settings, db, self._create_agent)
        found = await asyncio.to_thread(profile.service.recover)
        self._profiles[name] = profile
        profile.finish_removals()
        _log.info("gateway.profile_opened", profile=name, turns_resumed=found)


Mark = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Other:
    """Another profile, as its folder was when it was looked at."""

    home: Path
    mark: Mark
    """Of the folder, and of the files that its settings come from."""
    keys: KeyRing | None
    """None lets nobody in: its settings cannot be used."""
    served: bool
    look_at: float
    """The time from which on it is looked at again."""


def _look(root: Path, name: str, known: _Other | None) -> _Other | None:
    home = home_module.find_profile(root, name)
    if home is None:
        return None
    look_at = time.monotonic() + _LOOK_EVERY
    mark = tuple(_mark(path) for path in (home, home / "config.yaml", home / ".env"))
    if known is not None and known.mark == mark:
        return _Other(home, mark, known.keys, known.served, look_at)
    try:
        server = _settings_of(home).api_server
        return _Other(home, mark, KeyRing(home, server.key), server.enabled, look_at)
    except SettingsError as error:
        _log.failure("gateway.profile_unusable", error, profile=name)
        return _Other(home, mark, None, served=True, look_at=look_at)


def _mark(path: Path) -> tuple[int, ...]:
    """What tells a file from another version of it, and a folder from another one of its name."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    which = found.st_dev, found.st_ino
    return which if path.is_dir() else (*which, found.st_mtime_ns, found.st_size)


def _settings_of(home: Path) -> Settings:
    return settings_module.load(home, settings_module.shared_environment())


GATEWAY = web.AppKey("gateway", Gateway)


def build(gateway: Gateway) -> web.Application:
    """The application: every route of the table, bare and behind `/p/{profile}`, with the guard in front of it."""
    app = web.Application()
    app[GATEWAY] = gateway
    app[system.TABLE] = ROUTES
    app[system.SERVER] = server = gateway.settings.api_server
    scopes: dict[tuple[str, str], Scope | None] = {}

    def scope_of(request: web.Request) -> Scope | None:
        resource = request.match_info.route.resource
        return scopes.get((request.method, resource.canonical if resource is not None else ""), Scope.ADMIN)

    async def recognise(request: web.Request, who: Principal | None, header: str) -> Principal | None:
        named = _PROFILE.match(request.path)  # a path without a route has no `match_info`
        return await gateway.whom(named.group(1) if named else None, who, header)

    guard = Guard(
        gateway.own_keys,
        scope_of=scope_of,
        recognise=recognise,
        bind_host=server.host,
        allowed_hosts=server.allowed_hosts,
        allowed_origins=server.cors_origins,
    )
    guard.install(app)
    for route in ROUTES:
        handler = _handler(gateway, route)
        for path in (route.path, PROFILE_PATH + route.path):
            app.router.add_route(route.method, path, handler, expect_handler=guard.expect)
            scopes[route.method, path] = route.scope
    return app


def _handler(gateway: Gateway, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        if route.scope is None:
            # Nobody asked for a key: what is answered says nothing about any profile.
            return await route.handler(Call(request, gateway.own, keys.OPEN))
        who, name = principal(request), request.match_info.get("profile")
        if not who.may_use(name or gateway.own_name):
            raise unknown_profile() if name is not None else other_profile()
        return await route.handler(Call(request, await gateway.profile(name), who))

    return handle


def unknown_profile() -> ApiError:
    return ApiError(404, "profile_not_found", "Unknown or unconfigured profile")


def other_profile() -> ApiError:
    return ApiError(403, "profile_not_allowed", "This key is for another profile: put /p/NAME before the path.")
