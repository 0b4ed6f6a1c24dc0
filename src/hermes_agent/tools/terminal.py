"""`terminal`: run a shell command and return what it printed and how it ended.

The folder is kept between the calls of a session. Unsafe unless the command provably
only reads. What the approval gate does not let through is not started.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from hermes_agent.errors import ToolError
from hermes_agent.tools.arguments import integer, text
from hermes_agent.tools.context import ToolContext
from hermes_agent.tools.registry import Arguments, Effect, ToolEntry
from hermes_agent.tools.results import json_handler

MAX_TIMEOUT = 600
FOLDER = "terminal.cwd"
"""Key of the session's memory: the folder the last command ended in."""


def _run(args: Arguments, context: ToolContext) -> dict[str, Any]:
    # Reading commands and starting processes cost more to import than a whole answer without tools.
    from hermes_agent.tools import child_env, shell, shell_output  # noqa: PLC0415
    from hermes_agent.tools.approval import gate  # noqa: PLC0415

    command = text(args, "command")
    if not command.strip():
        raise ToolError("'command' is empty; give the command to run.")
    timeout = integer(args, "timeout", int(context.limits.terminal_timeout), 1, MAX_TIMEOUT)
    cwd = _folder(args, context)
    verdict = gate.decide(command, context, cwd)
    if not verdict.run:
        return {"output": "", "exit_code": -1, "status": "blocked", "error": verdict.message}
    if context.cancellation.requested:
        return _interrupted("")
    quiet_git = verdict.reading.read_only and bool(verdict.reading.repositories)
    env = child_env.build(context, quiet_git=quiet_git) | {"PWD": str(cwd)}
    call_id = context.call_id or f"call-{os.getpid()}-{time.monotonic_ns()}"
    output = shell_output.ShellOutput(context.limits.output_max_bytes, shell_output.spool_path(context.home, call_id))
    try:
        ended = shell.run(command, cwd, env, output, timeout, context.cancellation)
    except (OSError, ValueError) as error:
        raise ToolError(f"The command could not be started: {error}") from error
    finally:
        output.close()
    if ended.interrupted:
        return _interrupted(output.text())
    if ended.folder is not None and not args.get("workdir"):
        context.session_state[FOLDER] = str(ended.folder)
    error = ""
    if ended.timed_out:
        error = (
            f"The command did not end within {timeout} s, so it and everything it started was ended. "
            f"Give a longer timeout (up to {MAX_TIMEOUT}) or a smaller piece of work."
        )
    printed = output.text()
    if ended.left_running:
        printed += "\n[A background process that the command started still runs; what it prints from now on is lost.]"
    result = {"output": printed, "exit_code": ended.exit_code, "error": error or None}
    # A field of its own: the note inside the output is gone when this result is shortened once more.
    return result if output.kept_in is None else {**result, "whole_output": str(output.kept_in)}


def _folder(args: Arguments, context: ToolContext) -> Path:
    """Where the command starts: `workdir`, else where the last one ended, else the session's folder."""
    kept = str(context.session_state.get(FOLDER) or context.cwd)
    named = text(args, "workdir", "")
    if "\0" in named:
        raise ToolError("'workdir' contains a NUL character.")
    path = Path(os.path.normpath(os.path.join(kept, os.path.expanduser(named))))
    if path.is_dir():
        return path
    if named:
        raise ToolError(f"The folder {path} does not exist.")
    # Not elsewhere silently: the command may mean what lies around it.
    context.session_state.pop(FOLDER, None)
    raise ToolError(
        f"The folder {path}, where the last command ended, is gone; the next command starts in {context.cwd}."
    )


def _interrupted(printed: str) -> dict[str, Any]:
    return {"output": printed, "exit_code": 130, "error": "interrupted"}


def effect_of(args: Arguments) -> Effect:
    """Pure when the command provably only reads, else unsafe."""
    # See `_run`.
    from hermes_agent.tools.approval.reading import read_command  # noqa: PLC0415

    command = args.get("command")
    return Effect.PURE if isinstance(command, str) and read_command(command).read_only else Effect.UNSAFE


TOOL = ToolEntry(
    name="terminal",
    toolset="terminal",
    description=(
        "Run a shell command (bash) and return its output, both streams in order, and its exit code. The folder is "
        "kept between calls; exported variables are not. Standard input is empty. Commands that only read run "
        "at once; others may need a person's approval. Long output is shortened; the result says where all of it is."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command, as typed in a shell."},
            "timeout": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_TIMEOUT,
                "description": "Seconds until it is ended with everything it started; default 180.",
            },
            "workdir": {"type": "string", "description": "Folder for this call only."},
        },
        "required": ["command"],
    },
    handler=json_handler(_run),
    effect=effect_of,
    # The shell's own time limit holds.
    timeout=0,
)
