"""Our turn, as a measured process: `AIAgent` with a real store and a real tool."""

from __future__ import annotations

import time
from typing import Any

from bench import children, loop_options
from hermes_agent.agent.run import AIAgent
from hermes_agent.store.database import StoreOptions
from hermes_agent.store.session_db import SessionDB
from hermes_agent.tools.registry import Effect, ToolEntry, registry


def _tool(options: loop_options.Options) -> str:
    """Register the tool that the turn calls, unless it is `todo`; returns its toolset."""
    if not options.nap and not options.unsafe:
        return "todo"

    def nap(args: dict[str, Any], **_: Any) -> dict[str, Any]:
        time.sleep(options.nap)
        return {"todos": args["todos"]}

    effect = Effect.UNSAFE if options.unsafe else Effect.PURE
    schema = {"type": "object", "properties": {"todos": {"type": "array"}}}
    registry.register(ToolEntry("nap", "bench", "Sleep.", schema, nap, effect=effect, parallel=True))
    return "bench"


def _agent(options: loop_options.Options, db: SessionDB, toolset: str, **more: Any) -> AIAgent:
    return AIAgent(
        base_url=f"http://127.0.0.1:{options.port}/v1",
        api_key="none",
        provider="custom",
        max_iterations=1_000_000,
        enabled_toolsets=[toolset],
        session_db=db,
        cwd=options.folder,
        **more,
    )


def main() -> None:
    options = loop_options.parse()
    toolset = _tool(options)
    db = SessionDB(options.folder / "state.db", options=StoreOptions(synchronous=options.synchronous))
    _agent(options, db, toolset, model="warm").run_conversation("hi")
    marks: list[float] = []

    def mark(*_: object) -> None:
        marks.append(time.process_time())

    def listen(_: object) -> None:
        """Stand for a person who reads along."""

    agent = _agent(
        options,
        db,
        toolset,
        model="bench",
        step_callback=mark,
        stream_delta_callback=listen if options.stream else None,
    )
    with loop_options.Measured() as measured:
        before = db.commits
        result = agent.run_conversation("hi")
        commits = db.commits - before
    ok = result["final_response"] == "ok" and result["api_calls"] == options.steps + 1
    stored = db.message_count(agent.session_id)
    db.close()
    ok = ok and stored == 2 + options.steps * (1 + options.calls)
    children.report(measured.result(ok, commits=commits, marks=marks))


if __name__ == "__main__":
    main()
