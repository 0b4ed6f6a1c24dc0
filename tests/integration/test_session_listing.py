"""Sessions as a whole: made once, listed by what a person asks for, changed all or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import apsw
import pytest

from hermes_agent import errors
from hermes_agent.store import sessions
from hermes_agent.store.session_db import SessionDB, encode_row
from hermes_agent.store.writer import Batch
from tests import faults


@pytest.fixture
def db(tmp_path: Path):
    with SessionDB(tmp_path / "state.db") as opened:
        yield opened


def ids(found: list[dict[str, Any]]) -> list[str]:
    return [session["id"] for session in found]


class TestMaking:
    def test_a_new_session_is_not_an_old_one(self, db):
        assert db.create_new_session("s", "api_server", title="first", model="m") == "s"
        with pytest.raises(errors.SessionExists, match="'s'"):
            db.create_new_session("s", "cli", model="other")
        found = db.get_session("s")
        assert found is not None
        assert (found["source"], found["model"], found["title"]) == ("api_server", "m", "first")

    def test_a_taken_title_names_its_owner_and_nothing_is_made(self, db):
        db.create_new_session("s", "test", title="taken")
        with pytest.raises(errors.InvalidTitle) as caught:
            db.create_new_session("t", "test", title="  taken ")
        assert caught.value.session_id == "s"
        assert "session s already has that title: taken" in str(caught.value)
        assert db.get_session("t") is None
        assert isinstance(caught.value, errors.UsageError)

    def test_an_id_that_nobody_could_type_is_refused(self, db):
        for make in (db.create_new_session, lambda name: db.fork_session("s", name)):
            with pytest.raises(ValueError, match="visible characters"):
                make("a\nb")

    def test_of_processes_that_make_the_same_session_one_does(self, tmp_path):
        path = tmp_path / "many.db"
        SessionDB(path).close()
        code = """
db = SessionDB(sys.argv[1])
say("ready"); hear()
for i in range(40):
    for made in (lambda: db.create_new_session(f"s{i}", sys.argv[2]),
                 lambda: db.create_new_session(f"{i}-{sys.argv[2]}", "x", title=f"title {i}")):
        try:
            made()
            say("made")
        except (errors.SessionExists, errors.InvalidTitle) as error:
            say(type(error).__name__)
