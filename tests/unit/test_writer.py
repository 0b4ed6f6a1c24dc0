"""The chain and its outside witness: what is changed, lost or put back is noticed; what is not, is not."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import apsw
import pytest

from hermes_agent import errors
from hermes_agent.store import anchors, messages, processes
from hermes_agent.store.database import StoreOptions
from hermes_agent.store.messages import BLOCK
from hermes_agent.store.session_db import SessionDB, encode_row
from hermes_agent.store.turns import CallKey, CallState, Proposal, TurnState
from hermes_agent.store.usage import UsageDelta
from hermes_agent.store.writer import Batch, TurnEnd
from tests import faults

ROWS = 2 * BLOCK + 20
"""Two sealed blocks and a tail."""


def user(text: str, **more: Any) -> Batch:
    return Batch(rows=[encode_row({"role": "user", "content": text})], **more)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    with SessionDB(folder / "state.db") as db:
        db.create_session("s", "test")
        db.append_messages_batch(
            "s",
            [{"role": "user", "content": f"row {i}", "timestamp": 1000.0 + i, "beside": f"b{i}"} for i in range(ROWS)],
        )
    return folder


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    """A store with one session of two sealed blocks and a tail, closed."""
    return shutil.copytree(made, tmp_path / "home") / "state.db"


def edit(path: Path, *statements: str) -> None:
    """Change the file behind the store's back."""
    conn = apsw.Connection(str(path))
    for sql in statements:
        conn.execute(sql).fetchall()
    conn.close()


def read(path: Path) -> list[dict[str, Any]]:
    with SessionDB(path) as db:
        return db.get_messages_as_conversation("s")


def at(seq: int) -> str:
    return str(messages.row_id(1, seq))


WHERE = [1, 7, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, ROWS - 1, ROWS]


class TestTheChain:
    def test_a_sound_session_is_read_whole(self, path):
        assert [row["content"] for row in read(path)] == [f"row {i}" for i in range(ROWS)]
        assert [row["_seq"] for row in read(path)] == list(range(1, ROWS + 1))

    @pytest.mark.parametrize("seq", WHERE)
    @pytest.mark.parametrize(
        "change",
        [
            "wire = replace(wire, 'row', 'raw')",
            "extra = replace(extra, 'b', 'c')",
            "extra = NULL",
            "timestamp = timestamp + 0.001",
            "wire = CAST(wire AS BLOB) || x'00'",
            "timestamp = 'late'",
            "hash = x'00'",
        ],
    )
    def test_a_changed_row_is_named(self, path, change, seq):
        edit(path, f"UPDATE messages SET {change} WHERE id = {at(seq)}")
        sealed = seq <= 2 * BLOCK
        if change == "hash = x'00'" and sealed:
            assert len(read(path)) == ROWS, "the seal vouches for the rows; their links are not needed"
            return
        with pytest.raises(errors.StoreDamaged, match=rf"row {seq} of this session.*restore a backup"):
            read(path)

    @pytest.mark.parametrize("seq", WHERE)
    def test_a_removed_row_is_noticed(self, path, seq):
        edit(path, f"DELETE FROM messages WHERE id = {at(seq)}")
        with pytest.raises(errors.StoreDamaged, match=rf"row {seq} of this session"):
            read(path)

    @pytest.mark.parametrize("seq", [0, ROWS + 1, ROWS + 5])
    def test_an_added_row_is_noticed(self, path, seq):
        copied = "role, wire, extra, timestamp, event, hash"
        edit(
            path,
            f"INSERT INTO messages (id, {copied}) SELECT {at(0)} + {seq}, {copied} FROM messages WHERE id = {at(ROWS)}",
        )
        if seq == 0:
            assert len(read(path)) == ROWS, "number 0 belongs to no session"
            return
        with pytest.raises(errors.StoreDamaged):
            read(path)

    @pytest.mark.parametrize("seq", [1, BLOCK, 2 * BLOCK + 3])
    def test_swapped_rows_are_noticed(self, path, seq):
        edit(
            path,
            f"UPDATE messages SET id = -1 WHERE id = {at(seq)}",
            f"UPDATE messages SET id = {at(seq)} WHERE id = {at(seq + 1)}",
            f"UPDATE messages SET id = {at(seq + 1)} WHERE id = -1",
        )
        with pytest.raises(errors.StoreDamaged, match=f"row {seq}"):
            read(path)

    @pytest.mark.parametrize(
        "change",
        [
            "head = x'00'",
            "last_seq = last_seq - 1",
            "last_seq = last_seq + 1",
            "message_count = message_count - 1",
            "key = 2",
        ],
    )
    def test_a_changed_end_of_the_session_is_noticed(self, path, change):
        edit(path, f"UPDATE sessions SET {change}")
        with pytest.raises(errors.StoreDamaged):
            read(path)

    def test_a_row_that_is_hidden_by_its_mark_is_noticed(self, path):
        edit(path, f"UPDATE messages SET active = 0 WHERE id = {at(5)}")
        with pytest.raises(errors.StoreDamaged, match="marked as active"):
            read(path)

    def test_a_row_that_was_taken_out_in_order_is_left_out(self, path):
        """What later rewinds: the mark and the count change together, the chain stays."""
        edit(
            path,
            f"UPDATE messages SET active = 0 WHERE id = {at(5)}",
            "UPDATE sessions SET message_count = message_count - 1",
        )
        assert [row["_seq"] for row in read(path)] == [n for n in range(1, ROWS + 1) if n != 5]

    def test_another_session_is_not_concerned(self, path):
        with SessionDB(path) as db:
            db.create_session("t", "test")
            db.append_message("t", "user", "fine")
        edit(path, f"UPDATE messages SET timestamp = 0 WHERE id = {at(3)}")
        with SessionDB(path) as db:
            assert len(db.get_messages_as_conversation("t")) == 1
            db.append_message("t", "user", "still fine")


