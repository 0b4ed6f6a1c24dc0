"""The command `hermes`. Knows its version and nothing else before it looks at its arguments."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run one command line (the process's, if None) and return its exit code: 0, 1, 2 or 130."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments in (["--version"], ["-V"]):
        from hermes_agent.version import VERSION  # noqa: PLC0415 - start-up time

        sys.stdout.write(f"hermes {VERSION}\n")
        return 0
    try:
        from hermes_agent.cli import start  # noqa: PLC0415 - start-up time

        return start.run(arguments)
    except KeyboardInterrupt:  # before anything was begun
        return 130
