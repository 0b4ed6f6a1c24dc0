"""What must hold of a store after any death: each check answers with the invariants it finds broken.

I1 acknowledged messages exist once, with one turn. I2 rows and events are numbered without gaps.
I3 one row a settled call, none for another, in call order; a call only moves forward. I4 no
effect without a durable `started`, an unsafe one at most once, a done call at least once.
I5 what was seen is stored. I7 after faults stop, every turn ends and no dead owner blocks.
I8 fences only grow and an old one is refused. I10 the file, its chain and its anchor are sound.
I12 attempts and resumes are bounded. I13 a key is nowhere under the home. I14 two recoveries of
one image agree. I15 rows are never changed. I16 the transcript is the crash-free one. `wire`: a
strict provider takes each request, and requests only grow. `keys`: every result has the same keys.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw

from hermes_agent.agent.run import MAX_CRASH_RESUMES
from hermes_agent.errors import HermesError, StaleLease
from hermes_agent.store import messages, processes, sessions
from hermes_agent.store.session_db import SessionDB
from hermes_agent.store.turns import TurnState
from hermes_agent.store.writer import Batch, SessionWriter, _keeper
from hermes_agent.testing.crash.scenario import CANARY, SESSION, Outside, digest
from hermes_agent.transcript import rules

Record = dict[str, Any]

_ORDER = {"proposed": 0, "started": 1, "finished": 2, "done": 3, "unknown": 3}
_TURN_ID = re.compile(r"turn_[0-9a-f]{32}")


@dataclass
class Findings:
    """Broken invariants as sentences that begin with their name, and how many acknowledged rows are gone."""

    violations: list[str] = field(default_factory=list[str])
    lost: int = 0

    def add(self, invariant: str, text: str, *, lost: int = 0) -> None:
        self.violations.append(f"{invariant}: {text}")
        self.lost += lost


@dataclass
class Image:
    """The session as it stands in the file, read without the product's code."""

    session: Record
    rows: list[Record]
    turns: list[Record]
    calls: list[Record]
    events: list[Record]
    lease: Record | None
    faults: list[str]
    """What SQLite itself finds wrong with the file."""


def load(home: Path) -> Image | None:
    """Read the store under `home`; None while it holds no session. The file is left as it is."""
    path = home / "state.db"
    if not path.exists():
        return None
    conn = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        if not list(conn.execute("SELECT 1 FROM sqlite_schema WHERE name = 'sessions'")):
            return None
        found = _select(conn, "SELECT * FROM sessions WHERE id = ?", SESSION)
        if not found:
            return None
        key = found[0]["key"]
        low, high = messages.row_id(key, 0), messages.row_id(key, messages.MAX_SEQ)
        faults = [str(row[0]) for row in conn.execute("PRAGMA integrity_check") if row[0] != "ok"]
        faults += [f"foreign key {row}" for row in conn.execute("PRAGMA foreign_key_check")]
        turns = _select(conn, "SELECT * FROM turns WHERE session_key = ? ORDER BY key", key)
        return Image(
            session=found[0],
            rows=_select(
                conn,
                "SELECT id, role, wire, extra, timestamp, turn_key, hash, active, compacted FROM messages"
                " WHERE id > ? AND id <= ? ORDER BY id",
                low,
                high,
            ),
            turns=turns,
            calls=_select(
                conn,
                "SELECT c.*, t.id || '.' || c.step || '.' || c.idx AS ledger_id FROM tool_calls c"
                " JOIN turns t ON t.key = c.turn_key WHERE t.session_key = ? ORDER BY turn_key, step, idx",
                key,
            ),
            events=_select(conn, "SELECT * FROM session_events WHERE id > ? AND id <= ? ORDER BY id", low, high),
            lease=next(iter(_select(conn, "SELECT * FROM session_leases WHERE session_key = ?", key)), None),
            faults=faults,
        )
    finally:
        conn.close()


def _select(conn: apsw.Connection, sql: str, *values: Any) -> list[Record]:
    cursor = conn.execute(sql, values)
    names: list[str] = []
    found: list[Record] = []
    for row in cursor:
        names = names or [column[0] for column in cursor.get_description()]
        found.append(dict(zip(names, row, strict=True)))
    return found


# -- after every life ----------------------------------------------------------------------


