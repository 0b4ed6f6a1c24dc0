"""One SQLite file: opening, group commit, reading, and what went wrong in our own words.

Every write goes through `Database.write`. A caller who finds nobody committing leads:
it takes what waits into one transaction, commits once, and hands leadership on. The
file is opened by this SQLite library only; handles on one file in one process share one
`Database`.
"""

from __future__ import annotations

import os
import random
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import apsw

from hermes_agent import errors, failpoints
from hermes_agent.store import filesystems, migrate

T = TypeVar("T")
Work = Callable[[apsw.Connection], T]

SHARED_MEMORY_SUFFIXES = ("-wal", "-shm")
_READERS = 8
_BUSY_SLICE_MS = 5000
_FATAL = (
    apsw.FullError, apsw.IOError, apsw.CorruptError, apsw.NotADBError, apsw.BusyError, apsw.NoMemError,
    apsw.ReadOnlyError, apsw.CantOpenError,
)  # fmt: skip
"""Failures of the file, not of one caller's statement."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How the file is written.

    `synchronous` FULL keeps acknowledged rows over a power cut; NORMAL only over the
    death of the process. `patience` is how long, in seconds, a write waits for another
    process's lock.
    """

    synchronous: str = "FULL"
    wal_autocheckpoint: int = 1000
    journal_size_limit: int = 64 * 1024 * 1024
    patience: float = 60.0


class _Request:
    """One caller's work on its way through a commit."""

    __slots__ = ("done", "durable", "error", "result", "work", "_woken")

    def __init__(self, work: Work[Any], *, durable: bool) -> None:
        self.work = work
        self.durable = durable
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._woken = threading.Lock()
        self._woken.acquire()

    def settle(self, result: Any = None, error: BaseException | None = None) -> None:
        """Hand the outcome to the caller; only the first one counts."""
        if not self.done:
            self.result, self.error, self.done = result, error, True
            self.wake()

    def wake(self) -> None:
        """End the caller's wait; harmless when it does not wait."""
        with suppress(RuntimeError):
            self._woken.release()

    def wait(self) -> None:
        self._woken.acquire()


