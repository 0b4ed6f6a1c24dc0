"""Writing one file from many threads: who finds nobody committing commits for all who wait.

A caller who leads takes what waits into one transaction, commits once and hands
leadership to the first of those who came meanwhile. Callers whose work is committed are
woken while the next commit is on its way to the disk, or at once when there is none: as
long as a leader runs work, each of them would only take the interpreter from it.

What is under way is kept on this object and not on the leader's stack: a leader that an
interrupt throws out at any point leaves nothing that its successor cannot finish or undo.
"""

from __future__ import annotations

import operator
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import apsw

from hermes_agent import errors, failpoints
from hermes_agent.baton import waiting
from hermes_agent.store import faults

T = TypeVar("T")
Work = Callable[[apsw.Connection], T]
Probe = Callable[[apsw.Connection], bool]

_LOOK_AFTER = 1.0
"""Seconds after which one who waits looks whether the leader is still at work."""
_OVERWRITE = "INSERT OR REPLACE INTO state_meta VALUES ('failed_commit', ?)"


class File(Protocol):
    """What the queue needs to know of its file."""

    path: Path

    def admit(self) -> None:
        """Raise if nothing may be written to the file any more."""
        ...

    def connect(self) -> apsw.Connection:
        """Open a connection for writing; it never waits for another process longer than a second at a time."""
        ...

    def check(self, conn: apsw.Connection) -> None:
        """Raise if the file is not the one that was opened any more; called inside the transaction."""
        ...

    def notice(self, error: errors.StoreError) -> None:
        """Learn of an error of the file."""
        ...


class _Stage(Enum):
    """How far the transaction of the taken requests has come."""

    IDLE = 0
    COMMITTING = 1
    LANDED = 2
    FAILED = 3


class _Request:
    """One caller's work on its way through a commit."""

    __slots__ = ("done", "durable", "error", "landed", "place", "result", "thread", "woken", "work")

    def __init__(self, work: Work[Any], landed: Probe | None, place: int, *, durable: bool) -> None:
        self.work = work
        self.place = place
        self.landed = landed
        self.durable = durable
        self.thread = threading.get_ident()
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None
        self.woken = threading.Lock()
        self.woken.acquire()

    def settle(self) -> None:
        """The outcome stands: let the caller have it."""
        self.done = True
        self.wake()

    def wake(self) -> None:
        """End the caller's wait; harmless when it does not wait."""
        try:  # noqa: SIM105 - it is cheaper than `suppress`, and comes with every write
            self.woken.release()
        except RuntimeError:
            pass


_place = operator.attrgetter("place")


