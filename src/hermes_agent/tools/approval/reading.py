"""Prove from a shell command's syntax tree that it only reads; anything not proven counts as not read-only.

The proof is an allow-list: known node types, known programs (`programs`), known
redirections. A second, narrower reading (`words`) must find the same words at the same
places. It says nothing about secrets: the words are handed on for the gate to judge.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tree_sitter import Node

from hermes_agent.tools.approval import programs, syntax, words
from hermes_agent.tools.approval.words import Simple, Word


@dataclass(frozen=True, slots=True)
class Reading:
    """What could be proven about a command."""

    read_only: bool
    why: str = ""
    """The first thing that could not be proven, in plain words."""
    words: tuple[str, ...] = ()
    """Every argument and input file, quotes resolved; empty when the command was not understood."""
    reads: tuple[str, ...] = ()
    """Those of the words that may name a file whose content the command shows."""
    trees: tuple[str, ...] = ()
    """Folders whose files, at any depth, it may show."""
    folders: tuple[str, ...] = ("",)
    """The folders it may be in when it reads, relative to where it starts."""
    repositories: tuple[str, ...] = ()
    """The folders, relative to `folders`, from which it runs git."""


_LONGEST = 20_000
_CONTAINERS = frozenset({"program", "list", "pipeline", "redirected_statement", "negated_command"})
_JOINTS = frozenset({"&&", "||", "|", ";", "\n", "!"})
_ARGUMENTS = frozenset({"word", "number", "string", "raw_string", "concatenation", "simple_expansion"})
_PARTS = _ARGUMENTS | {"string_content", "variable_name", "special_variable_name", '"', "$"}
_VARIABLES = frozenset(
    {"HOME", "PWD", "OLDPWD", "USER", "LOGNAME", "PATH", "SHELL", "LANG", "TERM", "TMPDIR", "TZ", "?"}
)
_DEVICES = re.compile(r"/dev/(?!(?:null|zero|u?random|stdin|fd/\d+)$)")
_UNKNOWN = {
    "command_substitution": "it runs a command inside `$(…)` or backticks",
    "process_substitution": "it runs a command inside `<(…)`",
    "expansion": "it changes text inside `${…}`",
    "arithmetic_expansion": "it computes inside `$((…))`",
    "ansi_c_string": "it writes text with `$'…'`",
    "translated_string": 'it writes text with `$"…"`',
    "brace_expression": "it expands braces",
    "variable_assignment": "it sets a variable",
    "variable_assignments": "it sets a variable",
    "declaration_command": "it sets a variable",
    "unset_command": "it sets a variable",
    "function_definition": "it defines a function",
    "heredoc_redirect": "it feeds text to a program with `<<`",
    "herestring_redirect": "it feeds text to a program with `<<<`",
    "subshell": "it uses a subshell",
    "compound_statement": "it groups commands in braces",
    "for_statement": "it uses a loop",
    "c_style_for_statement": "it uses a loop",
    "while_statement": "it uses a loop",
    "if_statement": "it uses a condition",
    "case_statement": "it uses a condition",
    "&": "it runs something in the background",
    "|&": "it uses `|&`",
}
_UNCLEAR = "it could not be read with certainty"


def read_command(command: str, cwd: Path | None = None) -> Reading:
    """Read a command that would start in `cwd`; without a folder, what depends on it is left out."""
    reading = _read(command)
    if cwd is None or not reading.repositories:
        return reading
    for folder in reading.folders:
        for repository in reading.repositories:
            why = _configured_programs(locate(cwd, folder, repository))
            if why:
                return Reading(False, why, reading.words, reading.reads, reading.trees, reading.folders)
    return reading


def locate(cwd: Path, *steps: str) -> Path:
    """The path one comes to from `cwd`; `~`, `$HOME` and `$PWD` are resolved, links are not."""
    path = str(cwd)
    for step in steps:
        named = re.sub(r"^\$(\{HOME\}|HOME\b)", "~", step)
        named = re.sub(r"^\$(\{PWD\}|PWD\b)", lambda _match, here=path: here, named)
        path = os.path.join(path, os.path.expanduser(named))
    return Path(os.path.normpath(path))


@lru_cache(maxsize=256)
def _read(command: str) -> Reading:
    hidden = _unreadable(command)
    if hidden:
        return Reading(False, hidden)
    source = command.encode()
    root = syntax.parse(source)
    if root.has_error:
        return Reading(False, "its syntax could not be read")
    spans: list[list[tuple[int, int]]] = []
    redirects: list[tuple[int, int]] = []
    try:
        why = _walk(root, spans, redirects)
    except RecursionError:
        return Reading(False, "it is nested too deeply to be read")
    if why:
        return Reading(False, why, words=tuple(_loose_words(root)))
    commands = words.split(source)
    if commands is None or not spans:
        return Reading(False, _likely_reason(root) if spans else "there is nothing to run", tuple(_loose_words(root)))
    same_words = [simple.spans for simple in commands if simple.words] == spans
    if not same_words or [span for simple in commands for span in simple.redirects] != redirects:
        return Reading(False, _likely_reason(root), tuple(_loose_words(root)))
    return _judge(commands)


def _likely_reason(root: Node) -> str:
    """What to tell about a command on which the two readings differ."""
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if node.type == "command":
            program, *args = [Word(text) for text in _loose_words(node)] or [Word("")]
            why = programs.check(program.text, args)
            if why:
                return why
        nodes += reversed(node.children)
    return _UNCLEAR


def _unreadable(command: str) -> str:
    if len(command) > _LONGEST:
        return "it is too long to be read"
    if not command.isprintable() or not command.isascii():
        for char in command:
            if char not in "\n\t" and (char < " " or char == "\x7f" or (char > "~" and not _is_visible(char))):
                return f"it holds the hidden character U+{ord(char):04X}"
    return ""


def _is_visible(char: str) -> bool:
    return unicodedata.category(char)[0] not in "CZ"


def _walk(node: Node, spans: list[list[tuple[int, int]]], redirects: list[tuple[int, int]]) -> str:
    """Collect the words of each simple command in source order; why the tree is not allowed, or ""."""
    kind = node.type
    if kind == "command":
        return _walk_command(node, spans, redirects)
    if kind == "test_command":
        spans.append([])
        return _walk_test(node, spans[-1])
    if kind == "file_redirect":
        redirects.append((node.start_byte, node.end_byte))
        return _redirect(node)
    if kind in _CONTAINERS:
        for child in node.children:
            why = _walk(child, spans, redirects)
            if why:
                return why
        return ""
    if kind in _JOINTS or kind == "comment":
        return ""
    return _UNKNOWN.get(kind, _UNCLEAR)


def _walk_command(node: Node, spans: list[list[tuple[int, int]]], redirects: list[tuple[int, int]]) -> str:
    own: list[tuple[int, int]] = []
    spans.append(own)
    for child in node.children:
        kind = child.type
        if kind == "file_redirect":
            redirects.append((child.start_byte, child.end_byte))
            why = _redirect(child)
        elif kind == "command_name":
            own.append((child.start_byte, child.end_byte))
            why = "" if child.children[0].type == "word" else "the program's name is not written plainly"
        elif kind == "arithmetic_expansion" and words.is_sum(syntax.text(child)):
            own.append((child.start_byte, child.end_byte))
            why = ""
        elif kind in _ARGUMENTS:
            own.append((child.start_byte, child.end_byte))
            why = _parts(child) if child.child_count else ""
        else:
            why = _UNKNOWN.get(kind, _UNCLEAR)
        if why:
            return why
    return ""


def _walk_test(node: Node, own: list[tuple[int, int]]) -> str:
    for child in node.children:
        kind = child.type
        if kind in ("unary_expression", "binary_expression", "parenthesized_expression"):
            why = _walk_test(child, own)
        elif kind in ("[[", "((") or kind in _UNKNOWN:
            why = _UNKNOWN.get(kind, "it uses `[[ ]]`")
        else:
            own.append((child.start_byte, child.end_byte))
            why = _parts(child) if kind in ("string", "concatenation", "simple_expansion") else ""
        if why:
            return why
    return ""


def _parts(node: Node) -> str:
    for child in node.children:
        if child.type == "arithmetic_expansion" and words.is_sum(syntax.text(child)):
            continue
        if child.type not in _PARTS:
            return _UNKNOWN.get(child.type, _UNCLEAR)
        if child.child_count:
            why = _parts(child)
            if why:
                return why
    return ""


_QUIET = re.compile(r"[012]?>&[12]|[012&]?>>?[ \t]*/dev/null|0?<[ \t]*[^<>&(].*", re.DOTALL)


def _redirect(node: Node) -> str:
    written = syntax.text(node)
    if _QUIET.fullmatch(written):
        return ""
    return f"`{written}` writes to a file" if ">" in written else f"`{written}` is not a plain input"


def _judge(commands: list[Simple]) -> Reading:
    read_words: list[str] = []
    reads: list[str] = []
    trees: list[str] = []
    repositories: list[str] = []
    folders = [""]
    why = ""
    for simple in commands:
        why = why or _judge_simple(simple)
        args = simple.words[1:]
        program = simple.words[0].text if simple.words else ""
        read_words += [word.text for word in (*args, *simple.sources)]
        shown = [] if program in programs.NAMES_ONLY else _shown(program, args)
        reads += [word.text for word in (*shown, *simple.sources)]
        if _is_recursive(program, args):
            trees += [word.text for word in shown if word.text[:1] != "-"] or ["."]
        if program == "git":
            place = programs.git_place(args)
            repositories.append(place[0] if place else "")
        if program == "cd":
            target = args[0].text if args else "~"
            # Whether it runs at all is not known: it may be behind `||` or in a pipe.
            folders += [os.path.join(folder, target) for folder in folders]
            if len(folders) > 16:
                why = why or "it changes the folder too often"
                folders = folders[:16]
    unique = tuple(dict.fromkeys(folders))
    return Reading(not why, why, tuple(read_words), tuple(reads), tuple(trees), unique, tuple(repositories))


def _judge_simple(simple: Simple) -> str:
    if not simple.words:
        return "a redirection without a program"
    for word in (*simple.words, *simple.sources):
        for name in word.names:
            if name not in _VARIABLES:
                return f"the value of `${name}` is not known"
        path = os.path.normpath(word.text)
        if _DEVICES.match(path if path[:2] != "//" else path[1:]):
            return f"`{word.text}` is a device"
    for source in simple.sources:
        if source.glob or source.wild:
            return f"`< {source.text}` is not one known file"
    program = simple.words[0]
    if program.text != "echo" and any(word.sums for word in (*simple.words, *simple.sources)):
        return _UNKNOWN["arithmetic_expansion"]  # a number may name a file, or be an option
    if not program.plain:
        return "the program's name is not written plainly"
    return programs.check(program.text, simple.words[1:])


def _shown(program: str, args: list[Word]) -> list[Word]:
    """The arguments that may be files; what is certainly the pattern of a search is left out."""
    if program not in ("grep", "egrep", "fgrep", "rg"):
        return args
    options = [word.text for word in args if word.text[:1] == "-"]
    if any(re.match(r"--reg|--file(=|$)|-[^-]*[ef]", option) for option in options):
        return args
    for at, word in enumerate(args):
        if word.text[:1] != "-" and not word.glob:
            return args[:at] + args[at + 1 :]
    return args


def _is_recursive(program: str, args: list[Word]) -> bool:
    options = [word.text for word in args if word.text[:1] == "-"]
    if program in ("grep", "egrep", "fgrep"):
        return any(re.match(r"-[^-]*[rRd]|--(r|deref|dir)", option) for option in options)
    if program == "rg":
        return any(re.match(r"-[^-]*[u.]|--(hidden|unrestricted|no-ignore)", option) for option in options)
    if program == "diff":
        return any(re.match(r"-[^-]*r|--rec", option) for option in options)
    return False


def _loose_words(root: Node) -> Iterable[str]:
    """The words of a tree that was not understood, as they are written."""
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if node.type in ("word", "raw_string", "string", "concatenation"):
            yield syntax.text(node).strip("'\"")
        else:
            nodes += reversed(node.children)


_GIT_RUNS = re.compile(
    r"(?im)\[\s*(?:filter|include|includeif|submodule)\b"
    r"|(?:^|\])\s*(?:textconv|command|clean|smudge|process|program|external|promisor|partialclone|attributesfile)\b"
)


def _configured_programs(folder: Path) -> str:
    """Why git may run programs for the repository around this folder; "" when its configuration names none."""
    for place in (folder, *folder.parents):
        marker = place / ".git"
        if not os.path.lexists(marker):
            continue
        try:
            own = _linked(marker.read_text("utf-8"), place) if marker.is_file() else marker
            common = own / "commondir"
            shared = own / common.read_text("utf-8").strip() if common.is_file() else own
            if (shared / "modules").exists():
                return "the repository has submodules, whose configuration may run programs"
            more = own / "config.worktree"
            settings = (shared / "config").read_text("utf-8") + (more.read_text("utf-8") if more.exists() else "")
            if _GIT_RUNS.search(settings):
                return "the repository's own configuration makes git run programs"
        except (OSError, ValueError):
            return "the repository's configuration could not be read"
        return ""
    return ""


def _linked(marker: str, place: Path) -> Path:
    if not marker.startswith("gitdir:"):
        raise ValueError(marker)
    return place / marker.removeprefix("gitdir:").strip()
