"""One owner a session: who it is, whether it lives, and what one that was overtaken may still do."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from hermes_agent import errors
from hermes_agent.store import leases, processes, writer
from hermes_agent.store.session_db import SessionDB, encode_row
from hermes_agent.store.turns import CallKey, CallState, Proposal, TurnState
from hermes_agent.store.writer import Batch, SessionWriter, TurnEnd
from tests import faults


@pytest.fixture
def db(tmp_path: Path):
    with SessionDB(tmp_path / "state.db") as opened:
        opened.create_session("s", "test")
        yield opened


def user(text: str) -> Batch:
    return Batch(rows=[encode_row({"role": "user", "content": text})])


def set_lease(db: SessionDB, **columns: object) -> None:
    """Make the session's lease look as if another owner had written it."""
    for name, value in columns.items():
        db._database.write(
            lambda conn, name=name, value=value: conn.execute(f"UPDATE session_leases SET {name} = ?", (value,))
        )


def owner(**parts: object) -> str:
    boot, namespace, pid, start = processes.identity().split("|")
    found = {"boot": boot, "namespace": namespace, "pid": pid, "start": start} | parts
    return "|".join(str(found[key]) for key in ("boot", "namespace", "pid", "start"))


def stored(db: SessionDB) -> list[str]:
    return [row["content"] for row in db.get_messages("s")]


HOLDER = """
db = SessionDB(sys.argv[1])
claim = db.claim("s")
say("held")
hear()
"""


class TestAHeldSession:
    def test_keeps_others_out_and_says_which_process_has_it(self, db):
        claim = db.claim("s")
        with pytest.raises(errors.SessionBusy, match=f"process {os.getpid()}"):
            db.claim("s")
        with pytest.raises(errors.SessionBusy):
            db.append_message("s", "user", "in the middle of a turn")
        claim.release()
        db.claim("s").release()
        db.append_message("s", "user", "after it")
        assert stored(db) == ["after it"]

    def test_is_busy_for_another_process_too(self, db, tmp_path):
        with faults.Child(HOLDER, tmp_path / "state.db") as child:
            assert child.hear() == "held"
            with pytest.raises(errors.SessionBusy, match=f"process {child.pid}"):
                db.claim("s")
            with pytest.raises(errors.SessionBusy):
                db.append_message("s", "user", "x")
            child.say()
            child.end()
        db.claim("s").release()

    def test_can_be_waited_for(self, db):
        claim = db.claim("s")
        set_lease(db, expires=processes.boot_seconds() + 0.2)
        db.claim("s", wait=30).release()
        with pytest.raises(errors.StaleLease):
            claim.commit(user("late"))

    def test_that_was_appended_to_before_the_lease_is_not_appended_to_from_memory(self, db):
        """What this process remembers of the session's end does not get past a lease."""
        db.append_message("s", "user", "one")
        claim = db.claim("s")
        with pytest.raises(errors.SessionBusy):
            db.append_message("s", "user", "two")
        claim.commit(user("from the turn"))
        claim.release()
        db.append_message("s", "user", "three")
        assert stored(db) == ["one", "from the turn", "three"]
        assert len(db.get_messages_as_conversation("s")) == 3


class TestADeadOwner:
    def test_that_was_killed_is_replaced_at_once(self, db, tmp_path):
        with faults.Child(HOLDER, tmp_path / "state.db") as child:
            assert child.hear() == "held"
            child.kill()
        db.claim("s").release()

    def test_that_nobody_has_reaped_yet_is_dead(self, db, tmp_path):
        with faults.Child(HOLDER, tmp_path / "state.db") as child:
            assert child.hear() == "held"
            os.kill(child.pid, signal.SIGKILL)
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert Path(f"/proc/{child.pid}").exists(), "it is a zombie"
            db.claim("s").release()

    def test_whose_pid_runs_something_else_is_dead(self, db):
        """The start time tells the two apart."""
        db.claim("s")
        other = subprocess.Popen(["sleep", "60"])
        try:
            set_lease(db, owner=owner(pid=other.pid, start=1))
            db.claim("s").release()
        finally:
            other.kill()
            other.wait()

    def test_of_another_boot_is_dead_whatever_its_lease_says(self, db):
        db.claim("s")
        set_lease(db, owner=owner(boot="another"), boot_id="another", expires=1e12)
        db.claim("s").release()

    @pytest.mark.parametrize("text", ["", "nonsense", "a|b", "|||", "a|b|c|d|e"])
    def test_that_cannot_be_read_is_dead(self, db, text):
        db.claim("s")
        set_lease(db, owner=text)
        db.claim("s").release()


