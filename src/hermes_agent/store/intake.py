"""What delivery asks of the store: take a message once, find its turn, and keep what waits for a person."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import apsw

from hermes_agent import errors, failpoints
from hermes_agent.store import approvals, conversations, deliveries, events, leases, messages, sessions, turns, writer
from hermes_agent.store.approvals import ApprovalRecord, ApprovalState
from hermes_agent.store.deliveries import Incoming, Limits
from hermes_agent.store.events import Position, StoredEvent
from hermes_agent.store.session_db import SessionDB, encode_row
from hermes_agent.store.turns import TurnRecord, TurnState
from hermes_agent.store.writer import SessionWriter

Message = dict[str, Any]


class Taken(NamedTuple):
    """A message that is durable."""

    turn: TurnRecord
    session_id: str
    is_new: bool
    claim: SessionWriter | None
    """The session's lease, with the turn running in it; None when the turn waits, or was there already."""


class Place(NamedTuple):
    """A reader's place in a session's events."""

    session_key: int
    position: Position


class TurnView(NamedTuple):
    """A turn with what its readers ask of it."""

    turn: TurnRecord
    session_id: str
    sender: str
    scope: str
    message_id: str
    model: str | None
    reply: str
    """Text of its answer; "" while there is none."""
    beside: Mapping[str, Any]
    """What is stored beside that text: `finish_reason`, `reasoning`."""


class Intake:
    """Takes messages into one store and tells what became of them."""

    def __init__(self, db: SessionDB, limits: Limits) -> None:
        self._db = db
        self._limits = limits

    # -- taking -------------------------------------------------------------

    def take(
        self,
        session_id: str,
        message: Incoming,
        user: Message,
        *,
        at_once: bool,
        create: Mapping[str, Any] | None = None,
    ) -> Taken:
        """Make a message durable, once: a repeat under its id is given the turn that it began.

        `user` is the message as a row. With `at_once` the turn begins in the same transaction when nothing
        else of its session runs or waits; else it waits as a row. With `create` (source and
        other fields) a missing session is made.

        Raises `MessageConflict`, `QueueFull`, `UnknownSession`, `ConversationMoved` when it does
        not belong there (`Incoming.thread`), or what the store says; nothing of the message is stored then.
        """
        database, witness = self._db.database, self._db.anchors
        row, turn_id = encode_row(user), message.turn_id or turns.new_turn_id()

        def work(conn: apsw.Connection) -> tuple[TurnRecord, bool, sessions.Head | None, int]:
            seen = deliveries.known(conn, message)
            if seen is not None:
                return seen, False, None, 0
            made = 0
            head = sessions.head(conn, session_id) if create is not None else sessions.known(conn, session_id)
            if head is None:
                sessions.ensure(conn, session_id, str((create or {})["source"]), create or {})
                head = sessions.known(conn, session_id)
                made = head.key
            if message.thread is not None:
                conversations.enter(conn, head, message.thread, is_new=bool(made))
                head = sessions.known(conn, session_id)
            if not at_once or _is_busy(conn, head.key):
                deliveries.check_room(conn, head.key, self._limits)
                waiting = deliveries.accept(conn, head, message, turn_id)
                conversations.remember(conn, waiting.key, message.thread)
                return waiting, True, None, made
            head = head._replace(fence=leases.take(conn, head.key))
            if not made:
                witness.check_end(head.key, session_id, head.last_seq)
            seq = deliveries.unanswered(conn, head, message)
            new, turn = writer.begin_turn(
                conn, head, [] if seq else [row], turn_id,
                user_seq=seq, options=deliveries.options_of(message), deadline=message.deadline,
            )  # fmt: skip
            deliveries.remember(conn, message, turn.key)
            conversations.remember(conn, turn.key, message.thread)
            return turn, True, new, made

        failpoints.hit("intake.before_take")
        turn, is_new, head, made = database.write(work, landed=lambda conn: turns.find(conn, turn_id) is not None)
        failpoints.hit("intake.taken")
        if made:
            witness.forget(made)
        claim = None
        if head is not None:
            witness.record(head.key, head.last_seq, head.head)
            claim = SessionWriter(database, witness, head, (turn.key, turn.id))
        return Taken(turn, self.session_of(turn) if not is_new else session_id, is_new, claim)

    def withdraw(self, turn: TurnRecord, state: TurnState, reason: errors.FailureReason, prose: str) -> bool:
        """End a turn that still waits; False when it has begun, or is over."""
        return self._db.database.write(lambda conn: turns.withdraw(conn, turn.key, str(reason), state, prose))

    def end_waiting(self, turn: TurnRecord, state: TurnState, reason: errors.FailureReason, prose: str) -> bool:
        """End a turn that waits to be tried again; False when it waits no more."""
        return self._db.database.write(lambda conn: turns.give_up(conn, turn.key, state, str(reason), prose))

    def ask_to_stop(self, turn: TurnRecord) -> None:
        """Store that a running turn shall not go on, also not in another process."""
        self._db.database.write(lambda conn: turns.ask_to_stop(conn, turn.key, str(errors.FailureReason.INTERRUPTED)))

    # -- looking ------------------------------------------------------------

    def known(self, message: Incoming) -> TurnRecord | None:
        """The turn that this very message began before; raises `MessageConflict`."""
        return self._db.database.read(lambda conn: deliveries.known(conn, message))

    def find(self, turn_id: str) -> TurnView | None:
        """A turn by its public id, with its answer."""
        # what is read of a turn that has ended stays so, and of another one nothing else is read
        with self._db.database.reading() as conn:
            turn = turns.find(conn, turn_id)
            return None if turn is None else _view(conn, turn)

    def find_message(self, sender: str, message_id: str) -> TurnView | None:
        """The turn of a sender's message by the sender's own id."""

        def work(conn: apsw.Connection) -> TurnView | None:
            turn = deliveries.find_message(conn, sender, message_id)
            return None if turn is None else _view(conn, turn)

        return self._db.database.read(work)

    def session_of(self, turn: TurnRecord) -> str:
        """The id of a turn's session."""
        return self._db.database.read(lambda conn: deliveries.session_of(conn, turn.session_key))

    def waiting(self, session_id: str) -> list[TurnRecord]:
        """The session's turns that have not ended, oldest first."""
        return self._db.open_turns(session_id)

    def unfinished(self) -> list[tuple[str, TurnRecord]]:
        """All delivered turns that have not ended, oldest first, each with its session's id."""
        return self._db.database.read(deliveries.unfinished)

    def unanswered(self, sender: str | None, limit: int) -> list[TurnView]:
        """At most `limit` delivered turns that have not ended, a sender's or all, oldest first."""

        def work(conn: apsw.Connection) -> list[TurnView]:
            return [_view(conn, turn) for turn in deliveries.unanswered_of(conn, sender, limit)]

        return self._db.database.read(work)

    def forget_old(self, now: float) -> int:
        """Drop ids that are older than their promise."""
        return self._db.database.write(lambda conn: deliveries.forget_old(conn, now - deliveries.KEPT_SECONDS))

    def unknown_effects(self) -> int:
        """How many calls there are of which nobody knows whether they took effect."""
        return self._db.database.read(turns.unknown_effects)

    # -- what happened ------------------------------------------------------

    def place(self, session_id: str, event: int) -> Place:
        """Where a reader stands who has seen the session's events up to that number."""

        def work(conn: apsw.Connection) -> Place:
            head = sessions.known(conn, session_id)
            at = max(min(event, head.last_event), 0)
            return Place(head.key, events.position(conn, head.key, at))

        return self._db.database.read(work)

    def events(self, place: Place, limit: int = 200) -> tuple[list[StoredEvent], Place]:
        """What happened behind a place, in order and without gaps, and the place behind that."""
        found, position = self._db.database.read(
            lambda conn: events.read(conn, place.session_key, place.position, limit)
        )
        return found, Place(place.session_key, position)

    # -- questions to a person ------------------------------------------------

    def decide(
        self, approval_id: str, state: ApprovalState, answer: str | None, by: str
    ) -> tuple[bool, ApprovalRecord]:
        """Decide a question; the first decision counts, and only it is True.

        Raises `UsageError` for an unknown one.
        """

        def work(conn: apsw.Connection) -> tuple[bool, ApprovalRecord]:
            counts = approvals.decide(conn, approval_id, state, answer, by, time.time())
            return counts, approvals.known(conn, approval_id)

        return self._db.database.write(work)

    def is_granted(self, turn_id: str, request: dict[str, Any]) -> bool:
        """Whether a person allowed exactly this for the rest of the turn's session."""

        def work(conn: apsw.Connection) -> bool:
            return approvals.granted(conn, _known_turn(conn, turn_id).session_key, request)

        return self._db.database.read(work)

    def approval(self, approval_id: str) -> ApprovalRecord | None:
        """A question by its id."""
        return self._db.database.read(lambda conn: approvals.find(conn, approval_id))

    def approvals(self, turn_id: str | None = None) -> list[ApprovalRecord]:
        """Open questions, of one turn or of all."""

        def work(conn: apsw.Connection) -> list[ApprovalRecord]:
            if turn_id is None:
                return approvals.waiting(conn)
            return approvals.waiting(conn, _known_turn(conn, turn_id).key)

        return self._db.database.read(work)

    def turn_by_key(self, turn_key: int) -> TurnView:
        """The turn that a question belongs to."""
        return self._db.database.read(lambda conn: _view(conn, turns.by_key(conn, turn_key)))


