"""`logs/agent.log`: one JSON line for each thing that happened, for machines and for people who mend.

A line holds an `action`, ids and counts; never the text of a message. Secrets that
were registered, and what looks like a key, are blotted out. Several processes may
write at once: a line is one append, and the file rotates under a lock. Nothing is
opened before the first record, and a log that cannot be written stops nobody.

    log = get("store")
    log.info("migration.applied", number=3)
    log.failure("renewer.died", error, session_id=sid)      # with the traceback
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec

from hermes_agent import home as home_module
from hermes_agent.errors import HermesError

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
MASK = "***"
_SHORTEST_SECRET = 6
"""A shorter secret would blot out ordinary words."""


class Log:
    """Writes records under one name; cheap to make, opens nothing."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def debug(self, action: str, **fields: Any) -> None:
        _file.record("debug", self._name, action, fields)

    def info(self, action: str, **fields: Any) -> None:
        _file.record("info", self._name, action, fields)

    def warning(self, action: str, **fields: Any) -> None:
        _file.record("warning", self._name, action, fields)

    def error(self, action: str, **fields: Any) -> None:
        _file.record("error", self._name, action, fields)

    def failure(self, action: str, error: BaseException, **fields: Any) -> None:
        """Record an exception with its traceback, at a boundary that does not pass it on."""
        import traceback  # noqa: PLC0415 - start-up time

        _file.record("error", self._name, action, fields | {"traceback": "".join(traceback.format_exception(error))})


def get(name: str) -> Log:
    """The log of one part of the program."""
    return Log(name)


def configure(home: Path, *, level: str = "info", max_size_mb: float = 5, backup_count: int = 3) -> None:
    """Say where and how much to write; before this, records go to the home that the environment names."""
    _file.configure(home, LEVELS[level], int(max_size_mb * 1024 * 1024), backup_count)


def add_secrets(secrets: Iterable[str]) -> None:
    """Blot these texts out of every later record, and of all that `redact` is given."""
    _file.add_secrets(secrets)


def close() -> None:
    """Close the file and forget the configuration and the secrets."""
    _file.reset()


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without the registered secrets and the given ones, and without anything that looks like a key."""
    given = [secret for secret in secrets if len(secret) >= _SHORTEST_SECRET]
    # The longest first: one may be a part of another.
    for secret in sorted({*given, *_file.secrets}, key=len, reverse=True) if given else _file.secrets:
        text = text.replace(secret, MASK)
    return _key_pattern().sub(lambda found: (found.group("before") or "") + MASK, text)


@cache
def _key_pattern() -> re.Pattern[str]:
    return re.compile(
        r"\b(?:sk|pk|rk|ghp|gho|xox[abp])[-_][A-Za-z0-9_-]{12,}"
        r"|(?P<before>\b(?:bearer\s+|(?:api[-_]?key|access[-_]?token|password|secret)[\"']?\s*[:=]\s*[\"']?))"
        r"[^\s\"',;&]{6,}",
        re.IGNORECASE,
    )


class _LogFile:
    """The one open file of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may record while this thread is recording
        self._folder: Path | None = None
        self._path = ""
        self._descriptor = -1
        self._level = LEVELS["info"]
        self._max_bytes = 5 * 1024 * 1024
        self._backups = 3
        self.secrets: tuple[str, ...] = ()
        """What is blotted out, the longest first; read without the lock."""
        self._written: set[str] = set()
        """The secrets as they stand in JSON."""

    def configure(self, home: Path, level: int, max_bytes: int, backups: int) -> None:
        with self._lock:
            self._close()
            self._folder, self._level, self._max_bytes, self._backups = home, level, max_bytes, backups

    def add_secrets(self, secrets: Iterable[str]) -> None:
        with self._lock:
            found = {*self.secrets, *(secret for secret in secrets if len(secret) >= _SHORTEST_SECRET)}
            self.secrets = tuple(sorted(found, key=len, reverse=True))
            self._written = {_in_json(secret) for secret in found}

    def reset(self) -> None:
        with self._lock:
            self._close()
            self._folder, self._level, self.secrets, self._written = None, LEVELS["info"], (), set()

    def record(self, level: str, name: str, action: str, fields: dict[str, Any]) -> None:
        if LEVELS[level] < self._level:
            return
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
        line = {"time": stamp, "level": level, "log": name, "action": action, "pid": os.getpid()} | fields
        with self._lock:
            data = self._encoded(line)
            try:
                self._append(data + b"\n")
            except (OSError, HermesError):
                self._close()  # full or read-only disk: the work goes on, the next record tries again

    def _encoded(self, line: dict[str, Any]) -> bytes:
        """The record as JSON; only one in which something looks like a secret is gone through text by text."""
        try:
            data = msgspec.json.encode(line, enc_hook=str)
        except (TypeError, ValueError, msgspec.MsgspecError):
            return msgspec.json.encode(_without_secrets(line))
        text = data.decode()
        if _key_pattern().search(text) or any(written in text for written in self._written):
            return msgspec.json.encode(_without_secrets(line))
        return data

    def _append(self, data: bytes) -> None:
        if self._descriptor < 0:
            self._open()
        if os.fstat(self._descriptor).st_size + len(data) > self._max_bytes:
            self._rotate()
        os.write(self._descriptor, data)

    def _open(self) -> None:
        folder = home_module.private_folder(self._folder or home_module.hermes_home(), "logs")
        self._path = str(folder / "agent.log")
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, home_module.FILE_MODE)

    def _rotate(self) -> None:
        """Move the full file away, unless another process has done so; then go on in the new one."""
        lock = os.open(self._path + ".lock", os.O_WRONLY | os.O_CREAT, home_module.FILE_MODE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _same_file(self._descriptor, self._path):
                if self._backups < 1:
                    os.unlink(self._path)
                for number in range(self._backups, 0, -1):
                    _move(f"{self._path}.{number - 1}" if number > 1 else self._path, f"{self._path}.{number}")
            self._close()
            self._open()
        finally:
            os.close(lock)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _in_json(text: str) -> str:
    return msgspec.json.encode(text.encode("utf-8", "replace").decode())[1:-1].decode()


def _without_secrets(value: Any) -> Any:
    """`value` as plain JSON data, every text in it redacted and valid Unicode."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {_safe_text(str(key)): _without_secrets(item) for key, item in items}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_without_secrets(item) for item in cast("Iterable[Any]", value)]
    return _safe_text(str(value))


def _safe_text(text: str) -> str:
    return redact(text).encode("utf-8", "replace").decode()


def _same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _move(old: str, new: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.replace(old, new)


_file = _LogFile()