class TestAnOwnerThatCannotBeSeen:
    def test_in_another_pid_namespace_keeps_its_lease_until_it_ends(self, db):
        claim = db.claim("s")
        set_lease(db, owner=owner(namespace="pid:[1]", pid=1, start=1))
        with pytest.raises(errors.SessionBusy):
            db.claim("s")
        set_lease(db, expires=processes.boot_seconds() - 0.001)
        db.claim("s").release()
        with pytest.raises(errors.StaleLease):
            claim.commit(user("late"))

    def test_that_hides_from_us_in_proc_keeps_its_lease(self, db, tmp_path, monkeypatch):
        """A /proc that shows no other user's processes does not make them dead."""
        proc = tmp_path / "proc"
        (proc / "self").mkdir(parents=True)
        (proc / "self" / "stat").touch()
        monkeypatch.setattr(processes, "_PROC", proc)
        monkeypatch.setattr(processes, "_namespace", lambda: owner().split("|")[1])
        claim = db.claim("s")
        assert processes.is_alive(owner(pid=os.getpid(), start=5)) is False, "we may see ourselves"

        def not_permitted(_pid: int, _signal: int) -> None:
            raise PermissionError

        monkeypatch.setattr(os, "kill", not_permitted)
        assert processes.is_alive(owner(pid=1, start=5)) is None
        set_lease(db, owner=owner(pid=1, start=5))
        with pytest.raises(errors.SessionBusy):
            db.claim("s")
        claim.released = True


class TestTime:
    def test_a_step_of_the_wall_clock_neither_steals_nor_frees(self, db, monkeypatch):
        db.claim("s")
        for step in (1e9, -1e9):
            monkeypatch.setattr("time.time", lambda step=step: 1.7e9 + step)
            with pytest.raises(errors.SessionBusy):
                db.claim("s")

    def test_a_lease_that_is_not_renewed_runs_out(self, db, monkeypatch):
        claim = db.claim("s")
        later = processes.boot_seconds() + leases.TTL + 1
        monkeypatch.setattr(processes, "boot_seconds", lambda: later)
        second = db.claim("s")
        assert second.fence == claim.fence + 1

    def test_renewal_extends_it(self, db, monkeypatch):
        claim = db.claim("s")
        later = processes.boot_seconds() + leases.TTL - 1
        monkeypatch.setattr(processes, "boot_seconds", lambda: later)
        claim.renew()
        monkeypatch.setattr(processes, "boot_seconds", lambda: later + leases.TTL - 1)
        with pytest.raises(errors.SessionBusy):
            db.claim("s")

    def test_a_lease_that_ran_out_can_be_renewed_while_nobody_took_it(self, db, monkeypatch):
        claim = db.claim("s")
        later = processes.boot_seconds() + leases.TTL + 100
        monkeypatch.setattr(processes, "boot_seconds", lambda: later)
        claim.renew()
        claim.commit(user("still ours"))
        with pytest.raises(errors.SessionBusy):
            db.claim("s")

    def test_the_keeper_renews_the_leases_of_this_process(self, db, monkeypatch):
        monkeypatch.setattr(leases, "RENEW_EVERY", 0.01)
        monkeypatch.setattr(writer, "_keeper", writer._Keeper())
        claim = db.claim("s")
        set_lease(db, expires=0.0)
        for _ in range(3000):
            held = db._database.read(lambda conn: leases.holder(conn, claim.session_key))
            if held is not None and held.expires > processes.boot_seconds():
                break
            os.sched_yield()
        else:
            raise AssertionError("the lease was not renewed")
        claim.release()

    def test_the_keeper_lets_go_of_a_writer_that_was_overtaken_or_forgotten(self, db, monkeypatch):
        monkeypatch.setattr(leases, "RENEW_EVERY", 0.01)
        keeper = writer._Keeper()
        monkeypatch.setattr(writer, "_keeper", keeper)
        overtaken = db.claim("s")
        set_lease(db, expires=0.0, owner="dead")
        second = db.claim("s")
        db.create_session("t", "test")
        db.claim("t")  # nobody keeps it
        for _ in range(100_000):
            if set(keeper._writers) == {second}:
                break
            os.sched_yield()
        assert set(keeper._writers) == {second}
        assert not overtaken.released
        second.release()


