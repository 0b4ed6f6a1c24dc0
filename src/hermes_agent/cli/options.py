"""The options of a conversation, written down once, and what they ask for.

`parse` reads a plain, correct command line without any library, because most runs are
one. It answers None for everything else; the click commands, made from the same
table, then explain what is wrong or print the help.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from hermes_agent.errors import UsageError

TEXT, STREAM_JSON = "text", "stream-json"

PROFILE = ("-p", "--profile")
PROFILE_HELP = "Work in this profile: a home of its own, with its own settings, keys and sessions."


class Option(Struct, frozen=True):
    """One option: the field of `Request` it sets, and how it is typed."""

    name: str
    flags: tuple[str, ...]
    help: str
    metavar: str = ""
    """What stands for its value in the help; empty for a switch."""
    alone: str = ""
    """The value it has when it is given without one; empty: a value is needed."""
    choices: tuple[str, ...] = ()
    count: bool = False
    """The value is a whole number, at least 1."""


COMMON = (
    Option("model", ("-m", "--model"), "Model to ask.", "MODEL"),
    Option("provider", ("--provider",), "Provider that config.yaml or this program knows by name.", "NAME"),
    Option("base_url", ("--base-url",), "Address of an OpenAI-compatible API, usually ending in /v1.", "URL"),
    Option("script", ("--script",), "Play this script file offline instead of asking a model.", "FILE"),
    Option("resume", ("-r", "--resume"), "Go on with this session: id, its beginning, title, or latest.", "SESSION"),
    Option(
        "go_on", ("-c", "--continue"), "Go on with the latest session, or the one of that name.", "[NAME]", "latest"
    ),
    Option("max_turns", ("--max-turns",), "Most model calls in one turn.", "N", count=True),
    Option("yolo", ("--yolo",), "Run commands without asking; what is never allowed stays refused."),
    Option("usage_file", ("--usage-file",), "Write a JSON report of the run to this file, even if it fails.", "FILE"),
)
TOP = (Option("prompt", ("-z", "--oneshot"), "Run this one message and print only the final text.", "PROMPT"), *COMMON)
CHAT = (
    Option("query", ("-q", "--query"), "Run this one message and show the work.", "TEXT"),
    Option("query_file", ("--query-file",), "Take the message from a file; - is standard input.", "PATH"),
    Option("quiet", ("-Q", "--quiet"), "Print only the final text."),
    Option("format", ("--format",), "What a run prints.", "FORMAT", choices=(TEXT, STREAM_JSON)),
    *COMMON,
)


class Request(Struct, frozen=True):
    """What a command line asks for."""

    prompt: str | None = None
    query: str | None = None
    query_file: str | None = None
    quiet: bool = False
    format: str = TEXT
    model: str = ""
    provider: str = ""
    base_url: str = ""
    script: str = ""
    resume: str | None = None
    go_on: str | None = None
    max_turns: int | None = None
    yolo: bool = False
    usage_file: str | None = None

    @property
    def session(self) -> str | None:
        """The name of the session to go on with; None for a new one."""
        return self.resume if self.resume is not None else self.go_on

    @property
    def has_message(self) -> bool:
        return self.prompt is not None or self.query is not None or self.query_file is not None

    @property
    def only_final(self) -> bool:
        """Print the final text and nothing else."""
        return self.prompt is not None or (self.quiet and self.format == TEXT)

    def check(self) -> None:
        """Raise `UsageError` for options that do not go together."""
        if self.resume is not None and self.go_on is not None:
            raise UsageError("-r and -c both name a session; give one of them")
        if self.session == "":
            raise UsageError("the session's name is empty; see: hermes sessions list")
        if self.query is not None and self.query_file is not None:
            raise UsageError("-q and --query-file both give the message; give one of them")
        if self.prompt is not None and (self.query is not None or self.query_file is not None):
            raise UsageError("-z and the message of chat exclude each other")
        if self.script and (self.base_url or self.provider not in {"", "scripted"}):
            raise UsageError("--script plays a file offline; it does not go with --base-url or another --provider")
        if self.provider == "scripted" and not self.script and self.session is None:
            raise UsageError("the scripted provider needs a script file: --script FILE")
        if not self.has_message:
            if self.format == STREAM_JSON:
                raise UsageError("--format stream-json needs a message: -q TEXT or --query-file PATH")
            if self.quiet and self.session is None:
                raise UsageError("-Q needs a message (-q TEXT) or a session to finish (-r SESSION)")
            if self.usage_file is not None:
                raise UsageError("--usage-file needs a message: -z PROMPT or -q TEXT")

    def message(self) -> str:
        """The message to run; raises `UsageError` when it cannot be read or is empty."""
        text = self.prompt if self.prompt is not None else self.query
        if text is None:
            text = _read(self.query_file or "-")
        if not text.strip():
            raise UsageError("the message is empty")
        return text


def parse(arguments: list[str]) -> Request | None:
    """Read a plain command line of a conversation; None when it is anything else."""
    table, values = _by_flag(TOP), dict[str, Any]()
    at, in_chat = 0, False
    while at < len(arguments):
        word = arguments[at]
        at += 1
        if word == "chat" and not in_chat:
            table, in_chat = _by_flag(CHAT), True
            continue
        flag, given, value = word.partition("=") if word.startswith("--") else (word, "", "")
        option = table.get(flag)
        if option is None:
            return None
        if not option.metavar:
            if given:
                return None
            values[option.name] = True
            continue
        if not given:
            follows = at < len(arguments) and not (option.alone and arguments[at].startswith("-"))
            if not follows and not option.alone:
                return None
            value = arguments[at] if follows else option.alone
            at += follows
        if (option.choices and value not in option.choices) or (option.count and not _is_count(value)):
            return None
        values[option.name] = int(value) if option.count else value
    return request(values)


def take_profile(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The profile that a command line names, before or behind its command, and the line without it.

    It is taken out first, because it decides which settings everything else is read with.
    """
    if not any(word.startswith(PROFILE) for word in arguments):
        return None, arguments
    table = _by_flag((*TOP, *CHAT))
    name, rest, at = None, list[str](), 0
    while at < len(arguments):
        word = arguments[at]
        at += 1
        if word == "--":
            return name, [*rest, *arguments[at - 1 :]]
        flag, equals, value = word.partition("=") if word.startswith("--") else (word[:2], "", word[2:])
        if flag in PROFILE:
            if not value and not equals and at < len(arguments):
                value, at = arguments[at], at + 1
            if not value or value.startswith("-"):
                raise UsageError(f"{flag} needs the name of a profile; see: hermes profile list")
            name = value
            continue
        rest.append(word)
        option = table.get(word)
        if option is None or not option.metavar or at == len(arguments):
            continue
        if not (option.alone and arguments[at].startswith("-")):
            rest.append(arguments[at])
            at += 1
    return name, rest


def request(values: Mapping[str, Any]) -> Request:
    """The checked request of these values; None means not given."""
    found = Request(**{name: value for name, value in values.items() if value is not None})
    found.check()
    return found


def _by_flag(options: tuple[Option, ...]) -> dict[str, Option]:
    return {flag: option for option in options for flag in option.flags}


def _is_count(value: str) -> bool:
    return value.isascii() and value.isdecimal() and int(value) >= 1


def _read(place: str) -> str:
    import sys  # noqa: PLC0415 - only where the message is not an argument

    try:
        data = sys.stdin.buffer.read() if place == "-" else Path(place).expanduser().read_bytes()
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise UsageError(f"--query-file {place}: not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"--query-file {place}: {error.strerror}") from error
