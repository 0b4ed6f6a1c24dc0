"""The callbacks by which an agent tells of its turn to those who follow its session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hermes_agent.delivery.events import Hub


class Listener:
    """The callbacks by which an agent tells of its turn; what they carry is durable or marked as provisional."""

    def __init__(self, hub: Hub, session_id: str, ask: Any, before_call: Callable[[Any], None]) -> None:
        self._hub = hub
        self._session_id = session_id
        self._before_call = before_call
        self.ask = ask
        """Puts approval questions to whoever answers them; `tools.context.Ask`."""

    def attach(self, agent: Any, *, always: bool = False) -> None:
        """Have the agent stream its words while somebody follows the session, or `always`, since somebody will."""

        def step(*_: Any) -> None:
            followed = always or self._hub.is_followed(self._session_id)
            agent.stream_delta_callback = self.delta if followed else None
            agent.reasoning_callback = self.reasoning if followed else None
            self._hub.touch(self._session_id)  # what was stored comes before what will be said
            self._before_call(agent)

        agent.step_callback = step

    def delta(self, text: str | None) -> None:
        """Words of the answer; None when the reply they belong to is stored."""
        if text is None:
            self._hub.settle(self._session_id)
        else:
            self._hub.say(self._session_id, "delta", text)

    def reasoning(self, text: str) -> None:
        self._hub.say(self._session_id, "reasoning", text)

    def status(self, kind: str, _text: str) -> None:
        if kind in ("retry", "cut"):
            self._hub.say(self._session_id, "void", "")

    def stored(self, *_: Any, **__: Any) -> None:
        """The model's words are a row now."""
        self._hub.settle(self._session_id)

    def moved(self, *_: Any, **__: Any) -> None:
        """Something of a call was stored."""
        self._hub.touch(self._session_id)
