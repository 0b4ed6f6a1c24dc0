"""The terminal tool, driven as the executor does, with real shells."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_agent import failpoints
from hermes_agent.cancellation import Cancellation
from hermes_agent.tools import shell_output
from hermes_agent.tools.context import Decision, ToolContext, ToolLimits
from hermes_agent.tools.registry import Effect
from hermes_agent.tools.terminal import TOOL


@pytest.fixture
def context(tmp_path: Path) -> ToolContext:
    work = tmp_path / "work"
    work.mkdir()
    return ToolContext(home=tmp_path / "home", cwd=work, yolo=True, call_id="turn:1.2.3")


def run(context: ToolContext, command: str, **more: Any) -> dict[str, Any]:
    return json.loads(TOOL.handler({"command": command, **more}, context=context))


def output(context: ToolContext, command: str, **more: Any) -> str:
    result = run(context, command, **more)
    assert result["error"] is None
    return result["output"]


def wait_for(path: Path) -> None:
    """Until the file has something in it; it is written by a process that was just started."""
    give_up = time.monotonic() + 10
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < give_up, f"{path} never came"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


def test_both_streams_come_in_order_with_the_exit_code(context: ToolContext):
    result = run(context, "echo a; echo b >&2; echo c; exit 3")
    assert result == {"output": "a\nb\nc\n", "exit_code": 3, "error": None}


@pytest.mark.parametrize(
    "command",
    [
        "true",
        "false",
        "exit 3",
        "set -e; false; true",
        "set -u; : $nothing",
        "no_such_program",
        "exec no_such_program",
        "exec false",
        "kill -9 $$",
        "kill -TERM $$",
        "trap 'exit 7' EXIT",
        "(exit 4) | cat; exit ${PIPESTATUS[0]}",
        "set -e; cd /; nope",
        "exec >&-",
        "readonly a=1; a=2",
        "echo ${x?no}",
        "set -e; trap 'false' EXIT",
        "exec 199>&-",
        "set -e; exec 199>&-",
        "f() { return 9; }; f",
        ". ./nothing",
    ],
)
def test_the_exit_code_is_the_commands_own(command: str, context: ToolContext):
    """The same as without us."""
    plain = subprocess.run(["bash", "-c", command], cwd=context.cwd, check=False, capture_output=True).returncode
    assert run(context, command)["exit_code"] == (128 - plain if plain < 0 else plain)


def test_the_folder_is_kept_between_calls(context: ToolContext):
    """However the shell ends: by itself, by exit, by an error, or with descriptors of its own."""
    (context.cwd / "a" / "b c").mkdir(parents=True)
    steps = [
        ("cd a", "a"),
        ("cd 'b c'; exit 3", "a/b c"),
        ("set -e; cd ..; false", "a"),
        ("exec 3>x; set -C; cd ..", ""),
    ]
    for command, folder in steps:
        run(context, command)
        assert output(context, "pwd").rstrip("\n") == str(context.cwd / folder).rstrip("/")


@pytest.mark.parametrize(
    "command", ["cd /; exec true", "trap : EXIT; cd /", "cd /; kill -9 $$", "mkdir x; cd x; rmdir ../x"]
)
def test_a_shell_that_cannot_tell_its_folder_leaves_the_kept_one(command: str, context: ToolContext):
    (context.cwd / "a").mkdir()
    run(context, "cd a")
    run(context, command)
    assert output(context, "pwd") == f"{context.cwd}/a\n"


def test_a_kept_folder_that_is_gone_stops_the_call(context: ToolContext):
    """The command does not run somewhere else instead; the next one starts where the session does."""
    (context.cwd / "a").mkdir()
    run(context, "cd a")
    (context.cwd / "a").rmdir()
    assert "is gone" in run(context, "touch witness")["error"]
    assert list(context.cwd.iterdir()) == []
    assert output(context, "pwd") == f"{context.cwd}\n"


def test_workdir_holds_for_one_call(context: ToolContext):
    (context.cwd / "a").mkdir()
    assert output(context, "pwd", workdir="a") == f"{context.cwd}/a\n"
    assert output(context, "pwd") == f"{context.cwd}\n"
    assert "does not exist" in run(context, "pwd", workdir="b")["error"]


def test_messages_of_the_shell_count_lines_as_the_command_does(context: ToolContext):
    assert "line 2: nope" in output(context, "true\nnope\ntrue")


def test_standard_input_is_empty(context: ToolContext):
    assert output(context, "cat; echo end") == "end\n"


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({}, "'command' is missing"),
        ({"command": 3}, "must be a string"),
        ({"command": "  "}, "is empty"),
        ({"command": "ls", "timeout": 0}, "at least 1"),
        ({"command": "ls", "workdir": "a\0b"}, "NUL"),
        ({"command": "true " + "a" * 200_000}, "could not be started"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], why: str, context: ToolContext):
    assert why in json.loads(TOOL.handler(args, context=context))["error"]


def test_a_blocked_command_is_not_started(context: ToolContext):
    context.yolo = False
    result = run(context, "touch witness")
    assert (result["output"], result["exit_code"], result["status"]) == ("", -1, "blocked")
    assert "approval" in result["error"]
    assert list(context.cwd.iterdir()) == []


def test_a_person_may_allow_it(context: ToolContext):
    context.yolo, context.ask = False, lambda _request: Decision.ONCE
    run(context, "touch witness")
    assert [path.name for path in context.cwd.iterdir()] == ["witness"]


@pytest.mark.parametrize(
    "command",
    [
        "r\\m -rf victim",
        "r''m -rf victim",
        "$(echo rm) -rf victim",
        "/bin/rm -rf victim",
        "find victim -delete",
        "X=rm; $X -rf victim",
        "bash <(echo rm -rf victim)",
        "echo cm0gLXJmIHZpY3RpbQ== | base64 -d | sh",
        "rm${IFS}-rf${IFS}victim",
        "> victim/file",
    ],
)
def test_no_spelling_of_a_deletion_runs_unapproved(command: str, context: ToolContext):
    victim = context.cwd / "victim" / "file"
    victim.parent.mkdir()
    victim.write_text("x")
    context.yolo = False
    assert run(context, command)["status"] == "blocked"
    assert victim.read_text() == "x"


def test_the_effect_is_pure_only_for_what_provably_reads():
    assert TOOL.effect_of({"command": "ls | wc -l"}) is Effect.PURE
    assert TOOL.effect_of({"command": "touch x"}) is Effect.UNSAFE
    assert TOOL.effect_of({"command": "echo 'a"}) is Effect.UNSAFE
    assert TOOL.effect_of({}) is Effect.UNSAFE


def test_a_child_gets_no_keys(context: ToolContext, monkeypatch: pytest.MonkeyPatch):
    """Only the fixed names, what the operator declared, and who is calling."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("BASH_ENV", "/tmp/evil")
    monkeypatch.setenv("LC_TIME", "C")
    monkeypatch.setenv("MY_TOOL", "x")
    monkeypatch.setenv("PATH", f".::bin:{os.environ['PATH']}")
    context.env_passthrough = ("MY_TOOL", "NOT_SET")
    names = dict(line.split("=", 1) for line in output(context, "env").splitlines())
    assert set(names) <= {
        "PATH",
        "HOME",
        "LANG",
        "LANGUAGE",
        "TERM",
        "TMPDIR",
        "USER",
        "LOGNAME",
        "SHELL",
        "TZ",
        "LC_TIME",
        "LC_ALL",
        "LC_CTYPE",
        "PWD",
        "SHLVL",
        "_",
        "MY_TOOL",
        "HERMES_HOME",
        "HERMES_CALL_ID",
        "HERMES_SHELL_ID",
    }
    assert (names["MY_TOOL"], names["HERMES_CALL_ID"]) == ("x", "turn:1.2.3")
    assert names["HERMES_HOME"] == str(context.home)
    assert names["PATH"] == ":".join(part for part in os.environ["PATH"].split(":") if part.startswith("/"))


