"""The hard floor: what is never run, whoever approves it.

This is a net, not a boundary: it reads the syntax tree, resolves simple quoting,
variables, wrappers and shell strings, and stops what would plainly destroy the machine
or the person's files. A determined program can write its way around any such reading;
containment is a sandbox's work.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import shutil
import subprocess
from pathlib import Path

from tree_sitter import Node

from hermes_agent.tools.approval import syntax, verdicts
from hermes_agent.tools.approval.resolve import UNKNOWN, UNSET, Variables, resolve, variables

_DEPTH = 5
_TEXTS = 200
"""So many texts inside texts are read, no more."""
_TOO_DEEP = "it is nested too deeply to be read"
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "ash", "fish", "rbash", "su", "runuser"})
_RUN_TEXT = _SHELLS | {
    "eval", "source", ".", "xargs", "parallel", "python", "python2", "python3", "perl", "ruby", "node", "php", "lua",
    "awk", "gawk", "mawk", "trap", "ssh", "script", "watch", "make", "at", "batch", "osascript", "tclsh", "expect",
}  # fmt: skip
_FOUND_ANYWHERE = frozenset({"rm", "dd", "find", "chmod", "chown", "mkfs"})
_NAME = re.compile(r"[A-Za-z][\w.+-]*")
_TEXT_OPTION = re.compile(r"-[A-Za-z]*c[A-Za-z]*|--command(=.*)?")


def floor(command: str, cwd: Path | None = None) -> str | None:
    """Why the command is never run; None when the floor has nothing against it.

    `cwd` is where it would start; without it, relative paths count as harmless.
    """
    if "\0" in command:
        return "it holds a NUL character"
    try:
        source = command.encode()
    except UnicodeEncodeError:
        return "it holds characters that cannot be encoded"
    root = syntax.parse(source)
    if root.has_error and not _shell_accepts(source):
        return "its quoting or syntax does not end properly, so nobody can say what would run"
    try:
        return _Judge(str(cwd or ""), 0, [_TEXTS]).text(command, root)
    except RecursionError:
        return _TOO_DEEP


class _Judge:
    """Judges one text of commands, and the texts that it would hand to another shell."""

    def __init__(self, here: str, depth: int, budget: list[int]) -> None:
        self._here = here
        self._depth = depth
        self._budget = budget
        self._doubtful = False
        self._known: Variables = {}

    def text(self, command: str, root: Node | None = None) -> str | None:
        root = root or syntax.parse(command.encode("utf-8", "replace"))
        self._known = variables(root)
        why = self._walk(root)
        if why is None and (self._doubtful or root.has_error):
            why = self._patterns(command)
        return why

    def _walk(self, root: Node) -> str | None:
        nodes = [root]
        while nodes:
            node = nodes.pop()
            kind = node.type
            why = None
            if kind == "command":
                why = self._command(node)
            elif kind == "file_redirect":
                why = self._redirect(node)
            elif kind == "pipeline":
                why = self._pipeline(node)
            elif kind == "function_definition":
                why = _fork_bomb(node)
            if why:
                return why
            nodes += reversed(node.children)
        return None

    def _command(self, node: Node) -> str | None:
        words: list[str] = []
        for child in node.named_children:
            if child.type == "command_name" or "redirect" not in child.type:
                target = child.children[0] if child.type == "command_name" and child.children else child
                if child.type != "variable_assignment":
                    words += resolve(target, self._known)
        if not words:
            return None
        if UNKNOWN in words[0]:
            self._doubtful = True
        return self._words(words) or self._fed(node, words)

    def _words(self, words: list[str]) -> str | None:
        """Judge one command with its wrappers peeled off, and the text it hands to a shell."""
        name = verdicts.name_of(words[0])
        if name == "cd" and len(words) > 1:
            self._move(words[1])
        for at in _programs(words):
            inner = words[at:]
            own = verdicts.name_of(inner[0])
            why = verdicts.judge(inner, self._here)
            if why is None and own in _RUN_TEXT:
                self._doubtful = True
                text = _text_argument(own, inner)
                why = self._inner(text) if text else None
            if why:
                return why
        return None

    def _fed(self, node: Node, words: list[str]) -> str | None:
        """Judge the here-document or here-string that a shell is fed with."""
        if verdicts.name_of(words[0]) not in _RUN_TEXT:
            return None
        around = [*node.children, *(node.parent.children if node.parent else ())]
        for child in around:
            if child.type == "herestring_redirect":
                why = self._inner(" ".join(resolve(child.children[-1], self._known)))
            elif child.type == "heredoc_redirect":
                why = self._inner(
                    "\n".join(syntax.text(part) for part in child.children if part.type == "heredoc_body")
                )
            else:
                why = None
            if why:
                return why
        return None

    def _pipeline(self, node: Node) -> str | None:
        """Judge what `echo` or `base64 -d` would feed to a shell."""
        commands = [child for child in node.children if child.type == "command"]
        if len(commands) < 2:
            return None
        last = [word for part in commands[-1].named_children for word in resolve(part, self._known)]
        first = [word for part in commands[0].named_children for word in resolve(part, self._known)]
        if not last or not first or verdicts.name_of(last[0]) not in _RUN_TEXT | verdicts.WRAPPERS:
            return None
        if first[0] not in ("echo", "printf"):
            return None
        said = " ".join(first[1:])
        return self._inner(said) or self._inner(_decoded(said))

    def _redirect(self, node: Node) -> str | None:
        operator = next((child.type for child in node.children if child.type[:1] in "<>&"), "")
        if ">" not in operator:
            return None
        for child in node.named_children:
            if child.type != "file_descriptor":
                for target in resolve(child, self._known):
                    why = verdicts.raw_target(target)
                    if why:
                        return why
        return None

    def _move(self, target: str) -> None:
        if UNKNOWN in target or UNSET in target or target.startswith("-"):
            self._here = ""
        elif target.startswith(("/", "~")):
            self._here = target
        elif self._here:
            self._here = os.path.join(self._here, target)

    def _inner(self, text: str) -> str | None:
        if not text.strip():
            return None
        self._budget[0] -= 1
        if self._depth >= _DEPTH or self._budget[0] < 0:
            return _TOO_DEEP
        return _Judge(self._here, self._depth + 1, self._budget).text(text)

    def _patterns(self, command: str) -> str | None:
        """Judge the text once more with its quoting and grouping taken away, as a program might assemble it."""
        text = re.sub(r"\\\n", "", command)
        text = re.sub(r"\\x([0-9a-fA-F]{2})|\\0?([0-3]?[0-7]{2})", _character, text)
        text = re.sub(r"\$\{?IFS\}?", " ", text)
        text = re.sub(r"\$[@*0-9]|\$\{\w+[:-]*\}", "", text)
        text = re.sub(r"['\"]\s*,\s*['\"]|\[\s*(?=['\"])|(?<=['\"])\s*\]", " ", text)
        text = re.sub(r"\\(?=\w)|['\"]", "", text)
        text = re.sub(r"\{([^{}\s]*,[^{}\s]*)\}", lambda match: match[1].replace(",", " "), text)
        if re.search(r"(\S{1,64})\s*\(\)\s*\{\s*\1\s*\|\s*\1\s*&", text):
            return "it is a fork bomb"
        for piece in re.split(r"[;&|\n(){}`]|\bsystem\b|\s#", text):
            words = piece.split()
            starts = set(_programs(words)) if words else set[int]()
            for at, word in enumerate(words):
                if at in starts or verdicts.name_of(word) in _FOUND_ANYWHERE:
                    why = verdicts.judge(words[at:], self._here)
                    if why:
                        return why
        return None


def _programs(words: list[str]) -> list[int]:
    """Where a program's name may stand: at the front, and behind wrappers, their options and values."""
    places = [0]
    if verdicts.name_of(words[0]) not in verdicts.WRAPPERS:
        return places
    for at in range(1, len(words)):
        word = words[at]
        places.append(at)
        if verdicts.name_of(word) in verdicts.WRAPPERS:
            continue
        if verdicts.is_known(word) or (_NAME.fullmatch(word) and words[at - 1][:1] != "-"):
            break
    return places


