"""What an embedder sees of the store: sessions by any name, and messages that come back as they were given."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_agent import errors
from hermes_agent.store import encoding, messages
from hermes_agent.store.session_db import SessionDB, encode_row
from hermes_agent.store.writer import Batch
from tests import faults


@pytest.fixture
def db(tmp_path: Path):
    with SessionDB(tmp_path / "state.db") as opened:
        yield opened


def query(db: SessionDB, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    return db._database.read(lambda conn: conn.execute(sql, values).fetchall())


class TestSessions:
    def test_create_never_overwrites_what_is_set(self, db):
        assert db.create_session("s", "unknown", model="first") == "s"
        assert db.create_session("s", "cli", model="second", cwd="/x", system_prompt="be brief") == "s"
        assert db.create_session("s", "web", cwd="/y", system_prompt="be long") == "s"
        found = db.get_session("s")
        assert found is not None
        assert {key: found[key] for key in ("source", "model", "cwd", "system_prompt")} == {
            "source": "cli", "model": "first", "cwd": "/x", "system_prompt": "be brief",
        }  # fmt: skip
        assert len(db.list_sessions()) == 1

    def test_the_default_place_is_in_the_home_at_the_time_of_the_call(self, hermes_home):
        with SessionDB() as db:
            assert db.db_path == hermes_home / "state.db"

    def test_the_path_may_be_positional_or_named(self, tmp_path):
        with SessionDB(str(tmp_path / "a.db")) as first, SessionDB(db_path=tmp_path / "a.db") as second:
            first.create_session("s", "test")
            assert second.get_session("s") is not None

    @pytest.mark.parametrize("session_id", ["100%", "a_b", "ü-日本語-🙂", "a'b\"c", "-x", "a/b", "[*?]", "x" * 500])
    def test_any_visible_id_works(self, db, session_id):
        db.create_session(session_id, "test")
        db.append_message(session_id, "user", "hello")
        assert db.resolve_session(session_id) == session_id
        assert [row["content"] for row in db.get_messages_as_conversation(session_id)] == ["hello"]

    @pytest.mark.parametrize("session_id", ["", " ", "a\0b", "a\nb", "\ud83d", "\x1b[31m", "\u202e"])
    def test_an_id_that_nobody_could_type_is_refused(self, db, session_id):
        with pytest.raises(ValueError, match="visible characters"):
            db.create_session(session_id, "test")
        with pytest.raises(ValueError, match="visible characters"):
            db.claim(session_id, source="test")

    def test_fields_are_stored_without_what_sqlite_cannot_hold(self, db):
        """A folder whose name is no UTF-8 comes in with lone surrogates."""
        db.create_session(
            "s", "c\0li", cwd="/caf\udce9", model="m\ud83d", system_prompt="p\0\ud83d", user_id="\0",
            model_config={"k\0": ["\ud83d", 1]},
        )  # fmt: skip
        found = db.get_session("s")
        assert found is not None
        assert found["cwd"] == "/caf\ufffd"
        assert found["model"] == "m\ufffd"
        assert found["system_prompt"] == "p\ufffd\ufffd"
        assert found["model_config"] == '{"k\ufffd": ["\ufffd", 1]}'

    def test_a_session_that_does_not_exist_is_none_or_an_error(self, db):
        for name in ("nobody", "\ud83d", ""):
            assert db.get_session(name) is None
            for call in (db.get_messages, db.get_messages_as_conversation, db.message_count, db.open_turns):
                with pytest.raises(errors.UnknownSession):
                    call(name)
            with pytest.raises(errors.UnknownSession):
                db.append_message(name, "user", "x")

    def test_the_list_is_in_the_order_of_last_use_with_the_first_message(self, db):
        for name in ("a", "b", "c"):
            db.create_session(name, "test")
            db.append_message(name, "assistant", "hello")
            db.append_message(name, "user", f"about {name} " + "x" * 500)
        db.append_message("a", "user", "again")
        found = db.list_sessions()
        assert [session["id"] for session in found] == ["a", "c", "b"]
        assert found[0]["preview"] == ("about a " + "x" * 500)[:200]
        assert [session["id"] for session in db.list_sessions(limit=1, offset=1)] == ["c"]

    def test_the_list_does_not_show_the_stores_own_columns(self, db):
        db.create_session("s", "test", system_prompt="p")
        assert not {"head", "fence", "key", "last_event", "system_prompt_hash"} & set(db.list_sessions()[0])


class TestResolving:
    def test_an_id_goes_before_a_title_a_title_before_a_beginning(self, db):
        for name in ("abc", "abcd", "abcde", "x1", "x2"):
            db.create_session(name, "test")
        db.set_session_title("x1", "abc")
        db.set_session_title("x2", "abcde-long")
        assert db.resolve_session("abc") == "abc"
        db.set_session_title("x1", "ab")
        assert db.resolve_session("ab") == "x1"
        assert db.resolve_session("abcde") == "abcde"
        assert db.resolve_session("abcde-long") == "x2"

    def test_a_beginning_must_be_unique(self, db):
        for i in range(8):
            db.create_session(f"run-{i}", "test")
        assert db.resolve_session("run-3") == "run-3"
        with pytest.raises(errors.AmbiguousSession, match=r"run-0, run-1, run-2, run-3, run-4, …"):
            db.resolve_session("run")
        db.create_session("walk", "test")
        assert db.resolve_session("w") == "walk"

    def test_a_beginning_is_taken_as_it_is_written(self, db):
        """`%` and `_` stand for themselves, and letters for their own case."""
        for name in ("a_1", "ab1", "a%2", "abc", "ABD", "[x]1"):
            db.create_session(name, "test")
        assert db.resolve_session("a_") == "a_1"
        assert db.resolve_session("a%") == "a%2"
        assert db.resolve_session("AB") == "ABD"
        assert db.resolve_session("[x") == "[x]1"
        assert db.resolve_session("abc") == "abc"
        with pytest.raises(errors.UnknownSession):
            db.resolve_session("%")
        with pytest.raises(errors.UnknownSession):
            db.resolve_session("_")

    def test_beginnings_work_in_any_script(self, db):
        for name in ("日本", "日記", "🙂a", "🙂🙂"):
            db.create_session(name, "test")
        assert db.resolve_session("日記") == "日記"
        assert db.resolve_session("🙂a") == "🙂a"
        with pytest.raises(errors.AmbiguousSession):
            db.resolve_session("日")

    def test_latest_is_the_one_that_was_used_last(self, db):
        with pytest.raises(errors.UnknownSession, match="no session yet"):
            db.resolve_session("latest")
        for name in ("a", "b"):
            db.create_session(name, "test")
        assert db.resolve_session("latest") == "b"
        db.append_message("a", "user", "x")
        assert db.resolve_session("latest") == "a"

    def test_latest_comes_after_an_id_a_title_and_a_beginning(self, db):
        db.create_session("latest-news", "test")
        db.create_session("z", "test")
        assert db.resolve_session("latest") == "latest-news"
        db.create_session("latest-views", "test")
        db.append_message("z", "user", "x")
        assert db.resolve_session("latest") == "z"
        db.set_session_title("latest-news", "latest")
        assert db.resolve_session("latest") == "latest-news"

    @pytest.mark.parametrize("name", ["", "nobody", "\ud83d", "\0"])
    def test_nothing_is_made_for_an_unknown_name(self, db, name):
        db.create_session("s", "test")
        with pytest.raises(errors.UnknownSession):
            db.resolve_session(name)
        assert len(db.list_sessions()) == 1


class TestTitles:
    def test_are_unique(self, db):
        db.create_session("a", "test", title="plan")
        db.create_session("b", "test")
        with pytest.raises(errors.UsageError, match="already has that title"):
            db.set_session_title("b", " plan ")
        with pytest.raises(errors.UsageError, match="already has that title"):
            db.create_session("c", "test", title="plan")
        assert db.get_session("c") is None
        db.set_session_title("a", "plan")
        assert db.resolve_session("plan") == "a"

    def test_are_one_visible_line(self, db):
        db.create_session("s", "test", title="a\0\ud83d\n b\u202e\x1b")
        assert db.resolve_session("a b") == "s"
        db.set_session_title("s", "x" * 300)
        found = db.get_session("s")
        assert found is not None
        assert found["title"] == "x" * 100
        with pytest.raises(errors.UsageError, match="visible"):
            db.set_session_title("s", "\0 \n")
        db.create_session("t", "test", title="")
        db.create_session("u", "test", title=" ")

    def test_need_a_session(self, db):
        with pytest.raises(errors.UnknownSession):
            db.set_session_title("nobody", "x")


TEXT = st.text(st.characters(categories=None) | st.sampled_from("\0\ud83d\udc00\\u0"), max_size=40)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


class TestMessages:
    @pytest.mark.parametrize(
        "content",
        [
            "",
            "plain",
            None,
            0,
            5,
            -1.5,
            True,
            [],
            [{"type": "text", "text": "a"}],
            {"a": [1, None]},
            "\\u0000",
            "x" * 100_000,
        ],
        ids=repr,
    )
    def test_content_comes_back_as_it_was_given(self, db, content):
        db.create_session("s", "test")
        db.append_message("s", "user", content)
        for rows in (db.get_messages("s"), db.get_messages_as_conversation("s")):
            assert rows[0]["content"] == content
            assert type(rows[0]["content"]) is type(content)

    def test_everything_that_is_stored_beside_it_comes_back(self, db):
        db.create_session("s", "test")
        calls = [{"id": "c1", "type": "function", "function": {"name": "todo", "arguments": '{"a": 1}'}}]
        first = db.append_message("s", "assistant", None, tool_calls=calls, reasoning="why", finish_reason="tool_calls")
        second = db.append_message(
            "s", "tool", "done", tool_call_id="c1", tool_name="todo", timestamp=12.5, token_count=7
        )
        assistant, tool = db.get_messages("s")
        assert assistant["tool_calls"] == calls
        assert (assistant["reasoning"], assistant["finish_reason"], assistant["content"]) == ("why", "tool_calls", None)
        assert (tool["tool_call_id"], tool["tool_name"], tool["name"], tool["timestamp"]) == (
            "c1",
            "todo",
            "todo",
            12.5,
        )
        assert tool["token_count"] == 7
        assert [(row["id"], row["seq"], row["session_id"], row["active"]) for row in (assistant, tool)] == [
            (first, 1, "s", 1), (second, 2, "s", 1),
        ]  # fmt: skip

    def test_the_conversation_is_marked_as_stored_and_not_repaired(self, db):
        db.create_session("s", "test")
        calls = [{"id": "c1", "type": "function", "function": {"name": "todo", "arguments": "{}"}}]
        db.append_message("s", "user", "go")
        db.append_message("s", "assistant", "", tool_calls=calls)
        rows = db.get_messages_as_conversation("s")
        assert [row["role"] for row in rows] == ["user", "assistant"]
        assert all(row["_db_persisted"] is True for row in rows)
        assert rows[1]["tool_calls"] == calls
        assert isinstance(rows[0]["timestamp"], float)

    def test_marks_are_not_stored_and_own_names_are_not_taken(self, db):
        """A row that was read can be appended again; the store's own fields stay the store's."""
        db.create_session("s", "test")
        db.append_messages_batch("s", [{"role": "user", "content": "x", "_db_persisted": True, "_mark": 1}])
        db.append_messages_batch("s", db.get_messages("s"))
        first, second = db.get_messages("s")
        assert "_mark" not in first
        assert (second["seq"], second["id"] - first["id"]) == (2, 1)
        assert second["content"] == "x"

    def test_a_batch_is_all_or_nothing(self, db):
        db.create_session("s", "test")
        with pytest.raises(TypeError, match="'thing' cannot be stored"):
            db.append_messages_batch(
                "s", [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "thing": object()}]
            )
        assert db.message_count("s") == 0
        assert db.append_messages_batch("s", []) == []
        ids = db.append_messages_batch("s", [{"role": "user", "content": str(i)} for i in range(3)])
        assert ids == [row["id"] for row in db.get_messages("s")]
        assert db.message_count("s") == 3

    def test_limit_and_offset_count_rows(self, db):
        db.create_session("s", "test")
        db.append_messages_batch("s", [{"role": "user", "content": i} for i in range(10)])
        assert [row["content"] for row in db.get_messages("s", limit=3, offset=4)] == [4, 5, 6]
        assert [row["content"] for row in db.get_messages("s", offset=8)] == [8, 9]
        assert db.get_messages("s", limit=0) == []

    @pytest.mark.parametrize("bad", [{}, {"role": None}, {"role": ""}, {"role": 5}])
    def test_a_message_needs_a_role(self, db, bad):
        db.create_session("s", "test")
        with pytest.raises(TypeError, match="role"):
            db.append_messages_batch("s", [bad])

    @pytest.mark.parametrize("bad", ["yesterday", float("nan"), float("inf"), [1], object], ids=repr)
    def test_a_timestamp_is_a_number(self, db, bad):
        db.create_session("s", "test")
        with pytest.raises(TypeError, match="timestamp"):
            db.append_message("s", "user", "x", timestamp=bad)
        assert db.message_count("s") == 0

    def test_a_missing_timestamp_is_now(self, db):
        db.create_session("s", "test")
        before = time.time()
        db.append_message("s", "user", "x")
        db.append_message("s", "user", "x", timestamp=None)
        assert all(before <= row["timestamp"] <= time.time() for row in db.get_messages("s"))

    def test_bad_characters_are_replaced_once_at_the_edge(self, db):
        """NUL and lone surrogates, in every place a model can put them; what follows them is not cut off."""
        db.create_session("s", "test")
        bad, good = "a\0b\ud83dc", "a\ufffdb\ufffdc"
        calls = [{"id": bad, "type": "function", "function": {"name": bad, "arguments": bad}}]
        db.append_message("s", "assistant", bad, tool_calls=calls, reasoning=bad)
        db.append_message("s", "tool", [{"type": "text", "text": bad}], tool_call_id=bad, tool_name=bad)
        assistant, tool = db.get_messages_as_conversation("s")
        assert assistant["content"] == assistant["reasoning"] == good
        assert assistant["tool_calls"] == [
            {"id": good, "type": "function", "function": {"name": good, "arguments": good}}
        ]
        assert tool["content"] == [{"type": "text", "text": good}]
        assert (tool["tool_call_id"], tool["tool_name"], tool["name"]) == (good, good, good)

    def test_sqlite_sees_the_whole_text(self, db):
        """Its length and the search index do not stop at what was a NUL."""
        db.create_session("s", "test")
        db.append_message("s", "user", "before\0 behind " + "x" * 10)
        db.append_message("s", "user", "smile\ud83d behindtoo")
        assert query(db, "SELECT length(content), instr(content, 'behind') FROM messages") == [(25, 9), (16, 8)]
        for word in ("behind", "behindtoo"):
            assert len(query(db, "SELECT rowid FROM messages_fts WHERE messages_fts MATCH ?", word)) == 1

    @given(content=JSON, beside=JSON)
    @settings(max_examples=60)
    def test_any_json_value_survives(self, tmp_path_factory, content, beside):
        folder = tmp_path_factory.mktemp("any")
        with SessionDB(folder / "state.db") as db:
            db.create_session("s", "test")
            db.append_message("s", "user", content, beside=beside)
            [row] = db.get_messages_as_conversation("s")
        assert row["content"] == encoding.clean_json(content)
        assert row.get("beside") == encoding.clean_json(beside)

    def test_the_index_holds_just_what_the_content_column_says(self, db):
        """Else deleting a row later would leave words behind."""
        db.create_session("s", "test")
        for role, content in (
            ("user", 'plain "quoted" \\ back'),
            ("user", [{"type": "text", "text": 'naïve "é" \\ / 🙂 \t\n', "n": [1, 2.5, 1e300, True, None]}]),
            ("tool", {"b": "two", "a": {"c": ["\x7f", "\u2028"]}}),
            ("assistant", None),
            ("assistant", ""),
            ("system", "secret instructions"),
        ):
            db.append_message("s", role, content)
        expected = query(
            db, "SELECT id, content FROM messages WHERE role != 'system' AND content != '' AND typeof(content) = 'text'"
        )
        assert len(expected) == 3
        for key, text in expected:
            row = db.get_messages("s", limit=1, offset=(key & messages.MAX_SEQ) - 1)[0]
            assert encoding.searchable(row["role"], row["content"]) == text
        assert [key for key, _ in expected] == [
            row[0] for row in query(db, "SELECT id FROM messages_fts_docsize ORDER BY id")
        ]
        db._database.write(
            lambda conn: conn.execute("INSERT INTO messages_fts(messages_fts, rank) VALUES ('integrity-check', 0)")
        )


class TestEncoding:
    def test_equal_rows_have_equal_bytes(self):
        one = encode_row({"role": "user", "content": {"a": 1, "b": {"d": 1, "c": 2}}, "z": 1, "y": 2, "timestamp": 5})
        two = encode_row({"y": 2, "z": 1, "content": {"b": {"c": 2, "d": 1}, "a": 1}, "role": "user", "timestamp": 5.0})
        assert one == two

    def test_keys_that_are_no_text_become_some(self):
        row = encode_row({"role": "tool", "content": {1: "a", 2.5: "b"}, "timestamp": 1})
        assert row.wire == b'{"content":{"1":"a","2.5":"b"},"role":"tool"}'

    def test_what_cannot_be_stored_is_named(self):
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        for value in (object(), deep, {(1, 2): object()}):
            with pytest.raises(TypeError, match="'thing' cannot be stored as JSON"):
                encode_row({"role": "user", "content": "x", "thing": value})


class TestHandles:
    def test_closing_twice_and_using_a_closed_one(self, tmp_path):
        db = SessionDB(tmp_path / "state.db")
        other = SessionDB(tmp_path / "state.db")
        db.create_session("s", "test")
        db.close()
        db.close()
        for use in (
            lambda: db.append_message("s", "user", "x"),
            lambda: db.get_messages("s"),
            lambda: db.get_session("s"),
            db.list_sessions,
            lambda: db.claim("s"),
            lambda: db.create_session("t", "test"),
        ):
            with pytest.raises(errors.StoreError, match="closed"):
                use()
        other.append_message("s", "user", "the other handle is open")
        other.close()

    def test_two_handles_share_one_database(self, tmp_path):
        with SessionDB(tmp_path / "state.db") as one, SessionDB(tmp_path / "state.db") as two:
            assert one._database is two._database
            one.create_session("s", "test")
            assert one.commits == two.commits == 1
            two.append_message("s", "user", "x")
            one.append_message("s", "user", "y")
            assert [row["content"] for row in two.get_messages_as_conversation("s")] == ["x", "y"]

    def test_a_second_handle_can_read_while_the_first_is_in_use(self, tmp_path):
        """A callback of a turn may open the store again."""
        with SessionDB(tmp_path / "state.db") as first:
            claim = first.claim("s", source="test")
            claim.commit(_batch("from the turn"))
            with SessionDB(tmp_path / "state.db") as second:
                assert [row["content"] for row in second.get_messages("s")] == ["from the turn"]
            claim.commit(_batch("more"))
            claim.release()

    def test_a_read_only_handle_reads_what_is_written_beside_it(self, tmp_path):
        path = tmp_path / "state.db"
        with SessionDB(path) as db, SessionDB(path, read_only=True) as reader:
            db.create_session("s", "test")
            db.append_message("s", "user", "x")
            assert len(reader.get_messages_as_conversation("s")) == 1
            for write in (
                lambda: reader.append_message("s", "user", "y"),
                lambda: reader.create_session("t", "test"),
                lambda: reader.claim("s"),
            ):
                with pytest.raises(errors.StoreReadOnly):
                    write()

    def test_a_damaged_row_never_raises_a_strange_error(self, tmp_path):
        path = tmp_path / "state.db"
        with SessionDB(path) as db:
            db.create_session("s", "test")
            db.append_message("s", "user", "x", beside=1)
        faults.run("apsw.Connection(sys.argv[1]).execute(\"UPDATE messages SET extra = 'no json'\")", path)
        with SessionDB(path) as db:
            for read in (db.get_messages, db.get_messages_as_conversation):
                with pytest.raises(errors.StoreDamaged, match="row 1"):
                    read("s")


def _batch(text: str) -> Any:
    return Batch(rows=[encode_row({"role": "user", "content": text})])


class TestManyThreads:
    def test_sixteen_threads_append_to_sixteen_sessions(self, db):
        """Nothing is lost, doubled or out of order, and commits are shared."""
        for i in range(16):
            db.create_session(f"s{i}", "test")
        failures: list[BaseException] = []

        def append(name: str) -> None:
            try:
                for n in range(25):
                    db.append_message(name, "user", n)
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                failures.append(error)

        threads = [threading.Thread(target=append, args=(f"s{i}",)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        for i in range(16):
            assert [row["content"] for row in db.get_messages_as_conversation(f"s{i}")] == list(range(25))
        assert db.commits < 16 + 16 * 25

    def test_readers_see_whole_sessions_while_others_append(self, db):
        """What is read is some state that was committed, chain and outside witness included."""
        db.create_session("s", "test")
        stop = threading.Event()
        failures: list[BaseException] = []

        def read() -> None:
            try:
                while not stop.is_set():
                    rows = db.get_messages_as_conversation("s")
                    assert [row["content"] for row in rows] == list(range(len(rows)))
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                failures.append(error)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for n in range(200):
            db.append_message("s", "user", n)
        stop.set()
        for reader in readers:
            reader.join(60)
        assert not failures