def test_a_git_command_that_reads_runs_nothing_else(context: ToolContext):
    """A file-system monitor and hooks of the repository are not run, and `status` does not touch its index."""
    context.yolo = False
    hook = "#!/bin/sh\ntouch witness\n"
    for name in (".git/hooks/post-index-change", "monitor"):
        subprocess.run(["git", "init", "-q"], cwd=context.cwd, check=True)
        (context.cwd / name).parent.mkdir(exist_ok=True)
        (context.cwd / name).write_text(hook)
        (context.cwd / name).chmod(0o755)
    subprocess.run(["git", "add", "."], cwd=context.cwd, check=True)
    subprocess.run(["git", "config", "core.fsmonitor", "./monitor"], cwd=context.cwd, check=True)
    os.utime(context.cwd / "monitor", (1, 1))
    (context.cwd / "witness").unlink()  # the hook works
    before = (context.cwd / ".git" / "index").stat().st_mtime_ns
    assert "monitor" in output(context, "git status --short")
    assert (context.cwd / ".git" / "index").stat().st_mtime_ns == before
    # `git diff` notes fresh time stamps in the index; the hook on that does not run either.
    assert output(context, "git diff") == ""
    assert not (context.cwd / "witness").exists()


def test_a_call_leaves_no_descriptor_open(context: ToolContext):
    def count() -> int:
        return psutil.Process().num_fds()

    run(context, "true")
    before = count()
    for command in ("seq 100000", "sleep 30 & echo $!", "false"):
        result = run(context, command)
        if "$!" in command:
            os.kill(int(result["output"].split()[0]), 9)
    run(context, "sleep 30", timeout=1)
    assert count() == before