def look(folder: Path, before: Image | None, died: str = "") -> tuple[Image | None, Findings]:
    """Read the store of a trial after a life and check all that must hold at any time.

    `before` is the image after the last life, `died` the point at which this one was killed.
    """
    found = Findings()
    outside = Outside(folder / "outside")
    image = load(folder / "home")
    if image is None:
        for witness in ("acks", "seen", "effects"):
            if outside.read(witness):
                found.add("I1" if witness == "acks" else "I5", f"{witness} has records, the store is empty", lost=1)
        return None, found
    rows = [
        {
            **json.loads(row["wire"]),
            **json.loads(row["extra"] or "{}"),
            "seq": row["id"] & messages.MAX_SEQ,
            "turn": row["turn_key"],
        }
        for row in image.rows
    ]
    _file(folder, image, found)
    _numbers(image, found)
    _prefix(image, before, found)
    _acknowledged(image, rows, outside, found)
    _ledger(image, rows, found)
    if died == "executor.finished_kept" and all(call["state"] != "finished" for call in image.calls):
        found.add("I3", "a result was kept behind a slower call and is not in the ledger")
    _effects(image, rows, outside, found)
    _seen(image, rows, outside, found)
    _fences(image, before, found)
    _requests(outside, found)
    return image, found


def _file(folder: Path, image: Image, found: Findings) -> None:
    for fault in image.faults:
        found.add("I10", fault)
    try:
        with SessionDB(folder / "home" / "state.db", read_only=True) as db:
            db.get_messages_as_conversation(SESSION)
    except HermesError as error:
        found.add("I10", str(error))
    for path in (folder / "home").rglob("*"):
        if path.is_file() and CANARY.encode() in path.read_bytes():
            found.add("I13", f"the key stands in {path.name}")


def _numbers(image: Image, found: Findings) -> None:
    key = image.session["key"]
    for what, rows, last in (
        ("row", image.rows, image.session["last_seq"]),
        ("event", image.events, image.session["last_event"]),
    ):
        if [row["id"] for row in rows] != [messages.row_id(key, number) for number in range(1, last + 1)]:
            found.add("I2", f"{what} numbers are not 1..{last}")
    if image.session["message_count"] != len(image.rows):
        found.add("I2", f"message_count is {image.session['message_count']}, there are {len(image.rows)} rows")
    announced = [event["ref"] for event in image.events if event["kind"] == "message"]
    if announced != [str(number) for number in range(1, len(image.rows) + 1)]:
        found.add("I2", "the events do not announce each row once, in order")


def _prefix(image: Image, before: Image | None, found: Findings) -> None:
    if before is None:
        return
    if image.rows[: len(before.rows)] != before.rows:
        found.add("I15", "rows that were stored are gone or were changed")
    now = {turn["key"]: turn for turn in image.turns}
    for turn in before.turns:
        if TurnState(turn["state"]).is_end and now.get(turn["key"]) != turn:
            found.add("I15", f"{turn['id']} had ended and was changed")
    calls = {call["ledger_id"]: call for call in image.calls}
    for call in before.calls:
        later = calls.get(call["ledger_id"])
        if later is None:
            found.add("I3", f"call {call['ledger_id']} is gone")
        elif _ORDER[later["state"]] < _ORDER[call["state"]] or (call["state"], later["state"]) in _FORBIDDEN:
            found.add("I3", f"call {call['ledger_id']} went from {call['state']} to {later['state']}")


_FORBIDDEN = frozenset((("finished", "unknown"), ("done", "unknown"), ("unknown", "done")))


def _acknowledged(image: Image, rows: list[Record], outside: Outside, found: Findings) -> None:
    users = Counter(row["content"] for row in rows if row["role"] == "user")
    waiting = Counter(turn["input"] for turn in image.turns if turn["input"] is not None)
    of_row = Counter(turn["user_seq"] for turn in image.turns if turn["user_seq"] is not None)
    for text, count in (users + waiting).items():
        if count != 1:
            found.add("I1", f"message {text!r} was taken {count} times")
    for row in rows:
        if row["role"] == "user" and of_row[row["seq"]] != 1:
            found.add("I1", f"message {row['content']!r} has {of_row[row['seq']]} turns")
    ids = {turn["id"]: turn for turn in image.turns}
    for record in outside.read("acks"):
        text, turn_id = record["text"], record["turn"]
        if text not in users and text not in waiting:
            found.add("I1", f"message {text!r} was acknowledged and is not in the store", lost=1)
        elif turn_id:
            turn = ids.get(turn_id, {"input": None, "user_seq": None})
            own = [row["content"] for row in rows if row["seq"] == turn["user_seq"]]
            if text not in (turn["input"], *own):
                found.add("I1", f"message {text!r} was acknowledged as {turn_id}, which is another's turn or none")
    for turn in image.turns:
        resumes = turn["crash_resumes"]
        if turn["attempts"] > 2 or resumes > MAX_CRASH_RESUMES:
            found.add("I12", f"{turn['id']} has {turn['attempts']} attempts and {resumes} resumes")


