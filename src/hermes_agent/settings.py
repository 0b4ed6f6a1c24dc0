"""The only reader of `config.yaml`, `.env` and the environment: one frozen object comes out.

Who wins, strongest first: the command line, the environment of the process, `.env`,
`config.yaml`. Where a model is reached is decided as a whole (see `Settings.endpoint`),
so that a key is never sent to a server it was not meant for. What the API server is
told in `config.yaml` wins over its variables, `API_SERVER_*`.

A key of `config.yaml` that this version does not use is accepted silently; one that
looks like a misspelt known key is reported in `Settings.warnings`. A key without a
value means its default. `${NAME}` in a value is replaced from the environment or `.env`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, cast, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct, structs

from hermes_agent import home as home_module
from hermes_agent.errors import SettingsError

OPENAI_URL = "https://api.openai.com/v1"
OFFLINE_PROVIDER = "scripted"
"""The provider that plays a script file and needs no address."""

Count = Annotated[int, Meta(ge=1)]
Size = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Wait = Annotated[float, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class Secret:
    """A text that no log, traceback or `print` shows; `reveal` is the one way to it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


class ModelSettings(Struct, frozen=True):
    """`model:`, a mapping or just the name."""

    default: str = ""
    provider: str = ""
    base_url: str = ""
    api_key: Secret | None = None
    context_length: Count | None = None
    max_tokens: Count | None = None


class ProviderSettings(Struct, frozen=True):
    """One entry of `providers:`, an endpoint with a name of its own."""

    base_url: str = ""
    api_key: Secret | None = None
    key_env: str = ""
    """Name of the environment variable that holds the key."""
    model: str = ""


class AgentSettings(Struct, frozen=True):
    """`agent:`, the bounds of a turn."""

    max_turns: Count | None = None
    """Model calls in one turn; None takes the agent's own limit of 90."""
    api_max_retries: Size = 3
    disabled_toolsets: tuple[str, ...] = ()


class TerminalSettings(Struct, frozen=True):
    """`terminal:`, how commands run."""

    timeout: Seconds = 180.0
    cwd: str = ""
    env_passthrough: tuple[str, ...] = ()


class ApprovalSettings(Struct, frozen=True):
    """`approvals:`, the questions to the person."""

    timeout: Seconds = 300.0
    deny: tuple[str, ...] = ()
    """Patterns of commands that are refused even where approvals are lifted."""


class ToolOutputSettings(Struct, frozen=True):
    """`tool_output:`, how much of a result the model is shown."""

    max_bytes: Count = 50_000
    max_lines: Count = 2000
    max_line_length: Count = 2000


class DatabaseSettings(Struct, frozen=True):
    """`database:`, the store's file."""

    synchronous: Literal["full", "normal"] = "full"
    wal_autocheckpoint: Count | None = None
    journal_size_limit: Size | None = None


class LoggingSettings(Struct, frozen=True):
    """`logging:`, what `logs/agent.log` holds."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    max_size_mb: Annotated[float, Meta(gt=0)] = 5.0
    backup_count: Size = 3


class ApiServerSettings(Struct, frozen=True):
    """`platforms.api_server:`, where the gateway listens and whom it lets in."""

    enabled: bool = True
    key: Secret | None = None
    """The owner's key; without one the gateway makes its own."""
    host: str = "127.0.0.1"
    port: Port = 8642
    """0 takes a free one."""
    cors_origins: tuple[str, ...] = ()
    """The web pages that may call, as `https://host`; `*` stands for all."""
    model_name: str = ""
    """What the agent is called in the list of models; empty takes the profile's name."""
    allowed_hosts: tuple[str, ...] = ()
    """More names of this server than those of the loopback."""
    allow_remote: bool = False
    """Listen to other machines."""
    allow_unsandboxed_remote: bool = False
    """Do so although commands run without a sandbox."""


