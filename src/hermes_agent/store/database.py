"""One SQLite file: opening, sharing, reading, and its one way to write.

The file is opened by this SQLite library only, since any other would drop its locks.
Handles on one file in one process share one `Database`. Opening a file that is up to date
takes no write lock and writes nothing.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import apsw

from hermes_agent import errors
from hermes_agent.store import faults, filesystems, migrate
from hermes_agent.store.faults import translated
from hermes_agent.store.group_commit import GroupCommit

__all__ = ["Database", "StoreOptions", "open_database", "translated"]

T = TypeVar("T")
Work = Callable[[apsw.Connection], T]

SIDE_FILES = ("-wal", "-shm")
_READERS = 8
_BUSY_SLICE_MS = 1000
"""How long one wait for another process's lock lasts: an interrupt is heard after it."""
_MORE_CHECKS = 1.0
"""Seconds between two looks at whether the log is still the one that is open, and the schema ours."""
_HALF_MADE = 64 * 1024
"""A file up to this size may be a store whose making was cut off."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How the file is written; the first handle of a process on a file decides.

    `synchronous` FULL keeps acknowledged rows over a power cut; NORMAL only over the
    death of the process. `patience` is how long, in seconds, a write waits for another
    process's lock.
    """

    synchronous: str = "FULL"
    wal_autocheckpoint: int = 1000
    journal_size_limit: int = 64 * 1024 * 1024
    patience: float = 60.0


