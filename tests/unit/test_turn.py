"""A turn through `AIAgent`, the scripted model and a real store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_agent.agent.control import TurnControl
from hermes_agent.agent.journal import Journal
from hermes_agent.agent.run import AIAgent
from hermes_agent.errors import StoreFull
from hermes_agent.store.session_db import SessionDB
from hermes_agent.store.turns import CallState, TurnState
from hermes_agent.tools.registry import Effect, ToolEntry, registry
from hermes_agent.transcript import rules
from tests.unit.agents import call, make_agent, say, tools

SESSION = "s1"


@pytest.fixture
def db(tmp_path: Path) -> Iterator[SessionDB]:
    with SessionDB(tmp_path / "state.db") as store:
        yield store


def stored(folder: Path) -> list[dict[str, Any]]:
    """The transcript as another handle reads it."""
    with SessionDB(folder / "state.db") as other:
        return other.get_messages_as_conversation(SESSION)


def roles(folder: Path) -> list[str]:
    return [row["role"] for row in stored(folder)]


def agent_with(folder: Path, db: SessionDB, replies: list[Any], **options: Any) -> AIAgent:
    return make_agent(folder, replies, session_db=db, session_id=SESSION, **options)


def echo(args: dict[str, Any], **_: Any) -> str:
    return f"result {args.get('n', '')}"


def test_a_turn_stores_every_step_in_order(tmp_path: Path, db: SessionDB) -> None:
    with tools(echo=echo):
        agent = agent_with(tmp_path, db, [call(("echo", {"n": 1}), text="looking"), say("done")])
        result = agent.run_conversation("go")
    assert result["final_response"] == "done"
    assert result["completed"] is True
    assert [(row["role"], row["content"]) for row in stored(tmp_path)] == [
        ("user", "go"),
        ("assistant", "looking"),
        ("tool", "result 1"),
        ("assistant", "done"),
    ]
    assert db.open_turns(SESSION) == []


def test_what_a_callback_sees_is_already_in_the_store(tmp_path: Path, db: SessionDB) -> None:
    seen: dict[str, list[str]] = {}
    with tools(echo=echo):
        agent = agent_with(
            tmp_path,
            db,
            [call(("echo", {"n": 1}), ("echo", {"n": 2}), text="looking"), say("done")],
            interim_assistant_callback=lambda *_, **__: seen.setdefault("interim", roles(tmp_path)),
            tool_complete_callback=lambda call_id, *_: seen.setdefault(call_id, roles(tmp_path)),
        )
        agent.run_conversation("go")
    assert seen["interim"] == ["user", "assistant"]
    assert [seen[key][-1] for key in seen if key != "interim"] == ["tool", "tool"]
    assert sorted(len(value) for value in seen.values()) == [2, 3, 4]


@pytest.mark.parametrize("refused", range(6))
def test_after_a_refused_flush_nothing_is_shown_dispatched_or_asked(tmp_path: Path, refused: int) -> None:
    """Whatever flush is refused (the user row aside), the turn does nothing more."""
    log: list[str] = []

    def work(args: dict[str, Any], **_: Any) -> str:
        log.append(f"run {args['n']}")
        return "x"

    with tools(work=ToolEntry("work", "test", "", {"type": "object"}, work)):
        agent = make_agent(
            tmp_path,
            [call(("work", {"n": 1}), ("work", {"n": 2}), text="a"), call(("work", {"n": 3}), text="b"), say("end")],
            interim_assistant_callback=lambda text, **_: log.append(f"show {text}"),
            tool_complete_callback=lambda *args: log.append(f"show result {args[2]['n']}"),
            step_callback=lambda number, _: log.append(f"ask {number}"),
        )
        flushes: list[bool] = []

        def flush(_messages: object, _history: object = None) -> bool:
            flushes.append(len(flushes) != refused)
            log.append("flush" if flushes[-1] else "refused")
            return flushes[-1]

        agent._flush_messages_to_session_db = flush  # type: ignore[method-assign]
        result = agent.run_conversation("go")
    everything = [
        "flush", "ask 1", "flush", "show a", "run 1", "flush", "show result 1", "run 2", "flush", "show result 2",
        "ask 2", "flush", "show b", "run 3", "flush", "show result 3", "ask 3", "flush",
    ]  # fmt: skip
    at = [i for i, event in enumerate(everything) if event == "flush"][refused]
    if refused == 0:
        assert log == ["refused", *everything[1:]]
        assert result["completed"] is True
    else:
        assert log == [*everything[:at], "refused"]
        assert result["failed"] is True
        assert result["completed"] is False
        assert result["turn_exit_reason"] == "session_persistence_failed"


def test_rows_are_in_call_order_whatever_ends_first(tmp_path: Path, db: SessionDB) -> None:
    gates = [threading.Event() for _ in range(3)]

    def wait(args: dict[str, Any], **_: Any) -> str:
        number = args["n"]
        if number < 2:
            assert gates[number + 1].wait(5)
        gates[number].set()
        return f"result {number}"

    with tools(wait=wait):
        agent = agent_with(tmp_path, db, [call(*(("wait", {"n": n}, f"c{n}") for n in range(3))), say("done")])
        agent.run_conversation("go")
    assert [row["content"] for row in stored(tmp_path) if row["role"] == "tool"] == ["result 0", "result 1", "result 2"]


def test_a_result_behind_a_slower_call_is_kept_at_once(tmp_path: Path, db: SessionDB) -> None:
    """While the first call of a batch runs, the second one's result is in the ledger."""
    found: list[list[CallState]] = []
    ended = threading.Event()

    def slow(_args: dict[str, Any], **_: Any) -> str:
        assert ended.wait(5)
        for _ in range(500):
            states = [record.state for record in agent.journal.writer.ledger()]  # type: ignore[union-attr]
            if CallState.FINISHED in states:
                break
            threading.Event().wait(0.01)
        found.append(states)
        return "slow"

    def quick(_args: dict[str, Any], **_: Any) -> str:
        ended.set()
        return "quick"

    with tools(slow=(slow, Effect.UNSAFE), quick=(quick, Effect.UNSAFE)):
        agent = agent_with(tmp_path, db, [call(("slow", {}), ("quick", {})), say("done")])
        agent.run_conversation("go")
    assert found == [[CallState.STARTED, CallState.FINISHED]]
    assert [row["content"] for row in stored(tmp_path) if row["role"] == "tool"] == ["slow", "quick"]