class GroupCommit:
    """The writing side of one open file."""

    def __init__(self, file: File, *, full: bool, patience: float) -> None:
        self.commits = 0
        self._file = file
        self._full = full
        self._patience = patience
        self._lock = threading.Lock()
        self._waiting: deque[_Request] = deque()
        self._leader: _Request | None = None
        self._taken: deque[_Request] = deque()
        self._settled: deque[_Request] = deque()
        self._stage = _Stage.IDLE
        self._conn: apsw.Connection | None = None
        self._durable_now = True
        self._closed = False

    def open(self) -> None:
        """Open the connection for writing now instead of at the first write."""
        self._connection()

    def write(self, work: Work[T], landed: Probe | None, place: int, *, durable: bool) -> T:
        """See `Database.write`."""
        request = _Request(work, landed, place, durable=durable)
        try:
            self._join(request)
            while not request.done:
                if self._leader is request:
                    self._lead()
                else:
                    self._wait(request)
        except BaseException:
            self._leave(request)
            raise
        if request.error is not None:
            raise request.error
        return request.result

    def close(self) -> None:
        """Refuse what comes from now on; close the file when what is under way has ended."""
        with self._lock:
            self._closed = True
            idle = self._leader is None or not _is_writing(self._leader.thread)
        if idle:
            self._drop()

    def connections(self) -> list[apsw.Connection] | None:
        """What is open for writing; None while a transaction is under way."""
        if self._leader is not None:
            return None
        return [] if self._conn is None else [self._conn]

    # -- the queue ------------------------------------------------------------
    #
    # An interrupt may come after any call that returns to Python, not between two plain
    # assignments: pairs that belong together are assigned in one statement.

    def _join(self, request: _Request) -> None:
        with self._lock:
            if self._closed:
                raise errors.StoreError("the store is closed")
            self._file.admit()
            leader = self._leader
            if leader is not None and leader.thread == request.thread:
                if _is_writing(request.thread, besides=1):
                    raise errors.StoreError("a write cannot be begun from inside a write")
                leader.done = True
                self._leader = None
            self._waiting.append(request)
            if self._leader is None:
                self._leader = request

    def _wait(self, request: _Request) -> None:
        """Wait to be settled or to lead; take over from a leader that was thrown out of its work."""
        with waiting:
            woken = request.woken.acquire(timeout=_LOOK_AFTER)
        if woken:
            return
        with self._lock:
            leader = self._leader
            if not request.done and (leader is None or (leader is not request and not _is_writing(leader.thread))):
                if leader is not None:
                    leader.done = True
                self._leader = request

    def _leave(self, request: _Request) -> None:
        """Withdraw an interrupted call; if it led, put right what it left and let the next one lead."""
        request.done = True
        with self._lock:
            leads = self._leader is request
            if not leads and request in self._waiting:
                self._waiting.remove(request)
        if leads:
            self._wake_settled()
            self._clear_up()
            self._hand_over()
        elif (leader := self._leader) is not None:
            leader.wake()  # we may have been cut off just before
        else:
            self._wake_settled()  # the same

    def _lead(self) -> None:
        """Commit what waits and hand over."""
        if self._taken:
            self._clear_up()
        with self._lock:
            self._taken, self._waiting = deque(sorted(self._waiting, key=_place)), deque()
        if self._taken:
            self._commit()
        self._hand_over()

    def _hand_over(self) -> None:
        with self._lock:
            self._leader = successor = self._waiting[0] if self._waiting else None
            last = self._closed and successor is None
        if successor is None:
            self._wake_settled()
        else:
            successor.wake()
        if last:
            self._drop()

    def _clear_up(self) -> None:
        """Bring to an end what an interrupted leader left: nothing is committed twice, nothing forgotten."""
        if self._has_landed():
            self._settle()
        elif self._stage is _Stage.FAILED:
            self._drop()
            self._settle_all(errors.CommitUnknown("the commit failed half way, and the check of it was interrupted"))
        else:
            self._roll_back()
            with self._lock:
                left = deque(request for request in (*self._taken, *self._waiting) if not request.done)
                self._taken, self._waiting = deque(), left

    def _has_landed(self) -> bool:
        """Whether the transaction of the taken requests is committed."""
        if self._stage is _Stage.COMMITTING:
            return self._conn is not None and not self._conn.in_transaction
        return self._stage is _Stage.LANDED

    def _settle(self) -> None:
        """The transaction is committed: every caller may have its result, at the next wake."""
        for request in self._taken:
            request.done = True
        self.commits += 1
        self._settled, self._taken, self._stage = self._taken, deque(), _Stage.IDLE

    def _wake_settled(self) -> None:
        with suppress(IndexError):
            while True:
                self._settled.popleft().wake()

    def _settle_all(self, error: Exception) -> None:
        for request in self._taken:
            if not request.done:
                request.error = faults.again(error) if isinstance(error, errors.HermesError) else error
                request.settle()
        self._taken, self._stage = deque(), _Stage.IDLE

    # -- the transaction --------------------------------------------------------

    def _commit(self) -> None:
        try:
            self._transact()
        except Exception as raised:  # noqa: BLE001 - it belongs to every caller of the batch
            self._wake_settled()
            error = self._in_our_words(raised)
            if self._stage is _Stage.FAILED and isinstance(error, errors.StoreError):
                told = self._ask(error)
                if told is not None:
                    self._settle_all(told)
                    return
            elif not self._has_landed():
                self._roll_back()
                if getattr(error, "reason", None) is errors.FailureReason.STORE_IO:
                    self._drop()
                self._settle_all(error)
                return
        self._settle()

    def _in_our_words(self, error: Exception) -> Exception:
        try:
            with faults.translated(self._file.path, self._file.notice):
                raise error
        except Exception as ours:  # noqa: BLE001 - it is handed on
            return ours

    def _transact(self) -> None:
        conn = self._connection()
        durable = False
        for request in self._taken:
            durable = durable or request.durable
        self._begin(conn, durable=durable)
        self._file.check(conn)
        if not self._run_together(conn):
            conn.execute("ROLLBACK")
            self._begin(conn, durable=durable)
            self._file.check(conn)
            for request in self._taken:
                if not request.done:
                    self._run_apart(conn, request)
        failpoints.hit("store.before_commit")
        self._wake_settled()
        if conn.in_transaction:
            self._stage = _Stage.COMMITTING
            try:
                with waiting:
                    conn.execute("COMMIT")
            except apsw.Error:
                self._stage = _Stage.FAILED
                raise
        self._stage = _Stage.LANDED
        failpoints.hit("store.after_commit")

    def _run_together(self, conn: apsw.Connection) -> bool:
        """Run everybody's work; False, with the transaction to be rolled back, if the work of one of several failed.

        There are no savepoints, since the search index writes itself out at each of them.
        """
        for request in self._taken:
            if request.done:
                continue
            try:
                request.result, request.error = request.work(conn), None
            except Exception as error:
                if isinstance(error, faults.OF_THE_FILE) or not conn.in_transaction:
                    raise
                if len(self._taken) > 1:
                    return False
                conn.execute("ROLLBACK")
                self._refuse(request, error)
        return True

    def _run_apart(self, conn: apsw.Connection, request: _Request) -> None:
        """Run one caller's work; its own failure undoes its own part, the file's failure everybody's."""
        conn.execute("SAVEPOINT part")
        try:
            request.result, request.error = request.work(conn), None
        except Exception as error:
            if isinstance(error, faults.OF_THE_FILE) or not conn.in_transaction:
                raise
            conn.execute("ROLLBACK TO part")
            self._refuse(request, error)
        conn.execute("RELEASE part")

    def _refuse(self, request: _Request, error: Exception) -> None:
        own = faults.from_sqlite(error, self._file.path) if isinstance(error, apsw.Error) else error
        request.result, request.error = None, own

    def _begin(self, conn: apsw.Connection, *, durable: bool) -> None:
        if self._full and durable != self._durable_now:
            conn.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self._durable_now = durable
        deadline = time.monotonic() + self._patience
        while True:
            try:
                conn.execute("BEGIN IMMEDIATE")
            except apsw.BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(random.uniform(0.02, 0.15))  # noqa: S311 - jitter, not a secret
            else:
                return

    def _ask(self, error: errors.StoreError) -> errors.StoreError | None:
        """Find out whether a failed commit is in the file: None if it is, and safe there, else what happened.

        The system may have dropped what it could not sync, and an old log may still hold
        what we call absent. So what was found is copied into the file itself, and a commit
        of our own is written over the place in the log, before anybody relies on the answer.
        """
        unknown = errors.CommitUnknown(f"the commit failed half way: {error}", reason=error.reason)
        probe = next((request.landed for request in self._taken if request.landed and request.error is None), None)
        self._drop()
        if probe is None:
            return unknown
        try:
            with faults.translated(self._file.path, self._file.notice):
                conn = self._connection()
                self._begin(conn, durable=True)
                self._file.check(conn)
                landed = probe(conn)
                conn.execute("COMMIT")
                if landed:
                    _copy_log(conn)
                self._begin(conn, durable=True)
                conn.execute(_OVERWRITE, (str(time.time()),))
                conn.execute("COMMIT")
        except errors.StoreError:
            self._drop()
            # a full disk refused the record of the commit itself: that cannot be there
            return error if isinstance(error.__cause__, apsw.FullError) else unknown
        if not landed:
            return error
        self._stage = _Stage.LANDED
        return None

    # -- the connection ---------------------------------------------------------

    def _connection(self) -> apsw.Connection:
        if self._conn is None:
            self._conn, self._durable_now = self._file.connect(), True
        return self._conn

    def _roll_back(self) -> None:
        """Undo an open transaction; the stage first, since a rolled back one looks like one that has landed."""
        self._stage, conn = _Stage.IDLE, self._conn
        if conn is not None and conn.in_transaction:
            try:
                conn.execute("ROLLBACK")
            except apsw.Error:
                self._drop()

    def _drop(self) -> None:
        """Close the connection: after a failed commit or a disk error it is not trusted again."""
        conn, self._conn = self._conn, None
        if conn is not None:
            with suppress(apsw.Error):
                conn.close(True)


def _copy_log(conn: apsw.Connection) -> None:
    """Bring all that is committed from the log into the file, synced."""
    for busy, *_ in conn.execute("PRAGMA wal_checkpoint(TRUNCATE)"):
        if busy:
            raise apsw.BusyError("the log could not be copied: somebody still reads an older state")


def _is_writing(thread: int, *, besides: int = 0) -> bool:
    """Whether the thread is inside `write`, more than `besides` times."""
    frame = sys._current_frames().get(thread)
    found = 0
    while frame is not None:
        found += frame.f_code is _WRITE
        frame = frame.f_back
    return found > besides


_WRITE = GroupCommit.write.__code__
