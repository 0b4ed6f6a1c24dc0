"""The boundary of the process: what goes wrong below becomes one line and an exit code."""

from __future__ import annotations

import io
import os
import sys
from typing import cast

from hermes_agent import home, log, old_names
from hermes_agent.cli import options
from hermes_agent.cli.interrupts import INTERRUPTED
from hermes_agent.cli.options import Request
from hermes_agent.cli.screen import Stream, one_line
from hermes_agent.cli.surface import line_of
from hermes_agent.errors import HermesError, UsageError

_log = log.get("cli")


def run(arguments: list[str]) -> int:
    """Run a command line; only a request to end the process leaves it, as `SystemExit`."""
    out, err = _streams()
    try:
        try:
            old_names.activate()
        except UsageError as stranger:
            err.write(f"hermes: warning: {one_line(str(stranger))}\n")
        profile, arguments = options.take_profile(arguments)
        home.enter_profile(profile, may_be_gone=arguments[:1] == ["profile"])
        request = options.parse(arguments)
        if request is not None:
            return converse(request)
        from hermes_agent.cli import app  # noqa: PLC0415 - start-up time

        return app.run(arguments)
    except HermesError as error:
        return _explain(error, err)
    except KeyboardInterrupt:
        err.write("stopped\n")
        return INTERRUPTED
    except BrokenPipeError:
        out.hush()
        return 1
    except Exception as error:  # noqa: BLE001 - the process's boundary
        _log.failure("cli.bug", error)
        what = f"{type(error).__name__}: {one_line(str(error))}"
        err.write(f"hermes: internal error: {what}. Details: {home.hermes_home()}/logs/agent.log\n")
        return 1


def converse(request: Request) -> int:
    """Hold the conversation that is asked for and return the exit code."""
    out, err = Stream(sys.stdout), Stream(sys.stderr)
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the folder in which this was started is gone; change to another one") from None
    if request.has_message or request.quiet:
        from hermes_agent.cli.oneshot import OneShot  # noqa: PLC0415 - start-up time

        return OneShot(request, out, err, home.hermes_home()).run()
    from hermes_agent.cli.chat import loop  # noqa: PLC0415 - start-up time

    return loop.run(request, out, err, home.hermes_home())


def _explain(error: HermesError, err: Stream) -> int:
    from hermes_agent.cli.conversation import NoModel  # noqa: PLC0415 - start-up time

    if isinstance(error, NoModel):
        from hermes_agent.cli.guidance import no_model  # noqa: PLC0415 - start-up time

        err.write(no_model(home.hermes_home()))
    else:
        err.write(f"hermes: {line_of(error)}\n")
    return error.failure.exit_code


def _streams() -> tuple[Stream, Stream]:
    """Standard output and error, which take every text whatever the locale."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            cast("io.TextIOWrapper", stream).reconfigure(errors="backslashreplace")
    return Stream(sys.stdout), Stream(sys.stderr)
