"""The one gate through which anything of a turn becomes visible.

Whoever calls it has made the row behind it durable first. A callback's `Exception` is
the callback's problem and is logged; a `BaseException` ends the turn and goes through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hermes_agent import log

_log = log.get("agent.publish")


def publish(callback: Callable[..., Any] | None, *args: Any, **fields: Any) -> None:
    """Call `callback` on this thread, if there is one."""
    if callback is None:
        return
    try:
        callback(*args, **fields)
    except Exception as error:  # noqa: BLE001 - a surface's fault must not change the turn
        _log.failure("callback.failed", error, callback=getattr(callback, "__name__", type(callback).__name__))
