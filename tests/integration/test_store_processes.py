"""Several processes on one store: nothing is lost, doubled or mixed, and nobody starves."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hermes_agent.store.session_db import SessionDB
from tests import faults

APPEND = """
path, own, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
db = SessionDB(path)
db.create_session(own, "test")
say("ready"); hear()
slowest = 0.0
for n in range(count):
    before = time.monotonic()
    db.append_message(own, "user", f"{own} {n}")
    db.append_message("shared", "user", f"{own} {n}")
    slowest = max(slowest, time.monotonic() - before)
db.close()
say("done")
"""

READ = """
db = SessionDB(sys.argv[1])
say("reading")
seen = 0
while True:
    rows = [row["content"] for row in db.get_messages_as_conversation("shared")]
    assert len(rows) >= seen, "rows went away"
    seen = len(rows)
    if seen >= int(sys.argv[2]):
        break
say(seen)
"""


def test_four_processes_append_to_their_own_sessions_and_to_a_shared_one(tmp_path):
    """Each row once, each writer's rows in its order, every chain whole, two readers beside them."""
    path = tmp_path / "state.db"
    with SessionDB(path) as db:
        db.create_session("shared", "test")
    count = 150
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(faults.Child(APPEND, path, f"own{i}", count)) for i in range(4)]
        readers = [stack.enter_context(faults.Child(READ, path, 4 * count)) for _ in range(2)]
        for writer in writers:
            assert writer.hear() == "ready"
        for reader in readers:
            assert reader.hear() == "reading"
        for writer in writers:
            writer.say()
        for writer in writers:
            assert writer.end() == ["done"]
        for reader in readers:
            assert reader.end() == [str(4 * count)]
    with SessionDB(path) as db:
        for i in range(4):
            own = [row["content"] for row in db.get_messages_as_conversation(f"own{i}")]
            assert own == [f"own{i} {n}" for n in range(count)]
        shared = [row["content"] for row in db.get_messages_as_conversation("shared")]
        for i in range(4):
            assert [text for text in shared if text.startswith(f"own{i} ")] == [f"own{i} {n}" for n in range(count)]
        assert len(shared) == 4 * count
        assert len(db.list_sessions()) == 5
    assert faults.look(path, "PRAGMA integrity_check") == [["ok"]]
    faults.run("with SessionDB(sys.argv[1]) as db: db.create_session('last', 'test')", path)
    assert not path.with_name("state.db-wal").exists(), "the last writer to close has copied the log"


def test_the_log_stays_bounded_under_readers_and_writers(tmp_path):
    """Nobody of us reads for long enough to keep the log from being used again."""
    path = tmp_path / "state.db"
    with SessionDB(path) as db:
        db.create_session("shared", "test")
        big = """
db = SessionDB(sys.argv[1])
say("ready"); hear()
for n in range(300):
    db.append_message("shared", "user", "x" * 20_000)
say(os.path.getsize(sys.argv[1] + "-wal"))
"""
        with faults.Child(READ, path, 300) as reader, faults.Child(big, path) as writer:
            assert reader.hear() == "reading"
            assert writer.hear() == "ready"
            writer.say()
            assert int(writer.hear()) < 32 * 1024 * 1024
            assert reader.hear() == "300"


CLAIM = """
db = SessionDB(sys.argv[1])
say("ready"); hear()
for n in range(int(sys.argv[3])):
    claim = db.claim("s", wait=100)
    rows = db.get_messages_as_conversation("s")
    for part in ("begin", "middle"):
        row = encode_row({"role": "user", "content": [sys.argv[2], n, part, len(rows)]})
        claim.commit(Batch(rows=[row], begin=part == "begin"))
    end = encode_row({"role": "assistant", "content": [sys.argv[2], n, "end", len(rows)]})
    claim.commit(Batch(rows=[end], end=TurnEnd(turns.TurnState.DONE)))
    claim.release()
say("done")
"""


def test_turns_of_several_processes_follow_one_another_as_wholes(tmp_path):
    path = tmp_path / "state.db"
    with SessionDB(path) as db:
        db.create_session("s", "test")
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(faults.Child(CLAIM, path, f"p{i}", 6)) for i in range(3)]
        for child in children:
            assert child.hear() == "ready"
        for child in children:
            child.say()
        for child in children:
            assert child.end() == ["done"]
    with SessionDB(path) as db:
        rows = [row["content"] for row in db.get_messages_as_conversation("s")]
        assert db.open_turns("s") == []
    assert len(rows) == 3 * 6 * 3
    for start in range(0, len(rows), 3):
        owner, number, _, seen = rows[start]
        assert rows[start : start + 3] == [[owner, number, part, start] for part in ("begin", "middle", "end")]
        assert seen == start, "each turn saw every turn before it"
    for i in range(3):
        assert [row[1] for row in rows[::3] if row[0] == f"p{i}"] == list(range(6))


def test_a_process_killed_at_any_commit_loses_nothing_it_acknowledged(tmp_path):
    code = """
from hermes_agent import failpoints
hits = 0
def trap(name):
    global hits
    hits += 1
    if hits == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
db = SessionDB(sys.argv[1])
db.create_session("s", "test")
failpoints.arm(trap)
for n in range(4):
    db.append_message("s", "user", n)
    say(n)
"""
    acknowledged: list[int] = []
    for kill in range(1, 9):
        path = tmp_path / str(kill) / "state.db"
        with faults.Child(code, path, kill) as child:
            said = [int(line) for line in child.end(code=-9)]
        acknowledged.append(len(said))
        with SessionDB(path) as db:
            rows = [row["content"] for row in db.get_messages_as_conversation("s")]
        assert rows in (said, [*said, len(said)]), "the last row may be there unacknowledged"
    assert acknowledged == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_store_of_a_moved_home_goes_on(tmp_path):
    """Nothing in the files names the place where they lie."""
    old, new = tmp_path / "old", Path(tmp_path / "new")
    with SessionDB(old / "state.db") as db:
        db.create_session("s", "test")
        db.append_message("s", "user", "x")
    old.rename(new)
    with SessionDB(new / "state.db") as db:
        db.append_message("s", "user", "y")
        assert len(db.get_messages_as_conversation("s")) == 2
