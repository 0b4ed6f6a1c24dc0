"""What plugins and embedders say about one platform of the gateway: plain data, nothing is opened or read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, TypeVar, cast

_T = TypeVar("_T")


@dataclass
class HomeChannel:
    """Where a platform's own notices go."""

    platform: str
    chat_id: str
    name: str = ""
    thread_id: str | None = None
    user_id: str | None = None
    scope_id: str | None = None


@dataclass
class ChannelOverride:
    """What one channel uses instead of the configured model."""

    model: str | None = None
    provider: str | None = None
    system_prompt: str | None = None


@dataclass
class PlatformConfig:
    """The settings of one platform; what only that platform knows stands in `extra`."""

    enabled: bool = False
    token: str | None = field(default=None, repr=False)
    api_key: str | None = field(default=None, repr=False)
    home_channel: HomeChannel | None = None
    reply_to_mode: str = "first"
    """Which pieces of an answer quote the message: `off`, `first` or `all`."""
    gateway_restart_notification: bool = True
    typing_indicator: bool = True
    typing_status_text: str | None = None
    channel_overrides: dict[str, ChannelOverride] = field(default_factory=dict[str, ChannelOverride])
    extra: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a mapping; a key of no field becomes one of `extra`, unless `extra` has it. None means the default."""
        known = {each.name for each in fields(cls)} - {"extra"}
        values = {name: value for name, value in data.items() if name in known and value is not None}
        if "home_channel" in values:
            values["home_channel"] = _made(HomeChannel, values["home_channel"])
        overrides: Mapping[str, Any] = values.get("channel_overrides", {})
        values["channel_overrides"] = {str(name): _made(ChannelOverride, each) for name, each in overrides.items()}
        promoted = {name: value for name, value in data.items() if name not in {*known, "extra"}}
        return cls(**values, extra={**promoted, **(data.get("extra") or {})})

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `from_dict` turns into an equal object, secrets included."""
        return asdict(self)


def _made(kind: type[_T], value: Any) -> _T:
    if isinstance(value, kind):
        return value
    given = cast("Mapping[str, Any]", value)
    known = {each.name for each in fields(cast("Any", kind))}
    return kind(**{name: each for name, each in given.items() if name in known})