class Database:
    """A store file that is open in this process. Get one with `open_database`."""

    def __init__(self, path: Path, options: StoreOptions, *, read_only: bool) -> None:
        self.path = path
        self.options = options
        self.read_only = read_only
        self.references = 1
        self._name = str(path)
        self._pid = os.getpid()
        self._closed = False
        self._readers: list[apsw.Connection] = []
        self._reading: set[apsw.Connection] = set()
        self._identity = _identity(path)
        self._log_name = f"{path}-wal"
        self._log_identity: tuple[int, int] | None = None
        self._more_due = 0.0
        self._replaced: errors.StoreReplaced | None = None
        self._store_id: bytes | None = None
        self._group = GroupCommit(self, full=options.synchronous == "FULL", patience=options.patience)
        try:
            self._examine()
        except BaseException:
            self._close_files()
            raise

    @property
    def commits(self) -> int:
        """Transactions committed through this object."""
        return self._group.commits

    @property
    def store_id(self) -> bytes:
        """What tells this store from every other one; a copy of it has the same."""
        if self._store_id is None:
            rows = self.read(lambda conn: conn.execute(migrate.STORE_ID).fetchall())
            self._store_id = bytes.fromhex(str(rows[0][0])) if rows else b""
        return self._store_id

    def schema_version(self) -> int:
        """The version of the file's schema, read from it now."""
        return self.read(lambda conn: migrate.examine(conn, self.path))

    # -- opening and closing ----------------------------------------------------

    def _examine(self) -> None:
        """Refuse what is not ours, before anything could write to it; make or upgrade what is."""
        version = 0
        with translated(self.path, self.notice):
            if self.read_only or os.stat(self._name).st_size > 0:
                conn = self._open_reader()
                self._readers.append(conn)
                try:
                    version = migrate.examine(conn, self.path)
                except apsw.ReadOnlyError:
                    # a cut-off start left a journal, which only a writer may undo
                    if self.read_only or os.stat(self._name).st_size > _HALF_MADE:
                        raise
                    self._readers.remove(conn)
                    conn.close()
            if self.read_only:
                migrate.refuse_older(self.path, version)
                return
            _tighten(self.path)
            if version < migrate.SCHEMA_VERSION:
                self._group.open()

    def connect(self) -> apsw.Connection:
        """Open a connection for writing."""
        with translated(self.path, self.notice):
            self._check_path()
            conn = apsw.Connection(self._name, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOMUTEX)
            try:
                conn.set_busy_timeout(_BUSY_SLICE_MS)
                migrate.prepare(conn, self.path)
                for pragma in (
                    f"synchronous={self.options.synchronous}",
                    f"wal_autocheckpoint={self.options.wal_autocheckpoint}",
                    f"journal_size_limit={self.options.journal_size_limit}",
                    "fullfsync=ON",
                    "checkpoint_fullfsync=ON",
                ):
                    conn.execute(f"PRAGMA {pragma}")
            except BaseException:
                conn.close()
                raise
        self._log_identity = None
        return conn

    def _open_reader(self) -> apsw.Connection:
        conn = apsw.Connection(self._name, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_NOMUTEX)
        conn.set_busy_timeout(_BUSY_SLICE_MS)
        return conn

    def close(self) -> None:
        """Drop one reference; the last one closes the file. In a forked child nothing happens."""
        if self._pid != os.getpid():
            return
        with _table_lock:
            self.references -= 1
            if self.references > 0:
                return
            for key in [k for k, v in _table.items() if v is self]:
                del _table[key]
        self._close_files()

    def _close_files(self) -> None:
        self._closed = True
        while self._readers:
            self._readers.pop().close()
        self._group.close()

    def disown(self) -> None:
        """In a forked child: close what the parent had open, without touching the file.

        SQLite's table of locks came along with the fork, but the locks did not: until it
        forgets them, a connection of the child would believe that it holds them.
        Raises `StoreError` when the parent was at work on the file as it forked.
        """
        connections = self._group.connections()
        if connections is None or self._reading:
            raise errors.StoreError(
                f"{self.path} was in use while this process was forked; "
                "open it in a process that was started, not forked"
            )
        connections += self._readers
        for conn in connections:
            # neither copy the log into the file nor delete it: both are the parent's
            conn.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            conn.close()
        self._readers.clear()

    # -- reading ----------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[apsw.Connection]:
        """A connection for reads, which never wait for a writer."""
        self._check_process()
        if self._closed:
            raise errors.StoreError("the store is closed")
        with translated(self.path, self.notice):
            try:
                conn = self._readers.pop()
            except IndexError:
                self._check_path()
                conn = self._open_reader()
            self._reading.add(conn)
            try:
                yield conn
            finally:
                self._reading.discard(conn)
                if len(self._readers) < _READERS and not self._closed and not conn.in_transaction:
                    self._readers.append(conn)
                else:
                    conn.close()

    def read(self, work: Work[T]) -> T:
        """Return `work(connection)` under one snapshot of the file."""
        with self.reading() as conn:
            conn.execute("BEGIN")
            try:
                return work(conn)
            finally:
                conn.execute("COMMIT")

    # -- writing ----------------------------------------------------------------

    def write(
        self,
        work: Work[T],
        *,
        durable: bool = True,
        landed: Callable[[apsw.Connection], bool] | None = None,
        place: int = 0,
    ) -> T:
        """Run `work` in a transaction with whatever else waits, and return its result after the commit.

        `work` may run more than once and must not touch anything but the connection.
        An exception from it undoes its own part only. With `durable` the rows survive a
        power cut when this returns; without, they ride on the next durable commit.
        When a commit fails half way, `landed(connection)` is asked whether it is in the file.
        What shares a transaction runs in the order of `place`, the session's key: the search
        index writes itself out each time a row's number is below the one before it.

        Raises a `StoreError`; `CommitUnknown` when nobody can tell whether the
        transaction is in the file.
        """
        self._check_process()
        if self.read_only:
            raise errors.StoreReadOnly(f"{self.path} was opened for reading only")
        return self._group.write(work, landed, place, durable=durable)

    # -- guards -----------------------------------------------------------------

    def admit(self) -> None:
        """Raise when the file was found damaged or replaced: nothing more is written to it by this process."""
        found = self._replaced or _condemned.get(self._identity)
        if found is not None:
            raise faults.again(found)

    def check(self, conn: apsw.Connection) -> None:
        """Raise when the file is not the one we opened any more: replaced, removed or upgraded.

        That the path names the open file is checked each time, the rest about once a second.
        """
        self._check_path()
        now = time.monotonic()
        if now < self._more_due and self._log_identity is not None:
            return
        migrate.examine(conn, self.path)
        log = _identity(self._log_name)
        if self._log_identity is None:
            self._log_identity = log
        if log != self._log_identity:
            self._replaced = errors.StoreReplaced(f"{self._log_name} was replaced or removed while it was open")
            raise self._replaced
        self._more_due = now + _MORE_CHECKS

    def _check_path(self) -> None:
        try:
            found = os.stat(self._name)
            same = (found.st_dev, found.st_ino) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            same = False
        if not same:
            self._replaced = errors.StoreReplaced(f"{self.path} was replaced or removed while it was open")
            raise self._replaced

    def notice(self, error: errors.StoreError) -> None:
        """Stop all later writes of this process to a file that is damaged."""
        if isinstance(error, errors.StoreDamaged) and self._identity not in _condemned:
            _condemned[self._identity] = error
            _pin(self.path)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise errors.StoreError("a store handle does not survive a fork; open the store again in the child")


