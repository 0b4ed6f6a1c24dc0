"""`write_file`: make a text the whole content of a file, durably and in one step.

Idempotent: writing the same content again leaves the same file.
"""

from __future__ import annotations

from typing import Any

from hermes_agent.errors import ToolError
from hermes_agent.store.encoding import join_pairs
from hermes_agent.tools import paths
from hermes_agent.tools.arguments import text
from hermes_agent.tools.atomic_write import atomic_write, make_folders
from hermes_agent.tools.context import ToolContext
from hermes_agent.tools.registry import Arguments, Effect, ToolEntry
from hermes_agent.tools.results import json_handler


def _run(args: Arguments, context: ToolContext) -> dict[str, Any]:
    path = paths.resolve(text(args, "path"), context)
    data = join_pairs(text(args, "content")).encode()
    refused = paths.refuse_write(path, context)
    if refused:
        raise ToolError(refused)
    if path.is_dir():
        raise ToolError(f"{path} is a directory; name a file in it.")
    if path.exists() and not path.is_file():
        raise ToolError(f"{path} is a pipe, socket or device, not a regular file.")
    created = make_folders(path.parent)
    atomic_write(path, data)
    verified = path.read_bytes() == data
    if not verified:
        raise ToolError(f"{path} was written, but another program has changed it since; read it before going on.")
    return {
        "bytes_written": len(data),
        "dirs_created": created,
        "verified": True,
        "resolved_path": str(path),
        "files_modified": [str(path)],
    }


def written_paths(args: Arguments) -> list[str]:
    """The path a call of `write_file` or `patch` writes; empty when the arguments name none."""
    path = args.get("path")
    return [path] if isinstance(path, str) and path else []


TOOL = ToolEntry(
    name="write_file",
    toolset="file",
    description=(
        "Write a text file: the content replaces the whole file, missing folders are created. "
        "To change part of a file use patch."
    ),
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "File to write: absolute, relative to the working folder, or ~."},
            "content": {"type": "string", "description": "The whole new content."},
        },
        "required": ["path", "content"],
    },
    handler=json_handler(_run),
    effect=Effect.IDEMPOTENT,
    writes=written_paths,
)
