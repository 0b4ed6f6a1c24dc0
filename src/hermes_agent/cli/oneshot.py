"""A run that is not interactive: one message, or only what an earlier run left unfinished."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hermes_agent import home as home_module
from hermes_agent.cli import conversation
from hermes_agent.cli.conversation import Conversation
from hermes_agent.cli.interrupts import INTERRUPTED, Interrupts
from hermes_agent.cli.json_lines import JsonLines, report
from hermes_agent.cli.options import STREAM_JSON, Request
from hermes_agent.cli.screen import Stream
from hermes_agent.cli.surface import Quiet, Result, Surface, exit_code, failure_of
from hermes_agent.cli.text_view import TextView
from hermes_agent.errors import HermesError, TurnInterrupted
from hermes_agent.tools.context import Ask


class OneShot:
    """Runs what a request asks for, and says at the end how it went and how to go on."""

    def __init__(self, request: Request, out: Stream, err: Stream, home: Path) -> None:
        self._request = request
        self._out = out
        self._err = err
        self._home = home
        self._report: dict[str, Any] = {}

    def run(self) -> int:
        """The exit code. Raises, and still writes the usage file, for what kept the run from beginning."""
        surface = self._surface()
        try:
            with Interrupts() as interrupts:
                return self._run(surface, interrupts)
        except HermesError as error:
            code = error.failure.exit_code
            self._report = {"error": str(error), "failure_reason": str(error.reason), "exit_code": code}
            if isinstance(surface, JsonLines):
                surface.refused(error)
            raise
        except KeyboardInterrupt:
            self._report = {"failure_reason": "interrupted", "exit_code": INTERRUPTED}
            raise
        finally:
            self._write_report()

    def _surface(self) -> Surface:
        request = self._request
        if request.format == STREAM_JSON:
            return JsonLines(self._out)
        if request.only_final:
            return Quiet(self._out, self._err, earlier=not request.has_message)
        return TextView(self._out, self._err)

    def _run(self, surface: Surface, interrupts: Interrupts) -> int:
        settings = conversation.load_settings(self._home)
        for warning in settings.warnings:
            self._err.write(f"hermes: {warning}\n")
        message = self._request.message() if self._request.has_message else None

        def ask() -> Ask | None:
            if self._request.query_file == "-":
                return None
            return make_ask(self._err, surface, interrupts, settings.approvals.timeout)

        with Conversation(self._request, settings, surface, interrupts, ask) as talk:
            interrupts.farewell = lambda: self._err.raw(f"\nended at once; resume with: hermes -r {talk.session_id}\n")
            try:
                results = [talk.ask(message)] if message is not None else talk.recover()
            except TurnInterrupted:
                self._report = {
                    "session_id": talk.session_id,
                    "failure_reason": "interrupted",
                    "exit_code": INTERRUPTED,
                }
                self._err.fresh_line()
                self._err.write(f"stopped before the message was taken; resume with: hermes -r {talk.session_id}\n")
                return INTERRUPTED
            return self._conclude(talk, results)

    def _conclude(self, talk: Conversation, results: list[Result]) -> int:
        session = talk.session_id
        if not results:
            self._err.write(f"hermes: nothing is left to finish in session {session}\n")
            return 0
        self._report = report(results[-1])
        code = max(exit_code(result) for result in results)
        failed = next((result for result in reversed(results) if result["failed"]), None)
        if code == INTERRUPTED:
            self._err.fresh_line()
            self._err.write(f"stopped; resume with: hermes -r {session}\n")
        elif failed is not None and self._request.only_final:
            self._err.write(f"hermes: {failure_of(failed)} The session is kept: hermes -r {session}\n")
        elif self._request.format != STREAM_JSON:
            self._remind(session)
        if self._out.error is not None:
            lost = f"the answer could not be printed: {self._out.error}"
            self._err.write(f"hermes: {lost}; it is stored: hermes sessions show {session}\n")
            return max(code, 1)
        return code

    def _remind(self, session: str) -> None:
        if not self._request.only_final:
            self._err.write(f"session {session} — resume with: hermes -r {session}\n")

    def _write_report(self) -> None:
        """Replace the usage file as a whole: a reader never sees half of it."""
        if self._request.usage_file is None:
            return
        path = Path(self._request.usage_file).expanduser()
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with home_module.open_private(beside, "w") as file:
                file.write(json.dumps(self._report, indent=2) + "\n")
            os.replace(beside, path)
        except OSError as error:
            self._err.write(f"hermes: the usage file {path} could not be written: {error.strerror}\n")


def make_ask(err: Stream, surface: Surface, interrupts: Interrupts, timeout: float) -> Ask | None:
    """The way to ask the person at the terminal; None when nobody is there."""
    import sys  # noqa: PLC0415 - only for its standard input

    if not err.terminal or sys.stdin is None or not sys.stdin.isatty():
        return None
    from hermes_agent.cli.approvals import Questions  # noqa: PLC0415 - start-up time

    return Questions(err, surface, interrupts, timeout).ask
