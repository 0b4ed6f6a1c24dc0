"""One conversation of the command: a session, its agent and the runner, shown on a surface."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, cast

from hermes_agent import log
from hermes_agent import settings as settings_module
from hermes_agent.agent import plan
from hermes_agent.agent.run import AIAgent
from hermes_agent.cancellation import Cancellation
from hermes_agent.cli.interrupts import Interrupts
from hermes_agent.cli.options import Request
from hermes_agent.cli.screen import one_line
from hermes_agent.cli.surface import Call, Outcome, Result, Surface
from hermes_agent.delivery.runner import Notices, Runner, SessionFields
from hermes_agent.errors import FailureReason, HermesError, SettingsError, TurnInterrupted, UnknownSession
from hermes_agent.settings import Settings
from hermes_agent.store.opening import open_store
from hermes_agent.store.turns import TurnRecord
from hermes_agent.tools.context import Ask

Session = dict[str, Any]

_TYPED = ("provider", "base_url", "script")
"""Where the model is, as far as the command line said it; a session remembers it."""

_CUT_OFF = re.compile(r"\[(?P<kind>cancelled|abandoned|interrupted): ")


class NoModel(HermesError):
    """No model is configured."""

    reason = FailureReason.NOT_CONFIGURED


def load_settings(home: Path) -> Settings:
    """Read the settings and set up the log by them."""
    found = settings_module.load(home)
    log.configure(
        home,
        level=found.logging.level,
        max_size_mb=found.logging.max_size_mb,
        backup_count=found.logging.backup_count,
    )
    log.add_secrets(secret.reveal() for secret in found.secrets)
    return found


class Conversation:
    """A session that the command works in; made by the first message if it is new.

    `ask` runs a turn, `recover` finishes what a dead process left. While either runs a
    signal stops it at its next safe point.
    """

    def __init__(
        self,
        request: Request,
        settings: Settings,
        surface: Surface,
        interrupts: Interrupts,
        ask: Callable[[], Ask | None] = lambda: None,
    ) -> None:
        # A session to go on with is looked for before anything is made.
        if request.session is not None and not (settings.home / "state.db").exists():
            raise UnknownSession(f"no session is called {request.session!r}: there is no session yet")
        if request.session is None:
            _place(settings, request, {})
        self._surface = surface
        self._interrupts = interrupts
        self._wait = Cancellation()
        self._asked = False
        self._completed: dict[str, Any] = {}
        self.db = open_store(settings)
        try:
            stored = self._stored(request)
            typed = _place(settings, request, stored)
            self.stored_messages = int(stored.get("last_seq") or 0)
            self.agent = self._agent(request, stored, typed, ask())
            self.session_id = self.agent.session_id
            self._runner = self._make_runner(typed)
        except BaseException:
            self.db.close()
            raise
        surface.opened(self.session_id, self.agent.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.db.close()

    @property
    def exists(self) -> bool:
        """Something of the session is stored."""
        return self.db.get_session(self.session_id) is not None

    @property
    def unfinished(self) -> bool:
        """A dead process left something to finish."""
        return self.exists and bool(self.db.open_turns(self.session_id))

    def ask(self, text: str) -> Result:
        """Run a turn and return its result; raises what kept the message from being taken."""
        with self._interrupts.stopping(self._stop):
            self._begin(asked=True)
            result = self._runner.run(text, self._wait)
        self._surface.ended(result)
        return result

    def recover(self) -> list[Result]:
        """Finish what a dead process left; returns the results, oldest first."""
        with self._interrupts.stopping(self._stop):
            self._begin(asked=False)
            return self._runner.recover()

    # -- inside -----------------------------------------------------------------

    def _stored(self, request: Request) -> Session:
        """The session to go on with; empty for a new one."""
        if request.session is None:
            return {}
        return self.db.get_session(self.db.resolve_session(request.session)) or {}

    def _agent(self, request: Request, stored: Session, typed: dict[str, str], ask: Ask | None) -> AIAgent:
        return AIAgent(
            model=request.model or str(stored.get("model") or ""),
            provider=typed.get("provider"),
            base_url=typed.get("base_url"),
            script=typed.get("script"),
            max_iterations=request.max_turns,
            session_id=stored.get("id"),
            session_db=self.db,
            cwd=self._folder(stored),
            platform="cli",
            yolo=request.yolo,
            ask=ask,
            step_callback=self._step,
            stream_delta_callback=self._delta,
            interim_assistant_callback=self._message,
            status_callback=self._status,
            tool_start_callback=self._tool_start,
            tool_progress_callback=self._tool_progress,
            tool_complete_callback=self._tool_complete,
        )

    def _folder(self, stored: Session) -> str | None:
        """A session goes on in its folder, wherever the command was typed."""
        folder = str(stored.get("cwd") or "")
        if not folder or os.path.realpath(folder) == os.path.realpath(os.curdir):
            return None
        if not os.path.isdir(folder):
            self._surface.notice(f"the session's folder {folder} is gone; working in {os.getcwd()}")
            return None
        self._surface.notice(f"working in {folder}, the session's folder")
        return folder

    def _make_runner(self, typed: dict[str, str]) -> Runner:
        fields = SessionFields(
            source="cli",
            model=self.agent.model,
            cwd=str(self.agent.working_directory),
            model_config=typed or None,
        )
        notices = Notices(waiting=self._waiting, recovering=self._recovering, recovered=self._recovered)
        return Runner(self.db, self.agent, self.session_id, fields, notices)

    def _begin(self, *, asked: bool) -> None:
        self._asked = asked
        self._wait = Cancellation()
        self.agent.control.begin_turn()

    def _stop(self, _number: int) -> None:
        self._wait.cancel()
        self.agent.interrupt()

    def _waiting(self, why: str) -> None:
        self._surface.notice(f"{why.rstrip('.')}; the message is stored and waits its turn (Ctrl-C withdraws it)")

    def _recovering(self, turn: TurnRecord) -> None:
        self._surface.notice(f"finishing the turn that was interrupted ({turn.id})")

    def _recovered(self, result: Result) -> None:
        self._surface.ended(result, earlier=True)
        if self._asked and self._wait.requested:  # then the new message is not begun
            raise TurnInterrupted(self._wait.reason)

    # -- what the agent tells -----------------------------------------------------

    def _step(self, *_: Any) -> None:
        if self._wait.requested:  # the stop came before the agent had begun its turn
            self.agent.interrupt()
        self._surface.step()

    def _delta(self, text: str | None) -> None:
        if text:
            self._surface.delta(text)

    def _message(self, text: str, **_: Any) -> None:
        self._surface.message(text)

    def _status(self, kind: str, text: str) -> None:
        if kind in {"retry", "cut"}:
            self._surface.void(text)
        else:
            self._surface.notice(text)

    def _tool_start(self, call_id: str, name: str, args: dict[str, Any]) -> None:
        self._surface.tool_started(Call(call_id, name, args, plan.preview(name, args)))

    def _tool_progress(self, event: str, *_: Any, **fields: Any) -> None:
        if event == "tool.completed":
            self._completed = fields

    def _tool_complete(self, call_id: str, name: str, args: dict[str, Any], result: Any) -> None:
        facts, self._completed = self._completed, {}
        self._surface.tool_completed(Call(call_id, name, args, plan.preview(name, args)), _outcome(result, facts))


def _place(settings: Settings, request: Request, stored: Session) -> dict[str, str]:
    """Where the command line, or the session's own beginning, says that the model is.

    Raises `NoModel` when nothing says where a model is, or which.
    """
    typed = {name: getattr(request, name) for name in _TYPED if getattr(request, name)}
    if not typed:
        typed = _remembered(stored)
    if typed.get("script"):
        return {
            "provider": settings_module.OFFLINE_PROVIDER,
            "script": str(Path(typed["script"]).expanduser().absolute()),
        }
    model = request.model or str(stored.get("model") or "")
    place = settings.endpoint(model=model, provider=typed.get("provider", ""), base_url=typed.get("base_url", ""))
    if place is None:
        raise NoModel
    if place.provider == settings_module.OFFLINE_PROVIDER:
        raise SettingsError("the scripted provider needs a script file: --script FILE")
    if not place.model:
        raise HermesError(
            f"which model at {place.base_url}? Name it with -m, or as model.default in config.yaml.",
            reason=FailureReason.NOT_CONFIGURED,
        )
    return typed


def _remembered(stored: Session) -> dict[str, str]:
    config = _mapping(str(stored.get("model_config") or ""))
    return {name: config[name] for name in _TYPED if isinstance(config.get(name), str)}


def _mapping(text: str) -> dict[str, Any]:
    """The JSON object in a text; empty when there is none."""
    try:
        found: Any = json.loads(text)
    except ValueError:
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _outcome(result: Any, facts: dict[str, Any]) -> Outcome:
    """What a person should know of a tool's result at once."""
    failed, seconds = bool(facts.get("is_error")), float(facts.get("duration") or 0.0)
    if not isinstance(result, str):
        return Outcome(failed, seconds, result)
    cut_off = _CUT_OFF.match(result)
    if cut_off is not None:
        return Outcome(failed, seconds, result, cut_off["kind"], unknown=cut_off["kind"] != "cancelled")
    fields = _mapping(result) if failed or '"exit_code"' in result else {}
    code, error = fields.get("exit_code"), fields.get("error")
    note = one_line(str(error))[:200] if error else f"exit {code}" if code else ""
    return Outcome(failed, seconds, result, note, blocked=fields.get("status") == "blocked")