def test_what_runs_in_the_background_does_not_hold_the_call(context: ToolContext):
    """The call ends with the shell; the background process goes on and the model is told."""
    started = time.monotonic()
    result = run(context, "sleep 30 & echo $!")
    assert time.monotonic() - started < 5
    pid = int(result["output"].split()[0])
    assert "still runs" in result["output"]
    assert is_running(pid)
    os.kill(pid, 9)


def test_what_prints_in_the_background_without_end_does_not_hold_the_call(context: ToolContext):
    started = time.monotonic()
    result = run(context, "yes & echo $! > pid")
    assert time.monotonic() - started < 5
    assert result["exit_code"] == 0
    (pid,) = pids(context.cwd / "pid")
    give_up = time.monotonic() + 5
    while is_running(pid):
        assert time.monotonic() < give_up, "it can still print, so somebody still reads"
        time.sleep(0.01)


def test_a_command_that_closes_its_output_is_still_waited_for(context: ToolContext):
    assert run(context, "exec >&- 2>&-; sleep 0.3; exit 5")["exit_code"] == 5
    assert "did not end within 1 s" in run(context, "exec >&- 2>&-; sleep 30", timeout=1)["error"]


STUBBORN = (
    "echo $$ > pids; sleep 60 & echo $! >> pids; trap '' TERM; "
    "setsid sh -c 'echo $$ >> pids; sleep 60' & "
    "(setsid sh -c 'trap \"\" TERM; echo $$ >> pids; echo x > ready; while :; do sleep 60; done' &); "
    "wait; wait; sleep 60"
)
"""A shell that ignores TERM, a child in its group, one in its own session, and an orphan there that ignores TERM."""


def test_a_time_out_ends_the_whole_tree(context: ToolContext):
    started = time.monotonic()
    result = run(context, STUBBORN, timeout=1)
    assert time.monotonic() - started < 4
    assert result["exit_code"] == 124
    assert "did not end within 1 s" in result["error"]
    found = pids(context.cwd / "pids")
    assert len(found) == 4
    assert [pid for pid in found if is_running(pid)] == []


def test_a_time_out_keeps_what_was_printed(context: ToolContext):
    assert run(context, "echo first; sleep 30", timeout=1)["output"] == "first\n"