class Database:
    """A store file that is open in this process. Get one with `open_database`."""

    def __init__(self, path: Path, options: StoreOptions, *, read_only: bool) -> None:
        self.path = path
        self.options = options
        self.read_only = read_only
        self.references = 1
        self.commits = 0
        """Transactions committed through this object."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waiting: deque[_Request] = deque()
        self._leader: _Request | None = None
        self._broken: errors.StoreError | None = None
        self._readers: list[apsw.Connection] = []
        self._durable_now = True
        self._identity = (0, 0)
        self._writer = self._open_reader() if read_only else self._open_writer()
        self._identity = _identity(path)

    # -- opening ----------------------------------------------------------

    def _open_writer(self) -> apsw.Connection:
        with translated(self.path):
            conn = apsw.Connection(
                str(self.path), flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_NOMUTEX
            )
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
        self._durable_now = True
        return conn

    def _open_reader(self) -> apsw.Connection:
        with translated(self.path):
            conn = apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_NOMUTEX)
            try:
                conn.set_busy_timeout(_BUSY_SLICE_MS)
                if self.read_only:
                    migrate.check_ours(conn, self.path)
            except BaseException:
                conn.close()
                raise
            return conn

    def close(self) -> None:
        """Drop one reference; the last one closes the file."""
        with _table_lock:
            self.references -= 1
            if self.references > 0:
                return
            for key in [k for k, v in _table.items() if v is self]:
                del _table[key]
        with self._lock:
            readers, self._readers = self._readers, []
            self._broken = self._broken or errors.StoreError("the store is closed")
        if self._pid == os.getpid():
            for conn in (*readers, self._writer):
                conn.close()

    # -- reading ----------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[apsw.Connection]:
        """A connection for reads, which never wait for a writer."""
        self._check_process()
        try:
            conn = self._readers.pop()
        except IndexError:
            conn = self._open_reader()
        try:
            with translated(self.path, self._mark_broken):
                yield conn
        finally:
            if len(self._readers) < _READERS and self._broken is None:
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

    # -- writing ----------------------------------------------------------

    def write(self, work: Work[T], *, durable: bool = True) -> T:
        """Run `work` in a transaction with whatever else waits, and return its result after the commit.

        `work` may run more than once and must not touch anything but the connection.
        An exception from it undoes its own part only. With `durable` the rows survive a
        power cut when this returns; without, they ride on the next durable commit.

        Raises a `StoreError`; `CommitUnknown` when the file must be asked whether the
        transaction is in it.
        """
        self._check_process()
        if self.read_only:
            raise errors.StoreReadOnly(f"{self.path} was opened for reading only")
        request = _Request(work, durable=durable)
        with self._lock:
            if self._broken is not None:
                raise self._broken
            self._waiting.append(request)
            if self._leader is None:
                self._leader = request
        self._await(request)
        if request.error is not None:
            raise request.error
        return request.result

    def _await(self, request: _Request) -> None:
        """Return when the request is settled, leading its batch if that falls to us."""
        try:
            while not request.done and self._leader is not request:
                request.wait()
        except BaseException:
            with self._lock:
                if self._leader is not request and request in self._waiting:
                    self._waiting.remove(request)
            if self._leader is request:
                self._lead(request)
            raise
        if not request.done:
            self._lead(request)

    def _lead(self, own: _Request) -> None:
        """Commit one batch and hand over; an interrupt is raised only after both."""
        batch: list[_Request] = []
        interrupt: BaseException | None = None
        while True:
            try:
                self._commit_waiting(batch)
                self._hand_over(own)
                break
            except (KeyboardInterrupt, SystemExit, GeneratorExit) as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _commit_waiting(self, batch: list[_Request]) -> None:
        with self._lock:
            while not batch and self._waiting:
                batch.extend(self._waiting)
                self._waiting.clear()
        todo = [request for request in batch if not request.done]
        if not todo:
            return
        try:
            self._commit(todo)
        except Exception as error:  # noqa: BLE001 - it belongs to every caller of the batch
            for request in todo:
                request.settle(error=error)

    def _hand_over(self, own: _Request) -> None:
        """Make the first waiter the leader, or nobody; an interrupt may make us come here twice."""
        with self._lock:
            while self._waiting and self._waiting[0].done:
                self._waiting.popleft()
            if self._leader is own:
                self._leader = self._waiting[0] if self._waiting else None
            successor = self._leader
        if successor is not None:
            successor.wake()

    def _commit(self, batch: list[_Request]) -> None:
        conn = self._writer
        durable = any(request.durable for request in batch)
        results: list[tuple[_Request, Any, BaseException | None]] = []
        committing = False
        try:
            with translated(self.path, self._mark_broken):
                self._same_file()
                self._set_durable(conn, durable=durable)
                self._begin(conn)
                run = self._run_alone if len(batch) == 1 else self._run
                for request in batch:
                    results.append((request, *run(conn, request)))
                failpoints.hit("store.before_commit")
                if conn.in_transaction:
                    committing = True
                    conn.execute("COMMIT")
                failpoints.hit("store.after_commit")
        except BaseException as error:
            landed = committing and not conn.in_transaction and not isinstance(error, errors.StoreError)
            if not landed:
                self._abandon(conn, committing=committing, error=error)
                if committing and isinstance(error, errors.StoreError):
                    raise errors.CommitUnknown(f"the commit failed half way: {error}", reason=error.reason) from error
                raise
            self._settle(results)
            raise
        self._settle(results)

    def _settle(self, results: list[tuple[_Request, Any, BaseException | None]]) -> None:
        self.commits += 1
        for request, result, error in results:
            request.settle(result, error)

    def _run(self, conn: apsw.Connection, request: _Request) -> tuple[Any, BaseException | None]:
        """Run one caller's work; its own failure undoes its own part, the file's failure everybody's."""
        conn.execute("SAVEPOINT part")
        try:
            result = request.work(conn)
        except Exception as error:
            if isinstance(error, _FATAL) or not conn.in_transaction:
                raise
            conn.execute("ROLLBACK TO part")
            conn.execute("RELEASE part")
            return None, error
        conn.execute("RELEASE part")
        return result, None

    def _run_alone(self, conn: apsw.Connection, request: _Request) -> tuple[Any, BaseException | None]:
        """The same for a transaction of one caller, who needs no savepoint."""
        try:
            return request.work(conn), None
        except Exception as error:
            if isinstance(error, _FATAL) or not conn.in_transaction:
                raise
            conn.execute("ROLLBACK")
            return None, error

    def _begin(self, conn: apsw.Connection) -> None:
        deadline = time.monotonic() + self.options.patience
        while True:
            try:
                conn.execute("BEGIN IMMEDIATE")
            except apsw.BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(random.uniform(0.02, 0.15))  # noqa: S311 - jitter, not a secret
            else:
                return

    def _set_durable(self, conn: apsw.Connection, *, durable: bool) -> None:
        if self.options.synchronous == "FULL" and durable != self._durable_now:
            conn.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self._durable_now = durable

    def _abandon(self, conn: apsw.Connection, *, committing: bool, error: BaseException) -> None:
        """Leave no transaction open; after a failed commit or a disk error the connection is not trusted again."""
        try:
            if conn.in_transaction:
                conn.execute("ROLLBACK")
        except apsw.Error:
            committing = True
        if self._broken is None and (committing or isinstance(error, errors.StoreError)):
            suspicious = committing or getattr(error, "reason", None) == errors.FailureReason.STORE_IO
            if suspicious:
                self._reopen(conn)

    def _reopen(self, conn: apsw.Connection) -> None:
        with self._lock:
            readers, self._readers = self._readers, []
        for old in (*readers, conn):
            old.close(True)  # noqa: FBT003 - apsw's own positional flag: close even if it complains
        try:
            self._writer = self._open_writer()
        except errors.StoreError as error:
            self._broken = error

    def harden(self) -> None:
        """Copy the log into the file and sync it: what can be read now survives a power cut.

        For rows found after a failed sync, which the system may have dropped from its plans.
        """
        with self.reading() as conn:
            conn.execute("PRAGMA wal_checkpoint(PASSIVE)")
        self.write(lambda conn: None)
        with translated(self.path, self._mark_broken):
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    # -- guards -----------------------------------------------------------

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise errors.StoreError("a store handle does not survive a fork; open it again in the child")

    def _same_file(self) -> None:
        if _identity(self.path) != self._identity:
            error = errors.StoreReplaced(f"{self.path} was replaced or removed while it was open")
            self._mark_broken(error)
            raise error

    def _mark_broken(self, error: errors.StoreError) -> None:
        """Stop all later writes of this process to a file that is damaged or gone."""
        if isinstance(error, (errors.StoreDamaged, errors.StoreReplaced)):
            self._broken = error


