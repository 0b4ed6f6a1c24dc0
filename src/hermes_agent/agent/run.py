"""`AIAgent`: one agent that holds a conversation, turn after turn, each step durable.

Names that tests and embedders replace in this module (`OpenAI`, `get_tool_definitions`,
`check_toolset_requirements`, `handle_function_call`, `_hermes_home`) are looked up as its
globals at call time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from hermes_agent import failpoints, home, log, settings
from hermes_agent.agent import model_metadata, options, prompt, results, tool_executor, turn_loop
from hermes_agent.agent.control import DEFAULT_ITERATIONS, IterationBudget, TurnControl
from hermes_agent.agent.journal import Journal
from hermes_agent.agent.results import Exit, TurnFacts
from hermes_agent.agent.turn_loop import Turn
from hermes_agent.agent.wire import Wire, WireTools
from hermes_agent.agent.workers import Workers
from hermes_agent.errors import FailureReason, HermesError, SessionBusy, SettingsError
from hermes_agent.providers.base import Provider
from hermes_agent.providers.openai_chat import OpenAIChat
from hermes_agent.providers.openai_client import OpenAI
from hermes_agent.providers.retry import Retrying
from hermes_agent.store.turns import TurnRecord, TurnState
from hermes_agent.store.writer import SessionWriter, TurnEnd
from hermes_agent.tools import dispatch, todo
from hermes_agent.tools.context import ToolContext, ToolLimits
from hermes_agent.tools.results import ResultBudget, spill_folder
from hermes_agent.tools.toolsets import check_toolset_requirements, get_tool_definitions
from hermes_agent.transcript import rows, rules

Message = dict[str, Any]

MAX_CRASH_RESUMES = 3
"""A turn that took the process down more often is not tried again."""

_STATES = {FailureReason.INTERRUPTED: TurnState.CANCELLED, FailureReason.DEADLINE: TurnState.EXPIRED}
"""How a turn ends that was stopped; every other reason is a failure."""

_hermes_home: Path | None = None
_log = log.get("agent")


@lru_cache(maxsize=16)
def _client(kind: Any, key: str, url: str, proxy: str | None) -> Any:
    """A client of a model server, one for all agents that ask it with the same key; `kind` is `OpenAI` as it is now."""
    return kind(api_key=key, base_url=url, proxy=proxy)


def handle_function_call(
    function_name: str,
    function_args: dict[str, Any],
    effective_task_id: str = "default",  # noqa: ARG001 - part of the published signature
    *,
    context: ToolContext | None = None,
    **ids: Any,  # noqa: ARG001 - tool_call_id and friends, for whoever replaces this function
) -> Any:
    """Run one registered tool. Without a `context` nobody can be asked, so what needs a yes is refused."""
    if context is None:
        context = ToolContext(home=_hermes_home or home.hermes_home(), cwd=Path.cwd())
    return dispatch.call_tool(function_name, function_args, context)


class AIAgent:
    """One agent. See `AgentOptions` for what it can be told; not for two turns at once.

    `run_conversation` and `chat` run a turn; `interrupt` and `steer` may be called from any
    thread meanwhile. With a `SessionDB` every step is durable before it is shown.
    """

    def __init__(self, **given: Any) -> None:
        chosen = options.parse(given)
        self.home = _hermes_home or (chosen.settings.home if chosen.settings else home.hermes_home())
        self.settings = chosen.settings or settings.load(self.home)
        self.options = chosen
        self._choose_model(chosen)
        self.tools: list[dict[str, Any]] = get_tool_definitions(
            chosen.enabled_toolsets, chosen.disabled_toolsets or list(self.settings.agent.disabled_toolsets)
        )
        self.valid_tool_names = {tool["function"]["name"] for tool in self.tools}
        check_toolset_requirements()
        self.max_tokens = chosen.max_tokens or self.settings.model.max_tokens
        self.max_iterations = chosen.max_iterations or self.settings.agent.max_turns or DEFAULT_ITERATIONS
        self.working_directory = Path(chosen.cwd or self.settings.terminal.cwd or Path.cwd()).expanduser().absolute()
        self.control = TurnControl()
        self.journal = Journal()
        self.workers = Workers()
        window = self.settings.model.context_length or model_metadata.DEFAULT_CONTEXT
        self.result_budget = ResultBudget.for_window(window, spill_folder(self.home))
        self._tool_state: dict[str, Any] = {}
        self._set_callbacks(chosen)
        self._set_session(chosen)

    def _choose_model(self, chosen: options.AgentOptions) -> None:
        place = self.settings.endpoint(
            model=chosen.model, provider=chosen.provider, base_url=chosen.base_url, api_key=chosen.api_key
        )
        self.model = place.model if place else chosen.model
        self.provider = (place.provider if place else chosen.provider) or "custom"
        self.base_url = place.base_url if place else chosen.base_url
        self.client: Any = None
        if chosen.script or self.provider == settings.OFFLINE_PROVIDER:
            from hermes_agent.providers.scripted import Scripted  # noqa: PLC0415 - only the offline model needs it

            if not chosen.script:
                raise SettingsError("the scripted provider needs a script file: --script FILE")
            self.provider, self.model = settings.OFFLINE_PROVIDER, self.model or settings.OFFLINE_PROVIDER
            inner: Provider = Scripted.load(Path(chosen.script))
        else:
            key = place.api_key.reveal() if place and place.api_key else ""
            log.add_secrets([key])
            url = self.base_url or settings.OPENAI_URL
            self.client = _client(OpenAI, key, url, self.settings.proxies.for_url(self.base_url))
            inner = OpenAIChat(lambda: self.client, name=self.provider)
        self._answering: Provider = Retrying(inner, attempts=max(self.settings.agent.api_max_retries, 1))

    def _set_callbacks(self, chosen: options.AgentOptions) -> None:
        self.interim_assistant_callback = chosen.interim_assistant_callback
        self.tool_start_callback = chosen.tool_start_callback
        self.tool_complete_callback = chosen.tool_complete_callback
        self.tool_progress_callback = chosen.tool_progress_callback
        self.stream_delta_callback = chosen.stream_delta_callback
        self.reasoning_callback = chosen.reasoning_callback
        self.status_callback = chosen.status_callback
        self.step_callback = chosen.step_callback

    def _set_session(self, chosen: options.AgentOptions) -> None:
        self.session_id = chosen.session_id or time.strftime("%Y%m%d_%H%M%S_") + secrets.token_hex(3)
        self.session_prompt_tokens = self.session_completion_tokens = self.session_total_tokens = 0
        self.compression_enabled = False
        self.save_trajectories = False
        self.tool_delay = 0.0
        self._use_prompt_caching = False
        self._cached_system_prompt = ""
        self._session_db = chosen.session_db
        self._session_db_created = False
        self._persist_disabled = False
        self._pending_cli_user_message: Message | None = None
        self.leave_open: Callable[[FailureReason], bool] | None = None
        """Says of a failure that the turn shall stay open, because whoever runs it tries it again."""
        self._incremental_persistence_failed = False
        self._persistence_error: Exception | None = None
        self._claim: SessionWriter | None = None
        self._last_flushed_db_idx = 0
        self._flushed_db_message_ids: set[int] = set()
        self._flushed_db_message_session_id: str | None = None

    # -- a turn ---------------------------------------------------------------

    def chat(self, message: str, stream_callback: Callable[..., Any] | None = None) -> str:
        """Run a turn and return its final text."""
        return self.run_conversation(message, stream_callback=stream_callback)["final_response"]

    def run_conversation(
        self,
        user_message: Any,
        system_message: str | None = None,
        conversation_history: list[Message] | None = None,
        task_id: str | None = None,
        stream_callback: Callable[..., Any] | None = None,
        persist_user_message: str | None = None,
        **_later: Any,
    ) -> dict[str, Any]:
        """Run one turn to its end and return its result dict; the keys are the same on every exit.

        Whatever goes wrong is in the result (`failed`, `failure_reason`, `error`); only a
        `BaseException` leaves. What an earlier process left unfinished in the session is
        finished first.
        """
        self._begin(stream_callback)
        try:
            try:
                claim = self._take_session()
            except SessionBusy as error:
                return self._refused(error, conversation_history or [])
            if claim is not None and self.recover() and conversation_history is not None:
                conversation_history = self._stored_history()
            history = list(conversation_history or ())
            user = self._user_row(user_message, persist_user_message)
            own = self._begun(claim, user)
            turn = self._turn([*history, user, *own], len(history), system_message or "", task_id)
            if claim is not None:
                self.journal.attach(claim)  # a new turn counts its steps from the beginning
                self._store_prompt(claim)
                if claim.turn_key is None:
                    self.journal.stage_begin()
            self._persist_session(turn.messages, history)
            exit_ = turn_loop.finish_open_calls(self, turn) if own else None
            return self._finish(turn, exit_ or turn_loop.run(self, turn), claim)
        finally:
            self._let_go()
            if stream_callback is not None:
                self.stream_delta_callback = self.options.stream_delta_callback

    def recover(self) -> list[dict[str, Any]]:
        """Finish the turns that a dead process left in the session this agent holds; returns their results."""
        claim = self._claim or self.journal.writer
        if claim is None or claim.turn_key is not None:
            return []
        return [self._resume(claim, turn) for turn in claim.open_turns() if turn.state is not TurnState.ACCEPTED]

    def adopt(self, claim: SessionWriter) -> None:
        """Run the next turns under a lease that the caller took and gives back."""
        self._claim = claim
        self.session_id = claim.session_id
        self.journal.attach(claim)

    def interrupt(self, message: str | None = None, **_modes: Any) -> None:
        """Ask the running turn to stop at its next safe point; any thread, also a signal handler."""
        self.control.interrupt(message or "")

    def steer(self, text: str) -> None:
        """Give the running turn a word that reaches the model with its next call."""
        self.control.steer(text)

    # -- the pieces of a turn ---------------------------------------------------

    def _begin(self, stream_callback: Callable[..., Any] | None) -> None:
        self.control.begin_turn()
        self._forget_refusals()
        if stream_callback is not None:
            self.stream_delta_callback = stream_callback

    def _take_session(self) -> SessionWriter | None:
        """The lease under which this turn is stored: the caller's, or one of our own."""
        if self._session_db is None or self._persist_disabled:
            return None
        if self._claim is not None and not self._claim.released:
            return self._claim
        try:
            claim = self._session_db.claim(
                self.session_id,
                source=self.options.platform,
                model=self.model,
                cwd=str(self.working_directory),
            )
        except SessionBusy:
            raise
        except HermesError as error:
            # reported now, and again by the flush that must not go on without it
            self.note_persistence_failure(error)
            self._incremental_persistence_failed = False
            self.journal.attach(None)
            return None
        self.journal.attach(claim)
        self._session_db_created = True
        return claim

    def _let_go(self) -> None:
        """Give our own lease back; writes no rows."""
        writer = self.journal.writer
        if writer is not None and writer is not self._claim:
            self.journal.attach(None)
            try:
                writer.release()
            except HermesError as error:
                _log.warning("lease.release_failed", session_id=self.session_id, error=str(error))

    def _user_row(self, content: Any, stored: str | None) -> Message:
        pending, self._pending_cli_user_message = self._pending_cli_user_message, None
        # the row holds the text in its stored form, which has no NUL and no half surrogate pair
        if pending is not None and pending.get("content") == rows.user_row(content, timestamp=0)["content"]:
            return pending
        row = rows.user_row(content if stored is None else stored, timestamp=time.time())
        if stored is not None:
            row["api_content"] = rows.user_row(content, timestamp=0)["content"]
        return row

    def _begun(self, claim: SessionWriter | None, user: Message) -> list[Message]:
        """The rows that an earlier attempt at the turn of this user row left behind it."""
        seq = user.get("_seq")
        if claim is None or claim.turn_key is None or not isinstance(seq, int) or claim.last_seq <= seq:
            return []
        return [{**row.fields(), "_db_persisted": True, "_seq": row.seq} for row in claim.rows_since(seq + 1)]

    def _turn(self, messages: list[Message], start: int, system_message: str, task_id: str | None) -> Turn:
        system = self._system_prompt(system_message)
        if self.options.ephemeral_system_prompt:
            system = f"{system}\n\n{self.options.ephemeral_system_prompt}"
        lead: list[Message] = [{"role": "system", "content": system}, *(self.options.prefill_messages or ())]
        history = [_with_note(row) for row in messages[:start] if row.get("role") != "system"]
        self._tool_state.setdefault("todos", todo.restore(messages))
        return Turn(
            messages=messages,
            start=start,
            wire=Wire(lead, history),
            tools=WireTools.of(self.tools),
            model=self._answering,
            budget=IterationBudget(self.max_iterations),
            task_id=task_id or self.session_id,
            call_ids={call["id"] for row in messages for call in row.get("tool_calls") or ()},
        )

    def _system_prompt(self, system_message: str) -> str:
        if not self._cached_system_prompt:
            stored = self._stored_prompt()
            here = prompt.Place(self.model, self.provider, self.working_directory)
            fits = bool(stored) and prompt.still_fits(stored, here)
            self._cached_system_prompt = stored if fits else prompt.build(here, system_message)
        return self._cached_system_prompt

    def _store_prompt(self, claim: SessionWriter) -> None:
        """Keep the prompt with the session, for the turns to come; rides on the next durable commit."""
        if self._cached_system_prompt != self._stored_prompt():
            claim.set_system_prompt(self._cached_system_prompt)

    def _stored_prompt(self) -> str:
        return self.journal.writer.system_prompt() if self.journal.writer is not None else ""

    def _stored_history(self) -> list[Message]:
        return self._session_db.get_messages_as_conversation(self.session_id) if self._session_db else []

    def _resume(self, claim: SessionWriter, record: TurnRecord) -> dict[str, Any]:
        """Go on with a turn whose process died, from its durable prefix."""
        self._forget_refusals()
        failpoints.hit("turn.before_resume")
        given_up = record.crash_resumes >= MAX_CRASH_RESUMES
        claim.take_over(record, to_go_on=not given_up)
        failpoints.hit("turn.resumed")
        self.journal.attach(claim)
        messages = self._stored_history()
        start = next((i for i, row in enumerate(messages) if row.get("_seq") == record.user_seq), len(messages))
        turn = self._turn(messages, start, "", None)
        self._store_prompt(claim)
        _log.info("turn.resumed", session_id=self.session_id, turn_id=record.id, crashes=record.crash_resumes + 1)
        exit_ = self._give_up(turn, record) if given_up else turn_loop.finish_open_calls(self, turn)
        return self._finish(turn, exit_ or turn_loop.run(self, turn), claim)

    def _give_up(self, turn: Turn, record: TurnRecord) -> Exit:
        """Settle the calls of a turn that crashes again and again without running any of them."""
        why = f"The turn was given up after {record.crash_resumes} crashes."
        self.control.interrupt("the turn was given up")
        refused = turn_loop.finish_open_calls(self, turn)
        self.control.begin_turn()
        return refused or results.failed("poison", FailureReason.POISON, why)

    def _finish(self, turn: Turn, exit_: Exit, claim: SessionWriter | None) -> dict[str, Any]:
        turn_id = claim.turn_id if claim is not None else ""
        if exit_.reason is not None and exit_.kind != results.PERSISTENCE and not self._stays_open(exit_):
            self._store_end(turn, exit_)
        facts = TurnFacts(
            messages=turn.messages,
            api_calls=turn.api_calls,
            reasoning=turn.reasoning,
            model=self.model,
            served_model=turn.served_model,
            provider=self.provider,
            base_url=self.base_url,
            session_id=self.session_id,
            turn_id=turn_id,
            user_index=turn.start,
            pending_steer=self.control.take_steering(),
            totals=turn.totals,
        )
        self.session_prompt_tokens += turn.totals.input_tokens
        self.session_completion_tokens += turn.totals.output_tokens
        self.session_total_tokens = self.session_prompt_tokens + self.session_completion_tokens
        return results.build(exit_, facts)

    def _stays_open(self, exit_: Exit) -> bool:
        return (
            exit_.failed and exit_.reason is not None and self.leave_open is not None and self.leave_open(exit_.reason)
        )

    def _store_end(self, turn: Turn, exit_: Exit) -> None:
        """Store that and why the turn ended without an answer, with the text that was already seen."""
        seen = "".join(turn.streamed)
        if seen.strip():
            turn.messages.append(rows.assistant_row(seen, timestamp=time.time(), finish_reason="incomplete"))
        turn.messages[-1]["_turn_outcome"] = str(exit_.reason)
        state = _STATES.get(exit_.reason or FailureReason.UNKNOWN, TurnState.FAILED)
        self.journal.stage_end(TurnEnd(state, str(exit_.reason), exit_.error or exit_.detail, exit_.text))
        failpoints.hit("turn.before_end")
        self.flush(turn.messages)
        failpoints.hit("turn.after_end")

    def _refused(self, error: HermesError, history: list[Message]) -> dict[str, Any]:
        exit_ = results.failed(str(error.reason), error.reason, str(error))
        return results.build(exit_, TurnFacts(messages=list(history), model=self.model, session_id=self.session_id))

    # -- storing ----------------------------------------------------------------

    def _flush_messages_to_session_db(
        self, messages: list[Message], conversation_history: list[Message] | None = None
    ) -> bool | None:
        """Make what is new in `messages` durable: True, False when the store refused, None without a store."""
        if self._session_db is None or self._persist_disabled:
            return None
        try:
            self.journal.flush(self._session_db, self.session_id, messages, conversation_history)
        except HermesError as error:
            self._persistence_error = error
            _log.error("flush.failed", session_id=self.session_id, reason=str(error.reason), error=str(error))
            return False
        return True

    def flush(self, messages: list[Message]) -> bool:
        """Flush through the one entry; True when the turn may go on. An exception counts as refused."""
        try:
            return self._flush_messages_to_session_db(messages) is not False
        except Exception as error:  # noqa: BLE001 - whoever replaced the entry may raise anything
            self._persistence_error = error
            return False

    def _persist_session(self, messages: list[Message], conversation_history: list[Message] | None = None) -> None:
        """Store the user row at turn start; a failure is reported and does not stop a library call."""
        try:
            stored = self._flush_messages_to_session_db(messages, conversation_history)
        except Exception as error:  # noqa: BLE001 - whoever replaced the entry may raise anything
            self._persistence_error, stored = error, False
        if stored is False and self.status_callback is not None:
            self.status_callback("storage", f"The message could not be stored: {self._persistence_error}")

    def _forget_refusals(self) -> None:
        """A new turn may find the store well again."""
        self._incremental_persistence_failed = False
        self._persistence_error = None

    def note_persistence_failure(self, error: Exception | None) -> None:
        """A row could not be stored: nothing more of this turn may be shown or run."""
        self._incremental_persistence_failed = True
        self._persistence_error = error or self._persistence_error

    @property
    def persistence_failed(self) -> bool:
        return bool(self._incremental_persistence_failed)

    @property
    def persistence_error(self) -> Exception | None:
        return self._persistence_error

    # -- tools ------------------------------------------------------------------

    def _execute_tool_calls(
        self, assistant_message: Any, messages: list[Message], effective_task_id: str, api_call_count: int = 0
    ) -> None:
        tool_executor.execute_tool_calls_segmented(self, assistant_message, messages, effective_task_id, api_call_count)

    def _execute_tool_calls_sequential(
        self, assistant_message: Any, messages: list[Message], effective_task_id: str, api_call_count: int = 0
    ) -> None:
        tool_executor.execute_tool_calls_sequential(
            self, assistant_message, messages, effective_task_id, api_call_count
        )

    def _execute_tool_calls_concurrent(
        self, assistant_message: Any, messages: list[Message], effective_task_id: str, api_call_count: int = 0
    ) -> None:
        tool_executor.execute_tool_calls_concurrent(
            self, assistant_message, messages, effective_task_id, api_call_count
        )

    def dispatch_sequential(self, name: str, args: dict[str, Any], task_id: str, call_id: str) -> Any:
        """Run one call by the way that `handle_function_call` names."""
        return handle_function_call(
            name, args, task_id, tool_call_id=call_id, session_id=self.session_id, context=self._context(call_id)
        )

    def dispatch_concurrent(
        self, name: str, args: dict[str, Any], task_id: str, call_id: str, messages: list[Message]
    ) -> Any:
        """Run one call of a concurrent batch."""
        return self._invoke_tool(name, args, task_id, call_id, messages=messages)

    def _invoke_tool(
        self,
        function_name: str,
        function_args: dict[str, Any],
        effective_task_id: str,  # noqa: ARG002 - part of the published signature
        tool_call_id: str,
        **_: Any,
    ) -> Any:
        return dispatch.call_tool(function_name, function_args, self._context(tool_call_id))

    def _context(self, call_id: str) -> ToolContext:
        """The surroundings of one call."""
        chosen = self.settings
        return ToolContext(
            home=self.home,
            cwd=self.working_directory,
            session_id=self.session_id,
            turn_id=self.journal.writer.turn_id if self.journal.writer else "",
            call_id=self.journal.public_id(call_id),
            cancellation=self.control.cancellation,
            ask=self.options.ask,
            yolo=self.options.yolo or chosen.yolo,
            env_passthrough=chosen.terminal.env_passthrough,
            limits=ToolLimits(
                terminal_timeout=chosen.terminal.timeout,
                output_max_bytes=chosen.tool_output.max_bytes,
                read_max_chars=chosen.file_read_max_chars,
                read_max_lines=chosen.tool_output.max_lines,
                read_max_line_length=chosen.tool_output.max_line_length,
            ),
            session_state=self._tool_state,
        )

    # -- published names that a surface may replace --------------------------------

    def _save_trajectory(self, *_: Any) -> None:
        """Trajectories are exported from the store, not written by a turn."""

    def _cleanup_task_resources(self, *_: Any) -> None:
        """Tools clean up after themselves when their call ends."""


def _with_note(row: Message) -> Message:
    """The row with the note that the wire shows where a turn ended without an answer."""
    outcome = row.get("_turn_outcome")
    if outcome is None:
        return row
    return {**row, rules.OUTCOME_NOTE: f"[no answer was given here: {outcome.replace('_', ' ')}]"}