class TestSeals:
    def test_each_full_block_is_sealed_once(self, path):
        assert faults.look(path, "SELECT id FROM seals ORDER BY id") == [[at(BLOCK)], [at(2 * BLOCK)]]

    def test_sessions_without_seals_or_with_bad_ones_are_read_row_by_row(self, path):
        for change in ("UPDATE seals SET digest = x'00'", "UPDATE seals SET chain = x'00'", "DELETE FROM seals"):
            edit(path, change)
            assert len(read(path)) == ROWS

    def test_a_seal_does_not_vouch_for_another_place(self, path):
        edit(
            path,
            f"UPDATE messages SET id = id + {BLOCK} - 1000000 WHERE id <= {at(BLOCK)}",
            f"UPDATE messages SET id = id - {BLOCK} WHERE id > {at(BLOCK)} AND id <= {at(2 * BLOCK)}",
            "UPDATE messages SET id = id + 1000000 WHERE id < (1 << 24)",
            f"UPDATE seals SET id = {at(5000)} WHERE id = {at(BLOCK)}",
            f"UPDATE seals SET id = {at(BLOCK)} WHERE id = {at(2 * BLOCK)}",
            f"UPDATE seals SET id = {at(2 * BLOCK)} WHERE id = {at(5000)}",
        )
        with pytest.raises(errors.StoreDamaged, match="row 1 "):
            read(path)

    def test_a_block_that_was_changed_before_it_was_full_is_not_sealed(self, path):
        """A seal never makes a change look right that came before it."""
        edit(path, f"UPDATE messages SET timestamp = 0 WHERE id = {at(2 * BLOCK + 5)}")
        with SessionDB(path) as db:
            for i in range(BLOCK):
                db.append_message("s", "user", i)
            with pytest.raises(errors.StoreDamaged, match=f"row {2 * BLOCK + 5}"):
                db.get_messages_as_conversation("s")
        assert len(faults.look(path, "SELECT id FROM seals")) == 2

    @pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
    def test_batches_of_any_size_are_sealed_alike(self, tmp_path, size):
        with SessionDB(tmp_path / "state.db") as db:
            db.create_session("s", "test")
            for start in range(0, 3 * BLOCK, size):
                rows = [
                    {"role": "user", "content": i, "timestamp": 1} for i in range(start, min(start + size, 3 * BLOCK))
                ]
                db.append_messages_batch("s", rows)
            assert [row["content"] for row in db.get_messages_as_conversation("s")] == list(range(3 * BLOCK))
            seals = db._database.read(lambda conn: conn.execute("SELECT * FROM seals ORDER BY id").fetchall())
        assert [key & messages.MAX_SEQ for key, *_ in seals] == [BLOCK, 2 * BLOCK, 3 * BLOCK]


