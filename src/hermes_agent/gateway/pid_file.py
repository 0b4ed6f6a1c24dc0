"""Which gateway serves a home: at most one, and where it listens.

`gateway/gateway.lock` is locked by the gateway for as long as it lives, which no crash
can outlast. `gateway/gateway.pid` says who that is; one that a dead process left
behind counts for nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from hermes_agent import home as home_module
from hermes_agent.errors import Failure, HermesError
from hermes_agent.store import processes
from hermes_agent.tools.atomic_write import atomic_write
from hermes_agent.version import VERSION

_FOLDER = "gateway"


class GatewayError(HermesError):
    """The gateway cannot do this; the message says what to do."""

    @property
    def failure(self) -> Failure:
        return Failure(retry=False, advice="")


class Record(Struct, frozen=True):
    """A gateway that listens."""

    pid: int
    identity: str
    """The process, as `store.processes` tells it from another one with its pid."""
    host: str
    port: int
    version: str
    started_at: float

    @property
    def url(self) -> str:
        return url_of(self.host, self.port)


def url_of(host: str, port: int) -> str:
    """Where a client on this machine reaches a server that listens there."""
    if host in {"0.0.0.0", ""}:  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read(home: Path) -> Record | None:
    """The gateway that listens for this home, None when none does."""
    try:
        record = msgspec.json.decode((home / _FOLDER / "gateway.pid").read_bytes(), type=Record)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None
    except OSError as error:
        raise GatewayError(f"{home / _FOLDER / 'gateway.pid'} cannot be read: {error.strerror}") from error
    # One in another container cannot be seen from here; it is taken at its word.
    gone = processes.is_alive(record.identity) is False or processes.pid_of(record.identity) != str(record.pid)
    return None if gone else record


@contextlib.contextmanager
def held(home: Path) -> Iterator[PidFile]:
    """Be the one gateway of this home, or keep any from starting. Raises `GatewayError` when there is one."""
    folder = home_module.private_folder(home, _FOLDER)
    lock = os.open(folder / "gateway.lock", os.O_RDWR | os.O_CREAT, home_module.FILE_MODE)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found = read(home)
            where = f" (pid {found.pid}, {found.url})" if found else ""
            raise GatewayError(f"a gateway runs for {home} already{where}; end it with: hermes gateway stop") from None
        file = PidFile(folder / "gateway.pid")
        try:
            yield file
        finally:
            file.remove()
    finally:
        os.close(lock)


class PidFile:
    """The file of the gateway that holds the lock."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, host: str, port: int) -> Record:
        """Say that this process listens there."""
        record = Record(os.getpid(), processes.identity(), host, port, VERSION, round(time.time(), 3))
        try:
            atomic_write(self._path, msgspec.json.encode(record) + b"\n", mode=home_module.FILE_MODE)
        except OSError as error:
            raise GatewayError(f"{self._path} cannot be written: {error.strerror}") from error
        return record

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
