"""Named points in the durable protocol where a test may stop the process.

A point costs one function call and does nothing until `arm` is called. Only the
crash self-test arms them; nothing in the product reads the environment for it.
"""

from __future__ import annotations

from collections.abc import Callable

Handler = Callable[[str], None]

_handler: Handler | None = None


def hit(name: str) -> None:
    """Report that execution has reached the point `name`."""
    if _handler is not None:
        _handler(name)


def arm(handler: Handler | None) -> None:
    """Call `handler` with the name of every point reached from now on; None disarms."""
    global _handler  # noqa: PLW0603 - one process-wide switch, set once by a test child
    _handler = handler