def _identity(path: Path | str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return (0, 0)
    return (found.st_dev, found.st_ino)


# -- one object a file and process ----------------------------------------------

_table: dict[tuple[int, int, bool], Database] = {}
_condemned: dict[tuple[int, int], errors.StoreError] = {}
"""Files that were found damaged, and how."""
_table_lock = threading.Lock()


def _pin(path: Path) -> None:
    """Keep the number of a damaged file taken, so that no new file is mistaken for it."""
    with suppress(AttributeError, OSError):
        # this kind of descriptor is no opening of the file: its end drops no lock
        os.open(path, os.O_PATH | os.O_CLOEXEC)


def open_database(path: Path, options: StoreOptions | None = None, *, read_only: bool = False) -> Database:
    """Open or share the store at `path`; a new file is made with mode 0600 in a folder of mode 0700.

    An up-to-date file is opened without its write lock. Raises `StoreForeign` for a file
    that is not ours or is newer, `StoreUnsafePlace` on a network file system, and the other
    `StoreError`s for what the disk says. A file that this process found damaged can be
    opened for reading only.
    """
    path = Path(os.path.realpath(path))
    with _table_lock, translated(path):
        identity = _identity(path)
        _forget_parent(identity)
        shared = _table.get((*identity, read_only))
        if not read_only and identity in _condemned:
            raise faults.again(_condemned[identity])
        if shared is not None:
            shared.references += 1
            return shared
        if read_only and identity == (0, 0):
            raise errors.StoreMissing(f"there is no store at {path}")
        if not read_only:
            _make_file(path)
        database = Database(path, options or StoreOptions(), read_only=read_only)
        _table[(*_identity(path), read_only)] = database
        return database


def _forget_parent(identity: tuple[int, int]) -> None:
    """In a forked child, let go of the parent's handles on a file before opening it."""
    for key, database in list(_table.items()):
        if key[:2] == identity and database._pid != os.getpid():
            database.disown()
            del _table[key]


def _renew_lock() -> None:
    global _table_lock  # noqa: PLW0603 - another thread may have held it as this process was forked
    _table_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _make_file(path: Path) -> None:
    """Create the file before SQLite does, so that it and its side files are private from the first byte."""
    kind = filesystems.kind_of(path.parent)
    if filesystems.is_shared(kind):
        raise errors.StoreUnsafePlace(
            f"{path} lies on a {kind} file system, where a write-ahead log can be corrupted; "
            "set HERMES_HOME to a folder on a local disk"
        )
    _make_folder(path.parent)
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)


def _tighten(path: Path) -> None:
    """Take from others what they may do with a store that was made or copied here with looser rights."""
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        for name in (path, *(path.with_name(path.name + suffix) for suffix in SIDE_FILES)):
            with suppress(FileNotFoundError):
                name.chmod(stat.S_IMODE(name.stat().st_mode) & 0o700)
