"""What the words of a command come to, as far as its text tells: quotes, escapes, simple variables, `echo`.

For the hard floor only: a guess in favour of finding something, never a proof.
"""

from __future__ import annotations

import re
from itertools import product

from tree_sitter import Node

from hermes_agent.tools.approval import syntax

UNKNOWN = "\x00"
"""Stands for a part that only the run can tell."""
UNSET = "\x01"
"""Stands for a variable that nothing in the command sets."""

Variables = dict[str, str]

_INHERITED = frozenset({"PWD", "OLDPWD", "USER", "LOGNAME", "PATH", "SHELL", "LANG", "TERM", "TMPDIR", "TZ", "UID"})
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "E": "\x1b"}
_ANSI = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|([0-7]{1,3})|(.))", re.DOTALL)
_WHOLE = frozenset({"string", "raw_string", "ansi_c_string", "word", "translated_string"})
"""What stays one word, blanks and all."""
_KEPT = str.maketrans(" \t\n", "\x02\x03\x04")
_FREED = str.maketrans("\x02\x03\x04", " \t\n")
_LONGEST = 1_000
"""Longest value of a variable that is kept: a few assignments could double it for ever."""
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")


def variables(root: Node) -> Variables:
    """The texts that assignments and loops anywhere in the tree give to variables."""
    known: Variables = {"HOME": "~", "IFS": " "}
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if node.type == "variable_assignment":
            name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
            if name is not None:
                known[syntax.text(name)] = " ".join(resolve(value, known))[:_LONGEST] if value is not None else ""
        elif node.type == "for_statement":
            name = node.child_by_field_name("variable")
            values = [part for part in node.named_children if part.type not in ("variable_name", "do_group")]
            if name is not None:
                known[syntax.text(name)] = " ".join(word for part in values for word in resolve(part, known))[:_LONGEST]
        nodes += reversed(node.children)
    return known


def resolve(node: Node, known: Variables) -> list[str]:
    """The words this node becomes."""
    value = _value(node, known)
    words = [value] if node.type in _WHOLE or not value.strip() else value.split()
    words = [word.translate(_FREED) for word in words]
    if node.type in ("word", "concatenation", "command_name") and "{" in value:
        words = [made for word in words for made in _braces(word)]
    return words


def _value(node: Node, known: Variables) -> str:
    kind, written = node.type, syntax.text(node)
    if kind == "raw_string":
        return written[1:-1]
    if kind == "ansi_c_string":
        return _ANSI.sub(_ansi, written[2:-1])
    if kind in ("string", "translated_string"):
        return "".join(_value(child, known) for child in node.children if child.type not in ('"', "$"))
    if kind == "string_content":
        return re.sub(r'\\([$`"\\\n])', r"\1", written)
    if kind == "simple_expansion":
        return _variable(written[1:], known)
    if kind == "expansion":
        return _expansion(written[2:-1], known)
    if kind == "command_substitution":
        return _echoed(node, known)
    if kind in ("process_substitution", "arithmetic_expansion"):
        return UNKNOWN
    if kind in ("concatenation", "command_name") and node.child_count:
        return "".join(
            _value(child, known).translate(_KEPT) if child.type in _WHOLE else _value(child, known)
            for child in node.children
        )
    return re.sub(r"\\(.)", r"\1", written.replace("\\\n", ""), flags=re.DOTALL)


def _variable(name: str, known: Variables) -> str:
    if name in known:
        return known[name]
    if name in _INHERITED or name in ("?", "$", "!", "#", "-", "0", "_"):
        return UNKNOWN
    return UNSET


def _expansion(inner: str, known: Variables) -> str:
    match = re.fullmatch(r"(\w+|[@*])(?:(:?[-=])(.*)|:(\d+)(?::(\d+))?|(,,|\^\^))?", inner, re.DOTALL)
    if match is None:
        return UNKNOWN
    name, default, text, start, length, case = match.groups()
    value = _variable(name, known) if name not in "@*" else UNSET
    if default:
        return text.strip("'\"") if value in (UNSET, "") else value
    if start:
        return value[int(start) :][: int(length) if length else None]
    if case:
        return value.lower() if case == ",," else value.upper()
    return value


def _echoed(node: Node, known: Variables) -> str:
    """What `$(echo …)` or `$(printf …)` says; unknown for every other command."""
    commands = node.named_children
    if len(commands) != 1 or commands[0].type != "command":
        return UNKNOWN
    words = [word for part in commands[0].named_children for word in resolve(part, known)]
    if not words or words[0] not in ("echo", "printf"):
        return UNKNOWN
    return _ANSI.sub(_ansi, " ".join(word for word in words[1:] if word not in ("-n", "-e", "%s", "%b", "--")))


def _ansi(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    number = int(code, 16) if code else int(match[4], 8) if match[4] else -1
    if number >= 0:
        return chr(number) if 0 < number < 0x110000 else UNKNOWN
    return _ESCAPES.get(match[5], match[5])


def _braces(word: str) -> list[str]:
    """The words of `{a,b}` groups; at most a hundred."""
    parts = _BRACES.split(word)
    if len(parts) == 1:
        return [word]
    choices = [part.split(",") if at % 2 else [part] for at, part in enumerate(parts)]
    return ["".join(made) for _, made in zip(range(100), product(*choices), strict=False)]