class GatewaySettings(Struct, frozen=True):
    """`gateway:`, how much it takes on and how long it waits."""

    max_concurrent_runs: Size | None = None
    """Turns that run at once in the process; None or 0 takes our own limit, see `running_turns`."""
    max_queue: Count = 1024
    """Messages that wait in the process."""
    session_queue: Count = 32
    """Messages that wait in one session."""
    turn_timeout: Seconds = 1800.0
    drain_timeout: Wait = 30.0
    """How long running turns may take to end when the gateway stops."""
    heartbeat: Seconds = 10.0
    """Between two signs of life on a stream."""

    @property
    def running_turns(self) -> int:
        return self.max_concurrent_runs or 64


class Proxies(Struct, frozen=True):
    """The proxies of the environment; their addresses may hold a password."""

    https: Secret | None = None
    http: Secret | None = None
    bypass: tuple[str, ...] = ()

    def for_url(self, url: str) -> str | None:
        """As `for_host`, for the server of a URL; None for one that is no URL, which the client then refuses."""
        try:
            parts = urlsplit(url)
            return self.for_host(parts.scheme, parts.hostname or "", parts.port)
        except ValueError:
            return None

    def for_host(self, scheme: str, host: str, port: int | None = None) -> str | None:
        """The proxy's address for one server, or None for a direct connection. This machine is always direct."""
        proxy = self.https if scheme == "https" else self.http
        host = host.strip("[]").lower()
        if proxy is None or host in {"localhost", "::1"} or host.startswith("127.") or host.endswith(".localhost"):
            return None
        names = {host, f"{host}:{port}"} if port else {host}
        for entry in self.bypass:
            if entry == "*" or entry in names or any(name.endswith("." + entry) for name in names):
                return None
        return proxy.reveal()


class Endpoint(Struct, frozen=True):
    """Where a model is asked."""

    base_url: str
    model: str = ""
    api_key: Secret | None = None
    provider: str = ""


class OpenAIVariables(Struct, frozen=True):
    """`OPENAI_BASE_URL` and `OPENAI_API_KEY`."""

    base_url: str = ""
    api_key: Secret | None = None
    own_key: Secret | None = None
    """The key as our `.env` has it: meant for whatever model hermes is set up to ask."""