APPEND_AND_DIE = """
db = SessionDB(sys.argv[1])
for i in range(20):
    db.append_message("s", "user", f"acknowledged {i}")
os.kill(os.getpid(), 9)
"""


class TestALostEnd:
    @pytest.fixture
    def crashed(self, path: Path) -> Path:
        """Twenty acknowledged rows that are still in the log only."""
        with faults.Child(APPEND_AND_DIE, path) as child:
            child.end(code=-9)
        return path

    def test_rows_of_a_killed_process_are_all_there(self, crashed):
        assert len(read(crashed)) == ROWS + 20

    @pytest.mark.parametrize("keep", [0.0, 0.3, 0.7])
    def test_a_cut_log_is_noticed(self, crashed, keep):
        """SQLite itself takes what is left for the whole."""
        log = crashed.with_name("state.db-wal")
        os.truncate(log, int(log.stat().st_size * keep))
        with pytest.raises(
            errors.StoreDamaged, match=rf"row {ROWS + 20} was stored.*backup.*deleting .*state.db-anchors"
        ):
            read(crashed)

    def test_a_removed_log_is_noticed_by_whoever_comes_next(self, crashed):
        crashed.with_name("state.db-wal").unlink()
        with SessionDB(crashed) as db:
            for use in (
                lambda: db.get_messages_as_conversation("s"),
                lambda: db.append_message("s", "user", "over it"),
                lambda: db.claim("s"),
            ):
                with pytest.raises(errors.StoreDamaged, match="its end was lost"):
                    use()
            assert db.message_count("s") == ROWS, "nothing was written over the evidence"
            db.create_session("t", "test")
            db.append_message("t", "user", "other sessions go on")

    def test_one_can_go_on_with_what_is_left(self, crashed):
        crashed.with_name("state.db-wal").unlink()
        crashed.with_name("state.db-anchors").unlink()
        assert len(read(crashed)) == ROWS
        with SessionDB(crashed) as db:
            db.append_message("s", "user", "on")
        assert len(read(crashed)) == ROWS + 1

    def test_a_restored_older_backup_is_noticed(self, path, tmp_path):
        shutil.copy(path, tmp_path / "backup.db")
        with SessionDB(path) as db:
            db.append_message("s", "user", "after the backup")
        shutil.copy(tmp_path / "backup.db", path)
        with pytest.raises(errors.StoreDamaged, match=f"ends at row {ROWS}, but row {ROWS + 1} was stored"):
            read(path)

    def test_another_history_in_the_place_of_the_stored_one_is_noticed(self, path, tmp_path):
        shutil.copy(path, tmp_path / "backup.db")
        shutil.copy(path.with_name("state.db-anchors"), tmp_path / "anchors")
        with SessionDB(path) as db:
            db.append_message("s", "user", "the stored history")
        shutil.copy(path.with_name("state.db-anchors"), tmp_path / "anchors")
        shutil.copy(tmp_path / "backup.db", path)
        path.with_name("state.db-anchors").unlink()
        with SessionDB(path) as db:
            db.append_messages_batch("s", [{"role": "user", "content": "another"}] * 2)
        shutil.copy(tmp_path / "anchors", path.with_name("state.db-anchors"))
        with pytest.raises(errors.StoreDamaged, match="history was changed"):
            read(path)

    def test_a_new_session_in_a_restored_store_is_not_blamed_for_a_lost_one(self, path, tmp_path):
        shutil.copy(path, tmp_path / "backup.db")
        with SessionDB(path) as db:
            db.create_session("lost", "test")
            db.append_message("lost", "user", "x")
        shutil.copy(tmp_path / "backup.db", path)
        with SessionDB(path) as db:
            db.create_session("new", "test")
            assert db.get_messages_as_conversation("new") == []
            db.claim("newer", source="test").release()
            assert db.get_messages_as_conversation("newer") == []

    def test_a_new_store_is_not_blamed_for_an_old_one_of_its_name(self, path):
        path.unlink()
        with SessionDB(path) as db:
            db.create_session("s", "test")
            db.append_message("s", "user", "fresh")
            assert len(db.get_messages_as_conversation("s")) == 1