class TestAnOvertakenWriter:
    @pytest.fixture
    def overtaken(self, db: SessionDB) -> SessionWriter:
        """A writer in the middle of a turn whose session another owner has taken."""
        claim = db.claim("s")
        batch = user("ours")
        batch.begin = True
        batch.proposals = [Proposal(CallKey(1, 0), "call", "terminal", "unsafe")]
        claim.commit(batch)
        set_lease(db, owner="dead", expires=0.0)
        self.second = db.claim("s")
        return claim

    @pytest.mark.parametrize(
        "write",
        [
            lambda w: w.commit(user("late")),
            lambda w: w.commit(Batch(end=TurnEnd(TurnState.DONE))),
            lambda w: w.start_calls([CallKey(1, 0)]),
            lambda w: w.finish_call(CallKey(1, 0), "result"),
            lambda w: w.set_system_prompt("another"),
            lambda w: w.renew(),
            lambda w: w.take_over(w.open_turns()[0]),
        ],
        ids=["rows", "end", "start", "finish", "prompt", "renew", "take over"],
    )
    def test_writes_nothing(self, db, overtaken, write):
        def everything() -> list[object]:
            tables = ("sessions", "messages", "turns", "tool_calls", "events", "session_leases", "usage")
            return [db._database.read(lambda conn, t=t: conn.execute(f"SELECT * FROM {t}").fetchall()) for t in tables]

        before = everything()
        with pytest.raises(errors.StaleLease):
            write(overtaken)
        assert everything() == before

    def test_does_not_take_the_rows_of_its_successor_for_damage(self, db, overtaken):
        """It is told that it was overtaken, and the store is not given up."""
        self.second.commit(user("theirs"))
        with pytest.raises(errors.StaleLease):
            overtaken.conversation()
        assert [row["content"] for row in self.second.conversation()] == ["ours", "theirs"]
        self.second.commit(user("and on"))

    def test_does_not_give_back_what_is_not_its_own(self, db, overtaken):
        overtaken.release()
        with pytest.raises(errors.SessionBusy):
            db.claim("s")

    def test_leaves_the_new_owner_alone(self, db, overtaken):
        with pytest.raises(errors.StaleLease):
            overtaken.commit(user("late"))
        self.second.commit(user("the new owner's"))
        assert stored(db) == ["ours", "the new owner's"]
        assert self.second.fence == overtaken.fence + 1

    def test_whose_session_was_written_without_a_lease_writes_nothing_more(self, db):
        """After its lease ran out others may append; its rows would fall behind theirs."""
        claim = db.claim("s")
        claim.commit(user("ours"))
        set_lease(db, expires=0.0)
        db.append_message("s", "user", "theirs")
        with pytest.raises(errors.StaleLease):
            claim.commit(user("late"))
        assert stored(db) == ["ours", "theirs"]


def test_release_is_final_and_can_be_repeated(db):
    claim = db.claim("s")
    claim.release()
    again = db.claim("s")
    claim.release()
    with pytest.raises(errors.SessionBusy):
        db.claim("s")
    again.release()


def test_a_claim_makes_the_session_only_when_told_how(db):
    with pytest.raises(errors.UnknownSession):
        db.claim("new")
    db.claim("new", source="cli", model="m", cwd="/x").release()
    found = db.get_session("new")
    assert found is not None
    assert (found["source"], found["model"], found["cwd"]) == ("cli", "m", "/x")


def test_fences_only_grow(db):
    fences = []
    for _ in range(5):
        claim = db.claim("s")
        fences.append(claim.fence)
        claim.release()
    assert fences == [1, 2, 3, 4, 5]


def test_this_process_is_alive_and_knows_itself_after_a_fork(tmp_path):
    assert processes.is_alive(processes.identity()) is True
    code = """
from hermes_agent.store import processes
mine = processes.identity()
pid = os.fork()
if pid == 0:
    say(processes.identity() != mine, processes.is_alive(mine), processes.is_alive(processes.identity()))
    os._exit(0)
os.waitpid(pid, 0)
"""
    assert faults.run(code) == ["True True True"]


def test_a_name_of_a_process_that_is_no_text_does_not_matter(tmp_path):
    """/proc shows the bytes of a program's file name."""
    program = os.path.join(os.fsencode(tmp_path), b") \xff\xfe (")
    os.symlink(b"/bin/sleep", program)
    child = subprocess.Popen([program, "60"])
    try:
        start = processes._start_time(child.pid)
        assert start is not None
        assert start.isdecimal()
        assert processes.is_alive(owner(pid=child.pid, start=start)) is True
    finally:
        child.kill()
        child.wait()
    assert processes.is_alive(owner(pid=child.pid, start=start)) is False


class TestTheLedger:
    """A call moves forward only, and only one that is in the ledger may run."""

    @pytest.fixture
    def claim(self, db: SessionDB) -> SessionWriter:
        claim = db.claim("s")
        batch = user("go")
        batch.begin = True
        batch.proposals = [Proposal(CallKey(1, i), f"call{i}", "terminal", "unsafe") for i in range(2)]
        claim.commit(batch)
        return claim

    def test_a_call_that_was_not_proposed_cannot_start(self, claim):
        with pytest.raises(errors.StoreError, match="ledger"):
            claim.start_calls([CallKey(1, 0), CallKey(7, 0)])
        assert [call.state for call in claim.ledger()] == [CallState.PROPOSED] * 2

    def test_a_call_that_is_done_cannot_start_or_finish_again(self, claim):
        claim.start_calls([CallKey(1, 0)])
        batch = Batch(rows=[encode_row({"role": "tool", "content": "ok", "tool_call_id": "call0"})])
        batch.results = {0: (CallKey(1, 0), CallState.DONE)}
        claim.commit(batch)
        for write in (
            lambda: claim.start_calls([CallKey(1, 0)]),
            lambda: claim.finish_call(CallKey(1, 0), "again"),
            lambda: claim.commit(batch),
        ):
            with pytest.raises(errors.StoreError):
                write()
        assert [call.state for call in claim.ledger()] == [CallState.DONE, CallState.PROPOSED]
        claim.commit(user("the writer goes on"))

    def test_a_result_that_holds_bad_characters_is_kept_without_them(self, claim):
        claim.start_calls([CallKey(1, 1)])
        claim.finish_call(CallKey(1, 1), "a\0b\ud83d")
        assert [call.result for call in claim.ledger()] == [None, "a\ufffdb\ufffd"]