def test_a_started_row_is_written_for_all_but_pure_tools(tmp_path: Path, db: SessionDB) -> None:
    counts: dict[Effect, int] = {}
    for effect in Effect:
        with tools(work=(echo, effect)):
            agent = make_agent(tmp_path, [call(("work", {})), say("done")], session_db=db, session_id=effect)
            agent.run_conversation("warm up")
            before = db.commits
            make_agent(tmp_path, [call(("work", {})), say("done")], session_db=db, session_id=effect).run_conversation(
                "go"
            )
            counts[effect] = db.commits - before
    assert counts[Effect.UNSAFE] == counts[Effect.IDEMPOTENT] == counts[Effect.PURE] + 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("where", ["tool", "parallel tool", "interim", "complete"])
def test_a_base_exception_leaves_and_the_next_turn_finishes_the_work(
    tmp_path: Path, db: SessionDB, kind: type[BaseException], where: str
) -> None:
    """It goes through, writes nothing more, gives the lease back, and the turn is finished later."""
    armed = [True]

    def leave(*_: Any, **__: Any) -> str:
        if armed:
            armed.clear()
            raise kind
        return "fine"

    calls = [("work", {"n": 1})] if where == "tool" else [("work", {"n": 1}), ("work", {"n": 2})]
    callbacks = {"interim": "interim_assistant_callback", "complete": "tool_complete_callback"}
    options = {callbacks[where]: leave} if where in callbacks else {}
    handler = leave if where.endswith("tool") else echo
    with tools(work=(handler, Effect.UNSAFE)):
        agent = agent_with(tmp_path, db, [call(*calls, text="looking"), say("first"), say("second")], **options)
        with pytest.raises(kind):
            agent.run_conversation("go")
        assert [turn.state for turn in db.open_turns(SESSION)] == [TurnState.RUNNING]
        again = agent_with(tmp_path, db, [call(*calls, text="looking"), say("first"), say("second")])
        result = again.run_conversation("and now?", conversation_history=[])
    assert result["final_response"] == "second"
    rows = stored(tmp_path)
    assert [row["content"] for row in rows if row["role"] == "user"] == ["go", "and now?"]
    assert [row["role"] for row in rows].count("tool") == len(calls)
    assert (
        rules.check_strict(
            [{k: v for k, v in row.items() if k in ("role", "content", "tool_calls", "tool_call_id")} for row in rows]
        )
        is None
    )
    assert db.open_turns(SESSION) == []


