"""What the store does when the disk, the file or another process misbehaves."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from hermes_agent import errors
from hermes_agent.store import database
from hermes_agent.store.database import StoreOptions
from hermes_agent.store.session_db import SessionDB
from tests import faults


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with one session of ten rows."""
    found = tmp_path / "home" / "state.db"
    with SessionDB(found) as db:
        db.create_session("s", "test")
        for i in range(10):
            db.append_message("s", "user", f"row {i}")
    return found


def contents(path: Path) -> list[str]:
    """The session's texts, read by another process."""
    code = """
with SessionDB(sys.argv[1]) as db:
    for row in db.get_messages_as_conversation("s"):
        say(row["content"])
"""
    return faults.run(code, path)


TEN = [f"row {i}" for i in range(10)]

SYNC_FAILS = """
path, way = sys.argv[1:]
db = SessionDB(path)
claim = db.claim("s") if way == "leased" else None
def append(text):
    if claim is None:
        db.append_message("s", "user", text)
    else:
        claim.commit(Batch(rows=[encode_row({"role": "user", "content": text})]))
def attempt(text):
    try:
        append(text)
        say("stored")
    except errors.StoreError as error:
        say(type(error).__name__, error.reason)
append("before")
"""


@pytest.mark.parametrize("way", ["leased", "unleased"])
class TestACommitThatFailsHalfWay:
    def test_a_row_that_did_not_land_is_reported_and_the_next_write_works(self, path, shim, way):
        """A failed sync: the row is written, the log does not count it; the truth is asked for."""
        code = (
            SYNC_FAILS
            + """
arm("state.db-wal", SYNC)
attempt("lost")
say(hits())
attempt("after")
"""
        )
        assert faults.run(code, path, way, shim=shim) == ["StoreError store_io", "1", "stored"]
        assert contents(path) == [*TEN, "before", "after"]

    def test_a_row_that_landed_is_recognised_and_not_written_twice(self, path, shim, way):
        """No other connection keeps the log's index, so that reopening finds the frames of the failed commit."""
        code = (
            SYNC_FAILS
            + """
while db._open._readers:
    db._open._readers.pop().close()
# the commit's sync fails, and so does the one with which closing would copy and delete the log
arm("state.db-wal", SYNC, times=2)
attempt("landed")
say(hits())
attempt("after")
say(len(db.get_messages("s")))
"""
        )
        assert faults.run(code, path, way, shim=shim) == ["stored", "2", "stored", "13"]
        assert contents(path) == [*TEN, "before", "landed", "after"]

    def test_a_row_that_landed_is_in_the_file_before_the_caller_hears_of_it(self, path, shim, way):
        """The system may have dropped what it could not sync: the log alone is not trusted again."""
        code = (
            SYNC_FAILS
            + """
while db._open._readers:
    db._open._readers.pop().close()
arm("state.db-wal", SYNC, times=2)
attempt("landed")
import shutil
shutil.copy(path, path + ".alone")
"""
        )
        assert faults.run(code, path, way, shim=shim) == ["stored"]
        alone = path.with_name("state.db.alone")
        found = faults.look(alone, "SELECT count(*) FROM messages WHERE content = 'landed'")
        assert found == [["1"]]

    def test_what_was_called_absent_never_comes_back(self, path, shim, way):
        """The place of the failed commit in the log is written over: a crash does not bring it back."""
        code = (
            SYNC_FAILS
            + """
db.list_sessions()
arm("state.db-wal", SYNC)
attempt("absent")
os.kill(os.getpid(), 9)
"""
        )
        with faults.Child(code, path, way, shim=shim) as child:
            assert child.hear() == "StoreError store_io"
            child.end(code=-signal.SIGKILL)
        assert contents(path) == [*TEN, "before"]

    def test_a_disk_that_stays_broken_leaves_the_answer_open(self, path, shim, way):
        code = (
            SYNC_FAILS
            + """
db.list_sessions()
arm("state.db", WRITE | SYNC | TRUNCATE, times=1000)
attempt("unknown")
arm("none", 0)
attempt("after")
"""
        )
        said = faults.run(code, path, way, shim=shim)
        assert said[0] == "CommitUnknown store_io" or said[0] == "StoreError store_io"
        assert said[1] == "stored" or (way == "leased" and said[1] == "StaleLease stale_lease")
        found = contents(path)
        assert found[:11] == [*TEN, "before"]
        assert [text for text in found[11:] if text not in {"unknown", "after"}] == []
        assert len(found) == len(set(found))

    @pytest.mark.parametrize("partly", [False, True])
    @pytest.mark.parametrize(
        ("code_name", "told"), [("EIO", "StoreError store_io"), ("ENOSPC", "StoreFull store_full")]
    )
    def test_a_failed_write_is_reported_and_the_next_works(self, path, shim, way, code_name, told, partly):
        code = (
            SYNC_FAILS
            + f"""
for skip in range(0, 30, 3):
    arm("state.db-wal", WRITE, skip=skip, code=errno.{code_name}, partly={partly})
    attempt(f"lost {{skip}}")
    failed = hits()
    arm("none", 0)
    append(f"after {{skip}}")
    say(failed)
"""
        )
        said = faults.run(code, path, way, shim=shim)
        outcomes = list(zip(said[::2], said[1::2], strict=True))
        assert (told, "1") in outcomes
        assert set(outcomes) <= {(told, "1"), ("stored", "0")}
        kept = [
            text
            for skip, (outcome, _) in zip(range(0, 30, 3), outcomes, strict=True)
            for text in ([f"lost {skip}"] if outcome == "stored" else []) + [f"after {skip}"]
        ]
        assert contents(path) == [*TEN, "before", *kept]


