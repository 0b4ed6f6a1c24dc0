"""One file, many writers: what is committed together, and what is left when something goes wrong."""

from __future__ import annotations

import dis
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import apsw
import pytest

from hermes_agent import errors
from hermes_agent.store import database, group_commit
from hermes_agent.store.database import Database, StoreOptions, open_database
from tests import faults

PATIENT = 30.0


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    opened = open_database(tmp_path / "state.db", StoreOptions(synchronous="NORMAL"))
    opened.write(lambda conn: conn.execute("CREATE TABLE probe (name TEXT)"))
    yield opened
    opened.close()


def put(name: str) -> Callable[[apsw.Connection], str]:
    def work(conn: apsw.Connection) -> str:
        conn.execute("INSERT INTO probe VALUES (?)", (name,))
        return name

    return work


def names(db: Database) -> list[str]:
    return sorted(db.read(lambda conn: [str(row[0]) for row in conn.execute("SELECT name FROM probe")]))


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(60_000):
        if true():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it did not come to that")


class Crowd:
    """Threads that write while a leader is at work, so that they wait in its queue."""

    def __init__(self, db: Database, works: list[Callable[[apsw.Connection], Any]]) -> None:
        self.db = db
        self.outcomes: dict[int, Any] = {}
        self.begin = threading.Event()
        self.threads = [
            threading.Thread(target=self._write, args=(i, work), daemon=True) for i, work in enumerate(works)
        ]
        for thread in self.threads:
            thread.start()

    def _write(self, index: int, work: Callable[[apsw.Connection], Any]) -> None:
        self.begin.wait()
        try:
            self.outcomes[index] = self.db.write(work)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.outcomes[index] = error

    def queue_up(self, _: object = None) -> None:
        """As the leader's work: go on when all others wait."""
        self.begin.set()
        wait_until(lambda: len(self.db._group._waiting) + len(self.outcomes) >= len(self.threads))

    def join(self) -> dict[int, Any]:
        self.begin.set()
        for thread in self.threads:
            thread.join(PATIENT)
            assert not thread.is_alive(), "a writer hangs"
        return self.outcomes