class Settings(Struct, frozen=True, kw_only=True):
    """Everything the program was told, at one moment."""

    home: Path
    model: ModelSettings = ModelSettings()
    providers: dict[str, ProviderSettings] = {}
    agent: AgentSettings = AgentSettings()
    toolsets: tuple[str, ...] = ("hermes-cli",)
    terminal: TerminalSettings = TerminalSettings()
    approvals: ApprovalSettings = ApprovalSettings()
    tool_output: ToolOutputSettings = ToolOutputSettings()
    file_read_max_chars: Count = 100_000
    database: DatabaseSettings = DatabaseSettings()
    logging: LoggingSettings = LoggingSettings()
    api_server: ApiServerSettings = ApiServerSettings()
    gateway: GatewaySettings = GatewaySettings()
    openai: OpenAIVariables = OpenAIVariables()
    proxies: Proxies = Proxies()
    notify_socket: str = ""
    """Where a service manager wants to hear that the gateway is ready."""
    yolo: bool = False
    """The operator lifted approvals through `HERMES_YOLO_MODE`."""
    secrets: frozenset[Secret] = frozenset()
    """Every secret that was read, for the log to blot out."""
    warnings: tuple[str, ...] = ()
    """What the person should know, one sentence each."""

    def endpoint(
        self, *, model: str = "", provider: str = "", base_url: str = "", api_key: str = ""
    ) -> Endpoint | None:
        """Where to ask the model, given what the command line says; None when nothing names a place.

        The place: `base_url` given here; else the named provider; else what config.yaml
        names (`model.base_url`, `model.provider`); else `OPENAI_BASE_URL`; else OpenAI
        itself when there is an `OPENAI_API_KEY`. A place brings its own key. One without
        gets `OPENAI_API_KEY` if the person typed that place here or it is the place that
        the variable belongs to; any other place gets that key only from our own `.env`.
        """
        config = self.model
        name = provider or ("" if base_url else config.provider)
        place = base_url or self._place_of(name)
        if place is None:
            known = ", ".join(sorted({*self.providers, "openai", OFFLINE_PROVIDER}))
            raise SettingsError(f"no address is known for the provider {name!r}; known providers: {known}")
        if not place and name != OFFLINE_PROVIDER:
            return None
        default = self.providers[name].model if name in self.providers else ""
        return Endpoint(
            base_url=place,
            model=model or (config.default or default if name == config.provider else default or config.default),
            api_key=Secret(api_key) if api_key else self._key_for(place, typed=bool(base_url)),
            provider=name,
        )

    def _place_of(self, provider: str) -> str | None:
        """The address a provider's name stands for; empty if none is needed or set, None for an unknown name."""
        if provider == self.model.provider and self.model.base_url:
            return self.model.base_url
        if provider in self.providers and self.providers[provider].base_url:
            return self.providers[provider].base_url
        if provider == OFFLINE_PROVIDER:
            return ""
        if provider == "openai":
            return OPENAI_URL
        if provider in {"", "auto", "custom"}:
            return self.openai.base_url or (OPENAI_URL if self.openai.api_key or self.model.api_key else "")
        return None

    def _key_for(self, place: str, *, typed: bool) -> Secret | None:
        """The key that belongs to a place; see `endpoint` for when the variable's key may go there."""
        if self.model.api_key and _same_place(place, self._place_of(self.model.provider)):
            return self.model.api_key
        for provider in self.providers.values():
            if provider.api_key and _same_place(place, provider.base_url):
                return provider.api_key
        if typed or _same_place(place, self.openai.base_url or OPENAI_URL):
            return self.openai.api_key
        return self.openai.own_key if place else None


def load(home: Path, environ: Mapping[str, str] | None = None) -> Settings:
    """Read what lies in `home` and what `environ` (the process's, if None) says.

    Raises `SettingsError` with the file, and the line or the key, for what cannot be used.
    """
    process = os.environ if environ is None else environ
    warnings: list[str] = []
    dotenv = _read_dotenv(home / ".env", warnings)
    variables = {**dotenv, **process}
    reader = _Reader(home / "config.yaml", variables, warnings)
    values = reader.settings()

    model: ModelSettings = values.get("model", ModelSettings())
    if variables.get("HERMES_MODEL"):
        values["model"] = model = structs.replace(model, default=variables["HERMES_MODEL"])
    values["openai"] = openai = OpenAIVariables(
        base_url=variables.get("OPENAI_BASE_URL", ""),
        api_key=_secret(variables.get("OPENAI_API_KEY")),
        own_key=_secret(dotenv.get("OPENAI_API_KEY")),
    )
    values["proxies"] = proxies = _proxies(variables)
    named: dict[str, Any] = values.get("api_server", {})
    values["api_server"] = server = ApiServerSettings(**{**_server_variables(variables), **named})
    providers: dict[str, ProviderSettings] = values.get("providers", {})
    secrets = [model.api_key, openai.api_key, server.key, proxies.https, proxies.http]
    secrets += [provider.api_key for provider in providers.values()]
    secrets += [Secret(value) for name, value in dotenv.items() if value and _names_a_secret(name)]
    return Settings(
        home=home,
        notify_socket=process.get("NOTIFY_SOCKET", ""),
        yolo=_is_on(variables.get("HERMES_YOLO_MODE", "")),
        secrets=frozenset(secret for secret in secrets if secret is not None),
        warnings=tuple(warnings),
        **values,
    )


