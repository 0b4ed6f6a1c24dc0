"""From what a handler returned to what a transcript row holds: one text or list of parts, never too big.

A result over its budget is written whole to a spill file first; only then is it shortened.
Budgets are applied before a row is stored; a stored row is never changed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hermes_agent.errors import ToolError
from hermes_agent.store.encoding import join_pairs
from hermes_agent.tools.atomic_write import atomic_write, make_folders
from hermes_agent.tools.context import ToolContext
from hermes_agent.tools.registry import Arguments, Handler

Part = dict[str, Any]
"""One content part: `{"type": "text", ...}`, `{"type": "image_url", ...}`."""

Content = str | list[Part]

NO_OUTPUT = "(no output)"
CHARS_PER_TOKEN = 4

_MCP_LIMIT = 50_000
_MIN_INLINE = 2_000
"""No budget goes below this: the block that stands in for a spilled result is about as long."""
_STATE_TOOLS = frozenset({"todo"})
"""Tools whose row is the durable copy of their state: such a row stays whole."""
_ENVELOPE_KEYS = frozenset({"result", "structuredContent", "_meta"})
_PART_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "image_url": "image_url",
    "image": "data",
    "audio": "data",
    "resource": "resource",
    "resource_link": "uri",
}
_STEM = 120


@dataclass(frozen=True, slots=True)
class ResultBudget:
    """How much of tool results stays inline, and where the rest goes."""

    per_result: int = 100_000
    per_turn: int = 200_000
    spill_dir: Path | None = None
    """None: there is no place to write; what is cut off is lost, and the model is told."""
    preview: int = 1_500
    """Characters of a spilled result that stay: two thirds of its head, one third of its tail."""

    @classmethod
    def for_window(cls, context_tokens: int, spill_dir: Path | None) -> ResultBudget:
        """The budget for a context window: 15 % of it a result, 30 % a turn, within fixed bounds."""
        window = context_tokens * CHARS_PER_TOKEN
        return cls(
            per_result=max(8_000, min(window * 15 // 100, 100_000)),
            per_turn=max(16_000, min(window * 30 // 100, 200_000)),
            spill_dir=spill_dir,
        )


class TurnBudget:
    """The running total of one batch of calls: make one for each assistant message with calls.

    Ask `threshold_for` before a result is made into a row, `add` what the row then holds.
    """

    def __init__(self, budget: ResultBudget) -> None:
        self._budget = budget
        self._used = 0

    def threshold_for(self, tool_name: str, entry_limit: int | None) -> int:
        """Characters this tool's next result may keep inline; 0 means no limit.

        `entry_limit` is the tool's own limit: None takes the common one, 0 leaves only
        the batch's budget to keep.
        """
        if tool_name in _STATE_TOOLS:
            return 0
        left = max(self._budget.per_turn - self._used, 0)
        common = self._budget.per_result
        if entry_limit == 0:
            wanted = left
        elif entry_limit is not None:
            wanted = min(entry_limit, common)
        else:
            wanted = min(_MCP_LIMIT, common) if tool_name.startswith("mcp_") else common
        return max(min(wanted, left), min(_MIN_INLINE, entry_limit or common, common))

    def add(self, content: Content) -> None:
        """Count a result that goes into a row."""
        self._used += text_length(content)


def to_json(value: Any) -> str:
    """JSON text that can be encoded as UTF-8: half surrogate pairs become U+FFFD."""
    return join_pairs(json.dumps(value, ensure_ascii=False, default=str))


def _no_nul(text: str) -> str:
    """The text with NUL shown as a symbol: some servers refuse a request that holds one."""
    return text.replace("\0", "\u2400") if "\0" in text else text


def error_result(error: BaseException | str) -> str:
    """The result of a call that failed: `{"error": "..."}`."""
    text = str(error)
    return to_json({"error": text or type(error).__name__})


def json_handler(run: Callable[[Arguments, ToolContext], Mapping[str, Any]]) -> Handler:
    """A handler that answers with the JSON of what `run` returns.

    Mistakes of the caller (`ToolError`) and of the file system (`OSError`) become `{"error": ...}`.
    """

    @functools.wraps(run)
    def handler(args: Arguments, *, context: ToolContext) -> str:
        try:
            return to_json(run(args, context))
        except ToolError as error:
            return error_result(error)
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            return error_result(f"{error.strerror or error}{where}")

    return handler


def normalise(value: Any) -> Content:
    """One result from whatever a handler returned: never empty, text joined in order.

    A list of content parts (bare, or as the `content` of an MCP-style object) becomes
    one text when it holds only text; with other parts it stays a list.
    """
    if isinstance(value, str):
        return _no_nul(join_pairs(value)) or NO_OUTPUT
    if isinstance(value, bytes | bytearray):
        return _no_nul(bytes(value).decode("utf-8", "replace")) or NO_OUTPUT
    if value is None or value == []:
        return NO_OUTPUT
    parts = _as_parts(value)
    if parts is not None:
        return _from_parts(parts)
    if isinstance(value, dict) and isinstance(cast("dict[str, Any]", value).get("content"), list):
        envelope = cast("dict[str, Any]", value)
        parts = _as_parts(envelope["content"])
        if envelope["content"] == [] or parts is not None:
            content = _from_parts(parts or [])
            return _as_error(content) if envelope.get("isError") is True else content
    return to_json(value)


def text_length(content: Content) -> int:
    """Characters of text in a result; images count nothing."""
    if isinstance(content, str):
        return len(content)
    return sum(len(str(part.get("text") or "")) for part in content)


def maybe_persist_tool_result(
    *,
    content: Content,
    tool_name: str,
    tool_use_id: str,
    env: object = None,  # noqa: ARG001 - accepted for callers that run tools elsewhere
    config: ResultBudget | None = None,
    threshold: int | None = None,
) -> Content:
    """The result as it goes into the row: unchanged up to the threshold, else spilled and shortened.

    `threshold` None takes the common budget, 0 means no limit. The spill file is named
    after `tool_use_id`: a repeated call with the same result writes the same file, and a
    file with other content is never overwritten. Images stay; only text is spilled.
    """
    budget = config or ResultBudget()
    limit = budget.per_result if threshold is None else threshold
    if limit == 0 or text_length(content) <= limit:
        return content
    if isinstance(content, str):
        return _spilled(content, tool_name, tool_use_id, budget)
    text = "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
    block: Part = {"type": "text", "text": _spilled(text, tool_name, tool_use_id, budget)}
    return [block, *(part for part in content if part.get("type") != "text")]


def _spilled(text: str, tool_name: str, tool_use_id: str, budget: ResultBudget) -> str:
    fields, field, body = _readable(text)
    body = join_pairs(body)
    path = _save(body, tool_use_id, budget.spill_dir)
    head_size = budget.preview * 2 // 3
    head = _head(body, head_size)
    tail = _tail(body[len(head) :], budget.preview - head_size)
    left_out = len(body) - len(head) - len(tail)
    what = f'field "{field}" of the result' if field else "result"
    lines = [f'<spilled_result tool="{tool_name}" chars="{len(body)}">']
    if path is None:
        lines.append(f"The {what} was too long; it was truncated and could not be saved.")
    else:
        lines.append(f"The {what} was too long to show. All of it is in {path}")
        lines.append("Read more of it with read_file (offset, limit); do not make the call again for that.")
    if fields:
        lines.append(f"Other fields: {_head(fields, head_size)}")
    lines += [head, f"[... {left_out} characters left out ...]", tail, "</spilled_result>"]
    return _no_nul("\n".join(lines))


def _readable(text: str) -> tuple[str, str, str]:
    """Other fields as JSON, the long field's name, and the text worth reading line by line.

    A JSON object that is mostly one long string is unwrapped to that string: as JSON it
    would be a single line that nobody can page through.
    """
    if not text.startswith("{"):
        return "", "", text
    try:
        value = json.loads(text)
    except ValueError:
        return "", "", text
    if not isinstance(value, dict):
        return "", "", text
    fields = cast("dict[str, Any]", value)
    if "result" in fields and set(fields) <= _ENVELOPE_KEYS:
        result = fields["result"]
        return "", "", result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, indent=1)
    longest = max(fields, key=lambda key: len(fields[key]) if isinstance(fields[key], str) else -1)
    body = fields[longest]
    others = to_json({key: fields[key] for key in fields if key != longest})
    if isinstance(body, str) and len(body) > len(others) * 4:
        return others if len(fields) > 1 else "", longest, body
    return "", "", json.dumps(fields, ensure_ascii=False, indent=1)


def _save(text: str, tool_use_id: str, folder: Path | None) -> Path | None:
    """Write the whole text to its spill file; None when that was not possible."""
    if folder is None:
        return None
    data = text.encode()
    try:
        make_folders(folder, mode=0o700)
        path = folder / f"{_safe_stem(tool_use_id)}.txt"
        if path.exists() and not _holds(path, data):
            path = path.with_name(f"{path.stem}-{_digest(data)}.txt")
        atomic_write(path, data, mode=0o600)
        if path.stat().st_size != len(data):
            return None
    except OSError:
        return None
    return path


def spill_folder(home: Path) -> Path:
    """Where the spilled results of a home lie."""
    return home / "cache" / "spillover"


def erase_spilled(folder: Path, turn_ids: Iterable[str]) -> None:
    """Erase the spill files of these turns; others stay."""
    wanted = frozenset(turn_ids)
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.partition(".")[0] in wanted:
                Path(entry.path).unlink(missing_ok=True)


def _safe_stem(tool_use_id: str) -> str:
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", tool_use_id)[:_STEM].lstrip(".")
    if safe == tool_use_id and safe:
        return safe
    return f"{safe or 'result'}-{_digest(tool_use_id.encode('utf-8', 'surrogatepass'))}"


def _digest(data: bytes) -> str:
    import hashlib  # noqa: PLC0415 - loads OpenSSL, which few spills need; it would slow every start

    return hashlib.sha256(data).hexdigest()[:12]


def _holds(path: Path, data: bytes) -> bool:
    return path.stat().st_size == len(data) and path.read_bytes() == data


def _head(text: str, size: int) -> str:
    """The first `size` characters, cut at a line end when one lies in the second half."""
    if len(text) <= size:
        return text
    end = text.rfind("\n", size // 2, size)
    return text[: end if end > 0 else size]


def _tail(text: str, size: int) -> str:
    """The last `size` characters, begun at a line start when one lies in the first half."""
    if len(text) <= size:
        return text
    start = len(text) - size
    newline = text.find("\n", start, start + size // 2)
    return text[newline + 1 if newline >= 0 else start :]


def _as_parts(value: object) -> list[Part] | None:
    """The value as content parts, or None when it is something else."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return None
    items = cast("Sequence[Any]", value)
    if all(isinstance(item, dict) and _is_part(cast("Part", item)) for item in items):
        return [_as_part(cast("Part", item)) for item in items]
    return None


def _is_part(item: Part) -> bool:
    """Is this a content part, and not just any object with a `type`?"""
    needs = _PART_KEYS.get(str(item.get("type")))
    return needs is not None and needs in item


def _as_part(part: Part) -> Part:
    """A part in chat-completions form."""
    kind = part["type"]
    if kind in ("text", "input_text", "output_text"):
        return {"type": "text", "text": _no_nul(join_pairs(str(part.get("text") or "")))}
    if kind == "image" and isinstance(part.get("data"), str):
        mime = part.get("mimeType") or "image/png"
        return {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{part['data']}"}}
    if kind == "image_url":
        return part
    return {"type": "text", "text": to_json(part)}


def _from_parts(parts: list[Part]) -> Content:
    if any(part["type"] != "text" for part in parts):
        return [part for part in parts if part["type"] != "text" or part["text"]]
    return "\n".join(part["text"] for part in parts if part["text"]) or NO_OUTPUT


def _as_error(content: Content) -> Content:
    if isinstance(content, str):
        return error_result(content)
    return [{"type": "text", "text": error_result("the tool reported an error")}, *content]