class TestTheQueue:
    def test_what_waits_is_committed_together(self, db):
        """Fifteen writers that wait for a leader share the next commit."""
        crowd = Crowd(db, [put(f"n{i:02}") for i in range(15)])
        before = db.commits
        db.write(crowd.queue_up)
        assert crowd.join() == {i: f"n{i:02}" for i in range(15)}
        assert db.commits - before == 2
        assert names(db) == [f"n{i:02}" for i in range(15)]

    def test_an_error_undoes_its_own_part_only(self, db):
        def fail(conn: apsw.Connection) -> None:
            put("half")(conn)
            raise LookupError("mine")

        crowd = Crowd(db, [put("a"), fail, put("b")])
        db.write(crowd.queue_up)
        outcomes = crowd.join()
        assert (outcomes[0], outcomes[2]) == ("a", "b")
        assert isinstance(outcomes[1], LookupError)
        assert names(db) == ["a", "b"]

    def test_a_failure_among_many_is_told_to_its_caller_alone_each_time_the_work_is_run(self, db):
        """Two that fail, also for what another one of the batch did, between ones that do not."""

        def only_once(name: str) -> Callable[[apsw.Connection], str]:
            def work(conn: apsw.Connection) -> str:
                if list(conn.execute("SELECT 1 FROM probe WHERE name = ?", (name,))):
                    raise errors.StoreError(f"{name} is there")
                return put(name)(conn)

            return work

        crowd = Crowd(db, [only_once("a"), only_once("a"), only_once("b"), only_once("b"), put("c")])
        db.write(crowd.queue_up)
        outcomes = crowd.join()
        assert sorted(str(outcome) for outcome in outcomes.values()) == ["a", "a is there", "b", "b is there", "c"]
        assert names(db) == ["a", "b", "c"]

    def test_a_commit_takes_its_parts_in_the_order_of_their_place(self, db):
        order: list[int] = []
        inside, go_on = threading.Event(), threading.Event()

        def hold(_: apsw.Connection) -> None:
            inside.set()
            go_on.wait(PATIENT)

        places = [3, 1, 2, 1]
        threads = [threading.Thread(target=db.write, args=(hold,))]
        threads[0].start()
        assert inside.wait(PATIENT)
        for place in places:
            thread = threading.Thread(
                target=db.write, args=(lambda _, place=place: order.append(place),), kwargs={"place": place}
            )
            threads.append(thread)
            thread.start()
        wait_until(lambda: len(db._group._waiting) == len(places))
        go_on.set()
        for thread in threads:
            thread.join(PATIENT)
        assert order == sorted(places)

    def test_an_error_of_a_lone_caller_leaves_nothing(self, db):
        def fail(conn: apsw.Connection) -> None:
            put("half")(conn)
            raise LookupError("mine")

        with pytest.raises(LookupError):
            db.write(fail)
        assert names(db) == []
        assert db.write(put("next")) == "next"

    def test_a_statement_that_fails_is_a_store_error(self, db):
        """Callers never see the driver's own errors."""
        with pytest.raises(errors.StoreError) as caught:
            db.write(lambda conn: conn.execute("INSERT INTO probe VALUES (1, 2, 3)"))
        assert isinstance(caught.value.__cause__, apsw.Error)

    def test_a_full_disk_reaches_every_caller_and_the_next_write_works(self, db):
        def fill(conn: apsw.Connection) -> None:
            conn.execute("PRAGMA max_page_count=1")
            conn.execute("INSERT INTO probe VALUES (zeroblob(100000))")

        crowd = Crowd(db, [put("a"), fill, put("b")])
        db.write(crowd.queue_up)
        outcomes = crowd.join()
        assert [type(outcomes[i]) for i in range(3)] == [errors.StoreFull] * 3
        assert len({id(error) for error in outcomes.values()}) == 3, "threads must not share one exception"
        assert names(db) == []
        db.write(lambda conn: conn.execute("PRAGMA max_page_count=1000000"))
        assert db.write(put("next")) == "next"

    def test_a_write_inside_a_write_is_refused(self, db):
        with pytest.raises(errors.StoreError, match="inside a write"):
            db.write(lambda _: db.write(put("inner")))
        assert db.write(put("outer")) == "outer"
        assert names(db) == ["outer"]

    def test_only_what_must_be_durable_is_synced(self, tmp_path):
        synchronous = "SELECT * FROM pragma_synchronous"
        db = open_database(tmp_path / "full.db")
        try:
            seen = [
                db.write(lambda conn: conn.execute(synchronous).fetchall(), durable=durable)
                for durable in (True, False, True)
            ]
        finally:
            db.close()
        assert seen == [[(2,)], [(1,)], [(2,)]]

    def test_one_durable_caller_makes_the_commit_durable(self, tmp_path):
        db = open_database(tmp_path / "full.db")
        try:
            seen: list[Any] = []
            crowd = Crowd(db, [lambda conn: seen.append(conn.execute("PRAGMA synchronous").fetchall())])
            crowd.threads.append(
                threading.Thread(target=lambda: (crowd.begin.wait(), db.write(lambda _: None, durable=False)))
            )
            crowd.threads[-1].start()
            db.write(crowd.queue_up)
            crowd.join()
        finally:
            db.close()
        assert seen == [[(2,)]]


class TestClosing:
    def test_handles_on_one_file_share_one_object(self, tmp_path):
        path = tmp_path / "state.db"
        first = open_database(path)
        (tmp_path / "link.db").symlink_to(path)
        second = open_database(tmp_path / "link.db")
        assert second is first
        first.close()
        second.write(lambda _: None)
        second.close()
        assert not database._table

    def test_closing_waits_for_what_is_under_way(self, db, tmp_path):
        crowd = Crowd(db, [put("a"), put("b")])

        def close_inside(_: apsw.Connection) -> None:
            crowd.queue_up()
            db.close()

        db.write(close_inside)
        assert crowd.join() == {0: "a", 1: "b"}
        with pytest.raises(errors.StoreError, match="closed"):
            db.write(put("late"))
        with pytest.raises(errors.StoreError, match="closed"):
            names(db)
        db.references = 1  # the fixture closes once more
        assert faults.look(tmp_path / "state.db", "SELECT name FROM probe ORDER BY name") == [["a"], ["b"]]

    def test_an_interrupted_read_holds_no_snapshot(self, db):
        """The next reader of the same connection sees what was written in between."""

        def interrupted() -> None:
            with db.reading() as conn:
                conn.execute("BEGIN")
                conn.execute("SELECT * FROM probe").fetchall()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        db.write(put("later"))
        assert names(db) == ["later"]
        assert all(not conn.in_transaction for conn in db._readers)


