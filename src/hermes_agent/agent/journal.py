"""What of a turn is stored, and when: the only writer of its rows.

The loop and the executor stage what belongs to a row (the calls it proposes, the call it
settles, the end of the turn); the next flush stores row and ledger in one transaction.
What is stored is marked on the row itself; a failed flush marks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hermes_agent.store.session_db import SessionDB, encode_row
from hermes_agent.store.turns import CallKey, CallRecord, CallState, Proposal
from hermes_agent.store.usage import UsageDelta
from hermes_agent.store.writer import Batch, SessionWriter, TurnEnd

Message = dict[str, Any]

PERSISTED = "_db_persisted"


class Journal:
    """Stages and stores the rows of one agent's turns."""

    def __init__(self) -> None:
        self.writer: SessionWriter | None = None
        """The session's lease while a turn runs; without it rows are stored with no ledger."""
        self._staged = Batch()
        self._results: dict[int, tuple[CallKey, CallState]] = {}
        self._keys: dict[str, CallKey] = {}
        self._records: dict[str, CallRecord] = {}
        self._step = 0
        self._settled: Message | None = None
        self._settled_count = 0

    # -- turns --------------------------------------------------------------

    def attach(self, writer: SessionWriter | None) -> None:
        """Write under this lease from now on (None: under none) and forget what was staged."""
        self.writer = writer
        self._staged = Batch()
        self._results = {}
        self._keys, self._records = {}, {}
        self._step = 0
        self._settled, self._settled_count = None, 0

    def stage_begin(self) -> None:
        """The next row begins a turn."""
        self._staged.begin = True

    def restore(self) -> list[CallRecord]:
        """Read the ledger of the running turn's last step; returns its calls in order."""
        if self.writer is None:
            return []
        self._step = self.writer.last_step()
        records = self.writer.ledger(self._step)
        self._keys = {record.call_id: record.key for record in records}
        self._records = {record.call_id: record for record in records}
        return records

    def stage_end(self, end: TurnEnd) -> None:
        """The turn ends with the next flush."""
        self._staged.end = end

    def stage_usage(self, delta: UsageDelta) -> None:
        """Count a model call with the next flush."""
        staged = self._staged.usage
        self._staged.usage = delta if staged is None else staged.plus(delta)

    # -- calls --------------------------------------------------------------

    def stage_proposals(self, calls: Sequence[tuple[str, str, str]]) -> None:
        """The next assistant row proposes these calls, each (id, name, effect)."""
        if self.writer is None or (self.writer.turn_key is None and not self._staged.begin):
            return
        self._step += 1
        proposals = [
            Proposal(CallKey(self._step, index), call_id, name, effect)
            for index, (call_id, name, effect) in enumerate(calls)
        ]
        self._keys = {proposal.call_id: proposal.key for proposal in proposals}
        self._records = {}
        self._staged.proposals = proposals

    def record(self, call_id: str) -> CallRecord | None:
        """What a crashed process left about a call; None for a call of this process."""
        return self._records.get(call_id)

    def asks_about(self, call_id: str) -> bool:
        """Whether a started call still waits for a person, so that it has provably not run."""
        key = self._keys.get(call_id)
        return key is not None and self.writer is not None and self.writer.asks_about(key)

    def public_id(self, call_id: str) -> str:
        """The ledger's id `turn.step.index` of a call, "" when it has none."""
        key = self._keys.get(call_id)
        return "" if key is None or self.writer is None else self.writer.call_name(key)

    def start(self, call_ids: Sequence[str]) -> None:
        """Store, before dispatch, that these calls run; raises when that is not durable."""
        keys = [self._keys[call_id] for call_id in call_ids if call_id in self._keys]
        if keys and self.writer is not None:
            self.writer.start_calls(keys)

    def finish(self, call_id: str, result: str) -> None:
        """Store the result of a call that waits for an earlier one of its batch."""
        key = self._keys.get(call_id)
        if key is not None and self.writer is not None:
            self.writer.finish_call(key, result)

    def stage_result(self, row: Message, call_id: str, state: CallState) -> None:
        """`row` settles that call."""
        key = self._keys.get(call_id)
        if key is not None:
            self._results[id(row)] = (key, state)

    # -- storing ------------------------------------------------------------

    def flush(self, db: SessionDB, session_id: str, messages: list[Message], history: Sequence[Message] | None) -> None:
        """Make every new row of `messages`, and what is staged, durable in one transaction.

        Rows that are members of `history` count as stored. Raises what the store raises.
        """
        rows = self._new_rows(messages, history)
        batch = self._staged
        if not rows and not batch:
            return
        batch.rows = [encode_row(row) for row in rows]
        batch.results = {i: self._results[id(row)] for i, row in enumerate(rows) if id(row) in self._results}
        if self.writer is not None and self.writer.session_id == session_id:
            self.writer.commit(batch)
        else:
            db.append_rows(session_id, batch.rows)
        self._staged = Batch()
        self._results = {}
        for row in rows:
            row[PERSISTED] = True
        self._settled_count = len(messages)
        self._settled = messages[-1] if messages else None

    def _new_rows(self, messages: list[Message], history: Sequence[Message] | None) -> list[Message]:
        count = self._settled_count
        if not (count and count <= len(messages) and messages[count - 1] is self._settled):
            count = 0
        for row in history or ():
            row.setdefault(PERSISTED, True)
        return [row for row in messages[count:] if not row.get(PERSISTED) and row.get("role") != "system"]
