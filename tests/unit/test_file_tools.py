"""The rules of read_file, write_file and patch, and of what lies under them: paths and atomic writing."""

from __future__ import annotations

import json
import os
import socket
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from hermes_agent.errors import ToolError
from hermes_agent.tools import atomic_write, patch, paths, read_file, write_file
from hermes_agent.tools.context import ToolContext, ToolLimits
from hermes_agent.tools.registry import Effect, ToolEntry


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToolContext:
    """A working folder, a HERMES_HOME and a user's home, side by side."""
    for name in ("work", "hermes", "user"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    return ToolContext(home=tmp_path / "hermes", cwd=tmp_path / "work")


def call(tool: ToolEntry, context: ToolContext, **args: Any) -> dict[str, Any]:
    return json.loads(tool.handler(args, context=context))


def read(context: ToolContext, path: str, **args: Any) -> dict[str, Any]:
    return call(read_file.TOOL, context, path=path, **args)


# --- read_file ---------------------------------------------------------------------------


def test_lines_are_numbered_and_line_ends_not_shown(context: ToolContext) -> None:
    (context.cwd / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\nfo\xffur")
    got = read(context, "a.txt")
    assert got["content"] == "1|one\n2|two\n3|\n4|fo\ufffdur"
    assert (got["total_lines"], got["file_size"], got["truncated"]) == (4, 20, False)
    assert "next_offset" not in got


def test_an_empty_file_has_no_lines(context: ToolContext) -> None:
    (context.cwd / "a.txt").touch()
    assert read(context, "a.txt") == {"content": "", "truncated": False, "total_lines": 0, "file_size": 0}


def test_pages_follow_each_other_without_gap_or_overlap(context: ToolContext) -> None:
    lines = [f"line {n}" for n in range(1, 5001)]
    (context.cwd / "a.txt").write_text("\n".join(lines) + "\n")
    seen: list[str] = []
    offset: int | None = 1
    while offset is not None:
        page = read(context, "a.txt", offset=offset, limit=777)
        seen += [line.split("|", 1)[1] for line in page["content"].split("\n")]
        assert page["total_lines"] == 5000
        assert page["truncated"] == ("next_offset" in page)
        offset = page.get("next_offset")
    assert seen == lines


def test_a_page_far_into_a_big_file_is_the_right_one(context: ToolContext) -> None:
    (context.cwd / "a.txt").write_text("".join(f"line {n}\n" for n in range(1, 200_001)))
    for offset in (1, 29_999, 100_000, 199_999):
        page = read(context, "a.txt", offset=offset, limit=2)
        assert page["content"] == f"{offset}|line {offset}\n{offset + 1}|line {offset + 1}"
        assert page["total_lines"] == 200_000


def test_a_page_ends_before_the_character_limit(context: ToolContext) -> None:
    context.limits = ToolLimits(read_max_chars=1000)
    (context.cwd / "a.txt").write_text(f"{'x' * 98}\n" * 50)
    page = read(context, "a.txt")
    assert len(page["content"]) <= 1000
    assert (page["truncated"], page["next_offset"], page["total_lines"]) == (True, 10, 50)


def test_an_offset_behind_the_end_names_the_number_of_lines(context: ToolContext) -> None:
    (context.cwd / "a.txt").write_text("one\ntwo\n")
    assert "2 lines" in read(context, "a.txt", offset=3)["error"]


@pytest.mark.parametrize("bad", [{"offset": 0}, {"offset": "x"}, {"limit": -1}, {"limit": True}, {"offset": 1.5}])
def test_a_wrong_argument_is_an_error_that_names_it(context: ToolContext, bad: dict[str, Any]) -> None:
    (context.cwd / "a.txt").write_text("one\n")
    assert next(iter(bad)) in read(context, "a.txt", **bad)["error"]


def test_a_number_sent_as_text_is_accepted(context: ToolContext) -> None:
    (context.cwd / "a.txt").write_text("one\ntwo\nthree\n")
    assert read(context, "a.txt", offset="2", limit=1.0)["content"] == "2|two"


def test_a_long_line_is_cut_and_can_be_read_on_inside(context: ToolContext) -> None:
    text = "".join(chr(0x4E00 + n % 1000) for n in range(250_000))
    (context.cwd / "a.txt").write_text(f"{text}\nend\n", encoding="utf-8")
    page = read(context, "a.txt")
    first, second = page["content"].split("\n")
    assert first.startswith(f"1|{text[:2000]} [cut: the line has 750000 bytes; go on with offset=1, column=2001]")
    assert second == "2|end"
    assert page["truncated"] is True
    got, column = text[:2000], 2001
    while column:
        page = read(context, "a.txt", offset=1, column=column)
        got += page["content"].removeprefix("1|")
        column = page.get("next_column")
    assert got == text
    assert page["next_offset"] == 2
    assert "250000 characters" in read(context, "a.txt", column=250_001)["error"]


def test_reading_on_inside_a_line_counts_characters_not_bytes(context: ToolContext) -> None:
    """Neither a byte order mark nor the carriage return is one of them."""
    (context.cwd / "a.txt").write_bytes(b"\xef\xbb\xbf\xc3\xbcbc\r\nend")
    assert read(context, "a.txt", column=2) == {
        "content": "1|bc",
        "truncated": False,
        "next_offset": 2,
        "total_lines": 2,
        "file_size": 12,
    }
    assert "next_offset" not in read(context, "a.txt", offset=2, column=3)


def test_a_line_too_long_to_measure_is_still_cut(context: ToolContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_file, "_COUNT_AHEAD", 1 << 20)
    (context.cwd / "a.txt").write_bytes(b"x" * (4 << 20))
    page = read(context, "a.txt")
    assert "over 1048576 bytes" in page["content"]
    assert (page["truncated"], page["total_lines"]) == (True, None)
    assert "too far" in read(context, "a.txt", column=3_000_000)["error"]


def test_a_five_megabyte_line_is_read_in_little_memory(context: ToolContext) -> None:
    (context.cwd / "a.txt").write_bytes(b"x" * 5_000_000)
    tracemalloc.start()
    try:
        page = read(context, "a.txt")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert page["total_lines"] == 1
    assert len(page["content"]) < 2200
    assert peak < 2_000_000


def test_a_five_gigabyte_file_is_read_in_little_memory(context: ToolContext) -> None:
    """Its lines are not counted to the end: that would take long."""
    big = context.cwd / "big.log"
    with big.open("wb") as file:
        file.write(b"line\n" * 10_000)
        file.truncate(5 << 30)
    tracemalloc.start()
    try:
        page = read(context, "big.log", offset=9000, limit=3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert page["content"] == "9000|line\n9001|line\n9002|line"
    assert (page["next_offset"], page["total_lines"], page["file_size"]) == (9003, None, 5 << 30)
    assert peak < 2_000_000


def test_a_binary_file_and_an_image_are_named_not_shown(context: ToolContext) -> None:
    (context.cwd / "a.bin").write_bytes(b"abc\0def")
    (context.cwd / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    binary, image = read(context, "a.bin"), read(context, "a.png")
    assert (binary["is_binary"], binary["is_image"], binary["content"]) == (True, False, "")
    assert (image["is_binary"], image["is_image"]) == (True, True)
    assert "binary" in binary["error"]


def test_a_missing_file_names_similar_ones(context: ToolContext) -> None:
    (context.cwd / "README.md").touch()
    got = read(context, "readme.txt")
    assert got["not_found"] is True
    assert got["similar_files"] == ["README.md"]
    assert "README" not in got["error"]
    assert "does not exist either" in read(context, "no/such")["error"]


def test_what_is_not_a_regular_file_is_refused_at_once(context: ToolContext) -> None:
    """A pipe that nobody writes to would otherwise hold the turn for ever."""
    os.mkfifo(context.cwd / "pipe")
    (context.cwd / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(context.cwd / "sock"))
        assert "pipe" in read(context, "pipe")["error"]
        assert "socket" in read(context, "sock")["error"]
    assert "directory" in read(context, "folder")["error"]
    assert "device" in read(context, "/dev/zero")["error"]


def test_a_file_that_turns_into_a_pipe_or_link_while_it_is_opened_is_refused(
    context: ToolContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    (context.cwd / "file").touch()
    regular = (context.cwd / "file").stat()
    os.mkfifo(context.cwd / "pipe")
    (context.cwd / "link").symlink_to("file")
    monkeypatch.setattr(Path, "stat", lambda _path, **_options: regular)
    with pytest.raises(ToolError, match="pipe"):
        paths.open_regular(context.cwd / "pipe")
    with pytest.raises(ToolError, match="symbolic link"):
        paths.open_regular(context.cwd / "link")


def test_a_stop_ends_the_reading_of_a_big_file(context: ToolContext) -> None:
    with (context.cwd / "a.txt").open("wb") as file:
        file.write(b"line\n" * 2000)
        file.truncate(1 << 30)
    context.cancellation.cancel("stopped by the user")
    assert "stopped by the user" in read(context, "a.txt")["error"]


def test_a_path_may_be_absolute_relative_or_begin_with_the_home(context: ToolContext, tmp_path: Path) -> None:
    (tmp_path / "user" / "a.txt").write_text("x")
    for name in ("~/a.txt", "../user/a.txt", str(tmp_path / "user" / "a.txt")):
        assert read(context, name)["content"] == "1|x"
    assert "empty" in read(context, " ")["error"]
    assert "NUL" in read(context, "a\0b")["error"]
    assert "missing" in call(read_file.TOOL, context)["error"]
    assert "string" in call(read_file.TOOL, context, path=3)["error"]


# --- what may not be touched ---------------------------------------------------------------


def test_keys_are_not_read_whatever_the_way_to_them(context: ToolContext, tmp_path: Path) -> None:
    user = tmp_path / "user"
    secrets = [user / ".ssh/id_ed25519", user / ".aws/credentials", user / ".netrc", context.home / ".env"]
    secrets.append(context.home / "profiles/p/.env")
    for secret in secrets:
        secret.parent.mkdir(parents=True, exist_ok=True)
        secret.write_text("CANARY")
    (context.cwd / "link").symlink_to(user / ".ssh")
    (context.cwd / "file").symlink_to(context.home / ".env")
    ways = [str(secret) for secret in secrets]
    ways += ["link/id_ed25519", "file", "../user/.ssh/id_ed25519", "~/.SSH/../.ssh/id_ed25519", "/proc/self/environ"]
    for way in ways:
        answer = read(context, way)
        assert "error" in answer, way
        assert "CANARY" not in json.dumps(answer)
    (user / ".ssh" / "id_ed25519.pub").write_text("public")
    assert read(context, "~/.ssh/id_ed25519.pub")["content"] == "1|public"


@pytest.mark.parametrize(
    "way",
    [
        "~/.ssh/authorized_keys", "~/.bashrc", "~/.config/fish/config.fish", "~/.aws/config", "~/.gitconfig",
        "HOME/.env", "HOME/config.yaml", "HOME/state.db", "HOME/state.db-wal", "HOME/profiles/p/config.yaml",
        "HOME/cache/spillover/x.txt", "/etc/hermes-test", "/boot/x", "/dev/shm/x", "/proc/self/oom_score_adj", "/sys/x",
        "repo/.git/hooks/pre-commit", "repo/.git/config", "link/x", "inside/../link/x",
    ],
)  # fmt: skip
@pytest.mark.parametrize("tool", [write_file.TOOL, patch.TOOL])
def test_protected_places_are_not_written_whatever_the_way_to_them(
    context: ToolContext, tmp_path: Path, tool: ToolEntry, way: str
) -> None:
    (tmp_path / "user" / ".ssh").mkdir()
    (context.cwd / "inside").mkdir()
    (context.cwd / "link").symlink_to(tmp_path / "user" / ".ssh")
    before = sorted(tmp_path.rglob("*"))
    way = way.replace("HOME", str(context.home))
    answer = call(tool, context, path=way, content="x", old_string="a", new_string="b")
    assert "file tools do not change it" in answer["error"] or "own files" in answer["error"]
    assert sorted(tmp_path.rglob("*")) == before


def test_ordinary_places_may_be_written(context: ToolContext, tmp_path: Path) -> None:
    for name in ("~/notes.txt", "config.yaml", ".env", ".github/hooks/x", str(context.home / "notes.md")):
        assert paths.refuse_write(paths.resolve(name, context), context) is None


# --- write_file ------------------------------------------------------------------------------


def test_writing_creates_folders_and_says_what_was_done(context: ToolContext) -> None:
    got = call(write_file.TOOL, context, path="a/b/c.txt", content="hé\n")
    target = context.cwd / "a/b/c.txt"
    assert target.read_bytes() == b"h\xc3\xa9\n"
    assert got == {
        "bytes_written": 4,
        "dirs_created": True,
        "verified": True,
        "resolved_path": str(target),
        "files_modified": [str(target)],
    }
    assert call(write_file.TOOL, context, path="a/b/c.txt", content="hé\n")["dirs_created"] is False
    assert os.listdir(target.parent) == ["c.txt"]


def test_an_existing_file_keeps_its_mode_and_its_link(context: ToolContext) -> None:
    script = context.cwd / "run.sh"
    script.write_text("old")
    script.chmod(0o750)
    (context.cwd / "link").symlink_to("run.sh")
    call(write_file.TOOL, context, path="link", content="new")
    assert script.read_text() == "new"
    assert script.stat().st_mode & 0o7777 == 0o750
    assert (context.cwd / "link").is_symlink()
    atomic_write.atomic_write(context.cwd / "link", b"newer")
    assert script.read_text() == "newer"
    assert (context.cwd / "link").is_symlink()


def test_a_new_file_gets_the_mode_of_the_umask(context: ToolContext) -> None:
    old = os.umask(0o027)
    try:
        call(write_file.TOOL, context, path="a.txt", content="x")
    finally:
        os.umask(old)
    assert (context.cwd / "a.txt").stat().st_mode & 0o777 == 0o640


def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    context: ToolContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    (context.cwd / "a.txt").write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_write.os, "fsync", full)
    assert "No space left" in call(write_file.TOOL, context, path="a.txt", content="new")["error"]
    assert (context.cwd / "a.txt").read_text() == "old"
    assert os.listdir(context.cwd) == ["a.txt"]


def test_content_is_durable_before_it_takes_the_name(context: ToolContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """File synced, then renamed, then the folder synced."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        steps.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(atomic_write.os, "fsync", note_sync)
    monkeypatch.setattr(atomic_write.os, "replace", note_replace)
    call(write_file.TOOL, context, path="a.txt", content="new")
    assert steps == ["file", "rename", "folder"]


def test_a_reader_never_sees_half_a_file(context: ToolContext) -> None:
    target = context.cwd / "a.txt"
    versions = ["a" * 200_000, "b" * 300_000]
    target.write_text(versions[0])
    done = threading.Event()
    torn: list[int] = []

    def watch() -> None:
        while not done.is_set():
            seen = target.read_text()
            if seen not in versions:
                torn.append(len(seen))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for n in range(20):
        call(write_file.TOOL, context, path="a.txt", content=versions[n % 2])
    done.set()
    watcher.join()
    assert torn == []


def test_a_folder_or_a_pipe_is_not_replaced(context: ToolContext) -> None:
    (context.cwd / "folder").mkdir()
    os.mkfifo(context.cwd / "pipe")
    assert "directory" in call(write_file.TOOL, context, path="folder", content="x")["error"]
    assert "pipe" in call(write_file.TOOL, context, path="pipe", content="x")["error"]
    with pytest.raises(IsADirectoryError):
        atomic_write.atomic_write(context.cwd / "folder", b"x")
    with pytest.raises(OSError, match="Not a regular file"):
        atomic_write.atomic_write(context.cwd / "pipe", b"x")


def test_a_file_that_was_made_read_only_is_not_replaced(context: ToolContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renaming over it would need no permission."""
    (context.cwd / "a.txt").write_text("old")
    monkeypatch.setattr(atomic_write.os, "access", lambda _path, _mode: False)
    assert "Permission denied" in call(write_file.TOOL, context, path="a.txt", content="new")["error"]
    assert os.listdir(context.cwd) == ["a.txt"]


def test_half_a_surrogate_pair_is_replaced(context: ToolContext) -> None:
    call(write_file.TOOL, context, path="a.txt", content="caf\ud83d!")
    assert (context.cwd / "a.txt").read_text(encoding="utf-8") == "caf\ufffd!"


def test_effects_and_paths_are_declared() -> None:
    assert read_file.TOOL.effect is Effect.PURE
    assert read_file.TOOL.parallel
    assert write_file.TOOL.effect is Effect.IDEMPOTENT
    assert patch.TOOL.effect is Effect.UNSAFE
    for tool in (write_file.TOOL, patch.TOOL):
        assert tool.writes is not None
        assert list(tool.writes({"path": "a"})) == ["a"]
        assert list(tool.writes({})) == []
    assert read_file.TOOL.reads is not None
    assert list(read_file.TOOL.reads({"path": "a"})) == ["a"]