class TestEveryCallerHears:
    def test_of_a_failed_commit(self, path, shim):
        """One sync fails under sixteen callers: each is told, none of the rows is stored, none comes back."""
        code = """
db = SessionDB(sys.argv[1])
for i in range(16):
    db.create_session(f"t{i}", "test")
told, go = [], threading.Event()
def write(i):
    go.wait()
    try:
        db.append_message(f"t{i}", "user", "lost")
        told.append("stored")
    except errors.StoreError as error:
        told.append(type(error).__name__)
threads = [threading.Thread(target=write, args=(i,)) for i in range(16)]
for thread in threads: thread.start()
def gather(conn):
    go.set()
    while len(db._open._group._waiting) < 16:
        time.sleep(0.001)
    arm("state.db-wal", SYNC)  # our own commit is empty and syncs nothing
db._open.write(gather)
for thread in threads: thread.join()
say(sorted(set(told)), len(told), hits())
say([len(db.get_messages(f"t{i}")) for i in range(16)] == [0] * 16)
db.append_message("t3", "user", "after")
"""
        assert faults.run(code, path, shim=shim) == ["['StoreError'] 16 1", "True"]


class TestAFullDisk:
    def test_is_named_and_passes(self, path):
        """A limit on the size of files stands for the disk: full, then freed, on one handle."""
        code = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
