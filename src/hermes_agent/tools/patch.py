"""`patch`: replace one exact piece of a text file, or every occurrence of it.

The old text is looked for exactly, then without regard to white space at line ends, then
with another indentation, which the new text then takes on. Anything less alike is shown
as a near miss and not applied. Untouched bytes stay as they are, line ends and invalid
UTF-8 included; new lines get the file's line end.

The call is classed as unsafe: a second run may hit text that only the first one made
match (an insertion repeats the old text inside the new, and a removal can join what
stood around it), so nobody may repeat it without looking. Where the file shows beyond
doubt that the change is there already, a repeated call changes nothing and says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hermes_agent.errors import ToolError
from hermes_agent.store.encoding import join_pairs
from hermes_agent.tools import paths
from hermes_agent.tools.arguments import flag, text
from hermes_agent.tools.atomic_write import atomic_write
from hermes_agent.tools.context import ToolContext
from hermes_agent.tools.registry import Arguments, Effect, ToolEntry
from hermes_agent.tools.results import json_handler
from hermes_agent.tools.write_file import written_paths

_MAX_BYTES = 32 << 20
_MAX_DIFF = 20_000
_CONTEXT = 3
_DISTINCT = 12
"""Characters, white space aside, that a text needs before finding it again means anything."""
_NEAR_LINES = 5_000
_NEAR_WIDTH = 200


class _Edit(NamedTuple):
    """Put `new` in place of the characters from `start` to `end`."""

    start: int
    end: int
    new: str


def _run(args: Arguments, context: ToolContext) -> dict[str, Any]:
    name = text(args, "path")
    old, new = text(args, "old_string"), join_pairs(text(args, "new_string"))
    everywhere = flag(args, "replace_all")
    if not old:
        raise ToolError("old_string is empty; give the text to replace, or create a file with write_file.")
    if old == new:
        raise ToolError("old_string and new_string are the same; there is nothing to change.")
    path = paths.resolve(name, context)
    refused = paths.refuse_write(path, context) or paths.refuse_read(path, context)
    if refused:
        raise ToolError(refused)
    try:
        content, found = _read(path)
    except (FileNotFoundError, NotADirectoryError):
        similar = [paths.shown(Path(other), context) for other in paths.similar_files(path)]
        return {"error": f"There is no file {name} (looked for {path}).", "not_found": True, "similar_files": similar}

    line_end = "\r\n" if content.count("\r\n") * 2 > content.count("\n") else "\n"
    new = _with_line_end(new, line_end)
    edits = _find(content, old, new, line_end)
    done: dict[str, Any] = {"success": True, "diff": "", "files_modified": [], "resolved_path": str(path)}
    if _is_applied(content, _with_line_end(old, line_end), new, edits, everywhere=everywhere):
        return {**done, "already_applied": True, "note": "The file already holds new_string; nothing was changed."}
    if not edits:
        return _no_match(content, old)
    if len(edits) > 1 and not everywhere:
        lines = ", ".join(str(content.count("\n", 0, edit.start) + 1) for edit in edits[:10])
        raise ToolError(
            f"old_string occurs {len(edits)} times (lines {lines}); add surrounding lines to make it unique, "
            "or set replace_all."
        )
    changed = _apply(content, edits)
    if changed == content:
        raise ToolError("The change would leave the file as it is.")
    now = path.stat()
    if (now.st_mtime_ns, now.st_size, now.st_ino) != (found.st_mtime_ns, found.st_size, found.st_ino):
        raise ToolError(f"{path} changed while it was being patched; read it again.")
    atomic_write(path, changed.encode("utf-8", "surrogateescape"))
    done.update(diff=_diff(content, edits, paths.shown(path, context)), files_modified=[str(path)])
    if everywhere:
        done["replacements"] = len(edits)
    return done


def _read(path: Path) -> tuple[str, os.stat_result]:
    descriptor, found = paths.open_regular(path)
    with os.fdopen(descriptor, "rb") as stream:
        if found.st_size > _MAX_BYTES:
            raise ToolError(f"{path} has {found.st_size} bytes, too many to patch; edit it with a command (sed).")
        data = stream.read(_MAX_BYTES + 1)
    if b"\0" in data:
        raise ToolError(f"{path} is a binary file; patch changes only text.")
    return data.decode("utf-8", "surrogateescape"), found


def _with_line_end(piece: str, line_end: str) -> str:
    plain = piece.replace("\r\n", "\n")
    return plain if line_end == "\n" else plain.replace("\n", line_end)


# --- finding -----------------------------------------------------------------------------


def _find(content: str, old: str, new: str, line_end: str) -> list[_Edit]:
    """The places to change, from the first rung of the ladder that finds any."""
    edits = _exact(content, old, new) or _exact(content, _with_line_end(old, line_end), new)
    if edits or not old.strip():
        return edits
    return _by_lines(content, old, new, _same_but_line_ends) or _by_lines(content, old, new, _same_but_indentation)


def _exact(content: str, old: str, new: str) -> list[_Edit]:
    edits: list[_Edit] = []
    at = content.find(old)
    while at >= 0:
        edits.append(_Edit(at, at + len(old), new))
        at = content.find(old, at + len(old))
    return edits


Matcher = Callable[[list[str], list[str]], Callable[[str], str] | None]
"""Compares lines of the file with the wanted ones; on a match says how a new line is adapted."""


def _by_lines(content: str, old: str, new: str, match: Matcher) -> list[_Edit]:
    """Places where whole lines match; the line end behind the last one is kept unless `old` had it."""
    lines = _keep_ends(content)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    wanted = old.replace("\r\n", "\n").split("\n")
    with_end = wanted[-1] == "" and len(wanted) > 1
    if with_end:
        wanted.pop()
    bare = [line.rstrip("\r\n") for line in lines]
    anchor = next(i for i, line in enumerate(wanted) if line.strip())
    needle = wanted[anchor].strip()
    edits: list[_Edit] = []
    first = 0
    for i, line in enumerate(bare):
        top = i - anchor
        if top < first or top + len(wanted) > len(bare) or line.strip() != needle:
            continue
        adapt = match(bare[top : top + len(wanted)], wanted)
        if adapt is None:
            continue
        last = top + len(wanted) - 1
        end = starts[last + 1] if with_end else starts[last] + len(bare[last])
        edits.append(_Edit(starts[top], end, "".join(adapt(piece) for piece in _keep_ends(new))))
        first = last + 1
    return edits


def _keep_ends(content: str) -> list[str]:
    """Lines with their ends; only LF ends a line."""
    pieces = [piece + "\n" for piece in content.split("\n")]
    pieces[-1] = pieces[-1][:-1]
    return pieces if pieces[-1] else pieces[:-1]


def _same_but_line_ends(have: list[str], want: list[str]) -> Callable[[str], str] | None:
    same = all(a.rstrip() == b.rstrip() for a, b in zip(have, want, strict=True))
    return (lambda line: line) if same else None


def _same_but_indentation(have: list[str], want: list[str]) -> Callable[[str], str] | None:
    """A match when every line differs by one and the same indentation, more or less."""
    shift: tuple[str, str] | None = None
    for a, b in zip(have, want, strict=True):
        if a.strip() != b.strip():
            return None
        if not a.strip():
            continue
        here, there = a[: len(a) - len(a.lstrip())], b[: len(b) - len(b.lstrip())]
        if here.endswith(there):
            step = (here[: len(here) - len(there)], "")
        elif there.endswith(here):
            step = ("", there[: len(there) - len(here)])
        else:
            return None
        if shift is None:
            shift = step
        if shift != step:
            return None
    if shift is None:
        return None
    more, less = shift

    def adapt(line: str) -> str:
        if not line.strip():
            return line
        return more + line.removeprefix(less)

    return adapt


def _is_applied(content: str, old: str, new: str, edits: list[_Edit], *, everywhere: bool) -> bool:
    """Does the file show beyond doubt that this very change was made before?

    Either the old text is gone and the new one, which says something, is there exactly
    once; or the only place of the old text is the one that it has inside the new.
    """
    if everywhere or not new or content.count(new) != 1 or len("".join(new.split())) < _DISTINCT:
        return False
    if not edits:
        return True
    if len(edits) > 1 or old not in new or new.count(old) != 1:
        return False
    return edits[0].start == content.find(new) + new.find(old)


# --- answering ---------------------------------------------------------------------------


def _apply(content: str, edits: list[_Edit]) -> str:
    parts: list[str] = []
    at = 0
    for edit in edits:
        parts += [content[at : edit.start], edit.new]
        at = edit.end
    parts.append(content[at:])
    return "".join(parts)


def _diff(content: str, edits: list[_Edit], name: str) -> str:
    """A unified diff, made from the edits themselves: its cost does not grow with the file."""
    out = [f"--- a/{name.lstrip('/')}", f"+++ b/{name.lstrip('/')}"]
    size = shift = counted = lines_above = 0
    for group in _grouped(content, edits):
        top, bottom = _surroundings(content, group)
        local = [_Edit(edit.start - top, edit.end - top, edit.new) for edit in group]
        before, after = _keep_ends(content[top:bottom]), _keep_ends(_apply(content[top:bottom], local))
        lines_above += content.count("\n", counted, top)
        counted = top
        hunks = _hunks(before, after, lines_above, lines_above + shift)
        out += hunks
        shift += len(after) - len(before)
        size += sum(map(len, hunks))
        if size > _MAX_DIFF:
            whole = "\n".join(out)
            return whole[:_MAX_DIFF] + "\n[... the rest of the diff is left out ...]"
    return "\n".join(out)


def _hunks(before: list[str], after: list[str], old_base: int, new_base: int) -> list[str]:
    """The hunks between two lists of lines that lie below so many lines of the old and the new file."""
    from difflib import SequenceMatcher  # noqa: PLC0415 - not needed until the first change; it would slow every start

    matcher = SequenceMatcher(None, before, after)
    out: list[str] = []
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        out.append(f"@@ -{old_base + i1 + 1},{i2 - i1} +{new_base + j1 + 1},{j2 - j1} @@")
        for tag, start, end, new_start, new_end in group:
            if tag == "equal":
                out += [" " + line.rstrip("\r\n") for line in before[start:end]]
                continue
            out += ["-" + line.rstrip("\r\n") for line in before[start:end]]
            out += ["+" + line.rstrip("\r\n") for line in after[new_start:new_end]]
    return out


def _grouped(content: str, edits: list[_Edit]) -> list[list[_Edit]]:
    """Edits whose surroundings would overlap, together."""
    groups: list[list[_Edit]] = []
    for edit in edits:
        if groups and content.count("\n", groups[-1][-1].end, edit.start) <= 2 * _CONTEXT + 2:
            groups[-1].append(edit)
        else:
            groups.append([edit])
    return groups


def _surroundings(content: str, group: list[_Edit]) -> tuple[int, int]:
    """Where the whole lines around these edits start and end, with the lines shown for context."""
    top, bottom = group[0].start, group[-1].end
    for _ in range(_CONTEXT + 1):
        top = content.rfind("\n", 0, max(top - 1, 0)) + 1 if top > 0 else 0
    for _ in range(_CONTEXT + 1):
        end = content.find("\n", bottom)
        bottom = len(content) if end < 0 else end + 1
    return top, bottom


def _no_match(content: str, old: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"error": "old_string was not found in the file; nothing was changed."}
    near = _near_miss(content, old)
    if near:
        answer["near_miss"] = near
        answer["error"] += " The most similar place is shown in near_miss; copy it exactly, without the line numbers."
    else:
        answer["error"] += " Read the file again and copy the text exactly."
    return answer


def _near_miss(content: str, old: str) -> str:
    """The lines most like the wanted ones, numbered; empty when nothing is like them."""
    lines = content.split("\n", _NEAR_LINES)[:_NEAR_LINES]
    have = [line.strip()[:_NEAR_WIDTH] for line in lines]
    want = [line.strip()[:_NEAR_WIDTH] for line in old.replace("\r\n", "\n").strip("\n").split("\n")[:50]]
    places = {line: i for i, line in enumerate(want) if line}
    tops = [i - places[line] for i, line in enumerate(have) if line in places]
    if not tops and places:
        from difflib import get_close_matches  # noqa: PLC0415 - only a miss needs it; it would slow every start

        longest = max(places, key=len)
        close = get_close_matches(longest, list(dict.fromkeys(have)), n=1, cutoff=0.6)
        tops = [i - places[longest] for i, line in enumerate(have) if line in close]
    if not tops:
        return ""

    def score(top: int) -> int:
        return sum(a == b for a, b in zip(have[top : top + len(want)], want, strict=False) if b)

    best = max(dict.fromkeys(max(top, 0) for top in tops), key=score)
    return "\n".join(f"{best + i + 1}|{line[:500]}" for i, line in enumerate(lines[best : best + len(want)]))


TOOL = ToolEntry(
    name="patch",
    toolset="file",
    description=(
        "Replace a piece of a text file. old_string must be copied exactly from the file and occur once, "
        "unless replace_all is set. Answers with a diff."
    ),
    parameters={
        "type": "object",
        "properties": {
            "path": {
                "type": "string",
                "description": "File to change: absolute, relative to the working folder, or ~.",
            },
            "old_string": {"type": "string", "description": "Text to replace, with enough lines around to be unique."},
            "new_string": {"type": "string", "description": "Text to put in its place; empty removes it."},
            "replace_all": {"type": "boolean", "default": False, "description": "Replace every occurrence."},
        },
        "required": ["path", "old_string", "new_string"],
    },
    handler=json_handler(_run),
    effect=Effect.UNSAFE,
    writes=written_paths,
)
