"""A child's output: its head and tail in memory, all of it in a file once it is long."""

from __future__ import annotations

import codecs
import hashlib
import os
import re
from pathlib import Path

from hermes_agent.tools.atomic_write import make_folders
from hermes_agent.tools.results import spill_folder

SPOOL_MAX_BYTES = 100_000_000
"""Of an output longer than this the file keeps the beginning only."""

_CONTINUATION = range(0x80, 0xC0)


class ShellOutput:
    """Collects bytes in bounded memory. `close` it in any case."""

    def __init__(self, limit: int, spool: Path) -> None:
        self._head_size = limit * 2 // 5
        self._tail_size = limit - self._head_size
        self._head = bytearray()
        self._tail = bytearray()
        self._path = spool
        self._file = -1
        self._error = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._spooled = 0
        self.total = 0

    def add(self, data: bytes) -> None:
        """Take the next piece."""
        self.total += len(data)
        if self._file >= 0:
            self._spool(data)
        elif self.total > self._head_size + self._tail_size and not self._error:
            self._open()
            self._spool(bytes(self._head) + bytes(self._tail) + data)
        room = self._head_size - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_size + 65_536:
            del self._tail[: -self._tail_size]

    def text(self) -> str:
        """All of a short output; of a long one the head, what was left out and where it is, and the tail."""
        left_out = self.total - self._head_size - self._tail_size
        if left_out <= 0:
            return _clean(bytes(self._head) + bytes(self._tail))
        head, tail = bytes(self._head), bytes(self._tail[-self._tail_size :])
        while head and head[-1] in _CONTINUATION and len(self._head) - len(head) < 3:
            head = head[:-1]
        if head and head[-1] >= 0xC0:
            head = head[:-1]
        tail = tail[next((at for at in range(min(4, len(tail))) if tail[at] not in _CONTINUATION), 0) :]
        note = f"[{left_out:,} of {self.total:,} bytes left out here. {self._where()}]"
        return f"{_clean(head)}\n\n{note}\n\n{_clean(tail)}"

    @property
    def kept_in(self) -> Path | None:
        """The file with all that is kept of a long output; None when `text` leaves nothing out, or there is no file."""
        return self._path if self._spooled and not self._error else None

    def close(self) -> None:
        """Finish the file."""
        if self._file >= 0:
            self._write(self._decoder.decode(b"", final=True))
            os.close(self._file)
            self._file = -1

    def _where(self) -> str:
        if self._error:
            return f"The whole output could not be saved: {self._error}."
        part = "The whole output is" if self.total <= SPOOL_MAX_BYTES else f"Its first {SPOOL_MAX_BYTES:,} bytes are"
        return f"{part} in {self._path}; read it with read_file or search it, do not run the command again for that."

    def _open(self) -> None:
        try:
            make_folders(self._path.parent, mode=0o700)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o600)
        except OSError as error:
            self._error = error.strerror or str(error)

    def _spool(self, data: bytes) -> None:
        room = SPOOL_MAX_BYTES - self._spooled
        self._spooled += len(data)
        if room > 0:
            self._write(self._decoder.decode(data[:room]))

    def _write(self, text: str) -> None:
        # Written as text, since a file with NUL or broken UTF-8 could not be read by the file tools.
        data = memoryview(text.replace("\0", "\ufffd").encode())
        try:
            while data and self._file >= 0:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._error = error.strerror or str(error)
            os.close(self._file)
            self._file = -1


def spool_path(home: Path, call_id: str) -> Path:
    """Where the whole output of a call goes."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", call_id)[:120].lstrip(".")
    if safe != call_id:
        safe += "-" + hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return spill_folder(home) / f"{safe}.txt"


def _clean(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")
