"""Branches: the same rows under another id, never half of a turn, whole or not there at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw
import pytest

from hermes_agent import errors
from hermes_agent.store import messages
from hermes_agent.store.search import search
from hermes_agent.store.session_db import SessionDB, encode_row
from hermes_agent.store.turns import CallKey, CallState, Proposal, TurnState
from hermes_agent.store.usage import UsageDelta
from hermes_agent.store.writer import Batch, SessionWriter, TurnEnd
from tests import faults


@pytest.fixture
def db(tmp_path: Path):
    with SessionDB(tmp_path / "state.db") as opened:
        yield opened


def query(db: SessionDB, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    return db.database.read(lambda conn: conn.execute(sql, values).fetchall())


def key_of(db: SessionDB, session_id: str) -> int:
    return query(db, "SELECT key FROM sessions WHERE id = ?", session_id)[0][0]


def said(db: SessionDB, session_id: str) -> list[Any]:
    return [row["content"] for row in db.get_messages_as_conversation(session_id)]


def wires(db: SessionDB, session_id: str) -> list[tuple[Any, ...]]:
    first = messages.row_id(key_of(db, session_id), 0)
    return query(
        db,
        "SELECT role, wire, extra, timestamp FROM messages WHERE id > ? AND id <= ? AND active ORDER BY id",
        first, first + messages.MAX_SEQ,
    )  # fmt: skip


def row(role: str, content: str | None, **more: Any) -> messages.Row:
    return encode_row({"role": role, "content": content, **more})


def call(*names: str) -> dict[str, Any]:
    return {
        "tool_calls": [
            {"id": name, "type": "function", "function": {"name": "terminal", "arguments": "{}"}} for name in names
        ]
    }


def propose(claim: SessionWriter, text: str, *names: str) -> None:
    """A turn begins and asks for calls."""
    claim.commit(Batch(rows=[row("user", text)], begin=True))
    proposals = [Proposal(CallKey(1, i), name, "terminal", "unsafe") for i, name in enumerate(names)]
    claim.commit(Batch(rows=[row("assistant", None, **call(*names))], proposals=proposals))
    claim.start_calls([proposal.key for proposal in proposals])


def answer(claim: SessionWriter, index: int, name: str) -> None:
    result = {0: (CallKey(1, index), CallState.DONE)}
    claim.commit(Batch(rows=[row("tool", f"result of {name}", tool_call_id=name)], results=result))


def end(claim: SessionWriter, text: str = "ok", state: TurnState = TurnState.DONE) -> None:
    rows = [row("assistant", text)] if state is TurnState.DONE else []
    delta = UsageDelta("m", "p", input_tokens=100, output_tokens=10)
    claim.commit(Batch(rows=rows, usage=delta, end=TurnEnd(state, None if rows else "timeout", prose="sorry")))


class TestTheCopy:
    def test_it_has_the_same_bytes_and_a_chain_of_its_own(self, db):
        db.create_session("s", "cli", model="m", model_config={"a": 1}, system_prompt="p", cwd="/x", user_id="u")
        db.append_messages_batch(
            "s",
            [{"role": "user", "content": f"word{i} " + "ü" * (i % 5), "beside": i, "timestamp": 1000.5 + i}
             for i in range(2 * messages.BLOCK + 20)],
        )  # fmt: skip
        assert db.fork_session("s", "f") == "f"
        assert wires(db, "f") == wires(db, "s")
        assert said(db, "f") == said(db, "s")
        found, source = db.get_session("f"), db.get_session("s")
        assert found is not None
        assert source is not None
        for name in ("source", "model", "model_config", "system_prompt", "cwd", "user_id", "message_count", "last_seq"):
            assert found[name] == source[name], name
        assert found["parent_session_id"] == "s"
        assert found["started_at"] > source["started_at"]
        assert len(query(db, "SELECT id FROM seals")) == 4, "whole blocks are sealed in both"

    def test_both_go_their_own_way(self, db):
        db.create_session("s", "test")
        db.append_message("s", "user", "shared")
        db.fork_session("s", "f")
        db.append_message("s", "user", "only source")
        db.append_message("f", "user", "only branch")
        claim = db.claim("s")
        claim.commit(Batch(rows=[row("user", "turn")], begin=True))
        end(claim)
        claim.release()
        assert said(db, "s") == ["shared", "only source", "turn", "ok"]
        assert said(db, "f") == ["shared", "only branch"]
        assert (db.get_session("s") or {})["end_reason"] is None

    def test_what_is_found_in_one_is_found_in_the_other(self, db):
        db.create_session("s", "test")
        db.append_message("s", "system", "secret instructions")
        db.append_message("s", "user", [{"type": "text", "text": 'naïve "é" \\ 🙂'}])
        db.append_message("s", "assistant", "plain answer")
        db.fork_session("s", "f")
        for word, count in (("naive", 1), ("plain", 1), ("secret", 0)):
            for name in ("s", "f"):
                assert len(search(db.database, word, session_id=name).hits) == count
        db.database.write(
            lambda conn: conn.execute("INSERT INTO messages_fts (messages_fts, rank) VALUES ('integrity-check', 0)")
        )

    def test_counters_of_rows_are_right_and_those_of_use_begin_at_nothing(self, db):
        db.create_session("s", "test")
        claim = db.claim("s")
        propose(claim, "go", "a", "b")
        answer(claim, 0, "a")
        answer(claim, 1, "b")
        end(claim)
        claim.release()
        db.fork_session("s", "f")
        found = db.get_session("f")
        assert found is not None
        assert (found["message_count"], found["last_seq"], found["tool_call_count"]) == (5, 5, 2)
        for name in ("input_tokens", "output_tokens", "api_call_count", "cache_read_tokens"):
            assert found[name] == 0
        assert query(db, "SELECT count(*) FROM usage WHERE session_key = ?", key_of(db, "f")) == [(0,)]
        first = messages.row_id(key_of(db, "f"), 0)
        events = query(db, "SELECT id, kind FROM session_events WHERE id > ? ORDER BY id", first)
        assert events == [(first + n, "message") for n in range(1, 6)], "one sequence without gaps"

    def test_rows_that_were_set_aside_stay_behind(self, db):
        db.create_session("s", "test")
        for i in range(5):
            db.append_message("s", "user", f"row {i}")
        first = messages.row_id(key_of(db, "s"), 0)

        def set_aside(conn: apsw.Connection) -> None:
            conn.execute("UPDATE messages SET active = 0, compacted = 1 WHERE id IN (?, ?)", (first + 2, first + 3))
            conn.execute("UPDATE sessions SET message_count = 3 WHERE id = 's'")

        db.database.write(set_aside)
        db.fork_session("s", "f")
        assert said(db, "f") == said(db, "s") == ["row 0", "row 3", "row 4"]
        assert [row["_seq"] for row in db.get_messages_as_conversation("f")] == [1, 2, 3]
        db.append_message("f", "user", "on")

    def test_an_empty_session_has_an_empty_branch(self, db):
        db.create_session("s", "test")
        db.fork_session("s", "f")
        assert said(db, "f") == []
        db.append_message("f", "user", "x")

    def test_a_branch_keeps_why_turns_had_no_answer(self, db):
        """What a model is sent is derived from it, so the bytes on the wire stay the same."""
        db.create_session("s", "test")
        claim = db.claim("s")
        for text, state in (("one", TurnState.FAILED), ("two", TurnState.DONE), ("three", TurnState.CANCELLED)):
            claim.commit(Batch(rows=[row("user", text)], begin=True))
            end(claim, state=state)
        claim.release()
        db.fork_session("s", "f")
        outcomes = [found.get("_turn_outcome") for found in db.get_messages_as_conversation("s")]
        assert outcomes == ["timeout", None, None, "timeout"]
        assert [found.get("_turn_outcome") for found in db.get_messages_as_conversation("f")] == outcomes
        assert db.open_turns("f") == []

    def test_a_branch_of_a_branch_outlives_both(self, db):
        db.create_session("s", "test")
        db.append_message("s", "user", "x")
        db.fork_session("s", "f")
        db.fork_session("f", "g")
        db.delete_session("s")
        db.delete_session("f")
        assert said(db, "g") == ["x"]
        assert (db.get_session("g") or {})["parent_session_id"] == "f"


class TestWhereItStops:
    def test_a_turn_that_runs_stays_behind(self, db):
        db.create_session("s", "test")
        claim = db.claim("s")
        claim.commit(Batch(rows=[row("user", "one")], begin=True))
        end(claim)
        propose(claim, "two", "a")
        answer(claim, 0, "a")
        db.fork_session("s", "f")
        assert said(db, "f") == ["one", "ok"]
        end(claim)
        claim.release()
        db.fork_session("s", "g")
        assert said(db, "g") == ["one", "ok", "two", None, "result of a", "ok"]

    def test_a_turn_that_its_process_left_stays_behind(self, tmp_path):
        path = tmp_path / "left.db"
        code = """
