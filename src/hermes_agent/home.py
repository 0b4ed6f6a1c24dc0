"""Where the program keeps its files, for which profile, and that nobody else may read them.

The home that `HERMES_HOME` names is the root: it is the home of the profile `default`
and holds the homes of the others in `profiles/NAME`. A `HERMES_HOME` that names such
a folder chooses that profile, which is how child processes stay in their parent's.

Folders are made with mode 0700 and files with 0600, whatever the umask allows
beyond that. A folder or file that is already there keeps the mode its owner gave it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from hermes_agent.errors import StoreFull, StoreReadOnly, UsageError

FOLDER_MODE = 0o700
FILE_MODE = 0o600

PROFILES = "profiles"
DEFAULT_PROFILE = "default"
_PROFILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_CHOSEN = "active_profile"
"""The file in the root with the name of the profile that a command line without -p means."""


def hermes_home(environ: Mapping[str, str] | None = None) -> Path:
    """The home of this process: `HERMES_HOME`, else `~/.hermes`; absolute, not created."""
    named = (os.environ if environ is None else environ).get("HERMES_HOME", "").strip()
    return Path(os.path.abspath(os.path.expanduser(named or "~/.hermes")))


def root_of(home: Path) -> Path:
    """The root that a home belongs to: itself, or the one whose named profile it is."""
    return home.parent.parent if _is_named_profile(home) else home


def profile_of(home: Path) -> str:
    """The name of the profile whose home this is."""
    return home.name if _is_named_profile(home) else DEFAULT_PROFILE


def is_profile_name(name: str) -> bool:
    """Whether a profile may be called so; `default` is one."""
    return _PROFILE_NAME.fullmatch(name) is not None


def profiles(root: Path) -> list[str]:
    """The names of all profiles, `default` first."""
    try:
        found = [entry.name for entry in os.scandir(root / PROFILES) if entry.is_dir()]
    except FileNotFoundError:
        found = []
    return [DEFAULT_PROFILE, *sorted(name for name in found if is_profile_name(name) and name != DEFAULT_PROFILE)]


def find_profile(root: Path, name: str) -> Path | None:
    """The home of a profile; None when there is none of that name, whatever the name is."""
    if name == DEFAULT_PROFILE:
        return root
    folder = root / PROFILES / name
    return folder if is_profile_name(name) and folder.is_dir() else None


def profile_home(root: Path, name: str) -> Path:
    """As `find_profile`, but raise `UsageError` with the nearest names when there is none."""
    found = find_profile(root, name)
    if found is not None:
        return found
    import difflib  # noqa: PLC0415 - only where the name is wrong

    known = profiles(root)
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5) or known[:5]
    raise UsageError(f"there is no profile {name!r}; there is: {', '.join(near)}. Make one: hermes profile create NAME")


def chosen_profile(root: Path) -> str:
    """The profile that a command line without -p means; it may be gone."""
    try:
        return (root / _CHOSEN).read_text(encoding="utf-8").strip() or DEFAULT_PROFILE
    except (FileNotFoundError, NotADirectoryError):
        return DEFAULT_PROFILE
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{root / _CHOSEN} cannot be read: {error}") from None


def choose_profile(root: Path, name: str) -> None:
    """Let a command line without -p mean this profile from now on."""
    place = ensure_home(root) / _CHOSEN
    if name == DEFAULT_PROFILE:
        place.unlink(missing_ok=True)
        return
    fresh = place.with_name(f".{_CHOSEN}-{os.getpid()}")
    with open_private(fresh, "w") as file:
        file.write(name + "\n")
    os.replace(fresh, place)


def enter_profile(name: str | None, *, may_be_gone: bool = False) -> Path:
    """Make a profile's home that of this process and its children; None takes what the environment or `use` chose.

    Raises `UsageError` when there is no such profile; with `may_be_gone` a chosen one that
    is gone is no mistake, and nothing is entered.
    """
    here = hermes_home()
    root = root_of(here)
    if name is None:
        chosen = chosen_profile(root)
        if here != root or chosen == DEFAULT_PROFILE:
            return here
        home = find_profile(root, chosen)
        if home is None and may_be_gone:
            return here
        if home is None:
            raise UsageError(f"the profile {chosen!r} that was chosen is gone; choose one: hermes profile use default")
    else:
        home = profile_home(root, name)
    if home != here:
        os.environ["HERMES_HOME"] = str(home)
    return home


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


def _is_named_profile(home: Path) -> bool:
    return home.parent.name == PROFILES and is_profile_name(home.name)


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
