"""A shell command as a syntax tree."""

from __future__ import annotations

import threading

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

_parser = Parser(Language(tree_sitter_bash.language()))
_lock = threading.Lock()


def parse(source: bytes) -> Node:
    """The root of the tree; a tree that does not fit the grammar has `has_error` set."""
    with _lock:
        return _parser.parse(source).root_node


def text(node: Node) -> str:
    """The node as it is written."""
    return (node.text or b"").decode("utf-8", "replace")