def _text_argument(program: str, words: list[str]) -> str:
    """The shell text among a program's arguments, or ""."""
    args = words[1:]
    if program == "eval":
        return " ".join(args)
    if program in ("trap", "watch"):
        return " ".join(word for word in args if not word.startswith("-"))
    if program in _SHELLS or program == "script":
        for at, word in enumerate(args):
            if _TEXT_OPTION.fullmatch(word):
                return word.partition("=")[2] or " ".join(args[at + 1 : at + 2])
    return ""


def _decoded(text: str) -> str:
    """The texts inside base64 words, at most one a line."""
    found: list[str] = []
    for word in text.split():
        if len(word) >= 8 and len(word) % 4 == 0:
            try:
                found.append(base64.b64decode(word, validate=True).decode())
            except (binascii.Error, UnicodeDecodeError):
                continue
    return "\n".join(found)


def _character(match: re.Match[str]) -> str:
    code = int(match[1], 16) if match[1] else int(match[2], 8)
    return chr(code) if 32 <= code < 127 else match[0]


def _fork_bomb(definition: Node) -> str | None:
    """A function that starts itself in a pipe with itself, or in the background more than once."""
    name = definition.child_by_field_name("name")
    body = definition.child_by_field_name("body")
    if name is None or body is None:
        return None
    calls = syntax.text(name)
    nodes = [body]
    behind = 0
    while nodes:
        node = nodes.pop()
        own = [
            child for child in node.children if child.type == "command" and syntax.text(child).split()[:1] == [calls]
        ]
        if node.type == "pipeline" and len(own) > 1:
            return "it is a fork bomb"
        behind += sum(1 for child in own if child.next_sibling is not None and child.next_sibling.type == "&")
        nodes += node.children
    return "it is a fork bomb" if behind > 1 else None


def _shell_accepts(source: bytes) -> bool:
    """Does bash itself find the syntax sound? It is only parsed, never run."""
    try:
        done = subprocess.run(
            [shutil.which("bash") or "/bin/bash", "--norc", "-n", "-c", source],
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=5,
            env={},
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