db = SessionDB(sys.argv[1])
db.create_session("s", "test")
db.append_message("s", "user", "before")
claim = db.claim("s")
claim.commit(Batch(rows=[encode_row({"role": "user", "content": "cut off"})], begin=True))
os.kill(os.getpid(), 9)
"""
        with faults.Child(code, path) as child:
            child.end(code=-9)
        with SessionDB(path) as db:
            db.fork_session("s", "f")
            assert said(db, "f") == ["before"]

    @pytest.mark.parametrize(
        ("at", "expected"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 5), (6, 6), (7, 6), (8, 8), (9, 9)]
    )
    def test_no_call_is_taken_without_its_result(self, db, at, expected):
        db.create_session("s", "test")
        roles: list[dict[str, Any]] = [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2"},
            {"role": "assistant", "content": None, **call("a", "b")},
            {"role": "tool", "content": "4", "tool_call_id": "b"},
            {"role": "tool", "content": "5", "tool_call_id": "a"},
            {"role": "assistant", "content": "6"},
            {"role": "assistant", "content": None, **call("a")},
            {"role": "tool", "content": "8", "tool_call_id": "a"},
            {"role": "user", "content": "9"},
        ]
        db.append_messages_batch("s", roles)
        db.fork_session("s", "f", at_seq=at)
        assert db.message_count("f") == expected
        assert (db.get_session("f") or {})["tool_call_count"] == {1: 0, 2: 0, 5: 2, 6: 2, 8: 3, 9: 3}[expected]

    @pytest.mark.parametrize("at", [-1, 0, 3])
    def test_a_row_that_is_not_there_is_no_place_to_stop(self, db, at):
        db.create_session("s", "test")
        db.append_messages_batch("s", [{"role": "user", "content": "x"}] * 2)
        with pytest.raises(errors.UsageError, match="ends at row 2"):
            db.fork_session("s", "f", at_seq=at)
        assert db.get_session("f") is None


class TestTitles:
    def test_the_next_of_the_row(self, db):
        db.create_session("s", "test", title="New")
        for name, of, title in (
            ("a", "s", "New #2"), ("b", "s", "New #3"), ("c", "b", "New #4"), ("d", "a", "New #5"),
        ):  # fmt: skip
            db.fork_session(of, name)
            assert (db.get_session(name) or {})["title"] == title
        for name, title in (("e", "New #x"), ("f", "New #12 b"), ("g", "New #99999999999999"), ("h", "Newer #50")):
            db.create_session(name, "test", title=title)
        db.delete_session("a", scrub=False)
        db.fork_session("s", "i")
        assert (db.get_session("i") or {})["title"] == "New #6"

    def test_without_a_title_there_is_no_next_one(self, db):
        db.create_session("s", "test")
        db.fork_session("s", "f")
        assert (db.get_session("f") or {})["title"] is None

    @pytest.mark.parametrize("title", ["x" * 100, "#", "a #", "50% _ 'n' \"", "日本語 🙂"])
    def test_any_title_has_a_next_one(self, db, title):
        db.create_session("s", "test", title=title)
        for name in ("f", "g"):
            db.fork_session("s", name)
        titles = {(db.get_session(name) or {})["title"] for name in ("s", "f", "g")}
        assert len(titles) == 3
        assert all(len(found) <= 100 for found in titles)

    def test_a_title_may_be_given(self, db):
        db.create_session("s", "test", title="New")
        db.fork_session("s", "f", title="  other ")
        assert (db.get_session("f") or {})["title"] == "other"
        with pytest.raises(errors.InvalidTitle) as caught:
            db.fork_session("s", "g", title="other")
        assert caught.value.session_id == "f"
        with pytest.raises(errors.InvalidTitle):
            db.fork_session("s", "g", title=" ")
        assert db.get_session("g") is None


class TestFailures:
    def test_what_cannot_be_copied_leaves_nothing(self, db):
        db.create_session("s", "test")
        db.create_session("t", "test")
        with pytest.raises(errors.SessionExists):
            db.fork_session("s", "t")
        with pytest.raises(errors.SessionExists):
            db.fork_session("s", "s")
        with pytest.raises(errors.UnknownSession):
            db.fork_session("nobody", "f")
        assert len(db.list_sessions()) == 2

    @pytest.mark.parametrize(
        "change",
        [
            "UPDATE messages SET wire = replace(wire, 'row', 'raw') WHERE (id & 0xffffff) = 70",
            "UPDATE messages SET timestamp = 'late' WHERE (id & 0xffffff) = 1",
            "DELETE FROM messages WHERE (id & 0xffffff) = 100",
            "DELETE FROM messages WHERE (id & 0xffffff) = 30",
            "UPDATE sessions SET head = x'00'",
        ],
    )
    def test_damage_is_not_copied_into_a_sound_chain(self, tmp_path, change):
        path = tmp_path / "state.db"
        with SessionDB(path) as db:
            db.create_session("s", "test")
            db.append_messages_batch("s", [{"role": "user", "content": f"row {i}"} for i in range(100)])
        conn = apsw.Connection(str(path))
        conn.execute(change).fetchall()
        conn.close()
        with SessionDB(path) as db:
            with pytest.raises(errors.StoreDamaged):
                db.fork_session("s", "f")
            assert db.get_session("f") is None

    def test_a_lost_end_is_not_copied(self, tmp_path):
        path = tmp_path / "state.db"
        with SessionDB(path) as db:
            db.create_session("s", "test")
            db.append_message("s", "user", "one")
            [kept] = query(db, "SELECT last_seq, last_event, head, message_count FROM sessions")
            db.append_message("s", "user", "two")
        conn = apsw.Connection(str(path))
        conn.execute("UPDATE sessions SET last_seq = ?, last_event = ?, head = ?, message_count = ?", kept).fetchall()
        conn.execute("DELETE FROM messages WHERE (id & 0xffffff) = 2").fetchall()
        conn.close()
        with SessionDB(path) as db, pytest.raises(errors.StoreDamaged, match="its end was lost"):
            db.fork_session("s", "f")

    def test_a_process_killed_at_any_point_leaves_the_branch_whole_or_not_there(self, tmp_path):
        code = """
