"""A small stand-in for ripgrep, run as a child process where `rg` is not installed.

It is a process of its own so that a pattern that backtracks for ever can be stopped: in
the agent's process it would hold the interpreter. It prints what `rg --null` prints, in
the order of `--sort=path`: `PATH NUL LINE:TEXT` (`-` for context lines), `PATH NUL COUNT`,
`PATH NUL`. Exit 0 when the search was done, 2 with a message for a bad pattern.

Like rg it leaves out hidden names, symbolic links, binary files and what the
`.gitignore` files of a repository exclude. Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator

LINE_LIMIT = 4096
"""Characters of a line that are printed."""
_PIECE = 1 << 20
"""A longer line is searched in pieces of this size."""
_SNIFF = 8192

Write = Callable[[bytes], object]
Rule = tuple[re.Pattern[str], bool, bool, bool]
"""Pattern, negated, folders only, anchored to the ignore file's folder."""


class Job:
    """What to do; sent as one JSON argument.

    `mode` is content, files_only, count or list. `glob` keeps only files whose path
    below the root matches; `context` is the number of lines around a match; `lifetime`
    the seconds after which the child ends by itself.
    """

    __slots__ = ("context", "glob", "lifetime", "mode", "pattern", "root")

    def __init__(
        self, mode: str, pattern: str, root: str, glob: str = "", context: int = 0, lifetime: int = 90
    ) -> None:
        self.mode = mode
        self.pattern = pattern
        self.root = root
        self.glob = glob
        self.context = context
        self.lifetime = lifetime

    def argument(self) -> str:
        """The job as the one argument of the child."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


def glob_regex(glob: str) -> str:
    """A glob as a regular expression for the whole text: `*` and `?` stop at `/`, `**` does not."""
    out: list[str] = []
    i, depth = 0, 0
    while i < len(glob):
        char = glob[i]
        i += 1
        if char == "*":
            if glob.startswith("*", i):
                i += 1
                if glob.startswith("/", i):
                    i += 1
                    out.append("(?:.*/)?")
                else:
                    out.append(".*")
            else:
                out.append("[^/]*")
        elif char == "?":
            out.append("[^/]")
        elif char == "[" and (end := glob.find("]", i + 1)) > 0:
            inside = glob[i:end].replace("\\", "\\\\").replace("[", "\\[")
            out.append("[^" + inside[1:] + "]" if inside[0] in "!^" else f"[{inside}]")
            i = end + 1
        elif char == "{" and "}" in glob[i:]:
            depth += 1
            out.append("(?:")
        elif char == "}" and depth:
            depth -= 1
            out.append(")")
        elif char == "," and depth:
            out.append("|")
        elif char == "\\" and i < len(glob):
            out.append(re.escape(glob[i]))
            i += 1
        else:
            out.append(re.escape(char))
    return "(?s:" + "".join(out) + ")"


def glob_matcher(glob: str) -> Callable[[str], bool]:
    """A test for paths relative to the searched folder; a glob without `/` looks at the name only."""
    anchored = glob.lstrip("/")
    try:
        match = re.compile(glob_regex(anchored)).fullmatch
    except re.error as error:
        message = f"bad glob {glob!r}: {error}"
        raise ValueError(message) from None
    if "/" in glob.rstrip("/"):
        return lambda path: match(path) is not None
    return lambda path: match(path.rsplit("/", 1)[-1]) is not None


def read_rules(folder: str) -> list[Rule]:
    """The rules of one folder's .gitignore, last first: the first that matches decides."""
    try:
        with open(os.path.join(folder, ".gitignore"), encoding="utf-8", errors="replace") as file:
            lines = file.read(1 << 20).split("\n")
    except OSError:
        return []
    rules: list[Rule] = []
    for line in reversed(lines):
        glob = line.rstrip("\r")
        while glob.endswith(" ") and not glob.endswith("\\ "):
            glob = glob[:-1]
        if not glob or glob.startswith("#"):
            continue
        negated = glob.startswith("!")
        glob = glob[1:] if negated else glob
        folders_only = glob.endswith("/")
        glob = glob.rstrip("/")
        anchored = "/" in glob
        try:
            rules.append((re.compile(glob_regex(glob.removeprefix("/"))), negated, folders_only, anchored))
        except re.error:
            continue
    return rules


class Level:
    """The ignore rules that hold in one folder of a repository: its own, then those above."""

    __slots__ = ("above", "folder", "rules")

    def __init__(self, folder: str, above: Level | None) -> None:
        self.folder = folder.rstrip("/")
        self.rules = read_rules(folder)
        self.above = above

    def ignores(self, path: str, name: str, *, is_folder: bool) -> bool:
        """Is this entry left out? The nearest file that has a matching rule decides."""
        level: Level | None = self
        while level is not None:
            relative = path[len(level.folder) + 1 :]
            for pattern, negated, folders_only, anchored in level.rules:
                if (is_folder or not folders_only) and pattern.fullmatch(relative if anchored else name):
                    return not negated
            level = level.above
        return False