def test_the_default_time_comes_from_the_settings(context: ToolContext):
    context.limits = ToolLimits(terminal_timeout=1)
    assert "within 1 s" in run(context, "sleep 30")["error"]


def test_stopping_the_turn_ends_the_whole_tree_within_two_seconds(context: ToolContext):
    results: list[dict[str, Any]] = []
    worker = threading.Thread(target=lambda: results.append(run(context, "echo first; " + STUBBORN)))
    worker.start()
    wait_for(context.cwd / "ready")
    started = time.monotonic()
    context.cancellation.cancel()
    worker.join(10)
    assert time.monotonic() - started < 2
    assert results == [{"output": "first\n", "exit_code": 130, "error": "interrupted"}]
    assert [pid for pid in pids(context.cwd / "pids") if is_running(pid)] == []


def test_a_turn_that_was_stopped_before_starts_nothing(context: ToolContext):
    context.cancellation.cancel()
    assert run(context, "touch witness")["error"] == "interrupted"
    assert list(context.cwd.iterdir()) == []


def test_ending_a_tree_leaves_every_other_process_alone(context: ToolContext):
    """A sibling of the same agent with another call's name, and one with none."""
    other = ToolContext(home=context.home, cwd=context.cwd, yolo=True, call_id="turn:1.2.4")
    pid = int(run(other, "sleep 60 & echo $!")["output"].split()[0])
    with subprocess.Popen(["sleep", "60"]) as bystander:
        run(context, STUBBORN, timeout=1)
        assert is_running(pid)
        assert bystander.poll() is None
        bystander.kill()
    os.kill(pid, 9)


@pytest.fixture
def armed() -> Iterator[list[str]]:
    reached: list[str] = []
    failpoints.arm(reached.append)
    yield reached
    failpoints.arm(None)


def test_the_points_of_the_crash_test_are_passed_in_order(context: ToolContext, armed: list[str]):
    run(context, "true")
    assert armed == ["terminal.spawned", "terminal.exited"]


def test_an_interrupt_in_the_tool_ends_the_tree_and_leaves(context: ToolContext, armed: list[str]):
    """A KeyboardInterrupt is not turned into a result."""

    def interrupt(name: str) -> None:
        if name == "terminal.spawned":
            wait_for(context.cwd / "pid")
            raise KeyboardInterrupt

    failpoints.arm(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(context, "echo $$ > pid; sleep 60")
    assert [pid for pid in pids(context.cwd / "pid") if is_running(pid)] == []


def parts(printed: str) -> tuple[str, str, str]:
    match = re.fullmatch(r"(.*)\n\n(\[[^\n]*\])\n\n(.*)", printed, re.DOTALL)
    assert match is not None
    return match[1], match[2], match[3]


def test_an_output_just_within_the_limit_is_whole(context: ToolContext):
    context.limits = ToolLimits(output_max_bytes=1000)
    assert output(context, "head -c 1000 /dev/zero | tr '\\0' x") == "x" * 1000
    assert not (context.home / "cache").exists()


def test_a_long_output_keeps_head_and_tail_and_all_of_it_in_a_private_file(context: ToolContext):
    context.limits = ToolLimits(output_max_bytes=1000)
    head, note, tail = parts(output(context, "seq 1 100000"))
    whole = "".join(f"{number}\n" for number in range(1, 100001))
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert (len(head), len(tail)) == (400, 600)
    assert f"{len(whole) - 1000:,} of {len(whole):,} bytes left out" in note
    (path,) = (context.home / "cache" / "spillover").iterdir()
    assert str(path) in note
    assert path.read_text() == whole
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_characters_are_not_cut_in_two(context: ToolContext):
    for limit in range(100, 112):
        context.limits = ToolLimits(output_max_bytes=limit)
        printed = output(context, "for i in $(seq 200); do printf 'aé日🎉'; done")
        assert "\ufffd" not in printed


def test_bytes_that_are_no_text_are_replaced(context: ToolContext):
    """In the answer and in the file, so that the file tools can read it."""
    script = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 8)"
    expected = (bytes(range(256)) * 8).decode("utf-8", "replace").replace("\0", "\ufffd")
    assert output(context, f"{sys.executable} -c '{script}'") == expected
    context.limits = ToolLimits(output_max_bytes=100)
    output(context, f"{sys.executable} -c '{script}'")
    (path,) = (context.home / "cache" / "spillover").iterdir()
    assert path.read_bytes().decode() == expected