def test_an_unsafe_call_that_was_started_is_never_run_again(tmp_path: Path, db: SessionDB) -> None:
    runs: list[str] = []

    def work(args: dict[str, Any], **_: Any) -> str:
        runs.append(args["n"])
        raise SystemExit

    script = [call(("work", {"n": "x"})), say("first"), say("second")]
    with tools(work=(work, Effect.UNSAFE)):
        with pytest.raises(SystemExit):
            agent_with(tmp_path, db, script).run_conversation("go")
        agent_with(tmp_path, db, script).run_conversation("next", conversation_history=[])
    assert runs == ["x"]
    (answer,) = [row for row in stored(tmp_path) if row["role"] == "tool"]
    assert "inspect before repeating" in answer["content"]
    assert answer["effect_disposition"] == "unknown"


@pytest.mark.parametrize("effect", [Effect.PURE, Effect.IDEMPOTENT])
def test_a_repeatable_call_is_run_again_with_the_same_id(tmp_path: Path, db: SessionDB, effect: Effect) -> None:
    ids: list[str] = []

    def work(_args: dict[str, Any], *, context: Any) -> str:
        ids.append(context.call_id)
        if len(ids) == 1:
            raise SystemExit
        return "fine"

    script = [call(("work", {})), say("first"), say("second")]
    with tools(work=(work, effect)):
        with pytest.raises(SystemExit):
            agent_with(tmp_path, db, script).run_conversation("go")
        agent_with(tmp_path, db, script).run_conversation("next", conversation_history=[])
    assert len(ids) == 2
    assert ids[0] == ids[1] != ""
    assert [row["content"] for row in stored(tmp_path) if row["role"] == "tool"] == ["fine"]


def test_a_turn_that_crashes_again_and_again_is_given_up(tmp_path: Path, db: SessionDB) -> None:
    """Its calls are settled without being run, and the next message works."""
    runs: list[dict[str, Any]] = []

    def work(args: dict[str, Any], **_: Any) -> str:
        runs.append(args)
        raise SystemExit

    with tools(work=(work, Effect.IDEMPOTENT)):
        for _ in range(4):
            with pytest.raises(SystemExit):
                agent_with(
                    tmp_path, db, [call(("work", {"n": 1}), ("work", {"n": 2}))], max_iterations=1
                ).run_conversation("go")
        ran = len(runs)
        result = agent_with(tmp_path, db, [call(("work", {})), say("fresh")]).run_conversation(
            "something else", conversation_history=[]
        )
    assert result["final_response"] == "fresh"
    assert len(runs) == ran
    assert db.open_turns(SESSION) == []
    first, *_ = [row["content"] for row in stored(tmp_path) if row["role"] == "tool"]
    assert "inspect before repeating" in first


def test_a_stop_is_answered_for_every_call_and_ends_the_turn(tmp_path: Path, db: SessionDB) -> None:
    running = threading.Event()

    def patient(_args: dict[str, Any], *, context: Any) -> str:
        running.set()
        context.cancellation.wait(5)
        return "stopped in time"

    with tools(patient=ToolEntry("patient", "test", "", {"type": "object"}, patient)):
        agent = agent_with(tmp_path, db, [call(("patient", {"n": 1}), ("patient", {"n": 2})), say("never")])
        stopper = threading.Thread(target=lambda: (running.wait(5), agent.interrupt("enough")))
        stopper.start()
        result = agent.run_conversation("go")
        stopper.join()
    assert result["interrupted"] is True
    assert result["completed"] is False
    contents = [row["content"] for row in stored(tmp_path) if row["role"] == "tool"]
    assert contents[0] == "stopped in time"
    assert "skipped" in contents[1]
    assert db.open_turns(SESSION) == []


