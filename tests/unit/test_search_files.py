"""The rules of search_files, on ripgrep where it is installed and on the stand-in everywhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hermes_agent.tools import grep_child, search_files
from hermes_agent.tools.context import ToolContext

ENGINES = ["stand-in", *(["rg"] if shutil.which("rg") else [])]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "stand-in":
        monkeypatch.setattr(search_files, "rg_path", lambda: None)
    return request.param


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToolContext:
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / "work").mkdir()
    return ToolContext(home=tmp_path / "hermes", cwd=tmp_path / "work")


def search(surroundings: ToolContext, pattern: str, **args: Any) -> dict[str, Any]:
    return json.loads(search_files.TOOL.handler({"pattern": pattern, **args}, context=surroundings))


def fill(context: ToolContext, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = context.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


TREE: dict[str, str | bytes] = {
    ".git/config": "needle",
    ".gitignore": "ignored\n*.log\n!keep.log\n/top.txt\nbuild/\n",
    ".hidden": "needle",
    "a.py": "one\nneedle 1\ntwo\n",
    "a/z.py": "needle 2\r\n",
    "b.txt": "needle 3\nneedle 4\n",
    "binary": b"needle\n\0",
    "build/out.py": "needle",
    "ignored": "needle",
    "keep.log": "needle 5",
    "latin": b"needle \xff 6\n",
    "sub/.gitignore": "*.py\n",
    "sub/c.py": "needle",
    "sub/top.txt": "needle 7",
    "top.txt": "needle",
    "x.log": "needle",
}


def test_matches_come_in_order_of_paths_with_their_lines(context: ToolContext, engine: str) -> None:
    """Hidden, binary and git-ignored files are left out; line ends are not shown."""
    fill(context, TREE)
    (context.cwd / "link.py").symlink_to("a.py")
    assert search(context, "needle") == {
        "total_count": 7,
        "matches": [
            {"path": "a/z.py", "line": 1, "content": "needle 2"},
            {"path": "a.py", "line": 2, "content": "needle 1"},
            {"path": "b.txt", "line": 1, "content": "needle 3"},
            {"path": "b.txt", "line": 2, "content": "needle 4"},
            {"path": "keep.log", "line": 1, "content": "needle 5"},
            {"path": "latin", "line": 1, "content": "needle \ufffd 6"},
            {"path": "sub/top.txt", "line": 1, "content": "needle 7"},
        ],
    }


def test_ignore_files_hold_only_inside_a_repository(context: ToolContext, engine: str) -> None:
    fill(context, {".gitignore": "*.py\n", "a.py": "needle", "repo/.git/x": "", "repo/b.py": "needle"})
    fill(context, {"repo/.gitignore": "c.py\n", "repo/c.py": "needle"})
    assert search(context, "needle", output_mode="files_only")["files"] == ["a.py", "repo/b.py"]


def test_the_folders_above_the_searched_one_count_up_to_the_repository(context: ToolContext, engine: str) -> None:
    fill(context, {".git/x": "", ".gitignore": "/sub/a.py\n*.log\n", "sub/a.py": "needle", "sub/b.py": "needle"})
    fill(context, {"sub/c.log": "needle"})
    assert search(context, "needle", path="sub", output_mode="files_only")["files"] == ["sub/b.py"]


def test_files_and_counts(context: ToolContext, engine: str) -> None:
    fill(context, TREE)
    assert search(context, "needle", file_glob="*.{py,txt}", output_mode="files_only") == {
        "total_count": 4,
        "files": ["a/z.py", "a.py", "b.txt", "sub/top.txt"],
    }
    assert search(context, "needle", file_glob="[ab].*", output_mode="count") == {
        "total_count": 2,
        "counts": [{"path": "a.py", "count": 1}, {"path": "b.txt", "count": 2}],
    }
    assert search(context, "needle", file_glob="a/**", output_mode="files_only")["files"] == ["a/z.py"]
    assert search(context, "needle", file_glob="x.log")["total_count"] == 0


@pytest.mark.parametrize(
    ("glob", "files"),
    [
        ("*.py", ["a/z.py", "a.py"]),
        ("a*", ["a.py"]),
        ("a/*", ["a/z.py"]),
        ("**/z.py", ["a/z.py"]),
        ("?.txt", ["b.txt"]),
        ("op", ["sub/top.txt"]),
        ("nothing", []),
    ],
)
def test_files_are_found_by_name(context: ToolContext, engine: str, glob: str, files: list[str]) -> None:
    fill(context, TREE)
    assert search(context, glob, target="files") == {"total_count": len(files), "files": files}


def test_a_window_says_how_many_there_are_and_where_to_go_on(context: ToolContext, engine: str) -> None:
    fill(context, {"a.txt": "".join(f"needle {n}\n" for n in range(120))})
    first = search(context, "needle")
    assert (first["total_count"], len(first["matches"]), first["next_offset"]) == (120, 50, 50)
    last = search(context, "needle", offset=100, limit=50)
    assert [match["line"] for match in last["matches"]] == list(range(101, 121))
    assert "next_offset" not in last


def test_lines_around_a_match_are_marked_and_shown_once(context: ToolContext, engine: str) -> None:
    lines = [f"line {n}" for n in range(1, 31)]
    for n in (5, 7, 20):
        lines[n - 1] = "needle"
    fill(context, {"a.txt": "\n".join(lines), "b.txt": "needle\nx\n"})
    got = search(context, "needle", context=2, limit=3)
    shown = [(match["line"], "is_context" in match) for match in got["matches"]]
    hits = {5, 7, 20}
    assert shown == [(n, n not in hits) for n in (3, 4, 5, 6, 7, 8, 9, 18, 19, 20, 21, 22)]
    assert (got["total_count"], got["next_offset"]) == (4, 3)
    second = search(context, "needle", context=2, offset=1, limit=1)
    assert [match["line"] for match in second["matches"]] == [6, 7, 8, 9]


def test_the_newest_file_comes_first_when_asked(context: ToolContext, engine: str) -> None:
    fill(context, {"a.txt": "needle\nneedle\n", "b.txt": "needle\n", "c.txt": "needle\n"})
    for age, name in enumerate(("b.txt", "a.txt", "c.txt")):
        os.utime(context.cwd / name, (1e9 - age, 1e9 - age))
    got = search(context, "needle", order="newest")
    assert [(match["path"], match["line"]) for match in got["matches"]] == [
        ("b.txt", 1), ("a.txt", 1), ("a.txt", 2), ("c.txt", 1),
    ]  # fmt: skip
    assert search(context, "*", target="files", order="newest", limit=1)["files"] == ["b.txt"]


def test_a_bad_pattern_is_named(context: ToolContext, engine: str) -> None:
    fill(context, {"a.txt": "x"})
    assert "(unclosed" in search(context, "(unclosed")["error"]
    assert "empty" in search(context, "")["error"]
    assert "line break" in search(context, "a\nb")["error"]
    assert "no such" in search(context, "x", path="no such")["error"]
    assert "path, newest" in search(context, "x", order="size")["error"]


def test_look_around_works_and_line_ends_are_seen(context: ToolContext, engine: str) -> None:
    fill(context, {"a.txt": "foobar\r\nfoobaz\r\n"})
    assert [match["line"] for match in search(context, "foo(?!bar)")["matches"]] == [2]
    assert [match["line"] for match in search(context, "bar$")["matches"]] == [1]


def test_a_pattern_or_name_that_begins_with_a_dash_is_not_an_option(context: ToolContext, engine: str) -> None:
    fill(context, {"-a.txt": "--files\n"})
    assert search(context, "--files", path="-a.txt")["matches"] == [{"path": "-a.txt", "line": 1, "content": "--files"}]


def test_utf8_and_utf16_marks_are_understood(context: ToolContext, engine: str) -> None:
    fill(context, {"a.txt": b"\xef\xbb\xbfneedle\n", "b.txt": "\ufeffneedle ü\r\n".encode("utf-16-le")})
    assert [match["content"] for match in search(context, "^needle")["matches"]] == ["needle", "needle ü"]


def test_a_very_long_line_is_shown_cut(context: ToolContext, engine: str) -> None:
    fill(context, {"a.txt": "needle" + "x" * 5_000_000})
    (match,) = search(context, "needle")["matches"]
    assert match["content"] == "needle" + "x" * 494 + " [...]"


def test_one_file_is_searched_even_if_it_is_hidden_or_ignored(context: ToolContext, engine: str) -> None:
    fill(context, TREE)
    assert search(context, "needle", path=".hidden")["total_count"] == 1
    assert search(context, "needle", path="x.log", file_glob="*.py")["total_count"] == 1


def test_a_search_stops_counting_at_a_bound(context: ToolContext, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_files, "_MAX_COUNTED", 100)
    fill(context, {"a.txt": "needle\n" * 1_000_000})
    for order in ("path", "newest"):
        got = search(context, "needle", limit=10, order=order)
        assert (got["total_count"], len(got["matches"]), got["truncated"]) == (100, 10, True)
        assert "100 hits" in got["note"]


def test_files_that_may_not_be_read_are_never_among_the_results(context: ToolContext, engine: str) -> None:
    fill(context, {"../user/.ssh/id_rsa": "needle", "../hermes/.env": "needle", "../user/notes": "needle"})
    fill(context, {"../user/.aws/credentials": "needle"})
    for secret in ("~/.ssh", "~/.ssh/id_rsa", "~/.aws", str(context.home / ".env"), "/proc/self/environ"):
        assert "error" in search(context, "needle", path=secret), secret
    assert [Path(name).name for name in search(context, "needle", path="..", output_mode="files_only")["files"]] == [
        "notes"
    ]
    environ = search(context, ".", path="/proc/self", output_mode="files_only")
    assert not [name for name in environ.get("files", []) if name.endswith("environ")]


def test_every_file_that_is_found_is_checked(
    context: ToolContext, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(context, {"a.txt": "needle", "b.txt": "needle", "c.txt": "needle"})
    monkeypatch.setattr(
        search_files.paths, "refuse_read", lambda path, _context: "no" if path.name == "b.txt" else None
    )
    for args in ({}, {"output_mode": "files_only"}, {"output_mode": "count"}):
        assert "b.txt" not in json.dumps(search(context, "needle", **args))
    assert search(context, "*.txt", target="files")["files"] == ["a.txt", "c.txt"]


def test_a_pattern_that_backtracks_for_ever_is_stopped(context: ToolContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The searching program is another process: the agent goes on and the program is killed."""
    monkeypatch.setattr(search_files, "rg_path", lambda: None)
    monkeypatch.setattr(search_files, "_TIMEOUT", 0.5)
    fill(context, {"a.txt": "needle\n", "b.txt": "a" * 60})
    got = search(context, "needle|^(a+)+b")
    assert (got["total_count"], got["truncated"]) == (1, True)
    assert "stopped after" in got["note"]


