"""A removed session is unknown at once, and then gone: rows, index, files, and every byte of it in the store."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest

from hermes_agent import errors, failpoints
from hermes_agent.store import messages, removal
from hermes_agent.store.search import search
from hermes_agent.store.session_db import SessionDB, encode_row
from hermes_agent.store.turns import CallKey, CallState, Proposal, TurnState
from hermes_agent.store.usage import UsageDelta
from hermes_agent.store.writer import Batch, TurnEnd
from tests import faults

CANARY = "zqcanary"
"""Begins every word that must not be found afterwards."""


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


def row(role: str, content: str | None, **more: Any) -> messages.Row:
    return encode_row({"role": role, "content": content, **more})


def fill(db: SessionDB, session_id: str, word: str) -> str:
    """A session with something in every table; each text begins with `word`. Returns its turn's id."""
    db.create_session(
        session_id, "test", title=f"{word}title", system_prompt=f"{word}prompt", cwd=f"/{word}cwd",
        model_config={"k": f"{word}config"}, user_id=f"{word}user",
    )  # fmt: skip
    calls = {"tool_calls": [{"id": "c", "function": {"name": "terminal", "arguments": f'"{word}arguments"'}}]}
    claim = db.claim(session_id)
    claim.commit(Batch(rows=[row("user", f"{word}question", beside=f"{word}beside")], begin=True))
    proposals = [Proposal(CallKey(1, 0), "c", "terminal", "unsafe"), Proposal(CallKey(1, 1), "d", "terminal", "unsafe")]
    claim.commit(Batch(rows=[row("assistant", f"{word}thought", **calls)], proposals=proposals))
    claim.start_calls([CallKey(1, 0), CallKey(1, 1)])
    claim.finish_call(CallKey(1, 1), f"{word}kept")
    rows = [row("tool", f"{word}result", tool_call_id="c")]
    claim.commit(Batch(rows=rows, results={0: (CallKey(1, 0), CallState.DONE)}))
    used = UsageDelta("m", "p", api_calls=2, input_tokens=100, output_tokens=10)
    end = TurnEnd(TurnState.FAILED, "timeout", f"{word}error", f"{word}prose")
    claim.commit(Batch(rows=[row("assistant", f"{word}answer")], usage=used, end=end))
    db.database.write(
        lambda conn: conn.execute(
            "INSERT INTO approvals (id, turn_key, call_id, kind, request, request_hash, state, answer, asked_at,"
            " expires_at) SELECT ?, key, 'c', 'approval', ?, x'00', 'approved', ?, 0, 0 FROM turns WHERE id = ?",
            (session_id, f"{word}request", f"{word}reply", claim.turn_id),
        )
    )
    db.database.write(
        lambda conn: conn.execute(
            "INSERT INTO inbox SELECT ?, '', ?, key, x'00', 0 FROM turns WHERE id = ?",
            (f"{word}sender", f"{word}id", claim.turn_id),
        )
    )
    claim.release()
    withdrawn = db.accept_turn(session_id, f"{word}waiting")
    db.withdraw_turn(withdrawn, f"{word}reason")
    return claim.turn_id


def left_of(db: SessionDB, key: int) -> dict[str, int]:
    """Rows that still speak of the session of that key, by table; the tombstone aside."""
    first, last = messages.row_id(key, 0), messages.row_id(key, messages.MAX_SEQ)
    counts = {
        name: query(db, f"SELECT count(*) FROM {name} WHERE id > {first} AND id <= {last}")[0][0]
        for name in ("messages", "events", "seals", "messages_fts_docsize")
    }
    for name, column in (
        ("sessions", "key"), ("turns", "session_key"), ("session_leases", "session_key"),
        ("usage", "session_key"), ("lent_turns", "session_key"),
    ):  # fmt: skip
        counts[name] = query(db, f"SELECT count(*) FROM {name} WHERE {column} = ?", key)[0][0]
    for name in ("tool_calls", "approvals", "inbox"):
        counts[name] = query(db, f"SELECT count(*) FROM {name} WHERE turn_key NOT IN (SELECT key FROM turns)")[0][0]
    return {name: count for name, count in counts.items() if count}


