"""The words of a simple shell command, read by a second, much narrower grammar than the syntax tree's.

Only what is written here is known: anything else ends the reading. Both readings
must agree before a command counts as understood.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_DOUBLE = r'"(?:[^"\\$`]|\\[^\n]|\$[A-Za-z_][A-Za-z0-9_]*|\$\?|\$(?=["\s|)]))*+"'
_SUM = r"\$\(\((?:[0-9 ]|[+*/%-])*+\)\)"
_WORD = (
    r"(?:[A-Za-z0-9_@%+=:,./~^*?\[\]!\x80-\xff-]|'[^']*+'|"
    + _DOUBLE
    + r"|"
    + _SUM
    + r"|\\[^\n\x80-\xff]|\$[A-Za-z_][A-Za-z0-9_]*|\$\?)++"
)
_TOKEN = re.compile(
    (
        r"(?P<space>[ \t]+)"
        r"|(?P<end>&&|\|\|(?!\|)|\|(?![|&])|;(?![;&|])|\n)"
        r"|(?P<redirect>[012]?>&[12](?=[\s;|&]|$)"
        r"|[012&]?>>?[ \t]*/dev/null(?=[\s;|&]|$)"
        r"|0?<(?![<(&>])[ \t]*(?P<source>" + _WORD + r"))"
        r"|(?P<word>" + _WORD + r")"
        r"|(?P<comment>#[^\n]*)"
    ).encode("latin-1")
)
_PART = re.compile(
    rf"(?P<sum>{_SUM})"
    r"|'(?P<single>[^']*)'"
    r'|"(?P<double>(?:[^"\\]|\\.)*)"'
    r"|\\(?P<escaped>.)"
    r"|(?P<name>\$\w+|\$\?)"
    r"""|(?P<plain>[^'"\\$]+)""",
    re.DOTALL,
)
_PLAIN = re.compile(r"[^'\"\\$*?\[]*")
_ESCAPE = re.compile(r'\\([$`"\\\n])')
_NAME = re.compile(r"\\.|\$(\w+)", re.DOTALL)
_QUOTED_PATH = re.compile(r'"?\$(?:HOME|PWD)\b')


@dataclass(frozen=True, slots=True)
class Word:
    """One word, its quotes resolved; variables and patterns stay as they are written."""

    text: str
    plain: bool = True
    """Written without quotes, escapes, patterns or variables."""
    glob: bool = False
    """Holds an unquoted pattern, so it may become several words."""
    wild: bool = False
    """May become a word that starts with anything, an option too."""
    names: tuple[str, ...] = ()
    """The variables it reads."""
    sums: bool = False
    """Holds the result of a computation with plain numbers."""


@dataclass(frozen=True, slots=True)
class Simple:
    """One simple command: its words, where they stand in the source, and what it reads from `<`."""

    words: list[Word]
    spans: list[tuple[int, int]]
    redirects: list[tuple[int, int]]
    sources: list[Word]


def split(source: bytes) -> list[Simple] | None:
    """The simple commands in order; None when anything in the source is outside this grammar."""
    commands: list[Simple] = []
    current = Simple([], [], [], [])
    position, glued = 0, False
    while position < len(source):
        match = _TOKEN.match(source, position)
        if match is None:
            return None
        position, kind = match.end(), match.lastgroup
        if kind == "word" and match.group() == b"!" and not current.words:
            pass
        elif kind == "word":
            current.words.append(_word(match.group().decode()))
            current.spans.append(match.span())
        elif kind in ("redirect", "source"):
            if glued:
                return None  # digits before it may belong to it
            current.redirects.append(match.span())
            if match["source"] is not None:
                current.sources.append(_word(match["source"].decode()))
        elif kind == "end":
            commands.append(current)
            current = Simple([], [], [], [])
        elif kind == "comment" and glued:
            return None
        glued = kind in ("word", "redirect", "source")
    commands.append(current)
    return [command for command in commands if command.words or command.redirects]


def _word(raw: str) -> Word:
    if raw == "[" or _PLAIN.fullmatch(raw):
        return Word(raw)
    pieces: list[str] = []
    names: list[str] = []
    glob = unquoted_name = sums = False
    for part in _PART.finditer(raw):
        kind = part.lastgroup or ""
        value = part[kind]
        if kind == "double":
            names += [name for name in _NAME.findall(value) if name]
            value = _ESCAPE.sub(r"\1", value)
        elif kind == "name":
            names.append(value[1:])
            unquoted_name = unquoted_name or value != "$HOME"
        elif kind == "sum":
            sums = True
        elif kind == "plain" and any(char in value for char in "*?["):
            glob = True
        pieces.append(value)
    text = "".join(pieces)
    leads_with_name = raw.lstrip('"').startswith("$") and not _QUOTED_PATH.match(raw)
    wild = unquoted_name or leads_with_name or (glob and text[:1] in "*?[-")
    return Word(text, False, glob, wild, tuple(names), sums)


def is_sum(written: str) -> bool:
    """Whether an arithmetic expansion holds nothing but plain numbers and what adds them up."""
    return re.fullmatch(_SUM, written) is not None
