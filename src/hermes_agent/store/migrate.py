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

_HERE = Path(__file__).parent


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


SCHEMA_VERSION = 1
"""The version that `schema.sql` makes; equal to the last migration's (a test holds them together)."""


def prepare(
    conn: apsw.Connection, path: Path, *, steps: list[Migration] | None = None, version: int = SCHEMA_VERSION
) -> None:
    """Bring the file to `version`; takes no lock and writes nothing when it is there already.

    Raises `StoreForeign` for another program's or a newer file.
    """
    found = _version(conn, path)
    if found == version:
        return
    if found > version:
        raise errors.StoreForeign(_too_new(conn, path))
    if found == 0:
        _create(conn, version)
        return
    pending = [step for step in (steps if steps is not None else migrations()) if step.version > found]
    _backup(conn, path, found)
    for step in pending:
        _apply(conn, step)


def check_ours(conn: apsw.Connection, path: Path) -> None:
    """Refuse to read a file that is not a store of this version or an older one of ours."""
    found = _version(conn, path)
    if found > SCHEMA_VERSION:
        raise errors.StoreForeign(_too_new(conn, path))
    if found < SCHEMA_VERSION:
        raise errors.StoreForeign(f"{path} has the older schema {found}; open it once for writing to upgrade it")


def _scalar(conn: apsw.Connection, sql: str) -> int:
    for row in conn.execute(sql):
        return int(row[0])
    return 0


def _version(conn: apsw.Connection, path: Path) -> int:
    application = _scalar(conn, "PRAGMA application_id")
    if application == APPLICATION_ID:
        return _scalar(conn, "PRAGMA user_version")
    if application == 0 and _scalar(conn, "SELECT count(*) FROM sqlite_schema") == 0:
        return 0
    raise errors.StoreForeign(
        f"{path} was made by another program and was left untouched; choose another HERMES_HOME, "
        f"or bring its sessions over with: hermes sessions import --from-upstream {path}"
    )


def _too_new(conn: apsw.Connection, path: Path) -> str:
    needs = "a newer version"
    for row in conn.execute("SELECT value FROM state_meta WHERE key = 'written_by'"):
        needs = f"version {row[0]} or newer"
    return f"{path} was written by a newer hermes; it needs {needs}, this is {VERSION}"


def _create(conn: apsw.Connection, version: int) -> None:
    schema = (_HERE / "schema.sql").read_text(encoding="utf-8")
    conn.execute("PRAGMA journal_mode=WAL")
    conn.execute("BEGIN IMMEDIATE")
    try:
        # another process may have made the schema while we waited for the lock
        if _scalar(conn, "PRAGMA user_version") == 0:
            conn.execute(schema)
            _record(conn, Migration(version, "schema", ""))
            conn.execute("INSERT INTO state_meta VALUES ('store_id', ?)", (secrets.token_hex(16),))
            conn.execute(f"PRAGMA application_id={APPLICATION_ID}")
        conn.execute("COMMIT")
    except BaseException:
        conn.execute("ROLLBACK")
        raise


def _apply(conn: apsw.Connection, step: Migration) -> None:
    conn.execute("BEGIN IMMEDIATE")
    try:
        if _scalar(conn, "PRAGMA user_version") < step.version:
            conn.execute(step.sql)
            _record(conn, step)
        conn.execute("COMMIT")
    except BaseException:
        conn.execute("ROLLBACK")
        raise


def _record(conn: apsw.Connection, step: Migration) -> None:
    conn.execute("INSERT INTO migrations VALUES (?, ?, ?)", (step.version, step.name, time.time()))
    conn.execute("INSERT OR REPLACE INTO state_meta VALUES ('written_by', ?)", (VERSION,))
    conn.execute(f"PRAGMA user_version={step.version}")


def _backup(conn: apsw.Connection, path: Path, version: int) -> Path:
    """Copy the file as it is now to `<name>.v<version>.backup`, durably."""
    target = path.with_name(f"{path.name}.v{version}.backup")
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    conn.execute("VACUUM INTO ?", (str(partial),))
    for name in (partial, path.parent):
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    partial.replace(target)
    return target