def test_a_file_that_cannot_be_written_is_admitted(context: ToolContext):
    context.limits = ToolLimits(output_max_bytes=100)
    context.home.write_text("in the way")
    assert "could not be saved" in output(context, "seq 1000")


def test_the_file_is_bounded_too(context: ToolContext, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shell_output, "SPOOL_MAX_BYTES", 2000)
    context.limits = ToolLimits(output_max_bytes=100)
    note = parts(output(context, "seq 1 10000"))[1]
    assert "first 2,000 bytes" in note
    (path,) = (context.home / "cache" / "spillover").iterdir()
    assert path.stat().st_size == 2000


CROWDED = """
import json, resource, sys
from pathlib import Path
from hermes_agent.tools.context import ToolContext
from hermes_agent.tools.terminal import TOOL
work = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
resource.setrlimit(resource.RLIMIT_NOFILE, (150, 150))
context = ToolContext(home=work / "home", cwd=work, yolo=True)
print(json.loads(TOOL.handler({"command": "seq 20000; cd /"}, context=context))["output"])
print(context.session_state["terminal.cwd"])
"""


def test_a_full_disk_costs_the_file_and_not_the_call(tmp_path: Path, unmeasured: None):
    """Nor does a process that may open few files."""
    done = subprocess.run([sys.executable, "-c", CROWDED, tmp_path], check=True, capture_output=True, text=True)
    assert "could not be saved: File too large" in done.stdout
    assert done.stdout.endswith("20000\n\n/\n")


def test_without_bash_the_plain_shell_is_used(context: ToolContext, monkeypatch: pytest.MonkeyPatch):
    """It keeps the folder too; without any shell the call says so."""
    programs = context.home.parent / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    assert "neither bash nor sh" in run(context, "true")["error"]
    (programs / "sh").symlink_to(shutil.which("sh", path=os.defpath) or "/bin/sh")
    assert run(context, "cd /; exit 3")["exit_code"] == 3
    assert output(context, "pwd") == "/\n"


MEASURE = """
import json, resource, sys
from pathlib import Path
from hermes_agent.tools.context import ToolContext
from hermes_agent.tools.terminal import TOOL
work = Path(sys.argv[1])
context = ToolContext(home=work / "home", cwd=work, yolo=True, call_id="a.b.c")
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
TOOL.handler({"command": "seq 100000"}, context=context)
before = peak()
results = [json.loads(TOOL.handler({"command": command}, context=context)) for command in sys.argv[2:]]
print(json.dumps([peak() - before, [len(result["output"].encode()) for result in results]]))
"""


def test_huge_outputs_cost_no_memory(context: ToolContext, tmp_path: Path, unmeasured: None):
    """50 MB in lines, one line of 5 MB, and 20 MB of noise."""
    commands = [
        "yes 123456789 | head -c 50000000",
        "head -c 5000000 /dev/zero | tr '\\0' x",
        "head -c 20000000 /dev/urandom",
    ]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path, *commands], check=True, capture_output=True, text=True
    )
    grown, sizes = json.loads(done.stdout)
    assert grown < 8_000_000
    assert all(size < 160_000 for size in sizes)


def test_calls_side_by_side_do_not_disturb_each_other(context: ToolContext):
    def one(number: int) -> None:
        mine = ToolContext(
            home=context.home, cwd=context.cwd, yolo=True, call_id=f"t.{number}", cancellation=Cancellation()
        )
        printed.append(output(mine, f"for i in $(seq 50); do echo {number}; done"))

    printed: list[str] = []
    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(printed) == sorted(f"{number}\n" * 50 for number in range(8))
