"""A witness outside the database: the last committed row of each session.

SQLite cannot see that committed rows at the end of its log are gone. This file can: one
64-byte slot a session, written after each commit, compared when the session is next
opened. It is never synced, so after a power cut it may be behind, never ahead of a
store that syncs its commits; what one that does not sync has recorded counts until the
machine starts anew.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import zlib
from pathlib import Path

from hermes_agent import errors
from hermes_agent.store import processes

_SLOT = struct.Struct("<qq16s8s8s")
_SUM = struct.Struct("<I")
_SIZE = 64
_ANY_BOOT = b"\0" * 8


class Anchors:
    """The anchor file of one store; slots of another store that had its name count as empty."""

    def __init__(self, path: Path, store_id: bytes, *, synced: bool = True) -> None:
        self.path = path
        self._store = store_id[:8].ljust(8, b"\0")
        self._boot = _ANY_BOOT if synced else _this_boot()
        self._fd = -1
        self._opening = threading.Lock()
        self._ends: dict[int, int] = {}

    def close(self) -> None:
        with self._opening:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def record(self, session_key: int, seq: int, head: bytes) -> None:
        """Remember the session's last row; a failure to write is no failure of the commit."""
        body = _SLOT.pack(session_key, seq, head, self._store, self._boot)
        self._put(session_key, body + _SUM.pack(zlib.crc32(body)))
        self._ends[session_key] = seq

    def forget(self, session_key: int) -> None:
        """Empty the slot of a session that was just made: what it holds is of a lost one."""
        if self.read(session_key) is not None:
            self._put(session_key, b"")

    def read(self, session_key: int) -> tuple[int, bytes] | None:
        """The remembered row number and chain value, None when nothing that counts is there."""
        try:
            with self.path.open("rb") as file:
                file.seek(session_key * _SIZE)
                slot = file.read(_SIZE)
        except OSError:
            return None
        body = slot[: _SLOT.size]
        if len(slot) < _SIZE or _SUM.pack(zlib.crc32(body)) != slot[_SLOT.size : _SLOT.size + _SUM.size]:
            return None
        key, seq, head, store, boot = _SLOT.unpack(body)
        known = key == session_key and store == self._store and boot in {_ANY_BOOT, _this_boot()}
        return (seq, head) if known else None

    def check_end(self, session_key: int, session_id: str, last_seq: int) -> None:
        """Raise `StoreDamaged` when the session ended later than at row `last_seq` before; cheap when we wrote it."""
        if self._ends.get(session_key) != last_seq:
            self.check(session_key, session_id, last_seq, self.read(session_key), None)

    def check(
        self, session_key: int, session_id: str, seq: int, anchored: tuple[int, bytes] | None, hash_at: bytes | None
    ) -> None:
        """Compare what was read here with the store, which ends at row `seq` and has `hash_at` at the anchored row.

        `anchored` must have been read before the store, since others write on. Raises
        `StoreDamaged` when acknowledged rows are gone or another history stands in their place.
        """
        if anchored is None:
            return
        last, head = anchored
        advice = "Restore a newer backup of state.db, or go on with what is there by deleting"
        if seq < last:
            raise errors.StoreDamaged(
                f"session {session_id} ends at row {seq}, but row {last} was stored: its end was lost outside hermes. "
                f"{advice} {self.path}"
            )
        if hash_at is not None and hash_at != head:
            raise errors.StoreDamaged(
                f"row {last} of session {session_id} is not the one that was stored: the history was changed outside "
                f"hermes. {advice} {self.path}"
            )
        self._ends[session_key] = seq

    def _put(self, session_key: int, slot: bytes) -> None:
        try:
            if self._fd < 0:
                with self._opening:
                    if self._fd < 0:
                        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.pwrite(self._fd, slot.ljust(_SIZE, b"\0"), session_key * _SIZE)
        except OSError:
            self.close()


def _this_boot() -> bytes:
    return hashlib.sha256(processes.boot_id().encode()).digest()[:8]
