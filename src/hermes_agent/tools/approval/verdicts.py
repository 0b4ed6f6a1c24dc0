"""Which single commands destroy the machine or the person's files: the hard floor's table."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from hermes_agent.tools.approval.resolve import UNKNOWN, UNSET

WRAPPERS = frozenset(
    "sudo doas env nice ionice timeout nohup setsid stdbuf command exec builtin time xargs parallel busybox toybox "
    "unshare nsenter flock strace ltrace chroot systemd-run su runuser pkexec chrt taskset prlimit watch coproc "
    "if then else do while until !".split()
)
"""What runs the command that follows among its own arguments."""

_SYSTEM = frozenset(
    "/ /bin /boot /dev /etc /lib /lib32 /lib64 /libx32 /opt /proc /run /sbin /srv /sys /usr /var /usr/bin /usr/lib "
    "/usr/lib64 /usr/local /usr/sbin /usr/share /usr/libexec /usr/include /usr/local/bin /usr/local/lib /var/lib "
    "/System /Library /Applications /private /private/etc /private/var".split()
)
_TOP = frozenset(path[1:] for path in _SYSTEM if path.count("/") == 1 and path != "/") | {"home", "root", "Users"}
_RAW = re.compile(
    r"/dev/(?:[shv]d[a-z]|xvd[a-z]|nvme\d|mmcblk\d|r?disk\d|mapper/(?!control)|dm-\d|md\d|k?mem\b|port\b)"
    r"|/proc/sysrq-trigger"
)
_ALL_OF_IT = re.compile(r"\*+|\.\*|\.\[.*|\.\?\*|\?\*|")
_KEPT = re.compile(r"-(i?name|i?path|i?regex|newer.*|[acm](time|min)|size|user|group|perm|empty|maxdepth|i?wholename)")


def name_of(word: str) -> str:
    """The program's name: its path and what may be empty taken off."""
    return os.path.basename(word.replace(UNSET, ""))


def is_known(word: str) -> bool:
    """Does the table say anything about this program?"""
    return name_of(word) in _PROGRAMS


def judge(words: Sequence[str], here: str) -> str | None:
    """Why this one command is never run; `here` is the folder it runs in, "" when unknown."""
    name = name_of(words[0])
    args = [word.replace(UNSET, "") if word.startswith("-") else word for word in words[1:]]
    if any(char in name for char in "*?[") and "/" in words[0] and any(char.isalpha() for char in name):
        matching = [program for program in _PROGRAMS if fnmatchcase(program, name)]
        return next((why for program in matching if (why := _PROGRAMS[program](args, here))), None)
    if name.startswith(("mkfs.", "mkfs_", "newfs")):
        name = "mkfs"
    rule = _PROGRAMS.get(name)
    return rule(args, here) if rule else None


def raw_target(path: str) -> str | None:
    """Why nothing is ever written to this path."""
    if _RAW.match(os.path.normpath(path) if path else ""):
        return f"it writes to the raw device {path}"
    return None


def _protected(target: str, here: str) -> bool:
    """Is this the root, a home or a system folder, or everything in one?"""
    if UNKNOWN in target or UNSET in target:
        return False
    path = target if target.startswith(("/", "~")) else f"{here}/{target}" if here else ""
    if not path:
        return False
    path = re.sub(r"^~[\w.-]*", "/home/person", path)
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    while parts and _ALL_OF_IT.fullmatch(parts[-1]):
        parts.pop()
    whole = "/" + "/".join(parts)
    if whole in _SYSTEM or whole in ("/home", "/root", "/Users") or whole == os.path.expanduser("~"):
        return True
    if len(parts) == 2 and parts[0] in ("home", "Users"):
        return True
    return len(parts) == 1 and any(char in whole for char in "*?[") and any(fnmatchcase(top, parts[0]) for top in _TOP)


def _operands(args: Sequence[str]) -> list[str]:
    return [word for word in args if word[:1] != "-"]


def _recursive(args: Sequence[str], letters: str) -> bool:
    for word in args:
        if word.startswith("--"):
            if len(word) > 2 and "--recursive".startswith(word):
                return True
        elif word[:1] == "-" and any(letter in word for letter in letters):
            return True
    return False