def _identity(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return (found.st_dev, found.st_ino)


# -- one object a file and process ----------------------------------------

_table: dict[tuple[int, int, bool], Database] = {}
_table_lock = threading.Lock()


def open_database(path: Path, options: StoreOptions | None = None, *, read_only: bool = False) -> Database:
    """Open or share the store at `path`; a new file is made with mode 0600 in a folder of mode 0700.

    An up-to-date file is opened without its write lock. Raises `StoreForeign` for a file
    that is not ours or is newer, `StoreUnsafePlace` on a network file system, and the other
    `StoreError`s for what the disk says.
    """
    path = Path(os.path.realpath(path))
    with _table_lock:
        key = (*_identity(path), read_only)
        shared = _table.get(key)
        if shared is not None and shared._pid == os.getpid() and shared._broken is None:  # noqa: SLF001 - same module
            shared.references += 1
            return shared
        if read_only and key[:2] == (0, 0):
            raise errors.StoreError(f"there is no store at {path}")
        if not read_only:
            _make_file(path)
        database = Database(path, options or StoreOptions(), read_only=read_only)
        _table[(*_identity(path), read_only)] = database
        return database


def _make_file(path: Path) -> None:
    """Create the file before SQLite does, so that it and its side files are private from the first byte."""
    kind = filesystems.kind_of(path.parent)
    if filesystems.is_shared(kind):
        raise errors.StoreUnsafePlace(
            f"{path} lies on a {kind} file system, where a write-ahead log can be corrupted; "
            "set HERMES_HOME to a folder on a local disk"
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        _tighten(path)
    except OSError as error:
        raise _from_os(error, path) from error


def _tighten(path: Path) -> None:
    mode = path.stat().st_mode
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        for name in (path, *(path.with_name(path.name + suffix) for suffix in SHARED_MEMORY_SUFFIXES)):
            if name.exists():
                name.chmod(stat.S_IMODE(name.stat().st_mode) & 0o700)


# -- SQLite's words into ours -----------------------------------------------


@contextmanager
def translated(path: Path, notice: Callable[[errors.StoreError], None] | None = None) -> Iterator[None]:
    """Raise SQLite's and the system's errors as `StoreError`s; `notice` sees each first."""
    try:
        yield
    except apsw.Error as error:
        ours = _from_sqlite(error, path)
    except OSError as error:
        ours = _from_os(error, path)
    else:
        return
    if notice is not None:
        notice(ours)
    raise ours


def _from_sqlite(error: apsw.Error, path: Path) -> errors.StoreError:
    text = f"{path}: {error}"
    match error:
        case apsw.BusyError() | apsw.LockedError():
            ours: errors.StoreError = errors.StoreLocked(f"{text}; another process holds the store's write lock")
        case apsw.FullError():
            ours = errors.StoreFull(f"no space left for {path}")
        case apsw.ReadOnlyError() | apsw.PermissionsError() | apsw.AuthError():
            ours = errors.StoreReadOnly(text)
        case apsw.CorruptError():
            ours = errors.StoreDamaged(f"{text}; the file was left as it is, restore a backup or start a new store")
        case apsw.NotADBError():
            ours = errors.StoreDamaged(f"{path} is not a SQLite database; it was left as it is")
        case apsw.CantOpenError():
            ours = errors.StoreReadOnly(f"{text}; check that the folder exists and can be written")
        case apsw.IOError():
            full = _free_bytes(path) < 64 * 1024
            ours = errors.StoreFull(f"no space left for {path}") if full else errors.StoreError(text)
        case _:
            ours = errors.StoreError(text)
    ours.__cause__ = error
    return ours


def _from_os(error: OSError, path: Path) -> errors.StoreError:
    import errno  # noqa: PLC0415 - only when something already failed

    kinds: dict[int | None, type[errors.StoreError]] = {
        errno.ENOSPC: errors.StoreFull,
        errno.EDQUOT: errors.StoreFull,
        errno.EACCES: errors.StoreReadOnly,
        errno.EPERM: errors.StoreReadOnly,
        errno.EROFS: errors.StoreReadOnly,
    }
    ours = kinds.get(error.errno, errors.StoreError)(f"{path}: {error.strerror or error}")
    ours.__cause__ = error
    return ours


def _free_bytes(path: Path) -> int:
    try:
        found = os.statvfs(path.parent)
    except OSError:
        return 1 << 40
    return found.f_bavail * found.f_frsize