class TestFork:
    def test_a_handle_is_refused_in_a_forked_child(self, tmp_path):
        code = """
db = SessionDB(sys.argv[1]); db.create_session("s", "test"); db.append_message("s", "user", "from the parent")
pid = os.fork()
if pid == 0:
    for attempt in (lambda: db.append_message("s", "user", "x"), lambda: db.get_messages("s")):
        try:
            attempt()
        except errors.StoreError as error:
            say(error)
    db.close()
    with SessionDB(sys.argv[1]) as own:
        own.append_message("s", "user", "from the child")
    os._exit(0)
os.waitpid(pid, 0)
db.append_message("s", "user", "from the parent again")
say([row["content"] for row in db.get_messages_as_conversation("s")])
"""
        said = faults.run(code, tmp_path / "state.db")
        assert said[:2] == ["a store handle does not survive a fork; open the store again in the child"] * 2
        assert said[2] == "['from the parent', 'from the child', 'from the parent again']"

    def test_a_forked_child_that_opens_the_store_takes_real_locks(self, tmp_path):
        """SQLite's table of locks comes along with a fork, the locks do not."""
        code = """
parent = open_database(sys.argv[1] and __import__("pathlib").Path(sys.argv[1]))
parent.write(lambda _: None)
ready, go = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    child = open_database(parent.path, StoreOptions(patience=0.0))
    def hold(_):
        os.write(ready[1], b"x")
        os.read(go[0], 1)
    child.write(hold)
    os._exit(0)
os.read(ready[0], 1)
parent._group._patience = 0.0
try:
    parent.write(lambda _: None)
    say("no lock")
except errors.StoreLocked:
    say("locked")
os.write(go[1], b"x")
os.waitpid(pid, 0)
parent.write(lambda _: None)
say("free")
"""
        assert faults.run(code, tmp_path / "state.db") == ["locked", "free"]

    @pytest.mark.parametrize("first", ["pass", "db.close()"])
    def test_what_a_forked_child_stores_outlives_the_parents_last_handle(self, tmp_path, first):
        """The child's own lock on the file keeps the parent from taking the log away."""
        code = f"""
db = SessionDB(sys.argv[1]); db.create_session("s", "test"); db.append_message("s", "user", "of the parent")
ready, go = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    {first}
    own = SessionDB(sys.argv[1])
    own.append_message("s", "user", "of the child")
    os.write(ready[1], b"x"); os.read(go[0], 1)
    own.append_message("s", "user", "of the child alone")
    os.kill(os.getpid(), 9)
os.read(ready[0], 1)
db.close()
os.write(go[1], b"x")
os.waitpid(pid, 0)
with SessionDB(sys.argv[1]) as again:
    say([row["content"] for row in again.get_messages_as_conversation("s")])
"""
        assert faults.run(code, tmp_path / "state.db") == ["['of the parent', 'of the child', 'of the child alone']"]

    def test_a_child_that_ends_in_the_usual_way_leaves_the_parents_store_sound(self, tmp_path):
        code = """
db = SessionDB(sys.argv[1]); db.create_session("s", "test"); db.append_message("s", "user", "one")
pid = os.fork()
if pid == 0:
    del db
    sys.exit(0)
os.waitpid(pid, 0)
db.append_message("s", "user", "two")
db.close()
with SessionDB(sys.argv[1]) as again:
    say(len(again.get_messages_as_conversation("s")))
"""
        assert faults.run(code, tmp_path / "state.db") == ["2"]

    def test_a_store_in_use_while_forking_is_refused_in_the_child(self, tmp_path):
        code = """
db = open_database(__import__("pathlib").Path(sys.argv[1]))
with db.reading() as conn:
    conn.execute("BEGIN")
    conn.execute("SELECT count(*) FROM sessions").fetchall()
    pid = os.fork()
    if pid == 0:
        try:
            open_database(db.path)
        except errors.StoreError as error:
            say(error)
        os._exit(0)
    os.waitpid(pid, 0)
"""
        assert "was in use while this process was forked" in faults.run(code, tmp_path / "state.db")[0]


# -- interrupts -------------------------------------------------------------------

_CODES = {
    value.__code__
    for owner in (group_commit.GroupCommit, group_commit._Request, Database)
    for value in vars(owner).values()
    if hasattr(value, "__code__")
}
_BEFORE_CHECK = ("CALL", "RESUME", "JUMP_BACKWARD")


def _names_of_steps(code: CodeType, _known: dict[CodeType, dict[int, str]] = {}) -> dict[int, str]:  # noqa: B006 - a cache
    if code not in _known:
        _known[code] = {step.offset: step.opname for step in dis.get_instructions(code)}
    return _known[code]


