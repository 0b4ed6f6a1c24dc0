"""Turn a tool's path argument into a real path, and say which real paths tools may not touch.

Only the resolved path counts: symlinks and `..` are followed first, so a link into a
protected folder is as protected as the folder. Names are compared without case, since
some file systems do.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from hermes_agent.errors import ToolError
from hermes_agent.tools.context import ToolContext

_SYSTEM_FOLDERS = ("/etc", "/private/etc", "/boot", "/dev", "/proc", "/sys")

_SECRET_FOLDERS = (".ssh", ".gnupg", ".aws", ".kube")
"""Below the user's home: neither written nor, with few exceptions, read."""

_STARTUP_FILES = frozenset(
    {
        ".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile",
        ".zshrc", ".zshenv", ".zprofile", ".zlogin", ".zlogout", ".kshrc", ".cshrc", ".tcshrc", ".login",
        ".gitconfig", ".netrc", ".npmrc", ".pypirc", ".pgpass", ".git-credentials",
    }
)  # fmt: skip
"""Files of the user's home that are run at the next login or hold credentials."""

_STARTUP_FOLDERS = (".config/fish", ".config/autostart", ".config/systemd", ".config/git", "library/launchagents")

_CREDENTIAL_FILES = frozenset({".netrc", ".pypirc", ".pgpass", ".git-credentials"})

_READABLE_SSH = frozenset({"config", "known_hosts", "authorized_keys"})

_OWN_FILES = frozenset({"config.yaml", ".env"})

_SECRET_PROC = frozenset({"environ", "mem"})


def resolve(path: str, context: ToolContext) -> Path:
    """The real absolute path that `path` names: `~` expanded, relative to the call's folder, links followed."""
    if not path.strip():
        raise ToolError("The path is empty.")
    if "\0" in path:
        raise ToolError("The path contains a NUL character.")
    named = os.path.expanduser(path)
    return Path(os.path.realpath(context.cwd / named))


def shown(path: Path, context: ToolContext) -> str:
    """The path as a model should name it next time: relative inside the call's folder, else absolute."""
    try:
        return str(path.relative_to(os.path.realpath(context.cwd)))
    except ValueError:
        return str(path)


def refuse_write(path: Path, context: ToolContext) -> str | None:
    """Why tools may not change this resolved path; None when they may."""
    folded = _fold(path)
    for folder in _SYSTEM_FOLDERS:
        if _inside(folded, folder):
            return f"{path} belongs to the operating system ({folder}); file tools do not change it."
    own = _below(folded, context.home)
    if own is not None and _is_own_file(own):
        return f"{path} is one of hermes' own files; change it with the hermes command or by hand."
    user = _below(folded, _user_home())
    if user is not None:
        if _first_folder(user) in _SECRET_FOLDERS:
            return f"{path} lies in a folder of keys and credentials; file tools do not change it."
        if user in _STARTUP_FILES or any(_inside(f"/{user}", f"/{folder}") for folder in _STARTUP_FOLDERS):
            return f"{path} is run at login or holds credentials; file tools do not change it."
    if _is_git_control(folded):
        return f"{path} decides what git runs; file tools do not change it."
    return None


def refuse_read(path: Path, context: ToolContext) -> str | None:
    """Why tools may not read this resolved path; None when they may."""
    folded = _fold(path)
    if _inside(folded, "/dev"):
        return f"{path} is a device."
    if _inside(folded, "/proc") and path.name in _SECRET_PROC:
        return f"{path} shows a process's memory or environment, which may hold keys."
    own = _below(folded, context.home)
    if own is not None and own.rsplit("/", 1)[-1] == ".env" and _is_own_file(own):
        return f"{path} holds hermes' keys; file tools do not read it."
    user = _below(folded, _user_home())
    if user is None:
        return None
    name = path.name.casefold()
    if _first_folder(user) in _SECRET_FOLDERS:
        open_to_all = _first_folder(user) == ".ssh" and (name.endswith(".pub") or name in _READABLE_SSH)
        if not open_to_all and user != ".aws/config":
            return f"{path} lies in a folder of keys and credentials; file tools do not read it."
    if user in _CREDENTIAL_FILES:
        return f"{path} holds credentials; file tools do not read it."
    return None


def open_regular(path: Path) -> tuple[int, os.stat_result]:
    """Open a resolved path for reading; only a regular file will do.

    The caller closes the descriptor. Raises ToolError for anything but a regular file,
    OSError as `open` does. Never waits for the other end of a pipe.
    """
    _require_regular(path, path.stat())
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ToolError(f"{path} became a symbolic link while it was opened; try again.") from error
        raise
    try:
        found = os.fstat(descriptor)
        _require_regular(path, found)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, found


def similar_files(path: Path) -> list[str]:
    """At most five names in the missing path's folder that look like it."""
    from difflib import get_close_matches  # noqa: PLC0415 - only a wrong path needs it; it would slow every start

    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name for _, entry in zip(range(2000), entries, strict=False)]
    except OSError:
        return []
    folded = {name.casefold(): name for name in sorted(names)}
    close = get_close_matches(path.name.casefold(), list(folded), n=5, cutoff=0.6)
    return [str(path.parent / folded[name]) for name in close]


def _require_regular(path: Path, found: os.stat_result) -> None:
    mode = found.st_mode
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise ToolError(f"{path} is a directory; list it with search_files and target 'files'.")
    kinds = ((stat.S_ISFIFO, "a pipe (FIFO)"), (stat.S_ISSOCK, "a socket"))
    kind = next((name for test, name in kinds if test(mode)), "a device")
    raise ToolError(f"{path} is {kind}, not a regular file.")


def _user_home() -> Path:
    return Path(os.path.expanduser("~"))


def _fold(path: Path) -> str:
    return str(path).casefold()


def _inside(folded: str, folder: str) -> bool:
    return folded == folder or folded.startswith(folder + "/")


def _below(folded: str, folder: Path) -> str | None:
    """The folded path relative to a folder, or None when it lies outside."""
    base = os.path.realpath(folder).casefold()
    return folded[len(base) + 1 :] if base != "/" and _inside(folded, base) else None


def _first_folder(relative: str) -> str:
    return relative.split("/", 1)[0]


def _is_own_file(relative: str) -> bool:
    """Is this, relative to HERMES_HOME, a file that decides what hermes does or knows?"""
    parts = relative.split("/")
    if parts[0] == "profiles" and len(parts) > 2:
        parts = parts[2:]
    if parts[:2] == ["cache", "spillover"]:
        return True
    return len(parts) == 1 and (parts[0] in _OWN_FILES or parts[0].startswith("state.db"))


def _is_git_control(folded: str) -> bool:
    parts = folded.split("/")
    if ".git" not in parts:
        return False
    inside = parts[parts.index(".git") + 1 :]
    return "hooks" in inside or inside[-1:] == ["config"]