def level_of(folder: str, above: Level | None) -> Level | None:
    """The rules inside a folder: a repository starts anew, outside of one there are none."""
    if os.path.exists(os.path.join(folder, ".git")):
        return Level(folder, None)
    return Level(folder, above) if above is not None else None


def level_above(root: str) -> Level | None:
    """The rules that the folders above the root of the search set."""
    parent = os.path.dirname(root)
    return None if parent == root else level_of(parent, level_above(parent))


def walk(root: str) -> Iterator[str]:
    """Every file below a folder that is not left out, in order of names."""
    stack: list[tuple[str, bool, Level | None]] = [(root, True, level_above(root))]
    while stack:
        path, is_folder, above = stack.pop()
        if not is_folder:
            yield path
            continue
        level = level_of(path, above)
        try:
            with os.scandir(path) as found:
                entries = sorted(found, key=lambda entry: os.fsencode(entry.name), reverse=True)
        except OSError:
            continue
        for entry in entries:
            below = entry.is_dir(follow_symlinks=False)
            if entry.name.startswith(".") or not (below or entry.is_file(follow_symlinks=False)):
                continue
            if level is None or not level.ignores(entry.path, entry.name, is_folder=below):
                stack.append((entry.path, below, level))


def lines_of(path: str) -> Iterator[str]:
    """The lines of a text file without their ends; nothing of a binary one, nor behind its first NUL."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return
        sample = file.peek(_SNIFF)[:_SNIFF]
        if sample.startswith((b"\xff\xfe", b"\xfe\xff")):
            with open(path, encoding="utf-16", errors="replace", newline="\n") as wide:
                while line := wide.readline(_PIECE):
                    yield line.rstrip("\n").removesuffix("\r")
            return
        if b"\0" in sample:
            return
        if sample.startswith(b"\xef\xbb\xbf"):
            file.read(3)
        while raw := file.readline(_PIECE):
            if b"\0" in raw:
                return
            yield raw.decode("utf-8", "replace").rstrip("\n").removesuffix("\r")


def search(job: Job, files: Iterator[str], write: Write, flush: Callable[[], object]) -> None:
    """Print what the job asks for; a file that cannot be read is passed over."""
    try:
        find = re.compile(job.pattern).search
    except (re.error, OverflowError, RecursionError) as error:
        message = f"bad pattern {job.pattern!r}: {error}"
        raise ValueError(message) from None
    for path in files:
        with contextlib.suppress(OSError):
            _search_file(job, path, find, write)
        # What was found stays found when the next file takes too long.
        flush()


def _search_file(job: Job, path: str, find: Callable[[str], re.Match[str] | None], write: Write) -> None:
    name = os.fsencode(path) + b"\0"
    before: deque[tuple[int, str]] = deque(maxlen=job.context)
    count = after = 0
    for number, line in enumerate(lines_of(path), start=1):
        if find(line) is not None:
            count += 1
            if job.mode == "files_only":
                write(name)
                return
            if job.mode == "content":
                for earlier, text in before:
                    write(_record(name, earlier, b"-", text))
                before.clear()
                write(_record(name, number, b":", line))
                after = job.context
        elif after > 0:
            after -= 1
            write(_record(name, number, b"-", line))
        elif job.context:
            before.append((number, line))
    if job.mode == "count" and count:
        write(name + b"%d\n" % count)


def _record(name: bytes, number: int, mark: bytes, text: str) -> bytes:
    return b"%s%d%s%s\n" % (name, number, mark, text[:LINE_LIMIT].encode("utf-8", "replace"))


def main(argument: str) -> int:
    """Do the job that the JSON text describes."""
    job = Job(**json.loads(argument))
    # ends the process even inside a regex that backtracks for ever, and when its parent was killed
    signal.alarm(job.lifetime)
    write = sys.stdout.buffer.write
    try:
        wanted = glob_matcher(job.glob) if job.glob else None
        if os.path.isdir(job.root):
            cut = len(job.root.rstrip("/")) + 1
            files = (path for path in walk(job.root) if wanted is None or wanted(path[cut:]))
        else:
            files = iter([job.root])
        if job.mode == "list":
            for path in files:
                write(os.fsencode(path) + b"\0")
        else:
            search(job, files, write, sys.stdout.buffer.flush)
        sys.stdout.flush()
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
