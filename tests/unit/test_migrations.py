"""From any version of the schema to the current one, with a way back."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import apsw
import pytest

from hermes_agent import errors
from hermes_agent.store import migrate
from hermes_agent.store.database import open_database
from hermes_agent.store.migrate import APPLICATION_ID, SCHEMA_VERSION, Migration, migrations, prepare
from hermes_agent.store.session_db import SessionDB
from tests import faults

NEXT = SCHEMA_VERSION + 1
STEP = Migration(
    NEXT,
    "made_up",
    "ALTER TABLE sessions ADD COLUMN mood TEXT; SELECT 1; UPDATE sessions SET mood = 'calm';"
    "CREATE INDEX moods ON sessions (mood);",
)
BROKEN = Migration(NEXT, "broken", "ALTER TABLE sessions ADD COLUMN mood TEXT; INSERT INTO nowhere VALUES (1);")


def shape(conn: apsw.Connection) -> dict[str, str]:
    """What the file consists of; comments and white space aside."""
    rows = conn.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL")
    return {str(name): re.sub(r"\s*([(),])\s*|\s+", r" \1", re.sub(r"--[^\n]*", "", str(sql))) for name, sql in rows}


def scalar(conn: apsw.Connection, sql: str) -> object:
    return conn.execute(sql).fetchall()[0][0]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A store of the current version with data, which the made-up step treats as an older one."""
    path = tmp_path / "state.db"
    with SessionDB(path) as db:
        db.create_session("s", "test", title="kept")
        for i in range(100):
            db.append_message("s", "user", f"row {i}")
    return path


@contextlib.contextmanager
def connection(path: Path):
    conn = apsw.Connection(str(path))
    conn.set_busy_timeout(1000)
    try:
        yield conn
    finally:
        conn.close()


def test_the_migrations_make_the_schema(tmp_path):
    """A file that came through every step is the same as one that was made at once."""
    path = tmp_path / "state.db"
    open_database(path).close()
    with connection(path) as made, connection(tmp_path / "stepped.db") as stepped:
        for step in migrations():
            for _ in stepped.execute(step.sql):
                pass
        assert shape(stepped) == shape(made)


def test_the_steps_are_numbered_without_a_gap_and_end_at_the_current_version():
    assert [step.version for step in migrations()] == list(range(1, SCHEMA_VERSION + 1))


def test_a_new_file_says_whose_it_is_and_by_which_version_it_was_made(tmp_path):
    path = tmp_path / "state.db"
    open_database(path).close()
    with connection(path) as conn:
        assert scalar(conn, "PRAGMA application_id") == APPLICATION_ID
        assert scalar(conn, "PRAGMA user_version") == SCHEMA_VERSION
        assert scalar(conn, "PRAGMA journal_mode") == "wal"
        assert conn.execute("SELECT version, name FROM migrations").fetchall() == [(SCHEMA_VERSION, "schema")]
        assert len(str(scalar(conn, migrate.STORE_ID))) == 32


def test_an_older_file_with_data_is_upgraded_after_a_backup(old):
    with connection(old) as conn:
        prepare(conn, old, steps=[*migrations(), STEP], version=NEXT)
        assert scalar(conn, "PRAGMA user_version") == NEXT
        assert scalar(conn, "SELECT count(*) FROM messages") == 100
        assert scalar(conn, "SELECT mood FROM sessions WHERE id = 's'") == "calm"
        assert conn.execute("SELECT version, name FROM migrations ORDER BY version").fetchall() == [
            (SCHEMA_VERSION, "schema"),
            (NEXT, "made_up"),
        ]
    backup = old.with_name(f"state.db.v{SCHEMA_VERSION}.backup")
    assert backup.stat().st_mode & 0o777 == 0o600
    assert not list(old.parent.glob("*.partial"))


def test_the_backup_is_a_sound_store(old):
    """Put in the place of the file, it opens with everything that was in it."""
    with connection(old) as conn:
        prepare(conn, old, steps=[STEP], version=NEXT)
    backup = old.with_name(f"state.db.v{SCHEMA_VERSION}.backup")
    with connection(backup) as conn:
        assert scalar(conn, "PRAGMA integrity_check") == "ok"
    for side in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            Path(f"{old}{side}").unlink()
    backup.replace(old)
    with SessionDB(old) as db:
        assert [row["content"] for row in db.get_messages_as_conversation("s")] == [f"row {i}" for i in range(100)]
        db.append_message("s", "user", "on")
        assert db.resolve_session("kept") == "s"
    with connection(old) as conn:
        assert scalar(conn, "PRAGMA journal_mode") == "wal"


@pytest.mark.parametrize("broken", [BROKEN, Migration(NEXT, "breaks at its end", STEP.sql + "SELECT * FROM nowhere")])
def test_a_step_that_fails_changes_nothing(old, broken):
    with connection(old) as conn:
        before = (shape(conn), conn.execute("SELECT * FROM migrations").fetchall())
        with pytest.raises(apsw.SQLError):
            prepare(conn, old, steps=[broken], version=NEXT)
        assert not conn.in_transaction
        assert (shape(conn), conn.execute("SELECT * FROM migrations").fetchall()) == before
        assert scalar(conn, "PRAGMA user_version") == SCHEMA_VERSION
        prepare(conn, old, steps=[STEP], version=NEXT)
        assert scalar(conn, "PRAGMA user_version") == NEXT