def _rm(args: Sequence[str], here: str) -> str | None:
    if any(len(word) > 5 and "--no-preserve-root".startswith(word) for word in args):
        return "it switches off rm's own protection of the root"
    if not _recursive(args, "rR"):
        return None
    for target in _operands(args):
        if _protected(target, here):
            return f"it deletes {target} with everything in it"
    return None


def _owner(args: Sequence[str], here: str) -> str | None:
    if not _recursive(args, "R"):
        return None
    for target in _operands(args)[1:] or _operands(args):
        if _protected(target, here) and not target.startswith("~") and not re.match(r"/(home|Users)/", target):
            return f"it changes owner or mode of {target} with everything in it"
    return None


def _find(args: Sequence[str], here: str) -> str | None:
    deletes = "-delete" in args
    for at, word in enumerate(args):
        if word in ("-exec", "-execdir", "-ok", "-okdir") and name_of(" ".join(args[at + 1 : at + 2])) in _DELETERS:
            deletes = True
    if not deletes or any(_KEPT.fullmatch(word) for word in args):
        return None
    for target in args:
        if target[:1] in "-(!\\":
            break
        if _protected(target, here):
            return f"it deletes everything under {target}"
    return None


_DELETERS = frozenset({"rm", "unlink", "shred", "rmdir"})


def _mkfs(args: Sequence[str], _here: str) -> str | None:
    operands = _operands(args)
    if any(UNKNOWN in word or UNSET in word or word.startswith("/dev/") for word in operands):
        return "it formats a device"
    return None


def _dd(args: Sequence[str], _here: str) -> str | None:
    for word in args:
        if word.startswith("of="):
            return raw_target(word[3:])
    return None


def _writes_last(args: Sequence[str], _here: str) -> str | None:
    operands = _operands(args)
    return raw_target(operands[-1]) if operands else None


def _writes_any(args: Sequence[str], _here: str) -> str | None:
    return next((why for word in _operands(args) if (why := raw_target(word))), None)


def _kill(args: Sequence[str], _here: str) -> str | None:
    rest = list(args)
    if rest[:1] in (["-s"], ["-n"]):
        rest = rest[2:]
    elif rest and rest[0][:1] == "-" and rest[0] != "--" and len(rest) > 1:
        rest = rest[1:]
    if "-1" in rest:
        return "it stops every process"
    return None


def _stops(what: str) -> Callable[[Sequence[str], str], str | None]:
    def rule(args: Sequence[str], _here: str) -> str | None:
        if any(word in ("--help", "--version", "-c", "--show") for word in args):
            return None
        return what

    return rule


def _init(args: Sequence[str], _here: str) -> str | None:
    return "it shuts the machine down" if _operands(args)[:1] in (["0"], ["6"]) else None


def _systemctl(args: Sequence[str], _here: str) -> str | None:
    if _operands(args)[:1] and _operands(args)[0] in ("reboot", "poweroff", "halt", "kexec", "rescue", "emergency"):
        return "it shuts the machine down"
    return None


_PROGRAMS: dict[str, Callable[[Sequence[str], str], str | None]] = {
    "rm": _rm,
    "chmod": _owner,
    "chown": _owner,
    "chgrp": _owner,
    "find": _find,
    "mkfs": _mkfs,
    "mke2fs": _mkfs,
    "wipefs": _mkfs,
    "blkdiscard": _mkfs,
    "dd": _dd,
    "cp": _writes_last,
    "mv": _writes_last,
    "install": _writes_last,
    "tee": _writes_any,
    "shred": _writes_any,
    "truncate": _writes_any,
    "kill": _kill,
    "killall5": _stops("it stops every process"),
    "shutdown": _stops("it shuts the machine down"),
    "reboot": _stops("it shuts the machine down"),
    "halt": _stops("it shuts the machine down"),
    "poweroff": _stops("it shuts the machine down"),
    "init": _init,
    "telinit": _init,
    "systemctl": _systemctl,
}