def test_a_wedged_tool_is_abandoned_and_its_effect_is_unknown(
    tmp_path: Path, db: SessionDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_agent.agent.tool_executor.GRACE_SECONDS", 0.05)
    release = threading.Event()

    def wedged(_args: dict[str, Any], **_: Any) -> str:
        agent.interrupt("enough")
        release.wait(10)
        return "too late"

    with tools(wedged=(wedged, Effect.UNSAFE)):
        agent = agent_with(tmp_path, db, [call(("wedged", {})), say("never")])
        result = agent.run_conversation("go")
    release.set()
    assert result["interrupted"] is True
    (answer,) = [row for row in stored(tmp_path) if row["role"] == "tool"]
    assert "unknown" in answer["content"]


def test_a_call_past_its_deadline_is_abandoned(tmp_path: Path, db: SessionDB) -> None:
    release = threading.Event()

    def slow(_args: dict[str, Any], **_: Any) -> str:
        release.wait(10)
        return "too late"

    with tools(slow=ToolEntry("slow", "test", "", {"type": "object"}, slow, timeout=0.05)):
        agent = agent_with(tmp_path, db, [call(("slow", {})), say("went on")])
        result = agent.run_conversation("go")
    release.set()
    assert result["final_response"] == "went on"
    assert "timed out" in stored(tmp_path)[2]["content"]


def test_steering_reaches_the_model_with_its_next_call(tmp_path: Path, db: SessionDB) -> None:
    def work(_args: dict[str, Any], **_: Any) -> str:
        agent.steer("use the other file")
        return "x"

    with tools(work=work):
        agent = agent_with(tmp_path, db, [call(("work", {})), say("said: {{last_user}}")])
        result = agent.run_conversation("go")
    assert result["final_response"] == "said: use the other file"
    assert roles(tmp_path) == ["user", "assistant", "tool", "user", "assistant"]


def test_a_turn_ends_at_its_limit_of_model_calls(tmp_path: Path, db: SessionDB) -> None:
    with tools(work=echo):
        agent = agent_with(tmp_path, db, [call(("work", {}, "same"))] * 10, max_iterations=3)
        result = agent.run_conversation("go")
    assert result["api_calls"] == 3
    assert result["turn_exit_reason"] == "max_iterations_reached(3/3)"
    assert result["failure_reason"] == "max_iterations"


def test_one_id_for_every_call_is_made_unique(tmp_path: Path, db: SessionDB) -> None:
    with tools(echo=echo):
        agent = agent_with(
            tmp_path,
            db,
            [call(("echo", {"n": 1}, "X"), ("echo", {"n": 2}, "X")), call(("echo", {"n": 3}, "X")), say("done")],
        )
        agent.run_conversation("go")
    rows = stored(tmp_path)
    asked = [item["id"] for row in rows for item in row.get("tool_calls") or ()]
    answered = [row["tool_call_id"] for row in rows if row["role"] == "tool"]
    assert asked == answered
    assert len(set(asked)) == 3
    assert [row["content"] for row in rows if row["role"] == "tool"] == ["result 1", "result 2", "result 3"]


@pytest.mark.parametrize(("effect", "runs"), [(Effect.UNSAFE, 1), (Effect.PURE, 2)])
def test_a_call_doubled_to_the_letter_runs_once_unless_it_is_pure(
    tmp_path: Path, db: SessionDB, effect: Effect, runs: int
) -> None:
    ran: list[int] = []

    def work(args: dict[str, Any], **_: Any) -> str:
        ran.append(args["n"])
        return "x"

    with tools(work=(work, effect)):
        agent = agent_with(
            tmp_path, db, [call(("work", {"n": 1}), ("work", {"n": 1}), ("work", {"n": 2})), say("done")]
        )
        agent.run_conversation("go")
    assert ran.count(1) == runs
    assert ran.count(2) == 1
    assert roles(tmp_path).count("tool") == runs + 1


@pytest.mark.parametrize("count", [1, 3, 4, 8, 16, 40])
def test_every_call_of_a_batch_gets_its_own_result(tmp_path: Path, db: SessionDB, count: int) -> None:
    def work(args: dict[str, Any], **_: Any) -> str:
        if args["n"] == 0:
            raise RuntimeError("broken on purpose")
        return "" if args["n"] == 1 else f"result {args['n']}"

    with tools(work=work):
        agent = agent_with(tmp_path, db, [call(*(("work", {"n": n}) for n in range(count))), say("done")])
        agent.run_conversation("go")
    contents = [row["content"] for row in stored(tmp_path) if row["role"] == "tool"]
    assert len(contents) == count
    assert "broken on purpose" in contents[0]
    assert all(contents)
    assert contents[2:] == [f"result {n}" for n in range(2, count)]


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("nothing_like_it", {}, "Unknown tool"),
        ("sh\0ell", {"cmd": "a\0b"}, "Unknown tool"),
    ],
)
def test_a_call_that_cannot_run_is_answered_with_why(
    tmp_path: Path, db: SessionDB, name: str, arguments: dict[str, Any], said: str
) -> None:
    ran: list[str] = []
    with tools(shell=lambda *_, **__: ran.append("ran") or "x"):
        agent = agent_with(tmp_path, db, [call((name, arguments)), say("done")])
        result = agent.run_conversation("go")
    assert result["final_response"] == "done"
    assert ran == []
    assert said in stored(tmp_path)[2]["content"]