class TestTheWitness:
    @pytest.mark.parametrize("damage", ["missing", "short", "torn", "garbage", "folder"])
    def test_that_cannot_be_read_raises_no_false_alarm(self, path, damage):
        file = path.with_name("state.db-anchors")
        data = bytearray(file.read_bytes())
        file.unlink()
        if damage == "short":
            file.write_bytes(data[:-40])
        elif damage == "torn":
            data[64 + 10] ^= 0xFF
            file.write_bytes(data)
        elif damage == "garbage":
            file.write_bytes(random.Random(1).randbytes(500))
        elif damage == "folder":
            file.mkdir()
        assert len(read(path)) == ROWS
        with SessionDB(path) as db:
            db.append_message("s", "user", "on")
        assert len(read(path)) == ROWS + 1

    def test_that_is_behind_raises_no_false_alarm(self, path, tmp_path):
        """As after a crash between a commit and its record."""
        file = path.with_name("state.db-anchors")
        shutil.copy(file, tmp_path / "older")
        with SessionDB(path) as db:
            db.append_message("s", "user", "on")
        shutil.copy(tmp_path / "older", file)
        assert len(read(path)) == ROWS + 1

    def test_is_private(self, tmp_path):
        old = os.umask(0)
        try:
            with SessionDB(tmp_path / "home" / "state.db") as db:
                db.create_session("s", "test")
                db.append_message("s", "user", "x")
        finally:
            os.umask(old)
        assert (tmp_path / "home" / "state.db-anchors").stat().st_mode & 0o777 == 0o600

    def test_lies_beside_the_file_that_a_link_names(self, path, tmp_path):
        link = tmp_path / "elsewhere" / "link.db"
        link.parent.mkdir()
        link.symlink_to(path)
        with SessionDB(link) as db:
            db.append_message("s", "user", "x")
        assert [p.name for p in link.parent.iterdir()] == ["link.db"]

    def test_of_a_store_that_does_not_sync_ends_with_the_boot(self, tmp_path, monkeypatch):
        """A power cut may take its last rows; that is what was chosen, and no damage."""
        witness = anchors.Anchors(tmp_path / "anchors", b"store", synced=False)
        witness.record(1, 9, b"h" * 16)
        assert witness.read(1) == (9, b"h" * 16)
        monkeypatch.setattr(processes, "boot_id", lambda: "the next boot")
        assert witness.read(1) is None
        witness.close()
        synced = anchors.Anchors(tmp_path / "anchors", b"store")
        synced.record(2, 9, b"h" * 16)
        monkeypatch.setattr(processes, "boot_id", lambda: "the boot after")
        assert synced.read(2) == (9, b"h" * 16)
        synced.close()

    def test_of_another_store_does_not_count(self, tmp_path):
        """Two stores may have had one name, and number their sessions alike."""
        for store, seen in ((b"one", (9, b"h" * 16)), (b"other", None)):
            witness = anchors.Anchors(tmp_path / "anchors", store)
            if seen:
                witness.record(1, 9, b"h" * 16)
            assert witness.read(1) == seen
            witness.close()

    def test_is_written_only_after_the_commit(self, path, monkeypatch):
        with SessionDB(path) as db:
            seen: list[Any] = []
            claim = db.claim("s")

            def record(key: int, seq: int, head: bytes) -> None:
                stored = faults.look(path, "SELECT last_seq FROM sessions")
                seen.append((seq, int(stored[0][0])))

            monkeypatch.setattr(db._anchors, "record", record)
            claim.commit(user("x"))
            claim.release()
            db.append_message("s", "user", "y")
        assert seen == [(ROWS + 1, ROWS + 1), (ROWS + 2, ROWS + 2)]


