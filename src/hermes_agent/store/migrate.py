"""From an empty or older file to the current schema, and no further than we understand.

A new file gets `schema.sql` at once. An older one gets the numbered files of
`migrations/`, each in one transaction with its own record, after a backup beside it.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import apsw

from hermes_agent import errors
from hermes_agent.version import VERSION

APPLICATION_ID = 0x484D5331
"""SQLite header field that says the file is ours ("HMS1")."""
STORE_ID = "SELECT value FROM state_meta WHERE key = 'store_id'"

_HERE = Path(__file__).parent
_PATIENCE = 60.0
"""Seconds that making or upgrading a file waits for another process that does the same."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered step from `version - 1` to `version`."""

    version: int
    name: str
    sql: str


def migrations(folder: Path = _HERE / "migrations") -> list[Migration]:
    """The numbered files of `folder`, in order."""
    found: list[Migration] = []
    for path in sorted(folder.glob("[0-9]*.sql")):
        number, _, name = path.stem.partition("_")
        found.append(Migration(int(number), name, path.read_text(encoding="utf-8")))
    return found


SCHEMA_VERSION = 4
"""The version that `schema.sql` makes; equal to the last migration's (a test holds them together)."""


def examine(conn: apsw.Connection, path: Path, *, version: int = SCHEMA_VERSION) -> int:
    """The file's schema version, 0 when it is empty; only reads.

    Raises `StoreForeign` for another program's file or one that is newer than `version`.
    """
    if conn.in_transaction:
        return _examine(conn, path, version)
    # in one snapshot, or a file that is just being made would look like somebody else's
    conn.execute("BEGIN")
    try:
        return _examine(conn, path, version)
    finally:
        conn.execute("COMMIT")


def _examine(conn: apsw.Connection, path: Path, version: int) -> int:
    application = _scalar(conn, "PRAGMA application_id")
    if application == APPLICATION_ID:
        found = _scalar(conn, "PRAGMA user_version")
        if found > version:
            raise errors.StoreForeign(_too_new(conn, path))
        return found
    if application == 0 and _scalar(conn, "SELECT count(*) FROM sqlite_schema") == 0:
        return 0
    raise errors.StoreForeign(
        f"{path} was made by another program and was left untouched; choose another HERMES_HOME, "
        f"or bring its sessions over with: hermes sessions import --from-upstream {path}"
    )


def refuse_older(path: Path, found: int) -> None:
    """Refuse to read a file of ours that has not been upgraded, or that is still empty."""
    if found == 0:
        raise errors.StoreMissing(f"the store at {path} is still empty")
    if found < SCHEMA_VERSION:
        raise errors.StoreForeign(f"{path} has the older schema {found}; open it once for writing to upgrade it")


def prepare(
    conn: apsw.Connection, path: Path, *, steps: list[Migration] | None = None, version: int = SCHEMA_VERSION
) -> None:
    """Bring the file to `version`; takes no lock and writes nothing when it is there already.

    Waits for another process that makes or upgrades the file. Raises `StoreForeign` for
    another program's or a newer file.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            _prepare(conn, path, steps, version)
        except apsw.BusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _prepare(conn: apsw.Connection, path: Path, steps: list[Migration] | None, version: int) -> None:
    found = examine(conn, path, version=version)
    if found == 0:
        _create(conn, path, version)
    elif found < version:
        for step in migrations() if steps is None else steps:
            if found < step.version <= version:
                _apply(conn, path, step)
        if examine(conn, path, version=version) != version:
            raise errors.StoreError(f"there is no migration of {path} from schema {found} to {version}")
    _use_log(conn, path)


def _scalar(conn: apsw.Connection, sql: str) -> int:
    for row in conn.execute(sql):
        return int(str(row[0]))
    return 0


def _too_new(conn: apsw.Connection, path: Path) -> str:
    needs = "a newer version"
    try:
        for row in conn.execute("SELECT value FROM state_meta WHERE key = 'written_by'"):
            needs = f"version {row[0]} or newer"
    except apsw.SQLError:
        pass  # a schema we do not know need not have that table
    return f"{path} was written by a newer hermes; it needs {needs}, this is {VERSION}"


def _use_log(conn: apsw.Connection, path: Path) -> None:
    """Switch to the write-ahead log, if a tool switched it off or the file is new."""
    for change in ("", "=WAL"):
        if conn.execute(f"PRAGMA journal_mode{change}").fetchall() == [("wal",)]:
            return
    raise errors.StoreUnsafePlace(f"no write-ahead log can be kept beside {path}")


def _create(conn: apsw.Connection, path: Path, version: int) -> None:
    schema = (_HERE / "schema.sql").read_text(encoding="utf-8")
    _use_log(conn, path)
    conn.execute("BEGIN IMMEDIATE")
    try:
        # another process may have made the schema while we waited for the lock
        if examine(conn, path, version=version) == 0:
            _run(conn, schema)
            _record(conn, Migration(version, "schema", ""))
            conn.execute("INSERT INTO state_meta VALUES ('store_id', ?)", (secrets.token_hex(16),))
            conn.execute(f"PRAGMA application_id={APPLICATION_ID}")
        conn.execute("COMMIT")
    except BaseException:
        if conn.in_transaction:  # a full disk has rolled it back already
            conn.execute("ROLLBACK")
        raise
    # the file's own header now says that there is a log, and is synced
    _run(conn, "PRAGMA wal_checkpoint(PASSIVE)")


def _apply(conn: apsw.Connection, path: Path, step: Migration) -> None:
    """Run one step, unless another process did while we waited for the lock."""
    conn.execute("BEGIN IMMEDIATE")
    try:
        found = _scalar(conn, "PRAGMA user_version")
        if found < step.version:
            _back_up(path, found)
            _run(conn, step.sql)
            _record(conn, step)
        conn.execute("COMMIT")
    except BaseException:
        if conn.in_transaction:  # a full disk has rolled it back already
            conn.execute("ROLLBACK")
        raise


def _run(conn: apsw.Connection, sql: str) -> None:
    """Run all statements to their end; one that returns rows would else stop at its first."""
    for _ in conn.execute(sql):
        pass


def _record(conn: apsw.Connection, step: Migration) -> None:
    conn.execute("INSERT INTO migrations VALUES (?, ?, ?)", (step.version, step.name, time.time()))
    conn.execute("INSERT OR REPLACE INTO state_meta VALUES ('written_by', ?)", (VERSION,))
    conn.execute(f"PRAGMA user_version={step.version}")


def _back_up(path: Path, version: int) -> Path:
    """Copy what is committed to `<name>.v<version>.backup`, durably; the caller holds the write lock."""
    target = path.with_name(f"{path.name}.v{version}.backup")
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    conn = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        conn.execute("VACUUM INTO ?", (str(partial),))
    finally:
        conn.close()
    _sync(partial)
    partial.replace(target)
    _sync(path.parent)
    return target


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