def test_a_search_whose_agent_was_killed_ends_by_itself(tmp_path: Path) -> None:
    """Nobody is left to stop it, so it stops itself."""
    (tmp_path / "a.txt").write_text("a" * 60)
    job = grep_child.Job("content", "^(a+)+b", str(tmp_path), lifetime=1)
    child = subprocess.run(
        [sys.executable, "-I", "-S", grep_child.__file__, job.argument()], timeout=30, check=False, capture_output=True
    )
    assert child.returncode == -signal.SIGALRM


def test_a_stop_of_the_turn_ends_the_search(
    context: ToolContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the searching program does: this one hangs."""
    started = tmp_path / "started"
    os.mkfifo(started)
    program = tmp_path / "rg"
    program.write_text(f"#!/bin/sh\necho > {started}\nexec /bin/sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setattr(search_files, "rg_path", lambda: str(program))

    def cancel_when_started() -> None:
        started.read_bytes()
        context.cancellation.cancel("enough")

    canceller = threading.Thread(target=cancel_when_started)
    canceller.start()
    before = time.monotonic()
    assert "enough" in search(context, "x")["error"]
    assert time.monotonic() - before < search_files._TIMEOUT / 2
    canceller.join()


def test_a_searching_program_that_fails_is_replaced_by_the_stand_in(
    context: ToolContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(context, {"a.txt": "needle"})
    program = tmp_path / "rg"
    program.write_text("#!/bin/sh\necho broken >&2\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr(search_files, "rg_path", lambda: str(program))
    assert search(context, "needle")["total_count"] == 1


def test_a_stand_in_that_dies_is_an_error_and_not_an_empty_result(
    context: ToolContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(context, {"a.txt": "needle"})
    monkeypatch.setattr(search_files, "rg_path", lambda: None)
    monkeypatch.setattr(search_files.sys, "executable", "/bin/false")
    monkeypatch.setattr(grep_child, "__file__", "/nonexistent")
    # `false` answers 1, which the stand-in never does.
    assert "error" in search(context, "needle")


def test_a_file_name_that_is_not_utf8_is_shown_readably(context: ToolContext, engine: str) -> None:
    with open(os.fsencode(context.cwd) + b"/\xff.txt", "wb") as file:
        file.write(b"needle")
    assert search(context, "needle")["matches"][0]["path"] == "\ufffd.txt"


def test_the_stand_in_prints_what_ripgrep_prints(
    context: ToolContext, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    fill(context, TREE)
    fill(context, {"wide": b"\xff\xfen\x00", "late": b"needle\n" * 2000 + b"\0needle\n"})
    root = os.fsencode(context.cwd) + b"/"

    def printed(mode: str, pattern: str, glob: str = "", around: int = 0, path: str = "") -> list[bytes]:
        job = grep_child.Job(mode, pattern, f"{context.cwd}{path}", glob, around)
        assert grep_child.main(job.argument()) == 0
        return capfdbinary.readouterr().out.replace(root, b"").splitlines()

    assert printed("content", "needle [12]", around=1) == [
        b"a/z.py\x001:needle 2",
        b"a.py\x001-one",
        b"a.py\x002:needle 1",
        b"a.py\x003-two",
    ]
    assert printed("count", "needle", "b*") == [b"b.txt\x002"]
    assert printed("count", "needle", "late") == [b"late\x002000"]
    assert printed("files_only", "^n$") == [b"wide\0"]
    assert printed("list", "", "*.py") == [b"a/z.py\0a.py\0"]
    assert printed("count", "needle", path="/.hidden") == [b".hidden\x001"]
    assert printed("count", "needle", path="/no such") == []
    assert grep_child.main(grep_child.Job("count", "(", str(context.cwd)).argument()) == 2
    assert b"bad pattern" in capfdbinary.readouterr().err


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [
        ("*.py", "a/b.py", "b.pyc"),
        ("/*.py", "b.py", "b.pyc"),
        ("a/*.py", "a/b.py", "a/c/b.py"),
        ("a/**/b", "a/x/y/b", "a/bb"),
        ("a/**/b", "a/b", "b"),
        ("**/b", "b", "ab"),
        ("[!a]*", "b", "a"),
        ("[a-c]x", "bx", "dx"),
        ("[[]", "[", "a"),
        ("[", "[", "a"),
        ("{a,b}.{py,txt}", "b.txt", "c.py"),
        ("}{", "}{", "x"),
        ("a,b", "a,b", "a"),
        (r"\*", "*", "a"),
        ("a?c", "abc", "a/c"),
    ],
)
def test_what_a_glob_matches(glob: str, yes: str, no: str) -> None:
    matches = grep_child.glob_matcher(glob)
    assert matches(yes)
    assert not matches(no)


def test_a_bad_glob_is_named(context: ToolContext, engine: str) -> None:
    assert "[z-a]" in search(context, "x", file_glob="[z-a]")["error"]


def test_the_rules_of_ignore_files(context: ToolContext, engine: str) -> None:
    lines = ["# comment", "", "a b ", r"\#x", r"\!y", "deep/**", "/one/two", "name/", "[z-a]", "*.tmp", "!keep.tmp\r"]
    files = ["a b", "#x", "!y", "deep/f", "one/two", "one/one/two", "name", "sub/name/f", "x.tmp", "keep.tmp", "f"]
    fill(context, {".git/x": "", ".gitignore": "\n".join(lines), **dict.fromkeys(files, "needle")})
    assert search(context, "needle", output_mode="files_only")["files"] == ["f", "keep.tmp", "name", "one/one/two"]


def test_the_stand_in_imports_nothing_of_hermes() -> None:
    """It starts as a bare interpreter, without site-packages."""
    job = grep_child.Job("list", "", "/nonexistent")
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-X", "importtime", grep_child.__file__, job.argument()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "hermes" not in result.stderr
    assert "subprocess" not in result.stderr


def test_the_searched_place_is_declared() -> None:
    assert search_files.TOOL.reads is not None
    assert list(search_files.TOOL.reads({})) == ["."]
    assert list(search_files.TOOL.reads({"path": "a"})) == ["a"]