class TestFlippedBits:
    def test_never_give_a_wrong_transcript(self, path, tmp_path):
        """Any single bit of the file: the right rows, or an error of ours that says what is wrong."""
        right = [(row["role"], row["content"], row["beside"], row["timestamp"]) for row in read(path)]
        data = path.read_bytes()
        chance = random.Random(20)
        # most bits lie in free space; those of the rows, and of what leads to them, are tried more often
        heart = [data.index(b"row 70"), data.index(b'"beside":"b100"'), data.rindex(b"test"), 100, 4096 * 2]
        places = [chance.randrange(len(data) * 8) for _ in range(150)]
        places += [8 * (spot + chance.randrange(-60, 60)) + chance.randrange(8) for spot in heart for _ in range(50)]
        damaged = tmp_path / "flipped" / "state.db"
        damaged.parent.mkdir()
        noticed = 0
        for place in places:
            bad = bytearray(data)
            bad[place // 8] ^= 1 << place % 8
            for file in damaged.parent.iterdir():
                file.unlink()
            damaged.write_bytes(bad)
            try:
                with SessionDB(damaged, read_only=True) as db:
                    rows = db.get_messages_as_conversation("s")
            except errors.HermesError:
                noticed += 1
                continue
            assert [(row["role"], row["content"], row["beside"], row["timestamp"]) for row in rows] == right, place
        assert noticed > 60  # the test tries something: most of the other bits lie in free space


class TestCommits:
    @pytest.fixture
    def db(self, tmp_path: Path):
        with SessionDB(tmp_path / "state.db", options=StoreOptions(synchronous="NORMAL")) as opened:
            yield opened

    def everything(self, db: SessionDB, table: str) -> list[tuple[Any, ...]]:
        return db._database.read(lambda conn: conn.execute(f"SELECT * FROM {table}").fetchall())

    def test_what_belongs_together_is_one_transaction(self, db):
        claim = db.claim("s", source="test")
        before = db.commits
        batch = user("go", begin=True)
        batch.proposals = [Proposal(CallKey(1, 0), "c", "todo", "pure")]
        batch.usage = UsageDelta("m", "p", input_tokens=3)
        claim.commit(batch)
        assert db.commits - before == 1
        [turn] = claim.open_turns()
        assert (turn.state, turn.user_seq, turn.attempts) == (TurnState.RUNNING, 1, 1)
        assert [(call.key, call.state) for call in claim.ledger()] == [(CallKey(1, 0), CallState.PROPOSED)]
        assert [event[1:3] for event in self.everything(db, "session_events")] == [
            ("turn.running", turn.id),
            ("message", "1"),
        ]
        session = db.get_session("s")
        assert session is not None
        assert (session["message_count"], session["tool_call_count"], session["input_tokens"]) == (1, 1, 3)

    def test_a_batch_that_fails_leaves_nothing_and_the_writer_where_it_was(self, db):
        claim = db.claim("s", source="test")
        claim.commit(user("one", begin=True))
        tables = ("sessions", "messages", "turns", "tool_calls", "events", "usage")
        before = [self.everything(db, table) for table in tables]
        bad = user("two")
        bad.usage = UsageDelta("m", "p")
        bad.results = {0: (CallKey(9, 9), CallState.DONE)}
        with pytest.raises(errors.StoreError):
            claim.commit(bad)
        assert [self.everything(db, table) for table in tables] == before
        assert claim.commit(user("two")) == [2]
        assert len(db.get_messages_as_conversation("s")) == 2

    def test_events_are_numbered_without_a_gap(self, db):
        claim = db.claim("s", source="test")
        claim.commit(user("go", begin=True))
        claim.commit(Batch(rows=[encode_row({"role": "assistant", "content": "done"})], end=TurnEnd(TurnState.DONE)))
        claim.release()
        db.append_message("s", "user", "later")
        events = sorted(self.everything(db, "session_events"))
        assert [event[0] & messages.MAX_SEQ for event in events] == list(range(1, len(events) + 1))
        assert [event[1] for event in events] == ["turn.running", "message", "message", "turn.done", "message"]

    def test_a_session_that_is_full_says_so(self, db, monkeypatch):
        monkeypatch.setattr(messages, "MAX_SEQ", 4)
        claim = db.claim("s", source="test")
        for i in range(4):
            claim.commit(user(str(i)))
        for write in (lambda: claim.commit(user("x")), lambda: claim.start_calls([CallKey(1, 0)])):
            with pytest.raises(errors.StoreError, match="at most 4"):
                write()

    def test_a_turn_that_ended_without_an_answer_marks_its_last_row(self, db):
        claim = db.claim("s", source="test")
        claim.commit(user("go", begin=True))
        claim.commit(Batch(end=TurnEnd(TurnState.FAILED, "timeout", "no answer\ud83d")))
        claim.commit(user("again", begin=True))
        claim.commit(Batch(rows=[encode_row({"role": "assistant", "content": "ok"})], end=TurnEnd(TurnState.DONE)))
        claim.release()
        rows = db.get_messages_as_conversation("s")
        assert [row.get("_turn_outcome") for row in rows] == ["timeout", None, None]

    def test_an_accepted_message_is_started_once(self, db):
        claim = db.claim("s", source="test")
        accepted = db.accept_turn("s", "wait\0ing")
        assert db.find_turn(accepted.id) == accepted
        assert accepted.input == "wait\ufffding"
        claim.commit(user("waiting", resume=accepted))
        claim.commit(Batch(end=TurnEnd(TurnState.DONE)))
        with pytest.raises(errors.StoreError, match="withdrawn, or is being answered"):
            claim.commit(user("waiting", resume=accepted))
        assert db.message_count("s") == 1
        db.withdraw_turn(accepted, "too late")
        found = db.find_turn(accepted.id)
        assert found is not None
        assert found.state is TurnState.DONE

    def test_a_withdrawn_message_is_never_started(self, db):
        claim = db.claim("s", source="test")
        accepted = db.accept_turn("s", "x")
        db.withdraw_turn(accepted, "stopped")
        with pytest.raises(errors.StoreError):
            claim.commit(user("x", resume=accepted))
        assert claim.open_turns() == []

    def test_a_turn_that_ended_is_not_taken_over(self, db):
        claim = db.claim("s", source="test")
        claim.commit(user("go", begin=True))
        [turn] = claim.open_turns()
        claim.commit(Batch(end=TurnEnd(TurnState.DONE)))
        with pytest.raises(errors.StoreError, match="ended"):
            claim.take_over(turn)

    def test_a_write_that_was_cut_off_after_its_commit_is_not_written_again(self, db, monkeypatch):
        """The writer that does not know of it refuses to go on; the next owner sees it."""
        claim = db.claim("s", source="test")
        write = db._database.write

        def cut(*given: Any, **named: Any) -> None:
            write(*given, **named)
            raise KeyboardInterrupt

        monkeypatch.setattr(db._database, "write", cut)
        with pytest.raises(KeyboardInterrupt):
            claim.commit(user("landed"))
        monkeypatch.undo()
        with pytest.raises(errors.StaleLease):
            claim.commit(user("landed"))
        claim.release()
        db.claim("s").release()
        assert [row["content"] for row in db.get_messages_as_conversation("s")] == ["landed"]
