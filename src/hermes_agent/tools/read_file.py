"""`read_file`: a page of a text file with line numbers, in bounded memory whatever the file's size.

Lines end at LF; a CR before it and a byte order mark at the start are not shown, invalid
UTF-8 becomes U+FFFD. A long line is cut; `column` reads on inside it.
"""

from __future__ import annotations

import codecs
import os
from pathlib import Path
from typing import Any, NamedTuple

from hermes_agent.cancellation import Cancellation
from hermes_agent.errors import ToolError
from hermes_agent.tools import paths
from hermes_agent.tools.arguments import integer, text
from hermes_agent.tools.context import ToolContext, ToolLimits
from hermes_agent.tools.registry import Arguments, Effect, ToolEntry
from hermes_agent.tools.results import json_handler, spill_folder

_CHUNK = 1 << 18
_SNIFF = 8192
_COUNT_AHEAD = 128 << 20
"""Bytes read behind the page's start to count lines; a bigger file has no `total_lines`."""
_BYTES_PER_CHARACTER = 4
_BOM = codecs.BOM_UTF8
_IMAGES = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM")


class _Line(NamedTuple):
    head: bytes
    size: int
    """Bytes of the whole line; more than `head` holds when it was cut."""


class _Scanner:
    """Reads a descriptor forward, line by line, holding one chunk and one cut line at most."""

    def __init__(self, descriptor: int, cancellation: Cancellation) -> None:
        self._descriptor = descriptor
        self._cancellation = cancellation
        self._chunk = b""
        self._at = 0
        self._budget: int | None = None
        self._last = b"\n"
        self.newlines = 0
        self.gave_up = False

    def limit(self, budget: int) -> None:
        """Read at most `budget` more bytes."""
        self._budget = budget

    def skip_lines(self, count: int) -> None:
        """Go on to the line that `count` newlines lie before."""
        while count > 0 and self._fill():
            inside = self._chunk.count(b"\n", self._at)
            if inside < count:
                self._consume(len(self._chunk), inside)
                count -= inside
                continue
            end = self._at
            for _ in range(count):
                end = self._chunk.index(b"\n", end) + 1
            self._consume(end, count)
            return

    def line(self, keep: int) -> _Line | None:
        """The next line, cut at `keep` bytes; None at the end."""
        if not self._fill():
            return None
        head, size = bytearray(), 0
        while self._fill():
            end = self._chunk.find(b"\n", self._at)
            stop = len(self._chunk) if end < 0 else end
            head += self._chunk[self._at : min(stop, self._at + keep - len(head))]
            size += stop - self._at
            if end >= 0:
                self._consume(end + 1, 1)
                break
            self._consume(stop, 0)
        return _Line(bytes(head), size)

    def pieces_of_line(self) -> bytes | None:
        """The next piece of the current line; None when it is over."""
        if not self._fill():
            return None
        end = self._chunk.find(b"\n", self._at)
        if end == self._at:
            return None
        stop = len(self._chunk) if end < 0 else end
        piece = self._chunk[self._at : stop]
        self._consume(stop, 0)
        return piece

    def total_lines(self) -> int | None:
        """Lines of the whole file; None when counting them would take too long."""
        while self._fill():
            self._consume(len(self._chunk), self._chunk.count(b"\n", self._at))
        return None if self.gave_up else self.newlines + (self._last != b"\n")

    def more(self) -> bool:
        """Is anything left to read?"""
        return self._fill() or self.gave_up

    def _consume(self, end: int, newlines: int) -> None:
        if end > self._at:
            self._last = self._chunk[end - 1 : end]
        self._at = end
        self.newlines += newlines

    def _fill(self) -> bool:
        """Have at least one unread byte; False at the end of the file or of the budget."""
        if self._at < len(self._chunk):
            return True
        if self.gave_up:
            return False
        if self._cancellation.requested:
            raise ToolError(f"Reading was stopped: {self._cancellation.reason}.")
        if self._budget is not None and self._budget <= 0:
            self.gave_up = True
            return False
        self._chunk, self._at = os.read(self._descriptor, _CHUNK), 0
        if self._budget is not None:
            self._budget -= len(self._chunk)
        return bool(self._chunk)


def _run(args: Arguments, context: ToolContext) -> dict[str, Any]:
    limits = context.limits
    name = text(args, "path")
    offset = integer(args, "offset", 1, 1)
    count = integer(args, "limit", limits.read_max_lines, 1, limits.read_max_lines)
    column = integer(args, "column", 1, 1)
    path = paths.resolve(name, context)
    refused = paths.refuse_read(path, context)
    if refused:
        raise ToolError(refused)
    try:
        descriptor, found = paths.open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return _not_found(name, path, context)
    try:
        sample = os.read(descriptor, _SNIFF)
        os.lseek(descriptor, 0, os.SEEK_SET)
        if b"\0" in sample and not _is_spilled(path, context):
            return _binary(path, sample, found.st_size)
        scanner = _Scanner(descriptor, context.cancellation)
        scanner.skip_lines(offset - 1)
        scanner.limit(_COUNT_AHEAD)
        page = _inside_line(scanner, offset, column, limits) if column > 1 else _page(scanner, offset, count, limits)
        total = scanner.total_lines()
    finally:
        os.close(descriptor)
    if total is not None and offset > max(total, 1):
        raise ToolError(f"offset {offset} is past the end: {path} has {total} lines.")
    return {**page, "total_lines": total, "file_size": found.st_size}