"""
        with contextlib.ExitStack() as stack:
            children = [stack.enter_context(faults.Child(code, path, f"p{n}")) for n in range(3)]
            for child in children:
                assert child.hear() == "ready"
            for child in children:
                child.say()
            said = [line for child in children for line in child.end()]
        assert {line: said.count(line) for line in set(said)} == {"made": 80, "SessionExists": 80, "InvalidTitle": 80}


class TestChanging:
    def test_title_end_and_marks_change_together(self, db):
        db.create_session("s", "test")
        db.update_session("s", title=" a \n name ", end_reason="done", archived=True, hidden=True)
        found = db.get_session("s")
        assert found is not None
        assert (found["title"], found["end_reason"]) == ("a name", "done")
        assert (found["pinned"], found["archived"], found["hidden"]) == (False, True, True)
        assert found["ended_at"] >= found["started_at"]
        db.update_session("s", end_reason="", archived=False)
        found = db.get_session("s")
        assert found is not None
        assert (found["end_reason"], found["ended_at"], found["archived"], found["title"]) == (
            None,
            None,
            False,
            "a name",
        )

    def test_nothing_changes_when_one_part_cannot(self, db):
        db.create_session("s", "test", title="one")
        db.create_session("t", "test", title="two")
        before = db.get_session("t")
        for title in ("one", " ", "\u202e"):
            with pytest.raises(errors.InvalidTitle):
                db.update_session("t", title=title, end_reason="over", pinned=True)
        assert db.get_session("t") == before
        with pytest.raises(errors.UnknownSession):
            db.update_session("nobody", pinned=True)

    def test_to_pin_a_session_shows_it(self, db):
        db.create_session("s", "test")
        db.update_session("s", hidden=True)
        db.update_session("s", pinned=True, hidden=True)
        assert ids(db.list_sessions()) == ["s"]
        db.update_session("s", pinned=False, hidden=True)
        assert ids(db.list_sessions()) == []

    def test_a_change_disturbs_no_turn_and_is_no_activity(self, db):
        db.create_session("s", "test")
        db.create_session("t", "test")
        claim = db.claim("s")
        db.append_message("t", "user", "x")
        db.update_session("s", title="renamed", pinned=True)
        assert ids(db.list_sessions()) == ["t", "s"]
        claim.commit(Batch(rows=[encode_row({"role": "user", "content": "x"})], begin=True))
        claim.release()
        assert ids(db.list_sessions()) == ["s", "t"]


class TestListing:
    def test_the_list_says_what_a_client_may_know(self, db):
        db.create_session("s", "test", system_prompt="secret", model_config={"a": 1})
        db.create_session("t", "test")
        t, s = db.list_sessions()
        assert "secret" not in str(s)
        assert (s["has_system_prompt"], s["has_model_config"]) == (True, True)
        assert (t["has_system_prompt"], t["has_model_config"]) == (False, False)
        for name in ("pinned", "archived", "hidden"):
            assert s[name] is False
        wanted = (
            "source user_id model title started_at ended_at end_reason message_count tool_call_count input_tokens"
            " output_tokens cache_read_tokens cache_write_tokens reasoning_tokens api_call_count parent_session_id"
            " last_active preview"
        )
        assert set(wanted.split()) <= set(s)

    def test_archived_and_hidden_sessions_come_only_when_asked_for(self, db):
        for name, marks in (("plain", {}), ("old", {"archived": True}), ("inner", {"hidden": True})):
            db.create_session(name, "test")
            db.update_session(name, **marks)
        assert ids(db.list_sessions()) == ["plain"]
        assert ids(db.list_sessions(archived=True)) == ["old"]
        assert ids(db.list_sessions(hidden=None)) == ["inner", "plain"]
        assert ids(db.list_sessions(archived=None, hidden=None)) == ["inner", "old", "plain"]

    def test_each_filter_lets_through_what_it_says(self, db):
        for i in range(6):
            db.create_session(f"s{i}", "cli" if i % 2 else "api_server", title=f"title {i}")
        db.fork_session("s1", "child")
        db.update_session("s4", pinned=True)
        assert ids(db.list_sessions(source="cli")) == ["child", "s5", "s3", "s1"]
        assert ids(db.list_sessions(title="  title 3\n")) == ["s3"]
        assert ids(db.list_sessions(title="title")) == []
        assert ids(db.list_sessions(parent="s1")) == ["child"]
        assert ids(db.list_sessions(parent="")) == ["s5", "s4", "s3", "s2", "s1", "s0"]
        assert ids(db.list_sessions(pinned=True)) == ["s4"]
        assert "s4" not in ids(db.list_sessions(pinned=False))
        since = (db.get_session("s3") or {})["last_active"]
        assert ids(db.list_sessions(since=since)) == ["child", "s5", "s4"]
        assert ids(db.list_sessions(source="cli", since=since)) == ["child", "s5"]

    def test_pages_do_not_overlap_and_one_more_says_whether_there_is_more(self, db):
        for i in range(7):
            db.create_session(f"s{i}", "test")
        pages = [ids(db.list_sessions(3 + 1, offset)) for offset in (0, 3, 6)]
        assert [len(page) > 3 for page in pages] == [True, True, False]
        assert [name for page in pages for name in page[:3]] == [f"s{i}" for i in reversed(range(7))]

    def test_a_title_that_was_cut_is_found_by_its_whole_text(self, db):
        text = "x" * 300
        db.create_session("s", "test", title=text)
        assert ids(db.list_sessions(title=text)) == ["s"]

    def test_the_preview_is_the_text_of_the_first_message_whatever_its_parts(self, db):
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}
        texts = [{"type": "text", "text": "what is"}, image, {"type": "text", "text": "this?"}]
        for name, content in (("parts", texts), ("image", [image]), ("none", None), ("number", 5), ("empty", "")):
            db.create_session(name, "test")
            db.append_message(name, "user", content)
        db.create_session("silent", "test")
        found = {session["id"]: session["preview"] for session in db.list_sessions()}
        assert found == {
            "parts": "what is this?", "image": None, "none": None, "number": None, "empty": "", "silent": None,
        }  # fmt: skip

    def test_no_row_is_read_beyond_the_first_of_the_sessions_shown(self, db):
        """The cost of a list does not grow with the transcripts."""
        for i in range(3):
            db.create_session(f"s{i}", "test")
        db.append_messages_batch("s0", [{"role": "assistant", "content": "x"}] * (sessions._FIRST_ROWS + 50))
        db.append_message("s0", "user", "late")
        assert db.list_sessions()[0]["preview"] is None

        def plan(conn: apsw.Connection) -> list[str]:
            seen: list[str] = []
            conn.exec_trace = lambda cursor, sql, values: bool(seen.append(sql)) or True
            try:
                sessions.recent(conn, 10, source="test", hidden=None)
            finally:
                conn.exec_trace = None
            names = ("limit", "offset", "source", "title", "pinned", "archived", "hidden", "parent", "since")
            rows = conn.execute(f"EXPLAIN QUERY PLAN {seen[0]}", dict.fromkeys(names))
            return [str(row[3]) for row in rows]

        steps = db.database.read(plan)
        assert any("SEARCH m USING INTEGER PRIMARY KEY" in step for step in steps), steps
        assert not any("SCAN m" in step for step in steps), steps
