"""A witness outside the database: the last committed row of each session.

SQLite cannot see that committed rows at the end of its log are gone. This file can: one
64-byte slot a session, written after each commit, compared when the session is next
opened. It is never synced, so after a power cut it may be behind, never ahead of FULL.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

from hermes_agent import errors

_SLOT = struct.Struct("<qq16s")
_SIZE = 64
_SUM = struct.Struct("<I")


class Anchors:
    """The anchor file of one store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def record(self, session_key: int, seq: int, head: bytes) -> None:
        """Remember the session's last row; a failure to write is no failure of the commit."""
        body = _SLOT.pack(session_key, seq, head)
        slot = (body + _SUM.pack(zlib.crc32(body))).ljust(_SIZE, b"\0")
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.pwrite(self._fd, slot, session_key * _SIZE)
        except OSError:
            self.close()

    def read(self, session_key: int) -> tuple[int, bytes] | None:
        """The remembered row number and chain value, None when nothing readable is there."""
        try:
            with self.path.open("rb") as file:
                file.seek(session_key * _SIZE)
                slot = file.read(_SIZE)
        except OSError:
            return None
        body = slot[: _SLOT.size]
        if len(slot) < _SIZE or _SUM.pack(zlib.crc32(body)) != slot[_SLOT.size : _SLOT.size + _SUM.size]:
            return None
        key, seq, head = _SLOT.unpack(body)
        return (seq, head) if key == session_key else None

    def check(self, session_key: int, session_id: str, seq: int, hash_at: bytes | None) -> None:
        """Compare with the store, which ends at row `seq` and has chain value `hash_at` at the anchored row.

        Raises `StoreDamaged` when acknowledged rows are gone or another history stands in their place.
        """
        anchored = self.read(session_key)
        if anchored is None:
            return
        last, head = anchored
        if seq < last:
            raise errors.StoreDamaged(
                f"session {session_id} ends at row {seq}, but row {last} was stored: its end was lost outside hermes. "
                f"Restore state.db from a backup, or delete {self.path} to go on with the shorter history"
            )
        if hash_at is not None and hash_at != head:
            raise errors.StoreDamaged(
                f"session {session_id} was changed outside hermes. Restore state.db from a backup, "
                f"or delete {self.path} to go on with what is there"
            )
