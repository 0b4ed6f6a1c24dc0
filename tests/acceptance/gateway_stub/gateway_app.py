"""A stand-in for the gateway's application: turns begin and end when a client says so.

`STAND_IN` in the environment names what goes wrong: `broken` stores, or a `stuck` close.
"""

from __future__ import annotations

import asyncio
import ctypes
import os

from aiohttp import web

from hermes_agent.errors import StoreDamaged

PR_GET_DUMPABLE = 3


class Gateway:
    def __init__(self, home, settings):
        self.home, self.settings = home, settings
        self.fault = os.environ.get("STAND_IN", "")
        self.idle = asyncio.Event()
        self.idle.set()
        self.draining = False

    async def start(self):
        if self.fault == "broken":
            raise StoreDamaged(f"{self.home}/state.db is damaged")

    async def drain(self, timeout):  # noqa: ASYNC109 - the name that the server uses
        self.draining = True
        try:
            await asyncio.wait_for(self.idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def close(self):
        if self.fault == "stuck":
            await asyncio.Event().wait()


def build(gateway):
    async def look(request):
        return web.json_response(
            {
                "home": str(gateway.home),
                "draining": gateway.draining,
                "dumpable": ctypes.CDLL(None).prctl(PR_GET_DUMPABLE, 0, 0, 0, 0),
            }
        )

    async def begin(request):
        gateway.idle.clear()
        return web.Response()

    async def end(request):
        gateway.idle.set()
        return web.Response()

    async def crash(request):
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        raise LookupError("a handler's own mistake")

    app = web.Application()
    app.add_routes([web.get("/", look), web.post("/begin", begin), web.post("/end", end), web.get("/crash", crash)])
    return app