def on_disk(path: Path, pattern: bytes = CANARY.encode()) -> set[bytes]:
    """Different words of that beginning in the bytes of the file and its log, once the log is in the file."""
    conn = apsw.Connection(str(path))
    conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    conn.close()
    files = [path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-anchors")]
    return {word for file in files if file.exists() for word in re.findall(pattern + rb"\w*", file.read_bytes())}


def check_index(db: SessionDB) -> None:
    db.database.write(
        lambda conn: conn.execute("INSERT INTO messages_fts (messages_fts, rank) VALUES ('integrity-check', 0)")
    )


class TestNothingIsLeft:
    def test_nobody_finds_it_any_more(self, db):
        fill(db, "s", CANARY)
        fill(db, "t", "other")
        key = key_of(db, "s")
        assert search(db.database, f"{CANARY}*").hits
        assert db.delete_session("s") is True
        assert db.get_session("s") is None
        assert [session["id"] for session in db.list_sessions()] == ["t"]
        assert search(db.database, f"{CANARY}*").hits == []
        for name in ("s", f"{CANARY}title", "latest-of-s"):
            with pytest.raises(errors.UnknownSession):
                db.resolve_session(name)
        calls = (db.get_messages, db.get_messages_as_conversation, db.open_turns, db.message_count, db.delete_session)
        for call in calls:
            with pytest.raises(errors.UnknownSession, match="'s' was deleted"):
                call("s")
        assert left_of(db, key) == {}
        check_index(db)
        assert query(db, "PRAGMA integrity_check") == [("ok",)]

    def test_its_neighbours_keep_every_row_and_every_word(self, db):
        for name in ("a", "s", "b"):
            fill(db, name, f"{name}word")
            db.append_messages_batch(name, [{"role": "user", "content": f"common {name} {i}"} for i in range(150)])
        before = {name: (said(db, name), db.get_session(name)) for name in ("a", "b")}
        db.delete_session("s")
        assert {name: (said(db, name), db.get_session(name)) for name in ("a", "b")} == before
        assert {hit.session_id for hit in search(db.database, "common", limit=400).hits} == {"a", "b"}
        assert len(search(db.database, "common", limit=400).hits) == 300
        for name in ("a", "b"):
            assert db.append_message(name, "user", "on") > 0
            assert query(db, "SELECT count(*) FROM seals WHERE id >> 24 = ?", key_of(db, name)) == [(2,)]
        check_index(db)

    def test_no_byte_of_it_is_in_the_file(self, tmp_path):
        """Sessions grow side by side, so that pages were split and index pieces merged before."""
        path = tmp_path / "state.db"
        random_ = random.Random(7)
        words = ["".join(random_.choices("abcdefghij", k=6)) for _ in range(300)]
        with SessionDB(path) as db:
            fill(db, "s", CANARY)
            for name in "abcdefgh":
                db.create_session(name, "test")
            for i in range(1200):
                name = random_.choice("sssabcdefgh")
                own = [f"{CANARY}{i}"] if name == "s" else []
                db.append_message(name, "user", " ".join([*own, *random_.choices(words, k=random_.choice([5, 80]))]))
            assert len(on_disk(path)) > 200
            assert db.delete_session("s") is True
            assert on_disk(path) == set()
            assert len(db.list_sessions()) == 8
        assert on_disk(path) == set()
        with SessionDB(path) as db:
            check_index(db)
            for name in "abcdefgh":
                said(db, name)

    def test_the_rewrite_of_the_file_can_wait(self, tmp_path):
        path = tmp_path / "state.db"
        with SessionDB(path) as db:
            for name in ("s", "t"):
                fill(db, name, f"{CANARY}{name}")
                assert db.delete_session(name, scrub=False) is False
            assert search(db.database, f"{CANARY}*").hits == []
            assert removal.scrub(db.database) is True
            assert on_disk(path) == set()
            before = db.commits
            assert removal.scrub(db.database) is True
            assert db.commits == before, "there is nothing more to do"

    def test_a_reader_in_the_way_puts_the_rest_off(self, tmp_path):
        path = tmp_path / "state.db"
        with SessionDB(path) as db:
            fill(db, "s", CANARY)
            code = """
conn = apsw.Connection(sys.argv[1])
conn.execute("BEGIN").fetchall(); conn.execute("SELECT count(*) FROM messages").fetchall()
say("reads"); hear()
conn.execute("COMMIT").fetchall(); conn.close(); say("left")
"""
            with faults.Child(code, path) as reader:
                assert reader.hear() == "reads"
                assert db.delete_session("s") is False
                assert db.get_session("s") is None
                reader.say()
                assert reader.end() == ["left"]
            assert removal.scrub(db.database) is True
        assert on_disk(path) == set()

    def test_what_sessions_share_stays_until_the_last_of_them(self, db):
        for name in ("s", "t"):
            db.create_session(name, "test", system_prompt="shared")
        db.delete_session("s")
        assert (db.get_session("t") or {})["system_prompt"] == "shared"
        db.delete_session("t")
        assert query(db, "SELECT count(*) FROM system_prompts") == [(0,)]

    def test_what_was_used_still_counts(self, db):
        """Money that was spent is not unspent; it belongs to no session any more."""
        fill(db, "s", "a")
        fill(db, "t", "b")
        for name in ("s", "t"):
            db.delete_session(name, scrub=False)
        found = query(db, "SELECT session_key, model, provider, api_calls, input_tokens, output_tokens FROM usage")
        assert found == [(removal.OF_THE_DELETED, "m", "p", 4, 200, 20)]


class TestWhoHoldsIt:
    def test_a_session_on_which_a_turn_runs_is_not_removed(self, db):
        db.create_session("s", "test")
        claim = db.claim("s")
        claim.commit(Batch(rows=[row("user", "x")], begin=True))
        with pytest.raises(errors.SessionBusy, match="a turn is running"):
            db.delete_session("s")
        claim.commit(Batch(rows=[row("assistant", "y")], end=TurnEnd(TurnState.DONE)))
        claim.release()
        assert said(db, "s") == ["x", "y"]
        db.delete_session("s")

    def test_a_session_in_which_a_message_waits_is_not_removed(self, db):
        db.create_session("s", "test")
        turn = db.accept_turn("s", "x")
        with pytest.raises(errors.SessionBusy, match="a message waits"):
            db.delete_session("s")
        assert db.find_turn(turn.id) is not None
        db.withdraw_turn(turn, "never mind")
        db.delete_session("s")

    def test_what_a_dead_process_held_is_removed(self, tmp_path):
        path = tmp_path / "state.db"
        code = """
db = SessionDB(sys.argv[1])
db.create_session("s", "test")
claim = db.claim("s")
claim.commit(Batch(rows=[encode_row({"role": "user", "content": "x"})], begin=True))
db.accept_turn("s", "waits")
os.kill(os.getpid(), 9)
"""
        with faults.Child(code, path) as child:
            child.end(code=-9)
        with SessionDB(path) as db:
            key = key_of(db, "s")
            db.delete_session("s")
            assert left_of(db, key) == {}

    def test_a_session_that_was_never_there_is_unknown(self, db):
        with pytest.raises(errors.UnknownSession, match="no session 'nobody'"):
            db.delete_session("nobody")


class TestWhoComesLate:
    def expire(self, db: SessionDB) -> None:
        db.database.write(lambda conn: conn.execute("UPDATE session_leases SET expires = 0"))

    def test_a_writer_that_was_overtaken_writes_nothing(self, db):
        db.create_session("s", "test")
        claim = db.claim("s")
        claim.commit(Batch(rows=[row("user", "x")], begin=True))
        self.expire(db)
        key = key_of(db, "s")
        db.delete_session("s")
        late = (
            lambda: claim.commit(Batch(rows=[row("assistant", "late")], usage=UsageDelta("m", "p", input_tokens=9))),
            lambda: claim.set_system_prompt("late"),
            claim.renew,
        )
        for again in (False, True):
            if again:
                db.create_new_session("s", "test")
            for write in late:
                with pytest.raises(errors.StaleLease):
                    write()
        claim.release()
        assert left_of(db, key) == {}
        assert db.message_count("s") == 0
        assert query(db, "SELECT count(*) FROM system_prompts") == [(0,)]

    def test_nobody_brings_it_back_without_a_word(self, db, tmp_path):
        """Appending, claiming to go on, or leaving a message for it say that it is gone."""
        db.create_session("s", "test")
        db.append_message("s", "user", "x")
        with SessionDB(db.db_path) as other:
            other.append_message("s", "user", "y")
            db.delete_session("s")
            for write in (
                lambda: other.append_message("s", "user", "late"),
                lambda: db.append_message("s", "user", "late"),
                lambda: db.claim("s", source="test"),
                lambda: db.claim("s"),
                lambda: db.accept_turn("s", "late"),
                lambda: db.update_session("s", pinned=True),
                lambda: db.fork_session("s", "f"),
            ):
                with pytest.raises(errors.UnknownSession, match="was deleted"):
                    write()
        assert db.list_sessions() == []

    def test_its_id_may_be_used_again_for_another_session(self, db):
        db.create_session("s", "test", title="name")
        db.append_message("s", "user", "old")
        key = key_of(db, "s")
        for make in (db.create_new_session, db.create_session):
            db.delete_session("s", scrub=False)
            make("s", "test", title="name")
            assert key_of(db, "s") > key
            key = key_of(db, "s")
            assert said(db, "s") == []
            db.append_message("s", "user", "new")
            assert said(db, "s") == ["new"]
            db.claim("s", source="test").release()
        with SessionDB(db.db_path) as again:
            assert said(again, "s") == ["new"]

    def test_others_write_between_two_slices(self, db, monkeypatch):
        monkeypatch.setattr(removal, "_SLICE_ROWS", 10)
        db.create_session("s", "test")
        db.create_session("t", "test")
        db.append_messages_batch("s", [{"role": "user", "content": "x"}] * 95)
        reached: list[str] = []

        def write(name: str) -> None:
            if name == "removal.slice":
                reached.append(name)
                db.append_message("t", "user", f"{len(reached)}")

        failpoints.arm(write)
        try:
            db.delete_session("s", scrub=False)
        finally:
            failpoints.arm(None)
        assert len(reached) >= 10
        assert said(db, "t") == [str(n) for n in range(1, len(reached) + 1)]

    def test_a_slice_is_small_however_long_its_rows_are(self, db):
        db.create_session("s", "test")
        for _ in range(6):
            db.append_message("s", "user", "word " * 40_000)
        slices: list[str] = []
        failpoints.arm(lambda name: slices.append(name) if name == "removal.slice" else None)
        try:
            db.delete_session("s", scrub=False)
        finally:
            failpoints.arm(None)
        assert len(slices) >= 3


class TestFiles:
    def test_the_turns_whose_results_were_spilled_are_named_before_they_are_forgotten(self, db):
        turn_id = fill(db, "s", "a")
        db.append_message("s", "user", "x")
        erased: list[str] = []

        def erase(turn_ids: Sequence[str]) -> None:
            assert db.find_turn(turn_ids[0]) is not None
            erased.extend(turn_ids)

        db.delete_session("s", erase_files=erase)
        assert erased == [turn_id]
        assert db.find_turn(turn_id) is None

    def test_files_that_a_branch_shows_stay_as_long_as_it_does(self, db):
        turn_id = fill(db, "s", "a")
        db.fork_session("s", "f")
        db.fork_session("f", "g")
        erased: list[str] = []
        for name in ("f", "s"):
            db.delete_session(name, erase_files=erased.extend, scrub=False)
            assert erased == []
        db.delete_session("g", erase_files=erased.extend, scrub=False)
        assert erased == [turn_id]
        assert query(db, "SELECT count(*) FROM lent_turns") == [(0,)]

    def test_files_of_a_living_source_stay(self, db):
        fill(db, "s", "a")
        db.fork_session("s", "f")
        erased: list[str] = []
        db.delete_session("f", erase_files=erased.extend, scrub=False)
        assert erased == []

    def test_files_that_could_not_be_erased_are_named_again(self, db):
        turn_id = fill(db, "s", "a")

        def fail(turn_ids: Sequence[str]) -> None:
            raise OSError("disk")

        with pytest.raises(OSError, match="disk"):
            db.delete_session("s", erase_files=fail)
        assert db.get_session("s") is None
        erased: list[str] = []
        removal.finish(db.database, erased.extend)
        assert erased == [turn_id]


def test_a_full_disk_leaves_the_session_removed_and_its_traces_for_later(tmp_path):
    path = tmp_path / "state.db"
    with SessionDB(path) as db:
        fill(db, "s", CANARY)
        db.create_session("t", "test")
        db.append_messages_batch("t", [{"role": "user", "content": f"word {i} " * 500} for i in range(500)])
    code = """
import resource
from hermes_agent import failpoints
db = SessionDB(sys.argv[1])
def fill(name):
    if name == "removal.purged":
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat(sys.argv[1] + "-wal").st_size + 100_000, -1))
failpoints.arm(fill)
say(db.delete_session("s"))
say(db.get_session("s"))
db.append_message("t", "user", "on")
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
"""
    assert faults.run(code, path) == ["False", "None"]
    with SessionDB(path) as db:
        assert said(db, "t")[-1] == "on"
        assert removal.scrub(db.database) is True
    assert on_disk(path) == set()


KILLED = """
from hermes_agent import failpoints
from hermes_agent.store import removal
removal._SLICE_ROWS = 60
hits = 0
def trap(name):
    global hits
    hits += 1
    if hits == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
db = SessionDB(sys.argv[1])
failpoints.arm(trap)
db.delete_session("s", erase_files=lambda turn_ids: say(*turn_ids))
say("done")
"""


def test_a_process_killed_at_any_point_leaves_the_session_whole_or_gone(tmp_path):
    """And whoever comes next takes the rest away."""
    outcomes: list[bool] = []
    with SessionDB(tmp_path / "made" / "state.db") as db:
        turn_id = fill(db, "s", CANARY)
        db.append_messages_batch("s", [{"role": "user", "content": f"{CANARY} {i}"} for i in range(90)])
        db.create_session("t", "test")
        db.append_message("t", "user", "stays")
        rows, key = said(db, "s"), key_of(db, "s")
    kill, ended = 0, False
    while not ended:
        kill += 1
        path = shutil.copytree(tmp_path / "made", tmp_path / str(kill)) / "state.db"
        with faults.Child(KILLED, path, kill) as child:
            try:
                lines = child.end(code=-9)
            except AssertionError:
                assert child.process.returncode == 0
                lines, ended = [], True
        with SessionDB(path) as db:
            check_index(db)
            assert said(db, "t") == ["stays"]
            found = search(db.database, f"{CANARY}*", limit=200).hits
            outcomes.append(db.get_session("s") is not None)
            if outcomes[-1]:
                assert said(db, "s") == rows
                assert len(found) == 94
                db.delete_session("s")
            else:
                assert found == []
                with pytest.raises(errors.UnknownSession, match="was deleted"):
                    said(db, "s")
                again: list[str] = []
                removal.finish(db.database, again.extend)
                assert ended or turn_id in [*lines, *again], "no file is forgotten"
                assert removal.scrub(db.database) is True
            assert left_of(db, key) == {}
            assert query(db, "SELECT stage FROM tombstones") == [(2,)]
            check_index(db)
        assert on_disk(path) == set()
    assert outcomes[:1] == [True]
    assert outcomes == sorted(outcomes, reverse=True), "once it is gone it stays so"
    assert outcomes.count(False) > 10
