"""What a line that begins with a slash does in a conversation: one table."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Host(Protocol):
    """What commands need of the conversation's loop."""

    def leave(self) -> None: ...
    def renew(self) -> None: ...
    def say(self, text: str) -> None: ...
    def list_sessions(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Command:
    """One command and the names it answers to."""

    names: tuple[str, ...]
    help: str
    run: Callable[[Host], None]


def _help(host: Host) -> None:
    lines = [f"  {', '.join('/' + name for name in command.names):<16}{command.help}" for command in COMMANDS]
    keys = (
        ("Enter", "send the message"),
        ("Alt-Enter", "begin a new line in it (or Esc, then Enter)"),
        ("Ctrl-C", "stop the turn at a safe point; twice: end at once"),
        ("Ctrl-D", "leave"),
    )
    host.say("\n".join([*lines, *(f"  {key:<16}{what}" for key, what in keys)]))


COMMANDS = (
    Command(("help",), "show this", _help),
    Command(("new", "reset"), "go on in a new session", lambda host: host.renew()),
    Command(("sessions",), "list the sessions used last", lambda host: host.list_sessions()),
    Command(("quit", "exit"), "leave", lambda host: host.leave()),
)

_LOOKS_LIKE_ONE = re.compile(r"/[A-Za-z][\w-]*")


def run(host: Host, line: str) -> bool:
    """Run a line that is a command; False if it is a message. A path such as `/etc/hosts` is no command."""
    word = line.split(maxsplit=1)[0]
    if not _LOOKS_LIKE_ONE.fullmatch(word):
        return False
    for command in COMMANDS:
        if word[1:].lower() in command.names:
            command.run(host)
            return True
    host.say(f"  there is no command {word}; /help lists them")
    return True
