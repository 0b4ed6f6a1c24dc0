"""What the model calls of a session used."""

from __future__ import annotations

import time
from dataclasses import dataclass

import apsw

from hermes_agent.store import encoding


@dataclass(frozen=True, slots=True)
class UsageDelta:
    """Tokens of one or more model calls, to be added."""

    model: str
    provider: str
    api_calls: int = 1
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0

    def plus(self, other: UsageDelta) -> UsageDelta:
        """Both together; they must be of one model and provider."""
        return UsageDelta(
            self.model,
            self.provider,
            self.api_calls + other.api_calls,
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cache_read_tokens + other.cache_read_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


def add(conn: apsw.Connection, session_key: int, delta: UsageDelta) -> None:
    """Add to the session's counters for that model."""
    now = time.time()
    conn.execute(
        "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
        " api_calls = api_calls + excluded.api_calls, input_tokens = input_tokens + excluded.input_tokens,"
        " output_tokens = output_tokens + excluded.output_tokens,"
        " cache_read_tokens = cache_read_tokens + excluded.cache_read_tokens,"
        " cache_write_tokens = cache_write_tokens + excluded.cache_write_tokens,"
        " reasoning_tokens = reasoning_tokens + excluded.reasoning_tokens, last_seen = excluded.last_seen",
        (
            session_key, encoding.clean_text(delta.model), encoding.clean_text(delta.provider), delta.api_calls,
            delta.input_tokens, delta.output_tokens,
            delta.cache_read_tokens, delta.cache_write_tokens, delta.reasoning_tokens, now, now,
        ),
    )  # fmt: skip