db = SessionDB(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
stored = 0
try:
    while True:
        db.append_message("s", "user", "x" * 5000)
        stored += 1
except errors.StoreFull as error:
    say("full", "no space left" in str(error))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
db.append_message("s", "user", "freed")
say(len(db.get_messages_as_conversation("s")) == 10 + stored + 1)
"""
        assert faults.run(code, path) == ["full True", "True"]

    def test_at_the_first_start_leaves_a_store_that_can_be_made_later(self, tmp_path, shim):
        code = """
for skip in range(0, 600, 7):
    arm("state.db", WRITE, skip=skip, code=errno.ENOSPC)
    path = f"{sys.argv[1]}/{skip}/state.db"
    try:
        SessionDB(path).close()
    except errors.StoreError as error:
        # of the shared memory SQLite says only that it could not be had
        assert error.reason in ("store_full", "store_io"), error
    failed = hits()
    arm("none", 0)
    with SessionDB(path) as db:
        db.create_session("s", "test")
    if not failed:
        break
say(skip)
"""
        assert 5 < int(faults.run(code, tmp_path, shim=shim)[0]) < 500


def test_a_first_start_that_is_killed_at_any_write_leaves_a_store_that_can_be_made(tmp_path, shim):
    code = """
def life(run):
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException as error:
            say(repr(error)); os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
killed = 0
for partly in (False, True):
    for skip in range(0, 300, 2):
        path = f"{sys.argv[1]}/{partly}{skip}/state.db"
        def first():
            arm("state.db", WRITE | SYNC | TRUNCATE, skip=skip, code=0, partly=partly)
            with SessionDB(path) as db:
                db.create_session("s", "test")
        def second():
            with SessionDB(path) as db:
                db.create_session("s", "test")
                db.append_message("s", "user", "x")
                assert len(db.get_messages_as_conversation("s")) == 1
        end = life(first)
        assert end in (0, -9), end
        assert life(second) == 0
        if end == 0:
            break
        killed += 1
say(killed)
"""
    assert int(faults.run(code, tmp_path, shim=shim)[0]) > 40


class TestPermissions:
    AS_NOBODY = """
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
"""

    def test_a_folder_that_cannot_be_written_is_named(self, tmp_path):
        home = tmp_path / "home"
        home.mkdir()
        code = (
            """
SessionDB  # imported while we may still read the code
"""
            + self.AS_NOBODY
            + """
try:
    SessionDB(sys.argv[1])
except errors.StoreReadOnly as error:
    say(sys.argv[1] in str(error))
"""
        )
        home.chmod(0o555)
        for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
            folder.chmod(folder.stat().st_mode | 0o055)
        try:
            assert faults.run(code, home / "state.db") == ["True"]
        finally:
            home.chmod(0o755)

    def test_a_store_that_cannot_be_written_is_named_and_unchanged(self, path):
        before = path.read_bytes()
        path.chmod(0o444)
        path.parent.chmod(0o555)
        for folder in path.parents[1:4]:
            folder.chmod(folder.stat().st_mode | 0o055)
        code = (
            self.AS_NOBODY
            + """
try:
    db = SessionDB(sys.argv[1])
    db.append_message("s", "user", "x")
except errors.StoreReadOnly as error:
    say(sys.argv[1] in str(error))
"""
        )
        try:
            assert faults.run(code, path) == ["True"]
        finally:
            path.parent.chmod(0o755)
        assert path.read_bytes() == before


class TestAnotherProcess:
    def test_a_held_lock_is_named_after_the_patience(self, path):
        holder = """
conn = apsw.Connection(sys.argv[1]); conn.execute("BEGIN EXCLUSIVE")
say("held"); hear()
conn.execute("ROLLBACK"); say("free")
hear()
"""
        with faults.Child(holder, path) as child, SessionDB(path, options=StoreOptions(patience=0.0)) as db:
            assert child.hear() == "held"
            with pytest.raises(errors.StoreLocked):
                db.append_message("s", "user", "too early")
            assert [row["content"] for row in db.get_messages("s")] == TEN, "readers do not wait"
            child.say()
            assert child.hear() == "free"
            db.append_message("s", "user", "in time")
            child.say()
            child.end()
        assert contents(path) == [*TEN, "in time"]

    def test_a_writer_that_is_stopped_inside_its_transaction_delays_only_writers(self, path):
        writer = """
db = SessionDB(sys.argv[1])
def stop(conn):
    conn.execute("UPDATE sessions SET model = 'x'")
    say("inside")
    os.kill(os.getpid(), 19)
db._open.write(stop)
say("done")
"""
        with faults.Child(writer, path) as child, SessionDB(path, options=StoreOptions(patience=0.0)) as db:
            assert child.hear() == "inside"
            os.waitpid(child.pid, os.WUNTRACED)
            with pytest.raises(errors.StoreLocked):
                db.append_message("s", "user", "too early")
            assert len(db.get_messages("s")) == 10
            os.kill(child.pid, signal.SIGCONT)
            assert child.hear() == "done"
            db.append_message("s", "user", "in time")
            child.end()

    def test_a_writer_that_dies_inside_its_transaction_leaves_nothing(self, path):
        writer = """
db = SessionDB(sys.argv[1])
def die(conn):
    conn.execute("DELETE FROM messages")
    os.kill(os.getpid(), 9)
db._open.write(die)
"""
        with faults.Child(writer, path) as child:
            child.end(code=-signal.SIGKILL)
        assert contents(path) == TEN


class TestAFileThatIsNotTheOneWeOpened:
    @pytest.mark.parametrize("change", ["replaced", "removed", "log removed"])
    def test_is_noticed_before_anything_is_acknowledged(self, path, tmp_path, monkeypatch, change):
        monkeypatch.setattr(database, "_MORE_CHECKS", 0.0)
        with SessionDB(path) as db:
            db.append_message("s", "user", "ours")
            if change == "replaced":
                shutil.copy(path, tmp_path / "other.db")
                os.replace(tmp_path / "other.db", path)
            elif change == "removed":
                path.unlink()
            else:
                path.with_name("state.db-wal").unlink()
            for _ in range(2):
                with pytest.raises(errors.StoreReplaced, match="replaced or removed"):
                    db.append_message("s", "user", "into the void")
        assert not any("into the void" in str(p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file())

    def test_a_file_that_a_newer_version_upgraded_is_not_written_any_more(self, path, monkeypatch):
        monkeypatch.setattr(database, "_MORE_CHECKS", 0.0)
        with SessionDB(path) as db:
            db.append_message("s", "user", "ours")
            faults.run("apsw.Connection(sys.argv[1]).execute('PRAGMA user_version=99')", path)
            monkeypatch.setattr(database, "_MORE_CHECKS", 60.0)
            for _ in range(3):
                with pytest.raises(errors.StoreForeign, match="newer hermes"):
                    db.append_message("s", "user", "theirs now")

    def test_a_new_handle_opens_the_new_file(self, path):
        with SessionDB(path) as old:
            os.replace(path, path.with_name("old.db"))
            for side in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{path}{side}", path.with_name(f"old.db{side}"))
            with SessionDB(path) as new:
                new.create_session("fresh", "test")
                assert new.get_session("s") is None
                with pytest.raises(errors.StoreReplaced):
                    old.append_message("s", "user", "x")


FOREIGN = """
conn = apsw.Connection(sys.argv[1])
for _ in conn.execute("PRAGMA journal_mode=" + sys.argv[2]): pass
conn.execute("CREATE TABLE sessions (id TEXT PRIMARY KEY, source TEXT NOT NULL)")
conn.execute("CREATE TABLE messages (id INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT, role TEXT, content TEXT)")
conn.execute("INSERT INTO sessions VALUES ('theirs', 'cli')")
"""
NEWER = """
with SessionDB(sys.argv[1]) as db:
    pass
conn = apsw.Connection(sys.argv[1])
conn.execute("UPDATE state_meta SET value = '99.1' WHERE key = 'written_by'")
conn.execute(f"PRAGMA user_version={migrate.SCHEMA_VERSION + 1}")
"""


class TestAFileThatIsNotOurs:
    @pytest.mark.parametrize("read_only", [False, True])
    @pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"], ids=["closed", "killed"])
    @pytest.mark.parametrize("mode", ["delete", "wal"])
    def test_of_another_program_is_named_with_the_way_to_import_it(self, tmp_path, mode, end, read_only):
        path = tmp_path / "state.db"
        with faults.Child(FOREIGN + end, path, mode) as child:
            child.end(code=-signal.SIGKILL if end else 0)
        path.chmod(0o640)
        before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if not p.name.endswith("-shm")}
        with pytest.raises(errors.StoreForeign, match=f"hermes sessions import --from-upstream {path}"):
            SessionDB(path, read_only=read_only)
        after = {p.name: p.read_bytes() for p in tmp_path.iterdir() if not p.name.endswith("-shm")}
        assert {name: data for name, data in after.items() if data} == {n: d for n, d in before.items() if d}
        assert path.stat().st_mode & 0o777 == 0o640

    @pytest.mark.parametrize("read_only", [False, True])
    def test_of_a_newer_version_is_named_with_the_version_it_needs(self, tmp_path, read_only):
        path = tmp_path / "state.db"
        faults.run(NEWER, path)
        before = path.read_bytes()
        with pytest.raises(errors.StoreForeign, match=r"needs version 99\.1 or newer"):
            SessionDB(path, read_only=read_only)
        assert path.read_bytes() == before

    def test_with_a_schema_we_cannot_read_is_still_only_newer(self, tmp_path):
        path = tmp_path / "state.db"
        faults.run(NEWER + "conn.execute('DROP TABLE state_meta')", path)
        with pytest.raises(errors.StoreForeign, match="needs a newer version"):
            SessionDB(path)

    def test_that_is_no_database_is_left_as_it_is(self, tmp_path):
        path = tmp_path / "state.db"
        garbage = random.Random(3).randbytes(20_000)
        path.write_bytes(garbage)
        for _ in range(2):
            with pytest.raises(errors.StoreDamaged, match="not a SQLite database"):
                SessionDB(path)
        assert path.read_bytes() == garbage

    def test_that_is_empty_becomes_a_store(self, tmp_path):
        path = tmp_path / "state.db"
        path.touch(mode=0o644)
        with SessionDB(path) as db:
            db.create_session("s", "test")
        assert path.stat().st_mode & 0o777 == 0o600


def interior_page(path: Path) -> int:
    """Number of the root page of the messages table, which has grown beyond one page."""
    return int(faults.look(path, "SELECT rootpage FROM sqlite_schema WHERE name = 'messages'")[0][0])


class TestDamage:
    @pytest.fixture
    def damaged(self, path: Path) -> Path:
        with SessionDB(path) as db:
            for i in range(200):
                db.append_message("s", "user", f"{i} " + "x" * 300)
            db.create_session("other", "test")
        page = interior_page(path)
        with path.open("r+b") as file:
            file.seek((page - 1) * 4096)
            file.write(random.Random(5).randbytes(4096))
        return path

    def test_stops_all_writing_to_that_file(self, damaged):
        """Not another byte goes into it from any handle of this process, old or new."""
        before = damaged.read_bytes()
        first, second = SessionDB(damaged), SessionDB(damaged)
        reader = SessionDB(damaged, read_only=True)
        try:
            with pytest.raises(errors.StoreDamaged, match="left as it is"):
                reader.get_messages_as_conversation("s")
            for db in (first, second):
                with pytest.raises(errors.StoreDamaged):
                    db.append_message("other", "user", "x")
                with pytest.raises(errors.StoreDamaged):
                    db.create_session("new", "test")
            with pytest.raises(errors.StoreDamaged):
                SessionDB(damaged)
            assert first.get_session("other") is not None, "what can be read stays readable"
        finally:
            for db in (first, second, reader):
                db.close()
        assert damaged.read_bytes() == before
        with pytest.raises(errors.StoreDamaged):
            SessionDB(damaged)

    def test_of_one_write_stops_the_next(self, damaged):
        before = damaged.read_bytes()
        with SessionDB(damaged) as db:
            for _ in range(6):
                with pytest.raises(errors.StoreDamaged):
                    db.append_message("s", "user", "x")
        assert damaged.read_bytes() == before

    def test_does_not_hang_on_a_new_file_of_the_same_number(self, damaged):
        """A store that is made anew after the damaged one was moved away works at once."""
        with SessionDB(damaged) as db, pytest.raises(errors.StoreDamaged):
            db.append_message("s", "user", "x")
        for file in damaged.parent.iterdir():
            file.unlink()
        for _ in range(20):
            with SessionDB(damaged) as db:
                db.create_session("s", "test")
                db.append_message("s", "user", "x")
            for file in damaged.parent.iterdir():
                file.unlink()


class TestTheSideFiles:
    def test_a_killed_writer_leaves_a_store_that_opens_with_all_its_rows(self, path):
        code = """
db = SessionDB(sys.argv[1])
for i in range(50):
    db.append_message("s", "user", f"more {i}")
os.kill(os.getpid(), 9)
"""
        with faults.Child(code, path) as child:
            child.end(code=-signal.SIGKILL)
        path.with_name("state.db-shm").unlink()
        assert contents(path) == [*TEN, *(f"more {i}" for i in range(50))]

    def test_readers_leave_the_file_as_it_is(self, path):
        """Also the last one to close: copying the log is the writers' work."""
        code = """
db = SessionDB(sys.argv[1])
db.append_message("s", "user", "in the log")
os.kill(os.getpid(), 9)
"""
        with faults.Child(code, path) as child:
            child.end(code=-signal.SIGKILL)
        before = path.read_bytes()
        code = """
with SessionDB(sys.argv[1], read_only=True) as db:
    say(len(db.get_messages_as_conversation("s")))
"""
        assert faults.run(code, path) == ["11"]
        assert path.read_bytes() == before


def test_the_compiled_library_is_the_one_that_fails(shim, tmp_path):
    """The fault tests would pass for nothing if the library did not reach SQLite."""
    code = """
conn = apsw.Connection(sys.argv[1])
arm("x.db", WRITE)
try:
    conn.execute("CREATE TABLE t (a)")
except apsw.IOError:
    say(hits())
"""
    assert faults.run(code, tmp_path / "x.db", shim=shim) == ["1"]
    assert subprocess.run(["true"], check=True).returncode == 0