def _page(scanner: _Scanner, offset: int, count: int, limits: ToolLimits) -> dict[str, Any]:
    """Up to `count` whole or cut lines, as far as the character limit allows."""
    width = min(limits.read_max_line_length, limits.read_max_chars)
    lines: list[str] = []
    number, used, cut = offset, 0, False
    while number < offset + count:
        line = scanner.line(width * _BYTES_PER_CHARACTER)
        if line is None:
            break
        head = line.head.removeprefix(_BOM) if number == 1 else line.head
        if len(line.head) == line.size:
            head = head.removesuffix(b"\r")
        shown = _decoded(head)
        is_cut = len(shown) > width or len(line.head) < line.size
        if is_cut:
            size = f"over {line.size}" if scanner.gave_up else str(line.size)
            note = f" [cut: the line has {size} bytes; go on with offset={number}, column={width + 1}]"
            shown = shown[:width] + note
        shown = f"{number}|{shown}"
        if lines and used + len(shown) > limits.read_max_chars:
            return {"content": "\n".join(lines), "truncated": True, "next_offset": number}
        lines.append(shown)
        used += len(shown) + 1
        cut = cut or is_cut
        number += 1
    page: dict[str, Any] = {"content": "\n".join(lines), "truncated": cut}
    if scanner.more():
        page.update(truncated=True, next_offset=number)
    return page


def _inside_line(scanner: _Scanner, offset: int, column: int, limits: ToolLimits) -> dict[str, Any]:
    """One line from the character at `column`, as far as the character limit allows."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    skip, seen, parts = column - 1, 0, list[str]()
    room = limits.read_max_chars
    truncated = False
    while True:
        piece = scanner.pieces_of_line()
        if piece is not None and offset == 1 and seen == 0:
            piece = piece.removeprefix(_BOM)
        decoded = decoder.decode(piece or b"", final=piece is None)
        start = max(skip - seen, 0)
        seen += len(decoded)
        wanted = decoded[start : start + room]
        parts.append(wanted)
        room -= len(wanted)
        if piece is None:
            break
        if room == 0:
            truncated = True
            break
    if scanner.gave_up:
        raise ToolError(
            f"column {column} lies too far inside line {offset}; cut it out with a command in the terminal."
        )
    if seen < column:
        raise ToolError(f"column {column} is past the end: line {offset} has {seen} characters.")
    joined = "".join(parts)
    shown = _visible(joined if truncated else joined.removesuffix("\r"))
    page: dict[str, Any] = {"content": f"{offset}|{shown}", "truncated": truncated}
    if truncated:
        page.update(next_offset=offset, next_column=column + len(shown))
    else:
        scanner.skip_lines(1)
        if scanner.more():
            page["next_offset"] = offset + 1
    return page


def _decoded(line: bytes) -> str:
    return _visible(line.decode("utf-8", "replace"))


def _visible(decoded: str) -> str:
    # NUL is valid in a file but not in a request to a model.
    return decoded.replace("\0", "\u2400")


def _not_found(name: str, path: Path, context: ToolContext) -> dict[str, Any]:
    similar = [paths.shown(Path(found), context) for found in paths.similar_files(path)]
    hint = "Did you mean one of similar_files?" if similar else "Look for it with search_files and target 'files'."
    where = "" if path.parent.is_dir() else f" The folder {path.parent} does not exist either."
    return {
        "error": f"There is no file {name} (looked for {path}).{where} {hint}",
        "not_found": True,
        "similar_files": similar,
    }


def _is_spilled(path: Path, context: ToolContext) -> bool:
    """Results that were too long to show are text, whatever bytes a command printed."""
    return path.is_relative_to(Path(os.path.realpath(spill_folder(context.home))))


def _binary(path: Path, sample: bytes, size: int) -> dict[str, Any]:
    image = sample.startswith(_IMAGES) or (sample[:4] == b"RIFF" and sample[8:12] == b"WEBP")
    kind = "an image" if image else "a binary file"
    return {
        "error": f"{path} is {kind} of {size} bytes, not text; look at it with a command in the terminal.",
        "content": "",
        "file_size": size,
        "truncated": False,
        "is_binary": True,
        "is_image": image,
    }


def _reads(args: Arguments) -> list[str]:
    path = args.get("path")
    return [path] if isinstance(path, str) and path else []


TOOL = ToolEntry(
    name="read_file",
    toolset="file",
    description=(
        "Read a text file. Lines come as 'NUMBER|text'; the number is not part of the file. "
        "A long file is read in pages: go on at next_offset. Use this instead of cat, head or tail."
    ),
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "File to read: absolute, relative to the working folder, or ~."},
            "offset": {"type": "integer", "minimum": 1, "default": 1, "description": "First line to read."},
            "limit": {"type": "integer", "minimum": 1, "default": 2000, "description": "Lines to read at most."},
            "column": {
                "type": "integer",
                "minimum": 1,
                "default": 1,
                "description": "Read only the line at offset, from this character; for lines that were cut.",
            },
        },
        "required": ["path"],
    },
    handler=json_handler(_run),
    effect=Effect.PURE,
    parallel=True,
    reads=_reads,
    max_result_chars=0,
)
