"""One life of the program in a crash trial, and the server that forks such lives.

    python -m hermes_agent.testing.crash.child DIR PLAN     one life; PLAN is JSON, see `Plan`
    python -m hermes_agent.testing.crash.child              serve: requests and replies are JSON lines

A life does what a person would: it opens the session, finishes what an earlier life left, and
sends the messages that were not acknowledged. The program has no message ids yet, so a client
that lost its acknowledgement looks whether the session holds its text before it sends it again.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from hermes_agent import failpoints
from hermes_agent.agent import prompt
from hermes_agent.agent.run import AIAgent
from hermes_agent.cancellation import Cancellation
from hermes_agent.delivery.runner import Notices, Runner, SessionFields
from hermes_agent.errors import SessionBusy, StaleLease
from hermes_agent.providers.base import OnEvent, Provider, Reply, Request
from hermes_agent.store import database, leases
from hermes_agent.store.session_db import SessionDB
from hermes_agent.testing.crash import mutants
from hermes_agent.testing.crash.scenario import (
    CANARY,
    MESSAGES,
    QUEUED,
    SCRIPT,
    SESSION,
    TOOLSET,
    Outside,
    digest,
    register_tools,
)
from hermes_agent.tools import builtin

FINISHED, FAILED, BUSY, STALE = 0, 1, 10, 11
"""Exit codes of a life that was not killed."""
LIFE_SECONDS = 30
"""A life that takes longer hangs, and is ended by its alarm."""

Result = dict[str, Any]


class Plan(msgspec.Struct, kw_only=True):
    """What one life does, and where it ends."""

    phase: str = "main"
    """`queue`: take the first message while this process holds the session, and die; `line`: take message
    `until` while another holds it, and die; `main`: the whole conversation; `recover`: only finish what was left."""
    life: int = 1
    kill: int = 0
    """SIGKILL at this hit of a failpoint; 0 for never."""
    point: str = ""
    """Count only the hits of the point of this name."""
    until: int = len(MESSAGES)
    """How many messages the client has to send."""
    freeze: int = 0
    """SIGSTOP at this hit, with a lease that anybody may take."""
    mutant: str = ""
    count: bool = False
    """Write the names of all points that were hit to the file `points`."""
    apart: bool = False
    """What this life asks the model is kept apart: it may have been overtaken."""
    ttl: float = leases.TTL
    """For how long a lease is good; 0 lets anybody take it at once."""


# -- where a life ends -----------------------------------------------------------------


class _Trap:
    """Counts the failpoints of this life and ends it at the chosen one."""

    def __init__(self, plan: Plan, outside: Outside) -> None:
        self._plan = plan
        self._outside = outside
        self._lock = threading.Lock()
        self._hits = 0
        self.names: list[str] = []

    def hit(self, name: str) -> None:
        with self._lock:
            self.names.append(name)
            if self._plan.point not in ("", name):
                return
            self._hits += 1
            if self._hits == self._plan.kill:
                self.die(name)
            if self._hits == self._plan.freeze:
                os.kill(os.getpid(), signal.SIGSTOP)

    @property
    def overtaken(self) -> bool:
        """Whether another life may have done meanwhile what this one still thinks is its own."""
        return self._plan.apart or 0 < self._plan.freeze <= self._hits

    def die(self, name: str) -> None:
        self._outside.note("deaths", point=name, hit=len(self.names), life=self._plan.life)
        os.kill(os.getpid(), signal.SIGKILL)


class _Recorder:
    """A provider that writes down what the model is asked, and apart what a life asks that was overtaken."""

    def __init__(self, inner: Provider, outside: Outside, trap: _Trap) -> None:
        self._inner = inner
        self._outside = outside
        self._trap = trap

    def complete(self, request: Request, on_event: OnEvent | None, cancellation: Cancellation) -> Reply:
        messages: Any = request.messages
        self._outside.note("late_requests" if self._trap.overtaken else "requests", encoded=messages.encoded.decode())
        return self._inner.complete(request, on_event, cancellation)


# -- one life -----------------------------------------------------------------------------


class _Life:
    def __init__(self, folder: Path, plan: Plan) -> None:
        self.outside = Outside(folder / "outside")
        self.plan = plan
        self.trap = _Trap(plan, self.outside)
        self.db = SessionDB(folder / "home" / "state.db")
        self.sending = ""

    def agent(self, script: Path, cwd: Path) -> AIAgent:
        outside = self.outside

        def interim(text: str, **_: Any) -> None:
            outside.note("seen", kind="interim", text=text)

        def started(call_id: str, *_: Any) -> None:
            outside.note("seen", kind="start", call=call_id)

        def completed(call_id: str, _name: str, _args: Any, content: Any) -> None:
            outside.note("seen", kind="tool", call=call_id, digest=digest(content))

        def progress(_kind: str, name: str, *_: Any, **__: Any) -> None:
            if name == "terminal":
                raise RuntimeError(f"a surface broke and tells its key: {CANARY}")

        def streamed(_text: str | None) -> None:
            """Streamed text is provisional: nothing is owed for it."""

        agent = AIAgent(
            provider="scripted",
            script=script,
            session_db=self.db,
            session_id=SESSION,
            enabled_toolsets=[TOOLSET, "terminal"],
            cwd=cwd,
            yolo=True,
            interim_assistant_callback=interim,
            tool_start_callback=started,
            tool_complete_callback=completed,
            tool_progress_callback=progress,
            stream_delta_callback=streamed,
        )
        agent._answering = _Recorder(agent._answering, outside, self.trap)
        return agent

    def see(self, result: Result) -> None:
        self.outside.note(
            "seen",
            kind="result",
            turn=result["turn_id"],
            text=result["final_response"],
            failed=bool(result["failed"] or result["interrupted"]),
            exit=result["turn_exit_reason"],
            keys=sorted(result),
        )

    def acknowledge(self, turn_id: str) -> None:
        self.outside.note("acks", text=self.sending, turn=turn_id)

    def die_waiting(self, _why: str) -> None:
        self.count()
        self.trap.die("queued")

    def count(self) -> None:
        """Write down the points of this life, if that is its purpose."""
        for name in self.trap.names if self.plan.count else ():
            self.outside.note("points", name=name)

    def holds(self, text: str) -> bool:
        """Whether the session has the message, as a row or in line."""
        rows = self.db.get_messages(SESSION)
        waiting = (turn.input for turn in self.db.open_turns(SESSION))
        return text in waiting or any(row["role"] == "user" and row["content"] == text for row in rows)

    # -- phases -----------------------------------------------------------------

    def queue(self, runner: Runner) -> int:
        """Take a message while this process holds the session, and die with both."""
        self.db.claim(SESSION, source="selftest")
        self.sending = QUEUED
        runner.run(QUEUED)
        return FAILED  # the runner must have said that it waits

    def line(self, runner: Runner) -> int:
        """Take a message while another process holds the session, and die."""
        self.sending = MESSAGES[self.plan.until - 1]
        self.see(runner.run(self.sending))
        return FINISHED

    def main(self, runner: Runner) -> int:
        for result in runner.recover():
            self.see(result)
        acknowledged = {record["text"] for record in self.outside.read("acks")}
        for text in MESSAGES[: self.plan.until]:
            if text in acknowledged:
                continue
            self.sending = text
            if self.holds(text):
                self.acknowledge("")
                continue
            result = runner.run(text)
            self.see(result)
            if result["turn_exit_reason"] == "session_persistence_failed":
                return STALE
        return FINISHED

    def recover(self, runner: Runner) -> int:
        """Finish what was left, however many others do the same."""
        while True:
            try:
                for result in runner.recover():
                    self.see(result)
            except SessionBusy:
                threading.Event().wait(0.002)
            if not self.db.open_turns(SESSION):
                return FINISHED


def live(folder: Path, plan: Plan) -> int:
    """Live one life in `folder`; returns its exit code unless it is killed."""
    signal.alarm(LIFE_SECONDS)
    home, work = folder / "home", folder / "work"
    os.environ.update(HERMES_HOME=str(home), OPENAI_API_KEY=CANARY, HERMES_YOLO_MODE="")
    # each life sees another day, so that nothing of a session may depend on when it is opened
    cast("Any", prompt).time = SimpleNamespace(strftime=f"2030-01-{plan.life % 28 + 1:02d}".format)
    if plan.mutant:
        mutants.MUTANTS[plan.mutant].apply()
    leases.TTL = plan.ttl
    life = _Life(folder, plan)
    failpoints.arm(life.trap.hit)
    register_tools(life.outside)
    notices = Notices(admitted=life.acknowledge)
    if plan.phase in ("queue", "line"):
        notices.waiting = life.die_waiting
    agent = life.agent(folder / "script.json", work)
    runner = Runner(life.db, agent, SESSION, SessionFields(source="selftest"), notices)
    phases: dict[str, Callable[[Runner], int]] = {
        "queue": life.queue,
        "line": life.line,
        "main": life.main,
        "recover": life.recover,
    }
    try:
        return phases[plan.phase](runner)
    except SessionBusy:
        return BUSY
    except StaleLease:
        return STALE
    finally:
        failpoints.arm(None)
        life.count()
        life.db.close()


def prepare(folder: Path) -> None:
    """Make the folder of a new trial."""
    for name in ("home", "work", "outside"):
        (folder / name).mkdir(parents=True, mode=0o700)
    (folder / "script.json").write_text(json.dumps(SCRIPT), encoding="utf-8")


# -- the fork server --------------------------------------------------------------------------


def _fork(folder: Path, plan: Plan, gate: int | None = None) -> int:
    """Start a life in a process of its own; with a `gate` it begins when that pipe is closed."""
    assert not database._table, "a store is open; its locks would not survive the fork"
    pid = os.fork()
    if pid:
        return pid
    code = FAILED
    try:
        null = os.open(os.devnull, os.O_RDWR)
        errors = os.open(folder / "outside" / "stderr", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(null, 0)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        if gate is not None:
            os.read(gate, 1)
        code = live(folder, plan)
    except BaseException:  # noqa: BLE001 - the boundary of a process: told and counted as a failed life
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)
    return 0


def _wait(pid: int) -> dict[str, int | str]:
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return {"how": "frozen", "pid": pid, "code": 0}
    if os.WIFSIGNALED(status):
        how = "killed" if os.WTERMSIG(status) == signal.SIGKILL else "hung"
        return {"how": how, "pid": pid, "code": -os.WTERMSIG(status)}
    return {"how": "ended", "pid": pid, "code": os.WEXITSTATUS(status)}


def _crowd(folder: Path, plans: list[Plan]) -> list[dict[str, int | str]]:
    """Live several lives at once."""
    gate, opener = os.pipe()
    pids = [_fork(folder, plan, gate) for plan in plans]
    os.write(opener, b"g" * len(pids))
    os.close(gate)
    os.close(opener)
    return [_wait(pid) for pid in pids]


def _warm_up() -> None:
    """Load what a life loads late, once for all of them."""
    builtin.register_builtin()
    for tool in builtin.TOOLS:
        tool.effect_of({"command": "env"})
    tools = (f"hermes_agent.tools.{name}" for name in ("shell", "child_env", "approval.gate"))
    for name in ("difflib", "encodings.unicode_escape", "hermes_agent.providers.scripted", *tools):
        importlib.import_module(name)


def serve() -> None:
    """Answer requests on standard input until it ends."""
    _warm_up()
    gc.collect()
    gc.freeze()
    frozen: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        reply: list[dict[str, int | str]]
        if "wake" in request:
            os.kill(request["wake"], request["signal"])
            frozen.discard(request["wake"])
            reply = [_wait(request["wake"])]
        else:
            plans = msgspec.convert(request["plans"], list[Plan])
            folder = Path(request["folder"])
            reply = _crowd(folder, plans) if len(plans) > 1 else [_wait(_fork(folder, plans[0]))]
        frozen.update(int(ended["pid"]) for ended in reply if ended["how"] == "frozen")
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
    for pid in frozen:
        os.kill(pid, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Live one life, or serve."""
    if not arguments:
        serve()
        return 0
    folder = Path(arguments[0])
    if not folder.exists():
        prepare(folder)
    return live(folder, msgspec.json.decode(arguments[1] if len(arguments) > 1 else "{}", type=Plan))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