def test_a_tool_that_is_not_enabled_cannot_be_called(tmp_path: Path, db: SessionDB) -> None:
    """A registered tool outside the agent's toolsets is as good as unknown."""
    with tools(echo=echo):
        agent = agent_with(
            tmp_path,
            db,
            [call(("write_file", {"path": "x.txt", "content": "no"})), say("done")],
            enabled_toolsets=["test"],
        )
        agent.run_conversation("go")
    assert "Unknown tool" in stored(tmp_path)[2]["content"]
    assert not (tmp_path / "x.txt").exists()


@pytest.mark.parametrize("unusable", [("nonsense", {}), ("echo", '{"n": 1')])
def test_three_unusable_replies_end_the_turn(tmp_path: Path, db: SessionDB, unusable: Any) -> None:
    """Whether the tool does not exist or its arguments cannot be read."""
    with tools(echo=echo):
        agent = agent_with(tmp_path, db, [call(unusable) for _ in range(9)])
        result = agent.run_conversation("go")
    assert result["failure_reason"] == "invalid_tool_calls"
    assert result["api_calls"] == 3
    assert roles(tmp_path) == ["user", *["assistant", "tool"] * 3]


def test_a_tool_answers_to_its_alias(tmp_path: Path, db: SessionDB) -> None:
    entry = ToolEntry("echo", "test", "", {"type": "object"}, echo, effect=Effect.PURE, aliases=("say_again",))
    with tools(echo=entry):
        agent = agent_with(tmp_path, db, [call(("say_again", {"n": 1})), say("done")])
        agent.run_conversation("go")
    assert stored(tmp_path)[2]["content"] == "result 1"


def test_a_cut_tool_call_never_runs(tmp_path: Path, db: SessionDB) -> None:
    ran: list[str] = []
    cut = {**call(("work", {})), "finish_reason": "length"}
    with tools(work=lambda *_, **__: ran.append("ran") or "x"):
        agent = agent_with(tmp_path, db, [cut])
        result = agent.run_conversation("go")
    assert ran == []
    assert result["failure_reason"] == "truncated"
    assert result["api_calls"] == 3


def test_a_failed_turn_says_why_and_the_next_prompt_is_valid(tmp_path: Path, db: SessionDB) -> None:
    replies = [say("never", error={"reason": "auth", "message": "bad key"}), say("answer")]
    agent = agent_with(tmp_path, db, replies)
    failed = agent.run_conversation("one")
    assert (failed["failed"], failed["failure_reason"], failed["failure_retryable"]) == (True, "auth", False)
    history = stored(tmp_path)
    assert history[-1]["_turn_outcome"] == "auth"
    again = agent_with(tmp_path, db, [say("answer")])
    wires: list[list[dict[str, Any]]] = []
    inner = again._answering
    again._answering = _Recording(inner, wires)  # type: ignore[assignment]
    assert again.run_conversation("two", conversation_history=history)["final_response"] == "answer"
    assert [row["role"] for row in wires[0]] == ["system", "user", "assistant", "user"]
    assert rules.check_strict(wires[0]) is None


class _Recording:
    """Passes requests on and keeps what they held."""

    def __init__(self, inner: Any, wires: list[Any]) -> None:
        self.inner, self.wires = inner, wires
        self.encoded: list[bytes] = []

    def complete(self, request: Any, on_event: Any, cancellation: Any) -> Any:
        self.wires.append(list(request.messages))
        self.encoded.append(request.messages.encoded)
        return self.inner.complete(request, on_event, cancellation)