def _ledger(image: Image, rows: list[Record], found: Findings) -> None:
    proposed = {call["call_id"] for call in image.calls}
    answers: dict[str, list[Record]] = {}
    for row in rows:
        if row["role"] == "tool":
            answers.setdefault(row["tool_call_id"], []).append(row)
        for call in row.get("tool_calls") or ():
            if call["id"] not in proposed:
                found.add("I3", f"call {call['id']} stands in a reply and not in the ledger")
    last: dict[tuple[int, int], int] = {}
    for call in image.calls:
        own = answers.pop(call["call_id"], [])
        settled = call["state"] in ("done", "unknown")
        if len(own) != settled:
            found.add("I3", f"call {call['ledger_id']} is {call['state']} and has {len(own)} rows")
        elif own and own[0]["seq"] != call["result_seq"]:
            found.add("I3", f"call {call['ledger_id']} names row {call['result_seq']}, its row is {own[0]['seq']}")
        step = (call["turn_key"], call["step"])
        if own and own[0]["seq"] < last.get(step, 0):
            found.add("I3", f"the row of call {call['ledger_id']} stands before an earlier call's")
        last[step] = own[0]["seq"] if own else messages.MAX_SEQ
        if call["state"] == "finished" and call["result"] is None:
            found.add("I3", f"call {call['ledger_id']} is finished without a result")
    for call_id in answers:
        found.add("I3", f"a row answers {call_id}, which is not in the ledger")
    if image.session["tool_call_count"] != len(image.calls):
        found.add("I2", f"tool_call_count is {image.session['tool_call_count']}, the ledger has {len(image.calls)}")


def _effects(image: Image, rows: list[Record], outside: Outside, found: Findings) -> None:
    skipped = {row["seq"] for row in rows if row.get("effect_disposition") == "none"}
    calls = {call["ledger_id"]: call for call in image.calls}
    counts = Counter(record["call"] for record in outside.read("effects"))
    for ledger_id, count in counts.items():
        call = calls.get(ledger_id)
        if call is None or call["state"] == "proposed":
            found.add("I4", f"call {ledger_id} took effect, the ledger says {call['state'] if call else 'nothing'}")
        elif call["effect"] == "unsafe" and count > 1:
            found.add("I4", f"unsafe call {ledger_id} took effect {count} times")
    for call in calls.values():
        acts = call["name"].startswith("witness_") and call["effect"] != "pure"
        took_effect = bool(counts[call["ledger_id"]])
        if call["result_seq"] in skipped:
            if took_effect:
                found.add("I4", f"call {call['ledger_id']} is told as skipped and took effect")
        elif acts and call["state"] in ("done", "finished") and not took_effect:
            found.add("I4", f"call {call['ledger_id']} is {call['state']} and never took effect")


def _seen(image: Image, rows: list[Record], outside: Outside, found: Findings) -> None:
    texts = {row["content"] for row in rows if row["role"] == "assistant"}
    results = {(row["tool_call_id"], digest(row["content"])) for row in rows if row["role"] == "tool"}
    states = {call["call_id"]: call for call in image.calls}
    turns = {turn["id"]: turn for turn in image.turns}
    finals = {(row["turn"], row["content"]) for row in rows if row["role"] == "assistant"}
    shapes: set[tuple[str, ...]] = set()
    for record in outside.read("seen"):
        match record["kind"]:
            case "interim" if record["text"] not in texts:
                found.add("I5", f"text {record['text']!r} was shown and is not stored", lost=1)
            case "start":
                call = states.get(record["call"])
                if call is None or (call["effect"] != "pure" and call["state"] == "proposed"):
                    found.add("I5", f"call {record['call']} was shown as started and is not")
            case "tool" if (record["call"], record["digest"]) not in results:
                found.add("I5", f"a result of call {record['call']} was shown and is not stored", lost=1)
            case "result":
                shapes.add(tuple(record["keys"]))
                _final(record, turns, finals, found)
            case _:
                pass
    if len(shapes) > 1:
        found.add("keys", "two results have different keys")


def _final(record: Record, turns: dict[str, Record], finals: set[tuple[int, str]], found: Findings) -> None:
    if record["exit"] == "session_persistence_failed":
        return
    turn = turns.get(record["turn"] or "")
    if turn is None:
        found.add("I5", f"a result of turn {record['turn']} was given, which is not stored", lost=1)
    elif record["failed"]:
        if turn["state"] not in (TurnState.FAILED, TurnState.CANCELLED):
            found.add("I5", f"{turn['id']} was reported as failed and is {turn['state']}")
    elif turn["state"] != TurnState.DONE or (turn["key"], record["text"]) not in finals:
        found.add("I5", f"the answer {record['text']!r} was given; {turn['id']} is {turn['state']}", lost=1)