def shared_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for `load` of another profile that this process serves: what names our own API is not its."""
    process = os.environ if environ is None else environ
    return {name: value for name, value in process.items() if name not in _SERVER_VARIABLES}


_SERVER_VARIABLES = {
    "API_SERVER_ENABLED": "enabled",
    "API_SERVER_KEY": "key",
    "API_SERVER_HOST": "host",
    "API_SERVER_PORT": "port",
    "API_SERVER_CORS_ORIGINS": "cors_origins",
    "API_SERVER_MODEL_NAME": "model_name",
}
"""The variables of the API server and the settings they stand for."""

_UNUSED_SERVER_KEYS = """
    api_key channel_overrides direct_model_requests extra gateway_restart_notification history_tool_output_max_chars
    home_channel model_routes reply_to_mode token tool_progress_events typing_indicator typing_status_text
"""

_UNUSED_KEYS = {
    "": """
        _config_version auxiliary bedrock bot_mode bot_peers browser checkpoints command_allowlist compression
        computer_use cron curator dashboard delegation desktop display fallback_model fallback_providers gateway goals
        hooks kanban loops lsp mcp mcp_servers memory moa monitoring nous onboarding personalities pets
        platform_hints platform_toolsets platforms plugins privacy proxy quick_commands security sessions skills
        streaming stt timezone tool_loop_guardrails tools tts updates vault vertex voice wake_word web
    """,
    "agent": "bot_mode_protocol",
    "approvals": "cron_mode mode single_query_mode unattended_mode",
    "database": "journal_mode",
    "gateway": """
        api_server bot_loop_guard delivery_ledger direct_model_requests history_tool_output_max_chars
        multiplex_profiles on_all_adapters_down platform_connect_timeout platforms profile_routes quick_commands
        reset_triggers streaming systemd_watchdog_seconds unauthorized_dm_behavior
    """,
    "gateway.api_server": _UNUSED_SERVER_KEYS,
    "platforms": """
        bluebubbles dingtalk discord email feishu local matrix mattermost msgraph_webhook qqbot relay signal slack sms
        telegram webhook wecom wecom_callback weixin whatsapp whatsapp_cloud yuanbao
    """,
    "platforms.api_server": _UNUSED_SERVER_KEYS,
    "platforms.api_server.extra": _UNUSED_SERVER_KEYS,
    "model": "api_mode name",
    "terminal": "backend",
}
"""Keys that the upstream agent knows and this version does not use yet, by section."""

_NAME_IN_BRACES = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a mapping",
}


class _Reader:
    """Turns the mapping in one config file into the values of `Settings`."""

    def __init__(self, path: Path, variables: Mapping[str, str], warnings: list[str]) -> None:
        self._path = path
        self._variables = variables
        self._warnings = warnings

    def settings(self) -> dict[str, Any]:
        document = _read_yaml(self._path)
        if document is None:
            return {}
        if not _is_mapping(document):
            raise SettingsError(f"{self._path}: expected `key: value` lines, got {_shown(document)}")
        if isinstance(document.get("model"), str):
            document = {**document, "model": {"default": document["model"]}}
        rest = {key: value for key, value in document.items() if key not in {"gateway", "platforms"}}
        ours = {"api_server", "home", "notify_socket", "openai", "proxies", "yolo", "secrets", "warnings"}
        fields = {name: kind for name, kind in _fields(Settings).items() if name not in ours}
        return self._values(fields, rest, "") | self._server(document)

    def _server(self, document: Mapping[Any, Any]) -> dict[str, Any]:
        """`gateway` and what is said of `api_server`: a setting may stand in either section, the last place wins."""
        gateway = self._mapping(document.get("gateway"), "gateway")
        platforms = self._mapping(document.get("platforms"), "platforms")
        self._values({"api_server": Any}, dict.fromkeys(platforms), "platforms")
        path = "platforms.api_server"
        own = self._mapping(platforms.get("api_server"), path)
        inner = self._mapping(gateway.get("api_server"), "gateway.api_server")
        extra = self._mapping(own.get("extra"), f"{path}.extra")
        server, limits = _fields(ApiServerSettings), _fields(GatewaySettings)
        values: dict[str, Any] = {}
        places = {"gateway": gateway, "gateway.api_server": inner, path: own, f"{path}.extra": extra}
        for place, found in places.items():
            values |= self._values({**server, **limits}, found, place)
        return {
            "api_server": {name: value for name, value in values.items() if name in server},
            "gateway": GatewaySettings(**{name: value for name, value in values.items() if name in limits}),
        }

    def _mapping(self, raw: Any, path: str) -> Mapping[Any, Any]:
        if raw is not None and not _is_mapping(raw):
            raise self._wrong(path, raw, "a mapping")
        return raw or {}

    def _values(self, fields: Mapping[str, Any], found: Mapping[Any, Any], path: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, raw in found.items():
            name = str(key)
            if name not in fields:
                self._unknown(name, path, fields)
            elif raw is not None:
                value = self._value(fields[name], raw, f"{path}.{name}" if path else name)
                if value is not None:
                    values[name] = value
        return values

    def _value(self, kind: Any, raw: Any, path: str) -> Any:
        if path == "providers" and _is_mapping(raw):
            return {str(name): self._provider(entry, f"{path}.{name}") for name, entry in raw.items()}
        if _is_section(kind):
            if not _is_mapping(raw):
                raise self._wrong(path, raw, "a mapping")
            return kind(**self._values(_fields(kind), raw, path))
        value, expanded = self._expand(raw, path)
        if isinstance(value, str) and path.rpartition(".")[2] in {"allowed_hosts", "cors_origins"}:
            value = _items(value)
        if value is None:
            return None
        try:
            return msgspec.convert(value, kind, strict=not expanded, dec_hook=_make_secret)
        except msgspec.ValidationError as error:
            hide = Secret in get_args(kind) or expanded
            raise self._wrong(path, raw if not hide else None, _expected(error, kind)) from None

    def _provider(self, raw: Any, path: str) -> ProviderSettings:
        provider: ProviderSettings = self._value(ProviderSettings, {} if raw is None else raw, path)
        if provider.api_key is None and provider.key_env:
            key = _secret(self._variables.get(provider.key_env))
            provider = structs.replace(provider, api_key=key)
        return provider

    def _expand(self, raw: Any, path: str) -> tuple[Any, bool]:
        """`raw` with its variables filled in, and whether there were any; None if one is not set."""
        if isinstance(raw, list):
            items = [self._expand(item, path) for item in cast("list[Any]", raw)]
            return [item for item, _ in items if item is not None], any(expanded for _, expanded in items)
        if not isinstance(raw, str) or "${" not in raw:
            return raw, False
        names = _NAME_IN_BRACES.findall(raw)
        missing = [name for name in names if name not in self._variables]
        if missing:
            self._warnings.append(f"{self._path}: {path} uses ${{{missing[0]}}}, which is not set")
            return None, True
        return _NAME_IN_BRACES.sub(lambda name: self._variables[name.group(1)], raw), bool(names)

    def _unknown(self, name: str, path: str, fields: Mapping[str, Any]) -> None:
        unused = _UNUSED_KEYS.get(path, "").split()
        if name in unused or path.startswith("providers."):
            return
        import difflib  # noqa: PLC0415 - only where a key is unknown

        near = difflib.get_close_matches(name, [*fields, *unused], n=1, cutoff=0.75)
        if near:
            place = f"{path}.{name}" if path else name
            self._warnings.append(f"{self._path}: unknown setting {place!r}; did you mean {near[0]!r}?")

    def _wrong(self, path: str, raw: Any, expected: str) -> SettingsError:
        shown = "not usable" if raw is None else _shown(raw)
        return SettingsError(f"{self._path}: {path} is {shown}; expected {expected}")


def _read_yaml(path: Path) -> Any:
    text = _read_text(path)
    if not text:
        return None
    from ruamel.yaml import YAML  # noqa: PLC0415 - start-up time
    from ruamel.yaml.error import MarkedYAMLError, YAMLError  # noqa: PLC0415 - start-up time

    try:
        return YAML(typ="safe", pure=True).load(text)  # pyright: ignore[reportUnknownMemberType]
    except MarkedYAMLError as error:
        raise _broken_yaml(path, error) from None
    except YAMLError as error:
        raise SettingsError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def _broken_yaml(path: Path, error: Any) -> SettingsError:
    mark, start = error.problem_mark, error.context_mark
    place = f"{path}:{(mark or start).line + 1}" if mark or start else str(path)
    within = f" {error.context} that starts in line {start.line + 1}" if mark and start and error.context else ""
    return SettingsError(f"{place}: not valid YAML: {error.problem or error.context}{within}")


def _read_dotenv(path: Path, warnings: list[str]) -> dict[str, str]:
    """The assignments of a `.env` file, taken literally: a `$` in a key stays a `$`."""
    text = _read_text(path)
    if not text:
        return {}
    from io import StringIO  # noqa: PLC0415 - start-up time

    from dotenv.parser import parse_stream  # noqa: PLC0415 - start-up time

    if home_module.others_can_read(path):
        warnings.append(f"{path} can be read by other users; run: chmod 600 {path}")
    values: dict[str, str] = {}
    for binding in parse_stream(StringIO(text)):
        if binding.error:
            warnings.append(f"{path}:{binding.original.line}: not a NAME=value line")
        elif binding.key is not None and binding.value is not None:
            values[binding.key] = binding.value
    return values


def _read_text(path: Path) -> str:
    """The whole file; empty when there is none."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: not UTF-8 text") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error


