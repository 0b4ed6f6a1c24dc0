"""Replace a file's content in one step: after a crash the old or the new content is there, never a mixture."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path


def atomic_write(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Make `data` the whole content of `path`, durably.

    A symlink is followed: its target is replaced and the link stays. An existing file
    keeps its mode and, where the process may set it, its owner; a new one gets `mode`
    or the default of the process. The folder must exist. Raises OSError; then the old
    content is untouched and nothing else is left behind.
    """
    target = Path(os.path.realpath(path))
    old = _existing(target)
    temporary = target.parent / f".{target.name[:40]}.{os.urandom(6).hex()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666 if mode is None else mode)
    try:
        try:
            _write_all(descriptor, data)
            if old is not None:
                _keep_attributes(descriptor, old)
            elif mode is not None:
                os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(target.parent)


def make_folders(folder: Path, *, mode: int = 0o777) -> bool:
    """Create `folder` and its missing parents durably; True when something was created."""
    missing: list[Path] = []
    step = folder
    while not step.exists():
        missing.append(step)
        step = step.parent
    for new in reversed(missing):
        new.mkdir(mode=mode, exist_ok=True)
        sync_folder(new.parent)
    return bool(missing)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; file systems that cannot are left alone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Some network and FUSE file systems refuse to sync a folder; the rename itself is done.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _existing(target: Path) -> os.stat_result | None:
    """What is to be replaced: None, or a regular file that may be written."""
    try:
        found = target.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(target))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(target))
    # The rename needs no write permission on the file, but somebody who took it away meant it.
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "Permission denied", str(target))
    return found


def _keep_attributes(descriptor: int, old: os.stat_result) -> None:
    # First the owner: changing it clears the set-id bits.
    with contextlib.suppress(PermissionError):
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
