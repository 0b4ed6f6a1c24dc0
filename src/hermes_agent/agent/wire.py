"""The request's messages, kept as bytes: each row is encoded once, a request is their join."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from hermes_agent.store import encoding
from hermes_agent.transcript import rules

Message = dict[str, Any]


class WireMessages(Sequence[Message]):
    """A snapshot of the messages of one request: dicts for anybody, bytes for our own client."""

    def __init__(self, rows: list[Message], parts: list[bytes]) -> None:
        self._rows = rows
        self._parts = parts
        self._length = len(rows)

    @property
    def encoded(self) -> bytes:
        """The JSON array of the messages."""
        return b"[" + b",".join(self._parts[: self._length]) + b"]"

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return [_sent(row) for row in self._rows[: self._length][index]]
        return _sent(self._rows[: self._length][index])

    def __iter__(self) -> Iterator[Message]:
        return map(_sent, self._rows[: self._length])


class WireTools(list[Mapping[str, Any]]):
    """The tools of a turn's requests: dicts for anybody, bytes for our own client."""

    encoded: bytes

    @classmethod
    def of(cls, definitions: Iterable[Mapping[str, Any]]) -> WireTools:
        """Encode the definitions once."""
        tools = cls(definitions)
        tools.encoded = b"[" + b",".join(map(encoding.encode, tools)) + b"]"
        return tools


class Wire:
    """Follows the live transcript of one turn and renders only what is new.

    The history is brought into order once, by the rule engine; rows of the turn are legal
    by construction, so that the bytes of rows 0..k stay the same from step to step.
    """

    def __init__(self, lead: Iterable[Message], history: list[Message]) -> None:
        self._rows: list[Message] = []
        self._parts: list[bytes] = []
        self._seen = 0
        for row in (*lead, *rules.sanitize(history)):
            self._add(row)

    def follow(self, transcript: list[Message], start: int) -> None:
        """Render the rows of `transcript` that came since the last call; its turn begins at `start`."""
        for row in transcript[max(self._seen, start) :]:
            note = rules.note_between(self._rows[-1] if self._rows else None, row)
            if note is not None:
                self._add(note)
            self._add(row)
        self._seen = len(transcript)

    def messages(self) -> WireMessages:
        """The messages of the next request."""
        return WireMessages(self._rows, self._parts)

    def _add(self, row: Message) -> None:
        self._rows.append(row)
        self._parts.append(encoding.encode(_sent(row)))


def _sent(row: Message) -> Message:
    """The part of a row that is sent; a message that was stored without its frame is sent with it."""
    sent = encoding.split(row)[0]
    if "api_content" in row:
        sent["content"] = row["api_content"]
    return sent