from hermes_agent import failpoints
hits = 0
def trap(name):
    global hits
    hits += 1
    if hits == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
db = SessionDB(sys.argv[1])
db.create_session("s", "test", title="New")
db.append_messages_batch("s", [{"role": "user", "content": f"row {i}"} for i in range(150)])
failpoints.arm(trap)
db.fork_session("s", "f")
say("done")
"""
        whole: list[bool] = []
        for kill in range(1, 4):
            path = tmp_path / str(kill) / "state.db"
            with faults.Child(code, path, kill) as child:
                acknowledged = child.end(code=0 if kill == 3 else -9)
            with SessionDB(path) as db:
                rows = [f"row {i}" for i in range(150)]
                assert said(db, "s") == rows
                whole.append(db.get_session("f") is not None)
                if whole[-1]:
                    assert said(db, "f") == rows
                    assert len(search(db.database, "row", session_id="f", limit=200).hits) == 150
                    with pytest.raises(errors.SessionExists):
                        db.fork_session("s", "f")
                else:
                    assert query(db, "SELECT count(*) FROM messages") == [(150,)]
                    assert query(db, "SELECT count(*) FROM messages_fts_docsize") == [(150,)]
                    db.fork_session("s", "f")
                assert (acknowledged == ["done"]) == (kill == 3)
        assert whole == [False, True, True]
