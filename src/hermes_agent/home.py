"""Where the program keeps its files, and that nobody else may read them.

Folders are made with mode 0700 and files with 0600, whatever the umask allows
beyond that. A folder or file that is already there keeps the mode its owner gave it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from hermes_agent.errors import StoreFull, StoreReadOnly

FOLDER_MODE = 0o700
FILE_MODE = 0o600


def hermes_home(environ: Mapping[str, str] | None = None) -> Path:
    """The home of this process: `HERMES_HOME`, else `~/.hermes`; absolute, not created."""
    named = (os.environ if environ is None else environ).get("HERMES_HOME", "").strip()
    return Path(os.path.abspath(os.path.expanduser(named or "~/.hermes")))


def ensure_home(home: Path) -> Path:
    """Make `home` itself, private, if it is missing; what lies in it is made when it is first needed.

    Raises `StoreReadOnly` or `StoreFull` with the path when the folder cannot be made.
    """
    return _make_folder(home)


def private_folder(home: Path, *parts: str) -> Path:
    """Make the folder `home/parts...`, each level private, and return it."""
    folder = ensure_home(home)
    for part in parts:
        folder = _make_folder(folder / part)
    return folder


def create_private_file(path: Path) -> bool:
    """Make an empty private file; True if it was made, False if something was there already."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE))
    except FileExistsError:
        return False
    return True


def open_private(path: Path, mode: str = "r", *, encoding: str | None = "utf-8") -> IO[Any]:
    """Open like `open`; a file that this creates is private from its first instant."""
    return open(path, mode, encoding=None if "b" in mode else encoding, opener=_opener)


def others_can_read(path: Path) -> bool:
    """True if the file's mode lets the group or everybody read it."""
    return bool(os.stat(path).st_mode & 0o044)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)


def _make_folder(folder: Path) -> Path:
    if os.path.isdir(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    except OSError as error:
        kind = StoreFull if error.errno == errno.ENOSPC else StoreReadOnly
        raise kind(f"cannot make the folder {folder}: {error.strerror}") from error
    return folder
