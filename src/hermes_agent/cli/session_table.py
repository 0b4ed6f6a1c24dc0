"""Stored sessions as a table."""

from __future__ import annotations

import time
from typing import Any

from hermes_agent.cli.screen import Stream, clip, one_line


def table(found: list[dict[str, Any]], out: Stream) -> str:
    """Sessions as a table for the width of `out`; a narrow one leaves the model out."""
    columns = out.columns() if out.terminal else 200
    wide = columns >= 80
    lines = [["SESSION", "LAST USED", "MESSAGES", *(["MODEL"] if wide else [])]]
    abouts = ["ABOUT"]
    for session in found:
        model = clip(one_line(str(session.get("model") or "")), 24)
        lines.append([session["id"], ago(session["last_active"]), str(session["last_seq"]), *([model] if wide else [])])
        abouts.append(one_line(str(session.get("title") or session.get("preview") or "")))
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        clip("  ".join([*map(str.ljust, line, widths), about]).rstrip(), columns)
        for line, about in zip(lines, abouts, strict=True)
    )


def ago(then: float, now: float | None = None) -> str:
    """How long ago something was, roughly."""
    seconds = max((time.time() if now is None else now) - then, 0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"
