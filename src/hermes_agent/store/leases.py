"""The right to write one session: one owner at a time, with a number that only grows.

Every write under a lease carries its fence; a writer that was overtaken finds another
number in the session's row and writes nothing. Times are boot seconds with the boot's
id, so a step of the wall clock neither steals nor freezes a lease.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import apsw

from hermes_agent import errors
from hermes_agent.store import processes

TTL = 30.0
"""Seconds a lease is good for without renewal."""
RENEW_EVERY = 10.0


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a session's lease."""

    fence: int
    owner: str
    boot_id: str
    expires: float

    def is_live(self) -> bool:
        """Whether the holder may still write: its process runs, or cannot be seen and has time left."""
        if self.boot_id != processes.boot_id() or processes.boot_seconds() >= self.expires:
            return False
        return processes.is_alive(self.owner) is not False


def holder(conn: apsw.Connection, session_key: int) -> Holder | None:
    """The lease row of a session, whether it is still good or not."""
    for values in conn.execute(
        "SELECT fence, owner, boot_id, expires FROM session_leases WHERE session_key = ?", (session_key,)
    ):
        return Holder(*cast("tuple[int, str, str, float]", values))
    return None


def refuse_if_held(conn: apsw.Connection, session_key: int, session_id: str) -> None:
    """Raise `SessionBusy` while somebody's lease on the session is good."""
    found = holder(conn, session_key)
    if found is not None and found.is_live():
        pid = processes.pid_of(found.owner)
        raise errors.SessionBusy(f"session {session_id} is in use by process {pid}: a turn is running there")


def acquire(conn: apsw.Connection, session_key: int, session_id: str) -> int:
    """Take the session's lease and return its new fence; raises `SessionBusy`."""
    refuse_if_held(conn, session_key, session_id)
    return take(conn, session_key)


def take(conn: apsw.Connection, session_key: int) -> int:
    """Take the lease of a session that nobody holds, as the caller has found in this transaction; returns its fence."""
    rows = conn.execute("UPDATE sessions SET fence = fence + 1 WHERE key = ? RETURNING fence", (session_key,))
    fence = cast("int", rows.fetchall()[0][0])
    conn.execute(
        "INSERT OR REPLACE INTO session_leases VALUES (?, ?, ?, ?, ?)",
        (session_key, fence, processes.identity(), processes.boot_id(), processes.boot_seconds() + TTL),
    )
    return fence


def renew(conn: apsw.Connection, session_key: int, fence: int) -> None:
    """Extend the lease, expired or not; raises `StaleLease` when somebody else has taken it."""
    conn.execute(
        "UPDATE session_leases SET expires = ? WHERE session_key = ? AND fence = ?",
        (processes.boot_seconds() + TTL, session_key, fence),
    )
    if conn.changes() != 1:
        raise errors.StaleLease


def release(conn: apsw.Connection, session_key: int, fence: int) -> None:
    """Give the lease back; nothing happens when it is not ours any more."""
    conn.execute("DELETE FROM session_leases WHERE session_key = ? AND fence = ?", (session_key, fence))
