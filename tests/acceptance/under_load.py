"""A gateway that is killed again and again while clients talk to it, and what was told to whom."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench import wire

from hermes_agent.testing.fake_openai import call, calls, text
from hermes_agent.testing.replies import Answer, Json
from tests.acceptance.hermes import Done
from tests.acceptance.world import Run, World

KEY = "load-7Jq2vT9xPz4LmW8sRk3NbV5c"
CLIENTS = 16
SESSIONS = 12
"""The last clients share the sessions of the first ones."""
PER_SESSION = 40
"""Messages of one client in one session before both go on in the next one."""
KILL_EACH = (1.7, 2.3)
AT_ONCE = (0.0, 0.15)
"""After how many seconds a process is killed: mostly, and each fourth one, which is still busy with recovery."""
PATIENCE = 30.0
TOLD_AGAIN = 100
"""Messages that are sent once more when all have been answered."""

_LISTENING = "listening on http://127.0.0.1:"
_AGAIN = 0.02
_LOOK = """
import json, sys
from pathlib import Path
from hermes_agent.store.session_db import SessionDB

def work(conn):
    return {
        "faults": [row[0] for row in conn.execute("PRAGMA integrity_check") if row[0] != "ok"],
        "leases": conn.execute("SELECT count(*) FROM session_leases").get,
        "turns": [
            dict(zip(("message_id", "session", "state", "reason", "attempts", "resumes", "user_seq", "end_seq"), row))
            for row in conn.execute(
                "SELECT i.message_id, s.id, t.state, t.reason, t.attempts, t.crash_resumes, t.user_seq, t.end_seq"
                " FROM turns t JOIN sessions s ON s.key = t.session_key LEFT JOIN inbox i ON i.turn_key = t.key")
        ],
        "calls": conn.execute(
            "SELECT i.message_id, c.state FROM tool_calls c JOIN inbox i ON i.turn_key = c.turn_key").fetchall(),
    }

with SessionDB(Path(sys.argv[1]), read_only=True) as db:
    found = db.database.read(work)
    names = sorted({turn["session"] for turn in found["turns"]})
    found["rows"] = {name: db.get_messages(name) for name in names}
print(json.dumps(found))
"""


@dataclass(slots=True)
class Sent:
    """A message, under its key, and what its client was told."""

    key: str
    session: str
    text: str
    answers: list[str] = field(default_factory=list[str])
    failures: list[str] = field(default_factory=list[str])
    tries: int = 0
    acknowledged: bool = False
    """The server said once that it has it."""
    last: str = ""
    """What the server said last."""

    @property
    def is_settled(self) -> bool:
        return bool(self.answers or self.failures)


class Gateway:
    """The gateway of one home, which comes back after each death, each time on another port."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._run: Run | None = None
        self.port = 0
        """0 while there is none."""

    def start(self) -> None:
        """Return when it listens."""
        environment = {"API_SERVER_KEY": KEY, "API_SERVER_PORT": "0"}
        self._run = self._world.start("gateway", "run", env=environment)
        line = self._run.line()
        assert line.startswith(_LISTENING), f"{line!r} {self._run.end()}"
        self.port = int(line.removeprefix(_LISTENING))

    def kill(self) -> None:
        assert self._run is not None
        self.port = 0
        self._run.kill()
        with self._run:
            assert self._run.end().err == ""

    def stop(self) -> Done:
        """End it as an operator does."""
        assert self._run is not None
        with self._run as run:
            run.signal(signal.SIGTERM)
            return run.end()

    @property
    def pid(self) -> int:
        assert self._run is not None
        return self._run.pid

    def abandon(self) -> None:
        """End whatever still runs, of a test that failed."""
        if self._run is not None:
            self._run.__exit__()


@contextmanager
def gateway(world: World) -> Iterator[Gateway]:
    """A gateway that listens."""
    found = Gateway(world)
    try:
        found.start()
        yield found
    finally:
        found.abandon()


class Model:
    """Answers each request in words of its own, so that two answers to one message can be told apart.

    A message that begins with `do` has a command run first, if a person allows it; it leaves a line of its own.
    """

    def __init__(self, witness: str) -> None:
        self._witness = witness
        self._numbers = itertools.count()

    def __call__(self, body: Json) -> Answer:
        asked = next(row["content"] for row in reversed(body["messages"]) if row["role"] == "user")
        if asked.startswith("do ") and body["messages"][-1]["role"] == "user":
            command = f"sleep 0.0{next(self._numbers) % 10}; echo {asked.removeprefix('do ')} >> {self._witness}"
            return calls(call("terminal", {"command": command}))
        return text(f"answer {next(self._numbers)} to {asked}")