def _proxies(variables: Mapping[str, str]) -> Proxies:
    def either(name: str) -> str:
        return variables.get(name.lower()) or variables.get(name) or ""

    entries = (entry.strip().lower().removeprefix("*.").removeprefix(".") for entry in either("NO_PROXY").split(","))
    return Proxies(
        https=_secret(either("HTTPS_PROXY") or either("ALL_PROXY")),
        http=_secret(either("HTTP_PROXY") or either("ALL_PROXY")),
        bypass=tuple(entry for entry in entries if entry),
    )


def _server_variables(variables: Mapping[str, str]) -> dict[str, Any]:
    """What the environment says of the API server."""
    values: dict[str, Any] = {}
    for name, field in _SERVER_VARIABLES.items():
        text = variables.get(name, "").strip()
        if field == "enabled" and text:
            values[field] = _is_on(text)
        elif field == "port" and text:
            if not text.isascii() or not text.isdecimal() or int(text) > 65535:
                raise SettingsError(f"{name} is {_shown(text)}; expected a port, 0 to 65535")
            values[field] = int(text)
        elif text:
            values[field] = {"key": Secret, "cors_origins": _items}.get(field, str)(text)
    return values


def _is_on(text: str) -> bool:
    return text.strip().lower() in {"1", "true", "yes", "on"}


def _items(text: str) -> tuple[str, ...]:
    """The parts of a list that is written with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _fields(section: type[Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in structs.fields(section)}


def _secret(text: str | None) -> Secret | None:
    return Secret(text) if text else None


def _make_secret(kind: type, value: Any) -> Any:
    if kind is Secret and isinstance(value, str):
        return Secret(value)
    raise msgspec.ValidationError("Expected `str`")


def _names_a_secret(name: str) -> bool:
    return any(word in name.upper() for word in ("KEY", "TOKEN", "SECRET", "PASSWORD"))


def _same_place(one: str, other: str | None) -> bool:
    return bool(one and other) and one.rstrip("/").lower() == str(other).rstrip("/").lower()


def _is_mapping(value: Any) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


def _is_section(kind: Any) -> TypeGuard[type[Struct]]:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _expected(error: msgspec.ValidationError, kind: Any) -> str:
    """What would have been right, in words."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    text = str(error).partition(", got")[0].partition(" - at ")[0].removeprefix("Expected ").replace(" | null", "")
    return re.sub(r"`(\w+)`", lambda word: _WORDS.get(word.group(1), word.group(1)), text)
