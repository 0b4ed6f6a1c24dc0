"""`search_files`: find lines by regular expression, or files by name, in bounded time and memory.

System ripgrep does it where it is installed, else a child process with Python's `re`; both
skip hidden, binary and linked files and what a repository's .gitignore excludes, and the
answer is the same. A pattern that ripgrep does not know (look-around) goes to Python.
Files that tools may not read are never among the results.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from hermes_agent.errors import ToolError
from hermes_agent.tools import grep_child, paths
from hermes_agent.tools.arguments import choice, integer, text
from hermes_agent.tools.context import ToolContext
from hermes_agent.tools.registry import Arguments, Effect, ToolEntry
from hermes_agent.tools.results import json_handler

_TIMEOUT = 60.0
_MAX_LIMIT = 1_000
_MAX_CONTEXT = 20
_MAX_COUNTED = 10_000
"""Hits after which the search stops; the total is then a lower bound."""
_LINE_WIDTH = 500
_MAX_RECORD = 1 << 20
_CHUNK = 1 << 16
_RECORD = re.compile(rb"(\d+)([:-])(.*)", re.DOTALL)
_ENVIRONMENT = {"LC_ALL": "C.UTF-8"}
_RG = (
    "--no-config", "--no-messages", "--color=never", "--sort=path", "--null",
    "--no-ignore-global", "--no-ignore-exclude", "--no-ignore-dot",
)  # fmt: skip


class _Hit(NamedTuple):
    """A matching or surrounding line, a file, or a file with its count."""

    path: str
    line: int = 0
    content: str = ""
    is_match: bool = True


class _Window(NamedTuple):
    """The hits asked for, and how many there are."""

    hits: list[_Hit]
    total: int


def rg_path() -> str | None:
    """Where ripgrep is installed; None when it is not."""
    from shutil import which  # noqa: PLC0415 - not needed until the first search; it would slow every start

    return which("rg")


class _Search:
    """One search: what is asked, and how it went."""

    def __init__(self, job: grep_child.Job, context: ToolContext) -> None:
        self.job = job
        self._context = context
        self._root_length = len(job.root.rstrip("/")) + 1
        self._wanted = _glob_test(job.glob)
        self._is_folder = os.path.isdir(job.root)
        self._last = ("", False)
        self._failed = ""
        self.note = ""

    def hits(self) -> Generator[_Hit]:
        """Every hit in order of paths; raises ToolError for a bad pattern."""
        rg = rg_path()
        if rg is not None:
            any_hit = False
            for hit in self._run(self._rg_command(rg), nothing_found=1):
                any_hit = True
                yield hit
            if any_hit or not self._failed:
                return
        yield from self._run([sys.executable, "-I", "-S", grep_child.__file__, self.job.argument()], nothing_found=0)
        if self._failed:
            raise ToolError(self._failed)

    def _rg_command(self, rg: str) -> list[str]:
        job = self.job
        command = [rg, *_RG]
        if job.glob and not set("/:\\") & set(job.glob) and job.mode != "list":
            # As a glob it would also bring ignored files back; as a file type it does not.
            command += ["--type-add", f"wanted:{job.glob}", "--type", "wanted"]
        if job.mode == "list":
            return [*command, "--files", "--", job.root]
        if job.mode == "files_only":
            command.append("--files-with-matches")
        elif job.mode == "count":
            command += ["--count", "--with-filename"]
        else:
            width = str(grep_child.LINE_LIMIT)
            command += ["--line-number", "--no-heading", "--with-filename", "--max-columns", width]
            command += ["--max-columns-preview", f"--context={job.context}"]
        return [*command, "--crlf", "--", job.pattern, job.root]

    def _run(self, command: list[str], *, nothing_found: int) -> Iterator[_Hit]:
        """Run one searching program; `_failed` then holds why it could not do its work, if so."""
        import subprocess  # noqa: PLC0415 - not needed until the first search; it would slow every start

        self._failed = ""
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=_ENVIRONMENT,
            start_new_session=True,
        )
        late = threading.Event()

        def stop() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(_TIMEOUT, stop)
        timer.daemon = True
        cancellation = self._context.cancellation
        timer.start()
        with child, cancellation.aborting(child.kill):
            try:
                assert child.stdout is not None
                assert child.stderr is not None
                yield from self._parsed(child.stdout)
                message = child.stderr.read(4096).decode("utf-8", "replace").strip()
                child.wait()
            finally:
                timer.cancel()
                child.kill()
        if cancellation.requested:
            raise ToolError(f"The search was stopped: {cancellation.reason}.")
        if late.is_set():
            self.note = f"The search was stopped after {_TIMEOUT:.0f} seconds; narrow it with path or file_glob."
        elif child.returncode not in (0, nothing_found):
            self._failed = message or f"The search program ended with status {child.returncode}."

    def _parsed(self, stream: IO[bytes]) -> Iterator[_Hit]:
        names_only = self.job.mode in ("list", "files_only")
        for record in _records(stream, b"\0" if names_only else b"\n"):
            name, nul, rest = record.partition(b"\0")
            if names_only:
                if self._is_shown(os.fsdecode(name)):
                    yield _Hit(os.fsdecode(name))
                continue
            if not nul or not self._is_shown(os.fsdecode(name)):
                continue
            if self.job.mode == "count":
                if rest.strip().isdigit():
                    yield _Hit(os.fsdecode(name), int(rest))
                continue
            found = _RECORD.fullmatch(rest)
            if found is not None:
                number, mark, line = found.groups()
                yield _Hit(os.fsdecode(name), int(number), _shortened(line), mark == b":")

    def _is_shown(self, path: str) -> bool:
        if path != self._last[0]:
            shown = not self._is_folder or self._wanted is None or self._wanted(path[self._root_length :])
            self._last = (path, shown and paths.refuse_read(Path(path), self._context) is None)
        return self._last[1]


def _records(stream: IO[bytes], end: bytes) -> Iterator[bytes]:
    """The pieces between the end marks; one that is too long is dropped."""
    rest = b""
    while chunk := os.read(stream.fileno(), _CHUNK):
        pieces = (rest + chunk).split(end)
        rest = pieces.pop()
        yield from pieces
        if len(rest) > _MAX_RECORD:
            rest = b""


def _shortened(line: bytes) -> str:
    decoded = line.decode("utf-8", "replace").removesuffix("\r").replace("\0", "\u2400")
    return decoded if len(decoded) <= _LINE_WIDTH else decoded[:_LINE_WIDTH] + " [...]"


def _glob_test(glob: str) -> Callable[[str], bool] | None:
    if not glob:
        return None
    try:
        return grep_child.glob_matcher(glob)
    except ValueError as error:
        raise ToolError(str(error)) from None


def _window(hits: Iterable[_Hit], offset: int, limit: int, context: int) -> _Window:
    """The matches from `offset` on with the lines around them; the others are only counted."""
    kept: list[_Hit] = []
    before: deque[_Hit] = deque(maxlen=context)
    total = 0
    last: _Hit | None = None
    for hit in hits:
        if not hit.is_match:
            near = last is not None and hit.path == last.path and hit.line - last.line <= context
            if near:
                kept.append(hit)
            else:
                before.append(hit)
            continue
        total += 1
        last = None
        if offset < total <= offset + limit:
            kept += [line for line in before if line.path == hit.path and hit.line - line.line <= context]
            kept.append(hit)
            last = hit
        before.clear()
        if total >= _MAX_COUNTED:
            break
    return _Window(kept, total)


def _newest_first(hits: Iterable[_Hit]) -> list[_Hit]:
    times: dict[str, float] = {}
    kept: list[_Hit] = []
    for hit in hits:
        kept.append(hit)
        if hit.path not in times:
            try:
                times[hit.path] = -os.stat(hit.path).st_mtime_ns
            except OSError:
                times[hit.path] = 0
        if len(kept) >= _MAX_COUNTED * 2:
            break
    return sorted(kept, key=lambda hit: times[hit.path])


def _run(args: Arguments, context: ToolContext) -> dict[str, Any]:
    pattern = text(args, "pattern")
    target = choice(args, "target", ("content", "files"))
    mode = choice(args, "output_mode", ("content", "files_only", "count"))
    order = choice(args, "order", ("path", "newest"))
    limit = integer(args, "limit", 50, 1, _MAX_LIMIT)
    offset = integer(args, "offset", 0, 0)
    around = integer(args, "context", 0, 0, _MAX_CONTEXT) if mode == "content" else 0
    glob = text(args, "file_glob", "")
    name = text(args, "path", "") or "."
    if not pattern:
        raise ToolError("The pattern is empty.")
    if "\0" in pattern or "\n" in pattern:
        raise ToolError("The pattern contains a NUL character or a line break; lines are searched one by one.")
    root = paths.resolve(name, context)
    refused = paths.refuse_read(root, context)
    if refused:
        raise ToolError(refused)
    if not root.exists():
        raise ToolError(f"There is no file or folder {name} (looked for {root}).")
    if target == "files":
        mode = "list"
        glob = pattern if set("*?[{") & set(pattern) else f"*{pattern}*"
    search = _Search(grep_child.Job(mode, pattern, str(root), glob, around), context)
    with contextlib.closing(search.hits()) as hits:
        window = _window(_newest_first(hits) if order == "newest" else hits, offset, limit, around)
    return _answer(search, window, offset, context)


def _answer(search: _Search, window: _Window, offset: int, context: ToolContext) -> dict[str, Any]:
    mode = search.job.mode
    shown = {hit.path: paths.shown(Path(hit.path), context) for hit in window.hits}
    answer: dict[str, Any] = {"total_count": window.total}
    if mode == "content":
        answer["matches"] = [
            {"path": shown[hit.path], "line": hit.line, "content": hit.content}
            | ({} if hit.is_match else {"is_context": True})
            for hit in window.hits
        ]
    elif mode == "count":
        answer["counts"] = [{"path": shown[hit.path], "count": hit.line} for hit in window.hits]
    else:
        answer["files"] = [shown[hit.path] for hit in window.hits]
    end = offset + sum(hit.is_match for hit in window.hits)
    if end < window.total:
        answer.update(truncated=True, next_offset=end)
    if window.total >= _MAX_COUNTED:
        search.note = f"The search was stopped at {_MAX_COUNTED} hits; there are more. Make the pattern narrower."
    if search.note:
        answer.update(truncated=True, note=search.note)
    return answer


def _reads(args: Arguments) -> list[str]:
    path = args.get("path")
    return [path if isinstance(path, str) and path else "."]


TOOL = ToolEntry(
    name="search_files",
    toolset="file",
    description=(
        "Search in files by regular expression (target 'content'), or find files by name (target 'files', "
        "where pattern is a glob). Hidden, binary and git-ignored files are left out. "
        "Use this instead of grep, find or ls."
    ),
    parameters={
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "description": "Regular expression, or glob such as '*.py'."},
            "target": {"type": "string", "enum": ["content", "files"], "default": "content"},
            "path": {"type": "string", "default": ".", "description": "Folder or file to search in."},
            "file_glob": {"type": "string", "description": "Search only files whose name matches, such as '*.py'."},
            "limit": {"type": "integer", "minimum": 1, "default": 50},
            "offset": {"type": "integer", "minimum": 0, "default": 0, "description": "Hits to skip."},
            "order": {"type": "string", "enum": ["path", "newest"], "default": "path"},
            "output_mode": {"type": "string", "enum": ["content", "files_only", "count"], "default": "content"},
            "context": {"type": "integer", "minimum": 0, "default": 0, "description": "Lines to show around a match."},
        },
        "required": ["pattern"],
    },
    handler=json_handler(_run),
    effect=Effect.PURE,
    parallel=True,
    reads=_reads,
)