def _is_busy(conn: apsw.Connection, session_key: int) -> bool:
    """Whether something of the session runs or waits."""
    if turns.open_turns(conn, session_key):
        return True
    holder = leases.holder(conn, session_key)
    return holder is not None and holder.is_live()


def _known_turn(conn: apsw.Connection, turn_id: str) -> TurnRecord:
    found = turns.find(conn, turn_id)
    if found is None:
        raise errors.UsageError(f"there is no turn {turn_id!r}")
    return found


def _view(conn: apsw.Connection, turn: TurnRecord) -> TurnView:
    answered = turn.state is TurnState.DONE and turn.end_seq is not None
    answer = messages.row_id(turn.session_key, turn.end_seq or 0) if answered else None
    for session_id, model, sender, scope, message_id, content, extra in conn.execute(
        "SELECT s.id, s.model, i.sender, i.scope, i.message_id, m.content, CAST(m.extra AS BLOB) FROM sessions s"
        " LEFT JOIN inbox i ON i.turn_key = ?1 LEFT JOIN messages m ON m.id = ?2 WHERE s.key = ?3",
        (turn.key, answer, turn.session_key),
    ):
        reply, beside = str(content or ""), dict[str, Any]()
        if extra is not None:
            beside = messages.decoded(cast("bytes", extra))
        if not answered and turn.state.is_end:
            reply = turn.prose or ""
        named = None if model is None else str(model)
        told = (str(sender or ""), str(scope or ""), str(message_id or ""))
        return TurnView(turn, str(session_id), *told, named, reply, beside)
    raise errors.UnknownSession("the session of this turn was deleted")