class Load:
    """Clients that send messages one after the other, each until its end is known, and a person who is asked."""

    def __init__(self, world: World, gateway: Gateway, seed: int) -> None:
        self._gateway = gateway
        self._rng = random.Random(seed)
        self._over = False
        self._places: list[_Place] = []
        self.witness = world.hermes.cwd / "witness"
        self.sent: list[Sent] = []
        self.faults: list[str] = []
        """What no client may ever be told."""
        world.fake.extend([Model(str(self.witness))])

    async def run(self, kills: int) -> None:
        """Talk through so many deaths; return when every message has its end."""
        clients = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]
        person = asyncio.create_task(self._person())
        try:
            await self._kill(kills)
            self._over = True
            done, waiting = await asyncio.wait(clients, timeout=PATIENCE)
            assert not waiting, [message for message in self.sent if not message.is_settled]
            for client in done:
                client.result()
            await self._tell_again()
        finally:
            for task in (person, *clients):
                task.cancel()
            await asyncio.wait([person, *clients])
            for place in self._places:
                place.close()
            await asyncio.sleep(0)  # the loop closes what was asked to close

    def _place(self) -> _Place:
        self._places.append(_Place(self._gateway))
        return self._places[-1]

    async def _kill(self, kills: int) -> None:
        for number in range(kills):
            await asyncio.sleep(self._rng.uniform(*(AT_ONCE if number % 4 == 3 else KILL_EACH)))
            await asyncio.to_thread(self._gateway.kill)
            await asyncio.to_thread(self._gateway.start)

    async def _client(self, number: int) -> None:
        place = self._place()
        for count in itertools.count():
            if self._over:
                return
            session = f"s{number % SESSIONS}-{count // PER_SESSION}"
            if count % PER_SESSION == 0:
                await self._open(place, session)
            key = f"{number}-{count}"
            message = Sent(key, session, f"{'do' if (number + count) % 4 == 0 else 'say'} {key}")
            self.sent.append(message)
            while not message.is_settled:
                await self._try(place, message, leaves=number % 4 == 3 and self._rng.random() < 0.4)

    async def _person(self) -> None:
        """Allow whatever is asked, once."""
        place = self._place()
        while True:
            asked = await place.ask(wire.request("GET", "/api/approvals", None, place.headers))
            for question in json.loads(asked.body)["data"] if asked is not None and asked.status == 200 else ():
                path = f"/api/approvals/{question['id']}"
                told = await place.ask(wire.request("POST", path, {"choice": "once"}, place.headers))
                if told is not None and told.status not in (200, 409):
                    self.faults.append(f"question: {told}")
            await asyncio.sleep(_AGAIN)

    async def _open(self, place: _Place, session: str) -> None:
        while True:
            answer = await place.ask(wire.request("POST", "/api/sessions", {"id": session}, place.headers))
            if answer is not None and answer.status in (201, 409):
                return
            if answer is not None and answer.status != 503:
                self.faults.append(f"session {session}: {answer}")

    async def _try(self, place: _Place, message: Sent, *, leaves: bool = False) -> None:
        """Send the message once; with `leaves` the client goes away before it hears anything."""
        waits = len(message.key) % 2 == 0
        headers = {**place.headers, "Idempotency-Key": message.key, **({"Prefer": "wait=5"} if waits else {})}
        path = f"/api/sessions/{message.session}/chat"
        data = wire.request("POST", path, {"message": message.text}, headers)
        message.tries += 1
        if leaves:
            await place.leave(data, self._rng.uniform(0, 0.03))
            return
        answer = await place.ask(data)
        if answer is None:
            return
        message.last = f"{answer.status} {answer.body[:300].decode()}"
        if answer.status == 200:
            self._told(message, json.loads(answer.body))
        elif answer.status == 202 or (answer.status == 409 and b"request_in_progress" in answer.body):
            message.acknowledged = True
            await asyncio.sleep(_AGAIN)
        elif answer.status == 503:
            await asyncio.sleep(_AGAIN)
        else:
            self.faults.append(f"{message}: {answer}")
            message.failures.append("refused")

    def _told(self, message: Sent, body: Json) -> None:
        message.acknowledged = True
        if body["completed"]:
            message.answers.append(body["message"]["content"])
        else:
            message.failures.append(body["failure"]["reason"])

    async def _tell_again(self) -> None:
        """What was settled before is told again, also by a later process."""
        place = self._place()
        for message in self._rng.sample(self.sent, min(len(self.sent), TOLD_AGAIN)):
            await self._try(place, message)
            ends = message.answers + message.failures
            if len(set(ends)) != 1:
                self.faults.append(f"told differently: {message}")


class _Place:
    """A client's connection, wherever the gateway is now."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._connection: wire.Connection | None = None
        self.headers = {"Authorization": f"Bearer {KEY}"}

    async def ask(self, data: bytes) -> wire.Message | None:
        """The answer, or None when the server went away."""
        try:
            connection = await self._open()
            async with asyncio.timeout(PATIENCE):
                return await connection.ask(data)
        except ConnectionError:
            self._connection = None
            await asyncio.sleep(_AGAIN)
            return None

    async def leave(self, data: bytes, seconds: float) -> None:
        """Send it, and go away after so many seconds."""
        with contextlib.suppress(OSError):
            connection = await self._open()
            connection.send(data)
            await asyncio.sleep(seconds)
            connection.close()
        self._connection = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _open(self) -> wire.Connection:
        if self._connection is None or self._connection.is_closed:
            if not self._gateway.port:
                raise ConnectionRefusedError
            self._connection = await wire.Connection.open(self._gateway.port)
        return self._connection


def look(world: World) -> dict[str, Any]:
    """What the store says, read by another process."""
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, str(world.hermes.home / "state.db")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