def test_a_process_killed_inside_a_step_leaves_the_old_version(old):
    code = """
conn = apsw.Connection(sys.argv[1])
conn.create_scalar_function("die", lambda: os.kill(os.getpid(), 9), 0)
sql = "ALTER TABLE sessions ADD COLUMN mood TEXT; SELECT die();"
steps = [migrate.Migration(migrate.SCHEMA_VERSION + 1, "dies", sql)]
migrate.prepare(conn, __import__("pathlib").Path(sys.argv[1]), steps=steps, version=migrate.SCHEMA_VERSION + 1)
"""
    with faults.Child(code, old) as child:
        child.end(code=-9)
    with SessionDB(old) as db:
        assert len(db.get_messages_as_conversation("s")) == 100
    with connection(old) as conn:
        assert "mood" not in shape(conn)["sessions"]
        prepare(conn, old, steps=[STEP], version=NEXT)
        assert scalar(conn, "PRAGMA user_version") == NEXT


def test_several_steps_stop_at_the_one_that_fails(old):
    """Each step stands or falls with its own record."""
    with connection(old) as conn:
        last = Migration(NEXT + 1, "last", "SELECT * FROM nowhere")
        with pytest.raises(apsw.SQLError):
            prepare(conn, old, steps=[STEP, last], version=NEXT + 1)
        assert scalar(conn, "PRAGMA user_version") == NEXT
        assert scalar(conn, "SELECT max(version) FROM migrations") == NEXT


def test_a_missing_step_is_an_error_and_no_silence(old):
    with connection(old) as conn, pytest.raises(errors.StoreError, match="no migration"):
        prepare(conn, old, steps=migrations(), version=NEXT)


def test_concurrent_upgrades_run_each_step_once(old):
    code = """
path = __import__("pathlib").Path(sys.argv[1])
conn = apsw.Connection(str(path)); conn.set_busy_timeout(1000)
sql = "INSERT INTO state_meta VALUES ('once', 'x'); CREATE TABLE once (a);"
step = migrate.Migration(migrate.SCHEMA_VERSION + 1, "once", sql)
say("ready"); hear()
migrate.prepare(conn, path, steps=[step], version=migrate.SCHEMA_VERSION + 1)
say("done")
"""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(faults.Child(code, old)) for _ in range(4)]
        for child in children:
            assert child.hear() == "ready"
        for child in children:
            child.say()
        for child in children:
            assert child.end() == ["done"]
    with connection(old) as conn:
        assert conn.execute("SELECT name FROM migrations WHERE version = ?", (NEXT,)).fetchall() == [("once",)]
    with connection(old.with_name(f"state.db.v{SCHEMA_VERSION}.backup")) as conn:
        assert scalar(conn, "PRAGMA integrity_check") == "ok"
        assert scalar(conn, "PRAGMA user_version") == SCHEMA_VERSION


def test_processes_that_make_the_store_at_once_make_one(tmp_path):
    code = """
say("ready"); hear()
for i in range(20):
    with SessionDB(f"{sys.argv[1]}/{i}/state.db") as db:
        db.create_session(sys.argv[2], "test")
say("done")
"""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(faults.Child(code, tmp_path, f"s{n}")) for n in range(4)]
        for child in children:
            assert child.hear() == "ready"
        for child in children:
            child.say()
        for child in children:
            assert child.end() == ["done"]
    for i in range(20):
        with connection(tmp_path / str(i) / "state.db") as conn:
            assert scalar(conn, "SELECT count(*) FROM sessions") == 4
            assert scalar(conn, "SELECT count(*) FROM migrations") == 1
            assert scalar(conn, "PRAGMA journal_mode") == "wal"


def test_making_a_store_waits_for_a_process_that_makes_it_too(tmp_path, monkeypatch):
    path = tmp_path / "state.db"
    code = """
conn = apsw.Connection(sys.argv[1]); conn.execute("BEGIN EXCLUSIVE"); conn.execute("CREATE TABLE t (a)")
say("held"); hear()
conn.execute("ROLLBACK"); say("free")
"""
    with faults.Child(code, path) as child:
        assert child.hear() == "held"
        waited: list[float] = []

        def let_go(seconds: float) -> None:
            waited.append(seconds)
            child.say()
            assert child.hear() == "free"

        with monkeypatch.context() as patched:
            patched.setattr("hermes_agent.store.migrate.time.sleep", let_go)
            with SessionDB(path) as db:
                db.create_session("s", "test")
        assert len(waited) == 1
        child.end()


def test_an_older_store_is_not_read_by_a_reader_who_may_not_upgrade_it(old, monkeypatch):
    monkeypatch.setattr(migrate, "SCHEMA_VERSION", migrate.SCHEMA_VERSION + 1)
    with pytest.raises(errors.StoreForeign, match="older schema"):
        SessionDB(old, read_only=True)


def test_a_log_that_a_tool_switched_off_is_switched_on_again(old):
    with connection(old) as conn:
        assert scalar(conn, "PRAGMA journal_mode=delete") == "delete"
    with SessionDB(old) as db:
        db.append_message("s", "user", "on")
    with connection(old) as conn:
        assert scalar(conn, "PRAGMA journal_mode") == "wal"
