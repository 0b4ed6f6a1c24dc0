"""The interactive conversation: read a message, run its turn, again; plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from hermes_agent.cli import conversation
from hermes_agent.cli.chat import commands
from hermes_agent.cli.chat.reader import Reader, choose
from hermes_agent.cli.conversation import Conversation
from hermes_agent.cli.interrupts import INTERRUPTED, Interrupts
from hermes_agent.cli.oneshot import make_ask
from hermes_agent.cli.options import Request
from hermes_agent.cli.screen import Stream
from hermes_agent.cli.session_table import table
from hermes_agent.cli.surface import Result, exit_code, line_of
from hermes_agent.cli.text_view import TextView
from hermes_agent.errors import HermesError, SessionBusy, TurnInterrupted
from hermes_agent.settings import Settings
from hermes_agent.tools.context import Ask
from hermes_agent.version import VERSION


def run(request: Request, out: Stream, err: Stream, home: Path) -> int:
    """Talk until the person leaves; the exit code. Raises what keeps the conversation from beginning."""
    settings = conversation.load_settings(home)
    for warning in settings.warnings:
        err.write(f"hermes: {warning}\n")
    with Interrupts() as interrupts:
        chat = Chat(request, settings, out, err, interrupts)
        try:
            return chat.run()
        finally:
            chat.close()


class Chat:
    """One sitting at a terminal, or one reading of lines from a pipe."""

    def __init__(self, request: Request, settings: Settings, out: Stream, err: Stream, interrupts: Interrupts) -> None:
        self._request = request
        self._settings = settings
        self._err = err
        self._view = TextView(out, err)
        self._interrupts = interrupts
        self._talk = self._open(request)
        self._reader: Reader = choose(out, err, settings.home)
        self._code = 0
        self._leaving = False
        interrupts.farewell = self._farewell

    def run(self) -> int:
        """Read and run messages until there are no more."""
        self._banner()
        self._guarded(self._finish_earlier)
        while not self._leaving:
            try:
                text = self._reader.read()
            except KeyboardInterrupt:
                if not self._reader.interactive:
                    self._code = INTERRUPTED
                    break
                self._view.say("  Ctrl-D or /quit leaves.")
                continue
            if text is None:
                break
            if text.strip():
                self._guarded(lambda text=text: self._take(text))
            if self._code == INTERRUPTED and not self._reader.interactive:
                break
        if self._talk.exists:
            self._view.say(f"session {self._talk.session_id} — resume with: hermes -r {self._talk.session_id}")
        return 0 if self._reader.interactive else self._code

    def close(self) -> None:
        """Let the store go."""
        self._talk.db.close()

    # -- what commands use ---------------------------------------------------------

    def leave(self) -> None:
        self._leaving = True

    def renew(self) -> None:
        """Go on in a new session."""
        fresh = self._open(structs.replace(self._request, resume=None, go_on=None))
        self._talk.db.close()
        self._talk = fresh
        self._banner()

    def say(self, text: str) -> None:
        self._view.say(text)

    def list_sessions(self) -> None:
        self._view.say(table(self._talk.db.list_sessions(20), self._err))

    # -- inside -----------------------------------------------------------------------

    def _open(self, request: Request) -> Conversation:
        return Conversation(request, self._settings, self._view, self._interrupts, self._ask)

    def _ask(self) -> Ask | None:
        return make_ask(self._err, self._view, self._interrupts, self._settings.approvals.timeout)

    def _banner(self) -> None:
        if not self._reader.interactive:
            return
        talk = self._talk
        stored = f", {talk.stored_messages} messages" if talk.stored_messages else ""
        self._view.say(f"hermes {VERSION} · {talk.agent.model} · session {talk.session_id}{stored}")
        self._view.say("/help for help, Ctrl-D to leave\n")

    def _take(self, text: str) -> None:
        """Run a command of ours or a message; each exactly once."""
        if not commands.run(self, text):
            self._note(self._talk.ask(text))

    def _finish_earlier(self) -> None:
        if not self._talk.unfinished:
            return
        try:
            finished = self._talk.recover()
        except SessionBusy as busy:  # a live process runs it: the first message waits for that
            self._view.notice(str(busy))
            return
        for result in finished:
            self._note(result)

    def _note(self, result: Result) -> None:
        code = exit_code(result)
        self._code = max(self._code, code)
        if code == INTERRUPTED:
            self._view.say(f"stopped; resume with: hermes -r {self._talk.session_id}")

    def _guarded(self, work: Callable[[], None]) -> None:
        """Whatever keeps one message from being run is a line; the conversation goes on."""
        try:
            with self._reader.resting():
                work()
        except TurnInterrupted:
            self._code = INTERRUPTED
            self._view.say("stopped before the message was taken")
        except HermesError as error:
            self._code = max(self._code, error.failure.exit_code)
            self._view.failure(line_of(error))

    def _farewell(self) -> None:
        self._reader.restore()
        self._err.raw(f"\nended at once; resume with: hermes -r {self._talk.session_id}\n")
