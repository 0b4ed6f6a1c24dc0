"""The rules of patch: what is replaced, what is only shown, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hermes_agent.tools import patch, paths
from hermes_agent.tools.context import ToolContext

SOURCE = "def one():\n    return 1\n\n\ndef two():\n    return 2\n"


@pytest.fixture
def context(tmp_path: Path) -> ToolContext:
    (tmp_path / "work").mkdir()
    return ToolContext(home=tmp_path / "hermes", cwd=tmp_path / "work")


def change(context: ToolContext, old: str, new: str, **args: Any) -> dict[str, Any]:
    given = {"path": "a.py", "old_string": old, "new_string": new, **args}
    return json.loads(patch.TOOL.handler(given, context=context))


def test_an_exact_piece_is_replaced_and_shown_as_a_diff(context: ToolContext) -> None:
    (context.cwd / "a.py").write_text(SOURCE)
    got = change(context, "return 2", "return 3")
    assert (context.cwd / "a.py").read_text() == SOURCE.replace("2", "3")
    assert got["success"] is True
    assert got["files_modified"] == [got["resolved_path"]] == [str(context.cwd / "a.py")]
    assert got["diff"] == ("--- a/a.py\n+++ b/a.py\n@@ -3,4 +3,4 @@\n \n \n def two():\n-    return 2\n+    return 3")


def test_every_diff_can_be_applied_by_patch_itself(context: ToolContext, tmp_path: Path) -> None:
    """The hunks' numbers are right, with several edits that lie near and far."""
    lines = [f"line {n}" for n in range(1, 101)]
    for n in (3, 5, 40, 100):
        lines[n - 1] = "mark"
    (context.cwd / "a.py").write_text("\n".join(lines) + "\n")
    got = change(context, "mark\n", "new 1\nnew 2\n", replace_all=True)
    assert got["replacements"] == 4
    replayed = apply_diff(lines, got["diff"].split("\n"))
    assert replayed == (context.cwd / "a.py").read_text().splitlines()


def apply_diff(lines: list[str], diff: list[str]) -> list[str]:
    """Apply a unified diff strictly: every context and removed line must be where its hunk says."""
    out: list[str] = []
    at = 0
    for line in diff[2:]:
        if line.startswith("@@"):
            old, new = line.split()[1:3]
            start = int(old[1:].split(",")[0]) - 1
            out += lines[at:start]
            at = start
            assert int(new[1:].split(",")[0]) == len(out) + 1
        elif line[0] == "+":
            out.append(line[1:])
        else:
            assert lines[at] == line[1:]
            at += 1
            if line[0] == " ":
                out.append(line[1:])
    return out + lines[at:]


def test_an_ambiguous_piece_is_refused_with_its_lines(context: ToolContext) -> None:
    (context.cwd / "a.py").write_text(SOURCE)
    got = change(context, "    return", "    yield", replace_all="false")
    assert "2 times (lines 2, 6)" in got["error"]
    assert (context.cwd / "a.py").read_text() == SOURCE
    assert change(context, "    return", "    yield", replace_all=True)["replacements"] == 2
    assert (context.cwd / "a.py").read_text() == SOURCE.replace("return", "yield")


def test_white_space_at_line_ends_is_forgiven(context: ToolContext) -> None:
    (context.cwd / "a.py").write_text("def one():  \n    return 1\t\nrest\n")
    assert change(context, "def one():\n    return 1\n", "def two():\n    return 2\n")["success"] is True
    assert (context.cwd / "a.py").read_text() == "def two():\n    return 2\nrest\n"


def test_another_indentation_is_forgiven_and_taken_on(context: ToolContext) -> None:
    (context.cwd / "a.py").write_text("class A:\n    def one(self):\n        return 1\n\n    x = 1\n")
    got = change(context, "def one(self):\n    return 1", "def one(self):\n    y = 2\n\n    return y")
    assert got["success"] is True
    assert (context.cwd / "a.py").read_text() == (
        "class A:\n    def one(self):\n        y = 2\n\n        return y\n\n    x = 1\n"
    )


def test_an_indentation_that_is_too_deep_is_forgiven_too(context: ToolContext) -> None:
    (context.cwd / "a.py").write_text("if a:\n    b()\nrest\n")
    assert change(context, "\tif a:\n\t    b()\n", "\tif c:\n\t    d()\n")["success"] is True
    assert (context.cwd / "a.py").read_text() == "if c:\n    d()\nrest\n"


def test_tabs_and_spaces_are_not_taken_for_each_other(context: ToolContext) -> None:
    (context.cwd / "a.py").write_text("\tone()\n\ttwo()\n")
    assert "near_miss" in change(context, "    one()\n    two()\n", "x\n")


def test_a_near_miss_may_be_no_more_than_similar(context: ToolContext) -> None:
    (context.cwd / "a.py").write_text(SOURCE)
    assert change(context, "def twoo():\n    return 7", "x")["near_miss"] == "5|def two():\n6|    return 2"


