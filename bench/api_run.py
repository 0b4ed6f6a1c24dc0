"""A session API under load, as a client process: it starts the server, asks, and tells what that took.

Ours is `hermes gateway run` in an empty home, with commits that survive a loss of power.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench import children, wire

KEY = "bench-7Jq2vT9xPz4LmW8sRk3NbV5c"
LEVELS = (1, 8, 32)
PER_SESSION = 5
"""Turns of one session before the next one is used."""
_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
_HEADERS = {"Authorization": f"Bearer {KEY}"}
_CONFIG = """
model: {{default: bench, provider: custom, base_url: 'http://127.0.0.1:{model}/v1', api_key: none}}
database: {{synchronous: full}}
"""


@dataclass(frozen=True, slots=True)
class Options:
    """One run."""

    side: str
    folder: Path
    model: int
    """Port of the model server."""
    turns: int
    """Turns with one client; eight do four times as many, thirty-two twelve times."""
    sessions: int
    """Sessions of one turn each, while which memory is watched."""
    idle: float
    """Seconds without a request."""


class Server:
    """The measured process."""

    def __init__(self, options: Options) -> None:
        started = time.perf_counter()
        self._process = subprocess.Popen(
            _command(options),
            cwd=options.folder if options.side == "ours" else children.ROOT,
            env=children.environment(options.folder, API_SERVER_PORT="0", API_SERVER_KEY=KEY),
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started = started
        self.port = self._port()
        self._facts = psutil.Process(self._process.pid)

    def _port(self) -> int:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := _LISTENING.match(line):
                return int(found[1])
        raise SystemExit("the server ended before it listened")

    @property
    def cpu(self) -> float:
        """Seconds of all its threads so far; Linux counts them in nanoseconds."""
        if sys.platform == "linux":
            return time.clock_gettime((~self._process.pid << 3) | 2)
        times = self._facts.cpu_times()
        return times.user + times.system

    @property
    def memory(self) -> float:
        """Megabytes that are resident."""
        return self._facts.memory_info().rss / 1e6

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise


def _command(options: Options) -> list[str]:
    if options.side == "floor":
        store = options.folder / "floor.db"
        return [sys.executable, "-m", "bench.floor_gateway", "--model", str(options.model), "--store", str(store)]
    (options.folder / "config.yaml").write_text(_CONFIG.format(model=options.model), encoding="utf-8")
    return [str(Path(sys.executable).with_name("hermes")), "gateway", "run"]


async def _session(connection: wire.Connection) -> str:
    made = await connection.ask(wire.request("POST", "/api/sessions", {}, _HEADERS))
    if made.status != 201:
        raise SystemExit(f"no session: {made.status} {made.body[:500]!r}")
    return json.loads(made.body)["session"]["id"]


async def _turn(connection: wire.Connection, session: str, text: str) -> float:
    """Seconds until the answer was here; every one must be given."""
    data = wire.request("POST", f"/api/sessions/{session}/chat", {"message": text}, _HEADERS)
    began = time.perf_counter()
    answer = await connection.ask(data)
    seconds = time.perf_counter() - began
    if answer.status != 200 or b'"content":"ok"' not in answer.body:
        raise SystemExit(f"no answer: {answer.status} {answer.body[:500]!r}")
    return seconds


async def _level(server: Server, clients: int, turns: int) -> dict[str, float]:
    """So many clients that each wait for their answer before they ask again."""
    each = turns // clients
    connections = [await wire.Connection.open(server.port) for _ in range(clients)]
    sessions = [[await _session(connection) for _ in range(-(-each // PER_SESSION))] for connection in connections]
    seconds: list[float] = []

    async def ask(number: int) -> None:
        for turn in range(each):
            session = sessions[number][turn // PER_SESSION]
            seconds.append(await _turn(connections[number], session, f"hi {number} {turn}"))

    cpu, began = server.cpu, time.perf_counter()
    await asyncio.gather(*map(ask, range(clients)))
    wall = time.perf_counter() - began
    cpu = server.cpu - cpu
    for connection in connections:
        connection.close()
    return {
        "rate": len(seconds) / wall,
        "cpu": cpu / len(seconds),
        "p50": _quantile(seconds, 0.5),
        "p99": _quantile(seconds, 0.99),
    }


def _quantile(samples: list[float], part: float) -> float:
    ordered = sorted(samples)
    return ordered[min(math.ceil(part * len(ordered)), len(ordered)) - 1]


async def _growth(server: Server, sessions: int) -> float:
    """Megabytes that a hundred sessions of one turn leave behind."""
    clients = 8
    before = server.memory

    async def fill() -> None:
        connection = await wire.Connection.open(server.port)
        for _ in range(sessions // clients):
            await _turn(connection, await _session(connection), "hi")
        connection.close()

    await asyncio.gather(*(fill() for _ in range(clients)))
    return max(server.memory - before, 0.0) / sessions * 100


async def _measure(server: Server, options: Options) -> dict[str, Any]:
    connection = await wire.Connection.open(server.port)
    models = await connection.ask(wire.request("GET", "/v1/models", None, _HEADERS))
    if models.status != 200:
        raise SystemExit(f"not ready: {models.status}")
    found: dict[str, Any] = {"ready": time.perf_counter() - server.started}
    session = await _session(connection)
    found["first"] = await _turn(connection, session, "hi")
    cpu, began = server.cpu, time.perf_counter()
    await asyncio.sleep(options.idle)
    found["idle"] = (server.cpu - cpu) / (time.perf_counter() - began)
    found["memory"] = server.memory
    connection.close()
    for clients in LEVELS:
        level = await _level(server, clients, options.turns * _times(clients))
        found.update({f"{what} {clients}": value for what, value in level.items()})
    found["growth"] = await _growth(server, options.sessions)
    return found


def _times(clients: int) -> int:
    return {1: 1, 8: 4, 32: 12}[clients]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=("ours", "floor"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--sessions", type=int, required=True)
    parser.add_argument("--idle", type=float, required=True)
    options = Options(**vars(parser.parse_args()))
    server = Server(options)
    try:
        found = asyncio.run(_measure(server, options))
    finally:
        server.stop()
    children.report(found)


if __name__ == "__main__":
    main()
