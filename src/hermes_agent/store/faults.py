"""SQLite's and the system's errors in our own words: one typed `StoreError` each."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw

from hermes_agent import errors

OF_THE_FILE = (
    apsw.FullError, apsw.IOError, apsw.CorruptError, apsw.NotADBError, apsw.BusyError, apsw.NoMemError,
    apsw.ReadOnlyError, apsw.CantOpenError,
)  # fmt: skip
"""Failures of the file, not of one caller's statement."""

_ALMOST_NOTHING = 64 * 1024
_OF_THE_SYSTEM: dict[int | None, type[errors.StoreError]] = {
    errno.ENOSPC: errors.StoreFull,
    errno.EDQUOT: errors.StoreFull,
    errno.EACCES: errors.StoreReadOnly,
    errno.EPERM: errors.StoreReadOnly,
    errno.EROFS: errors.StoreReadOnly,
}


@contextmanager
def translated(path: Path, notice: Callable[[errors.StoreError], None] | None = None) -> Iterator[None]:
    """Raise SQLite's and the system's errors as `StoreError`s; `notice` sees each first."""
    try:
        yield
    except apsw.Error as error:
        ours = from_sqlite(error, path)
    except OSError as error:
        ours = from_os(error, path)
    except UnicodeDecodeError as error:
        ours = errors.StoreDamaged(f"{path} holds text that is none; the file was left as it is, restore a backup")
        ours.__cause__ = error
    else:
        return
    if notice is not None:
        notice(ours)
    raise ours


def from_sqlite(error: apsw.Error, path: Path) -> errors.StoreError:
    """What an error of the library means for the store at `path`."""
    text = f"{path}: {error}"
    match error:
        case apsw.BusyError() | apsw.LockedError():
            ours: errors.StoreError = errors.StoreLocked(f"{text}; another process holds the store's write lock")
        case apsw.FullError():
            ours = errors.StoreFull(f"no space left for {path}")
        case apsw.ReadOnlyError() | apsw.PermissionsError() | apsw.AuthError():
            ours = errors.StoreReadOnly(text)
        case apsw.CorruptError():
            ours = errors.StoreDamaged(f"{text}; the file was left as it is, restore a backup or start a new store")
        case apsw.NotADBError():
            ours = errors.StoreDamaged(f"{path} is not a SQLite database; it was left as it is")
        case apsw.CantOpenError():
            ours = errors.StoreReadOnly(f"{text}; check that the folder exists and can be written")
        case apsw.IOError():
            full = _room(path) < _ALMOST_NOTHING
            ours = errors.StoreFull(f"no space left for {path}") if full else errors.StoreError(text)
        case _:
            ours = errors.StoreError(text)
    ours.__cause__ = error
    return ours


def from_os(error: OSError, path: Path) -> errors.StoreError:
    """What an error of the system means for the store at `path`."""
    ours = _OF_THE_SYSTEM.get(error.errno, errors.StoreError)(f"{path}: {error.strerror or error}")
    ours.__cause__ = error
    return ours


def again(error: errors.HermesError) -> errors.HermesError:
    """The same error for one more caller: threads must not share one exception's traceback."""
    copy = type(error)(str(error), reason=error.reason)
    copy.__cause__ = error
    return copy


def _room(path: Path) -> int:
    """How many bytes the disk, and this process's limit on the size of files, leave to the store."""
    import resource  # noqa: PLC0415 - only when something already failed

    room = 1 << 40
    with suppress(OSError):
        found = os.statvfs(path.parent)
        room = found.f_bavail * found.f_frsize
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        sizes = [file.stat().st_size for file in (path, Path(f"{path}-wal")) if file.exists()]
        room = min(room, limit - max(sizes, default=0))
    return room