def _fences(image: Image, before: Image | None, found: Findings) -> None:
    now = image.session["fence"]
    last = 0
    for call in image.calls:
        if call["state"] in ("done", "unknown") and call["fence"] < last:
            found.add("I8", f"call {call['ledger_id']} was settled with an older fence than the call before it")
        last = max(last, call["fence"]) if call["state"] in ("done", "unknown") else last
        if call["fence"] > now:
            found.add("I8", f"call {call['ledger_id']} has a fence that was never given out")
    if before is None:
        return
    if now < before.session["fence"]:
        found.add("I8", f"the session's fence fell from {before.session['fence']} to {now}")
    earlier = {turn["key"]: turn for turn in before.turns}
    for turn in image.turns:
        old = earlier.get(turn["key"])
        if old and turn["crash_resumes"] > old["crash_resumes"] and turn["fence"] <= old["fence"]:
            found.add("I8", f"{turn['id']} was taken over without a new fence")


def _requests(outside: Outside, found: Findings) -> None:
    before = b""
    for number, line in enumerate(outside.lines("requests")):
        pair = hash((before, line))
        if pair not in _accepted:
            faults = list(_refusals(before, line))
            for fault in faults:
                found.add("wire", f"request {number} {fault}")
            if not faults:
                _accepted.add(pair)
        before = line


def _refusals(before: bytes, line: bytes) -> Iterator[str]:
    """What is wrong with a request that follows another one."""
    encoded: str = json.loads(line)["encoded"]
    if before and not encoded.startswith(json.loads(before)["encoded"][:-1]):
        yield "does not begin with the bytes of the one before"
    fault = rules.check_strict(json.loads(encoded), alternation=True)
    if fault:
        yield f"would be refused: {fault}"


_accepted: set[int] = set()
"""Pairs of requests that were found good; most of them are looked at after every life of a trial."""


# -- when faults have stopped --------------------------------------------------------------------


def settled(image: Image | None) -> Iterator[str]:
    """What keeps the session from being at rest."""
    if image is None:
        yield "I7: there is no session"
        return
    for turn in image.turns:
        if not TurnState(turn["state"]).is_end:
            yield f"I7: {turn['id']} is still {turn['state']}"
    if image.lease is not None and processes.is_alive(image.lease["owner"]) is not False:
        yield "I7: the session is still held"


def old_fence_is_refused(folder: Path) -> Iterator[str]:
    """Write with an old fence, and with an old end of the session; both must be refused."""
    with SessionDB(folder / "home" / "state.db") as db:
        claim = db.claim(SESSION)
        try:
            head = claim._head
            stale = sessions.Head(head.key, head.id, head.fence - 1, head.last_seq, head.last_event, head.head)
            behind = sessions.Head(head.key, head.id, head.fence, head.last_seq, head.last_event - 1, head.head)
            row = messages.Row("user", b'{"role":"user","content":"of a dead owner"}', None, 0.0)
            for what, wrong in (("fence", stale), ("event number", behind)):
                writer = SessionWriter(claim._database, claim._anchors, wrong)
                _keeper.forget(writer)
                try:
                    writer.commit(Batch(rows=[row], begin=True))
                except StaleLease:
                    continue
                yield f"I8: a write with an old {what} was taken"
        finally:
            claim.release()


def transcript(folder: Path, image: Image) -> list[tuple[Any, ...]]:
    """The session without what differs between two runs: ids, folders, and what nobody can know."""
    names = {turn["id"]: f"turn_{number}" for number, turn in enumerate(image.turns)}
    unknown = {call["result_seq"] for call in image.calls if call["state"] == "unknown"}

    def plain(text: str) -> str:
        return _TURN_ID.sub(lambda match: names.get(match[0], match[0]), text).replace(str(folder), "<folder>")

    lines: list[tuple[Any, ...]] = []
    for row in image.rows:
        known = row["id"] & messages.MAX_SEQ not in unknown
        lines.append(("row", row["role"], plain(row["wire"]) if known else "?"))
    return lines + [("turn", turn["state"], turn["reason"]) for turn in image.turns]


def ledger(image: Image) -> list[tuple[Any, ...]]:
    """The state of every call, for comparing two recoveries."""
    return [(call["step"], call["idx"], call["call_id"], call["effect"], call["state"]) for call in image.calls]