def test_the_bytes_of_earlier_rows_never_change(tmp_path: Path, db: SessionDB) -> None:
    """From step to step, and after a resume from the store, a request begins with the last one's bytes."""
    script = [call(("echo", {"n": 1}), text="é"), call(("echo", {"n": 2}), ("echo", {"n": 3})), say("one"), say("two")]
    with tools(echo=echo):
        agent = agent_with(tmp_path, db, script)
        agent._answering = first = _Recording(agent._answering, [])  # type: ignore[assignment]
        agent.run_conversation("go")
        again = agent_with(tmp_path, db, script)
        again._answering = second = _Recording(again._answering, [])  # type: ignore[assignment]
        again.run_conversation("more", conversation_history=stored(tmp_path))
    requests = first.encoded + second.encoded
    for before, after in itertools.pairwise(requests):
        assert after.startswith(before[:-1])


def test_every_exit_has_the_same_keys(tmp_path: Path, db: SessionDB) -> None:
    exits: dict[str, dict[str, Any]] = {}
    with tools(echo=echo):
        exits["answered"] = agent_with(tmp_path, db, [say("x")]).run_conversation("go")
        exits["failed"] = agent_with(
            tmp_path, db, [say("x")] + [say("", error={"reason": "billing", "message": "b"})] * 5
        ).run_conversation("go", conversation_history=stored(tmp_path))
        limited = agent_with(tmp_path, db, [call(("echo", {}))] * 9, max_iterations=1)
        exits["limit"] = limited.run_conversation("go")
        lease = db.claim(SESSION)
        exits["busy"] = agent_with(tmp_path, db, [say("x")]).run_conversation("go")
        lease.release()
        refusing = agent_with(tmp_path, db, [call(("echo", {}))])
        refusing._flush_messages_to_session_db = lambda *_: False  # type: ignore[method-assign]
        exits["refused"] = refusing.run_conversation("go")
    keys = {frozenset(result) for result in exits.values()}
    assert len(keys) == 1
    assert exits["busy"]["failure_reason"] == "session_busy"
    for name, result in exits.items():
        assert result["completed"] is (name == "answered"), name
        assert result["completed"] is (result["failure_reason"] is None), name


def test_a_full_disk_is_named(tmp_path: Path, db: SessionDB, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agent_with(tmp_path, db, [say("x")])
    agent.run_conversation("warm up")

    def full(*_: Any, **__: Any) -> None:
        raise StoreFull("no space left for state.db")

    monkeypatch.setattr("hermes_agent.agent.journal.Journal.flush", full)
    result = agent.run_conversation("go")
    assert result["failure_reason"] == "session_persistence_failed:full"
    assert "free some space" in result["final_response"]


def test_without_a_store_a_turn_still_works(tmp_path: Path) -> None:
    with tools(echo=echo):
        agent = make_agent(tmp_path, [call(("echo", {})), say("done")])
        assert agent.chat("go") == "done"


def test_an_unknown_option_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="max_iterations"):
        make_agent(tmp_path, [], max_iteration=3)


def test_late_steering_comes_back(tmp_path: Path) -> None:
    agent = make_agent(tmp_path, [say("done")])
    assert isinstance(agent.control, TurnControl)
    agent.step_callback = None
    agent.stream_delta_callback = lambda _: agent.steer("too late")
    assert agent.run_conversation("go")["pending_steer"] == "too late"


def test_registered_test_tools_are_gone() -> None:
    assert registry.get_entry("echo") is None


def test_a_turn_is_finished_by_the_agent_whose_store_refused_it(
    tmp_path: Path, db: SessionDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal ends a turn, not the agent: when the store is well again the same agent goes on."""
    with tools(echo=echo):
        agent = agent_with(tmp_path, db, [call(("echo", {"n": 1})), say("first"), say("second")])
        flush = Journal.flush

        def refuse_results(journal: Journal, *args: Any) -> None:
            if args[2][-1]["role"] == "tool":
                raise StoreFull("no space left")
            flush(journal, *args)

        with monkeypatch.context() as full:
            full.setattr(Journal, "flush", refuse_results)
            assert agent.run_conversation("go")["failure_reason"] == "session_persistence_failed:full"
        claim = db.claim(SESSION)
        agent.adopt(claim)
        (result,) = agent.recover()
        claim.release()
    assert result["final_response"] == "first"
    assert roles(tmp_path) == ["user", "assistant", "tool", "assistant"]