class Interrupt:
    """Raises KeyboardInterrupt at the n-th place where Python would deliver one while this thread writes.

    Python looks for signals as a function begins, after each call and as a loop goes back.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0
        self.raised = False
        self._last: dict[FrameType, str] = {}

    def __enter__(self) -> Self:
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, event: str, _: object) -> Any:
        if event != "call" or frame.f_code not in _CODES:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            last = self._last.get(frame, "")
            self._last[frame] = _names_of_steps(frame.f_code)[frame.f_lasti]
            if last.startswith(_BEFORE_CHECK) and "INTRINSIC" not in last:
                self.seen += 1
                if self.seen == self.at and not self.raised:
                    self.raised = True
                    raise KeyboardInterrupt
        return self._step


def _rest(db: Database) -> tuple[Any, ...]:
    group = db._group
    queues = (group._waiting, group._taken, group._settled)
    return (group._leader, [len(queue) for queue in queues], group._stage, group._lock.locked())


AT_REST = (None, [0, 0, 0], group_commit._Stage.IDLE, False)


class TestInterrupts:
    def test_the_leading_thread_can_be_interrupted_anywhere(self, db):
        """Whatever the leader was doing: what it leads is committed once, its own at most once."""
        for at in itertools.count(1):
            inside, finished = threading.Event(), threading.Event()

            def wait_for_all(_: apsw.Connection, inside: threading.Event = inside, finished: Any = finished) -> None:
                """Keep the others in the queue until the one to be interrupted, and two behind it, are there."""
                inside.set()
                wait_until(lambda: len(db._group._waiting) + finished.is_set() >= 3)

            first = Crowd(db, [wait_for_all])
            first.begin.set()
            assert inside.wait(PATIENT)
            behind = Crowd(db, [put(f"{at:04}-a"), put(f"{at:04}-b")])

            def start_behind(behind: Crowd = behind, finished: Any = finished) -> None:
                wait_until(lambda: bool(db._group._waiting) or finished.is_set())
                behind.begin.set()

            starter = threading.Thread(target=start_behind)
            starter.start()
            interrupt = Interrupt(at)
            own = f"{at:04}-own"
            try:
                with interrupt:
                    db.write(put(own))
                returned = True
            except KeyboardInterrupt:
                returned = False
            finished.set()
            first.join()
            starter.join()
            assert behind.join() == {0: f"{at:04}-a", 1: f"{at:04}-b"}, at
            found = [name for name in names(db) if name.startswith(f"{at:04}")]
            others = [f"{at:04}-a", f"{at:04}-b"]
            assert found == [*others, own] or (found == others and not returned), at
            if not interrupt.raised:
                break
            db.write(lambda _: None)
            assert _rest(db) == AT_REST, at
        assert at > 45, "the trap did not see the leader's steps"

    def test_a_lone_writer_can_be_interrupted_anywhere(self, db):
        for at in itertools.count(1):
            interrupt = Interrupt(at)
            try:
                with interrupt:
                    db.write(put(f"{at:04}"))
                returned = True
            except KeyboardInterrupt:
                returned = False
            assert names(db).count(f"{at:04}") in ({1} if returned else {0, 1}), at
            assert _rest(db) == AT_REST, at
            if not interrupt.raised:
                break
        assert at > 30, "the trap did not see the writer's steps"

    def test_a_leader_that_vanishes_is_replaced(self, db, monkeypatch):
        """Even when no handler of it could run: one who waits sees that nobody is at work."""
        monkeypatch.setattr(group_commit, "_LOOK_AFTER", 0.02)
        group = db._group
        ghost = group_commit._Request(put("ghost"), None, 0, durable=True)
        ghost.thread = -1
        group._leader = ghost
        group._taken.append(ghost)
        assert db.write(put("next")) == "next"
        assert _rest(db) == AT_REST
        assert names(db) == ["next"]

    def test_an_interrupt_that_work_raises_itself_ends_only_that_caller(self, db):
        """Also one that comes each time the work is run."""

        def exits(conn: apsw.Connection) -> None:
            put("half")(conn)
            raise SystemExit

        with pytest.raises(SystemExit):
            db.write(exits)
        assert db.write(put("next")) == "next"
        assert names(db) == ["next"]

    def test_a_storm_of_signals_loses_nothing(self, tmp_path):
        """Thousands of SIGINTs at chance moments of the main thread, others writing beside it."""
        code = """
import random, signal
db = open_database(__import__("pathlib").Path(sys.argv[1]), StoreOptions(synchronous="NORMAL"))
db.write(lambda conn: conn.execute("CREATE TABLE probe (name TEXT)"))
def put(name):
    return lambda conn: conn.execute("INSERT INTO probe VALUES (?)", (name,)) and None
