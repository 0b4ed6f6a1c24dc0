"""Read one argument of a tool call; a wrong one is a `ToolError` that says what was expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hermes_agent.errors import ToolError

_FLAGS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


def text(args: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A string; required unless a default is given."""
    value = args.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise ToolError(f"'{name}' is missing; give it as a string.")
    if not isinstance(value, str):
        raise ToolError(f"'{name}' must be a string, not {type(value).__name__}.")
    return value


def integer(args: Mapping[str, Any], name: str, default: int, low: int, high: int | None = None) -> int:
    """A whole number of at least `low`, lowered to `high`; digits in a string are accepted."""
    value = args.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ToolError(f"'{name}' must be a whole number, not {type(value).__name__}.")
    if isinstance(value, float) and not value.is_integer():
        raise ToolError(f"'{name}' must be a whole number, not {value!r}.")
    try:
        number = int(value)
    except ValueError:
        raise ToolError(f"'{name}' must be a whole number, not {value!r:.40}.") from None
    if number < low:
        raise ToolError(f"'{name}' must be at least {low}, not {number}.")
    return number if high is None else min(number, high)


def flag(args: Mapping[str, Any], name: str) -> bool:
    """True or false; false when it is not given."""
    value = args.get(name)
    if value is None:
        return False
    if isinstance(value, bool):
        return value
    known = _FLAGS.get(str(value).strip().lower())
    if known is None:
        raise ToolError(f"'{name}' must be true or false, not {value!r:.40}.")
    return known


def choice(args: Mapping[str, Any], name: str, options: Sequence[str]) -> str:
    """One of the options; the first when it is not given."""
    value = args.get(name)
    if value is None or value == "":
        return options[0]
    if value not in options:
        raise ToolError(f"'{name}' must be one of {', '.join(options)}, not {value!r:.40}.")
    return str(value)