def test_a_long_diff_is_cut(context: ToolContext) -> None:
    (context.cwd / "a.py").write_text("x = 1\n" * 5_000)
    got = change(context, "x", "y", replace_all=True)
    assert got["replacements"] == 5_000
    assert got["diff"].endswith("[... the rest of the diff is left out ...]")
    assert len(got["diff"]) < 21_000


def test_an_uneven_indentation_is_not_guessed(context: ToolContext) -> None:
    text = "if a:\n        b()\n    c()\n"
    (context.cwd / "a.py").write_text(text)
    assert "near_miss" in change(context, "if a:\n    b()\n    c()\n", "x\n")
    assert (context.cwd / "a.py").read_text() == text


def test_a_forgiven_match_must_be_unique_too(context: ToolContext) -> None:
    text = "  a = 1\n  b = 2\n\n    a = 1\n    b = 2\n"
    (context.cwd / "a.py").write_text(text)
    assert "2 times" in change(context, "a = 1\nb = 2\n", "c\n")["error"]
    assert (context.cwd / "a.py").read_text() == text


def test_a_near_miss_is_shown_and_not_applied(context: ToolContext) -> None:
    (context.cwd / "a.py").write_text(SOURCE)
    got = change(context, "def two():\n    return 22", "x")
    assert got["near_miss"] == "5|def two():\n6|    return 2"
    assert (context.cwd / "a.py").read_text() == SOURCE
    assert "near_miss" not in change(context, "zzzzzzzz qqqqqqq", "x")


def test_crlf_bom_and_invalid_bytes_are_kept(context: ToolContext) -> None:
    target = context.cwd / "a.py"
    target.write_bytes(b"\xef\xbb\xbfone\r\ntwo \xff\r\nthree\r\nodd\nlast\r\n")
    assert change(context, "one\ntwo", "1\n2")["success"] is True
    assert change(context, "three", "3\n3b")["success"] is True
    assert target.read_bytes() == b"\xef\xbb\xbf1\r\n2 \xff\r\n3\r\n3b\r\nodd\nlast\r\n"


def test_a_change_that_changes_nothing_is_refused(context: ToolContext) -> None:
    (context.cwd / "a.py").write_text(SOURCE)
    assert "same" in change(context, "return 1", "return 1")["error"]
    assert "empty" in change(context, "", "x")["error"]
    assert "true or false" in change(context, "a", "b", replace_all="maybe")["error"]


def test_a_repeated_replacement_changes_nothing_and_says_so(context: ToolContext) -> None:
    (context.cwd / "a.py").write_text(SOURCE)
    args = ("def one():\n    return 1", "def first():\n    return 1")
    assert change(context, *args)["success"] is True
    once = (context.cwd / "a.py").read_text()
    again = change(context, *args)
    assert (again["success"], again["already_applied"], again["files_modified"]) == (True, True, [])
    assert (context.cwd / "a.py").read_text() == once


def test_a_repeated_insertion_is_not_made_twice(context: ToolContext) -> None:
    (context.cwd / "a.py").write_bytes(SOURCE.replace("\n", "\r\n").encode())
    args = ("def two():\n", "import something\ndef two():\n")
    assert change(context, *args)["success"] is True
    once = (context.cwd / "a.py").read_bytes()
    assert change(context, *args)["already_applied"] is True
    assert (context.cwd / "a.py").read_bytes() == once
    assert once.count(b"import something\r\n") == 1


@pytest.mark.parametrize(("old", "new"), [("gone", "}"), ("gone", ""), ("gone", "return 1")])
def test_a_text_that_says_little_does_not_count_as_applied(context: ToolContext, old: str, new: str) -> None:
    (context.cwd / "a.py").write_text(SOURCE + "}\n")
    assert "not found" in change(context, old, new)["error"]


def test_a_missing_binary_or_huge_file_is_not_patched(context: ToolContext, monkeypatch: pytest.MonkeyPatch) -> None:
    (context.cwd / "b.py").touch()
    got = change(context, "a", "b")
    assert (got["not_found"], got["similar_files"]) == (True, ["b.py"])
    (context.cwd / "a.py").write_bytes(b"a\0")
    assert "binary" in change(context, "a", "b")["error"]
    monkeypatch.setattr(patch, "_MAX_BYTES", 1)
    assert "too many" in change(context, "a", "b")["error"]


def test_a_file_that_changes_meanwhile_is_not_overwritten(
    context: ToolContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = context.cwd / "a.py"
    target.write_text(SOURCE)
    real = paths.open_regular

    def opened(path: Path) -> tuple[int, os.stat_result]:
        result = real(path)
        target.write_text(SOURCE + "# somebody else\n")
        return result

    monkeypatch.setattr(patch.paths, "open_regular", opened)
    assert "changed while" in change(context, "return 1", "return 9")["error"]
    assert target.read_text().endswith("# somebody else\n")