inside, acknowledged, interrupted, sent = False, [], 0, 0
def handler(*_):
    if inside:
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, handler)
done = threading.Event()
def storm():
    global sent
    chance = random.Random(7)
    while sent < 3000 and not done.is_set():
        os.kill(os.getpid(), signal.SIGINT); sent += 1
        time.sleep(chance.random() * 0.0006)
def writer(letter):
    for i in range(150):
        db.write(put(f"{letter}{i}"))
        acknowledged.append(f"{letter}{i}")
threads = [threading.Thread(target=writer, args=(letter,), daemon=True) for letter in "abc"]
sender = threading.Thread(target=storm, daemon=True)
for thread in (*threads, sender):
    thread.start()
n = 0
while sender.is_alive():
    n += 1
    try:
        inside = True
        db.write(put(f"m{n}"))
        inside = False
        acknowledged.append(f"m{n}")
    except KeyboardInterrupt:
        inside = False
        interrupted += 1
inside = False
for thread in threads:
    thread.join(100)
    if thread.is_alive():
        say("a writer hangs"); os._exit(0)
stored = [row[0] for row in db.read(lambda conn: conn.execute("SELECT name FROM probe").fetchall())]
say(len(stored) == len(set(stored)), set(acknowledged) <= set(stored), interrupted > 50, len(acknowledged) > 450)
"""
        assert faults.run(code, tmp_path / "state.db") == ["True True True True"]


class TestOpening:
    def test_an_up_to_date_file_is_opened_while_another_process_holds_the_write_lock(self, tmp_path):
        path = tmp_path / "state.db"
        open_database(path).close()
        holder = """
conn = apsw.Connection(sys.argv[1]); conn.execute("BEGIN IMMEDIATE")
say("held"); hear()
"""
        opener = """
db = SessionDB(sys.argv[1], options=StoreOptions(patience=0.0))
say(db.list_sessions(), db.get_session("x"))
try:
    db.create_session("s", "test")
except errors.StoreLocked:
    say("locked")
"""
        with faults.Child(holder, path) as child:
            assert child.hear() == "held"
            assert faults.run(opener, path) == ["[] None", "locked"]
            child.say()
            child.end()

    def test_opening_and_reading_write_nothing(self, tmp_path):
        path = tmp_path / "state.db"
        open_database(path).close()
        before = (
            path.read_bytes(),
            sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith(("-wal", "-shm"))),
        )
        faults.run("db = SessionDB(sys.argv[1]); db.list_sessions(); db.close()", path)
        assert (
            path.read_bytes(),
            sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith(("-wal", "-shm"))),
        ) == before
        assert not any(p.stat().st_size for p in tmp_path.iterdir() if p.name.endswith("-wal"))

    @pytest.mark.parametrize("mask", [0o000, 0o022])
    def test_all_files_are_private_whatever_the_umask(self, tmp_path, mask):
        old = os.umask(mask)
        try:
            path = tmp_path / "deep" / "home" / "state.db"
            opened = open_database(path)
            opened.write(lambda conn: conn.execute("CREATE TABLE probe (name TEXT)"))
            modes = {p.name: p.stat().st_mode & 0o777 for p in path.parent.iterdir()}
            opened.close()
        finally:
            os.umask(old)
        assert modes == {"state.db": 0o600, "state.db-wal": 0o600, "state.db-shm": 0o600}
        assert [folder.stat().st_mode & 0o777 for folder in (path.parent, path.parent.parent)] == [0o700, 0o700]

    def test_a_store_that_others_can_read_is_made_private(self, tmp_path):
        path = tmp_path / "state.db"
        open_database(path).close()
        path.chmod(0o644)
        open_database(path).close()
        assert path.stat().st_mode & 0o777 == 0o600

    def test_reading_only_never_makes_a_file(self, tmp_path):
        with pytest.raises(errors.StoreError, match="no store at"):
            open_database(tmp_path / "state.db", read_only=True)
        assert not list(tmp_path.iterdir())

    def test_a_read_only_handle_refuses_to_write(self, tmp_path):
        path = tmp_path / "state.db"
        open_database(path).close()
        reader = open_database(path, read_only=True)
        with pytest.raises(errors.StoreReadOnly):
            reader.write(lambda _: None)
        reader.close()


def test_no_signal_handler_is_touched(db):
    before = signal.getsignal(signal.SIGINT)
    db.write(put("x"))
    assert signal.getsignal(signal.SIGINT) is before
