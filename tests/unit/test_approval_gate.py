"""Who decides whether a command runs: the floor, the reading, the operator, a person, and otherwise nobody."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from hermes_agent.tools.approval.floor import floor
from hermes_agent.tools.approval.gate import decide, visible
from hermes_agent.tools.context import ApprovalRequest, Decision, ToolContext

CASES = json.loads((Path(__file__).parent.parent / "data" / "shell_commands.json").read_text("utf-8"))


def nested_shells(command: str, levels: int) -> str:
    for _ in range(levels):
        command = f"sh -c {shlex.quote(command)}"
    return command


class Person:
    """Answers every question the same way and remembers the questions."""

    def __init__(self, answer: Decision) -> None:
        self.answer = answer
        self.asked: list[ApprovalRequest] = []

    def __call__(self, request: ApprovalRequest) -> Decision:
        self.asked.append(request)
        return self.answer


@pytest.fixture
def context(tmp_path: Path) -> ToolContext:
    return ToolContext(home=tmp_path / "home", cwd=tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf /",
        "rm -rf /*",
        "rm -r /.",
        "rm -fr --no-preserve-root x",
        "rm --rec --fo /",
        "rm -r -f ~",
        "rm -rf ~/*",
        "rm -rf $HOME",
        'rm -rf "$HOME"/*',
        "rm -rf ${HOME}/",
        "rm -rf ~bob",
        "rm -rf /home/bob",
        "rm -rf /h*",
        "rm -rf /x/..",
        "rm -rf /{etc,usr}",
        "rm -rf /usr/lib/",
        "cd / && rm -rf *",
        "cd ~; rm -rf .",
        "cd /var; cd lib; rm -rf ./*",
        "r\\m -rf /",
        "r''m -rf /",
        "\"rm\" -rf '/'",
        "$'\\162\\155' -rf /",
        "$'\\x72m' -rf /",
        "a=r;b=m;$a$b -rf /",
        "c='rm -rf /';$c",
        "rm${IFS}-rf${IFS}/",
        "{rm,-rf,/}",
        "r${x}m -rf /",
        "r$*m -rf /",
        "${x:-rm} -rf /",
        "R=RM;${R,,} -rf /",
        "x=arm;${x:1:2} -rf /",
        "$(echo rm) -rf /",
        "$(printf rm) -rf /",
        "/bin/rm -rf /",
        "/bin/r[m] -rf /",
        "/???/r[l-n] -rf /",
        "sudo rm -rf /etc",
        "env X=1 nice -n 5 timeout 5 rm -rf /home",
        "echo x | xargs rm -rf /",
        "busybox rm -rf /",
        "sh -c 'rm -rf /'",
        "bash -xc \"bash -c 'rm -rf /'\"",
        "su root -c 'rm -rf /'",
        "sudo sh -c reboot",
        "eval rm -rf /",
        "bash <<< 'rm -rf ~'",
        "bash <<'E'\nrm -rf /\nE",
        "echo 'rm -rf /' | sh",
        "echo cm0gLXJmIC8K | base64 -d | sudo sh",
        "trap 'rm -rf /' EXIT",
        "f() { rm -rf /; }; f",
        'echo "$(rm -rf /)"',
        "cat <(rm -rf /)",
        "for d in /etc /; do rm -rf $d; done",
        "python3 -c \"import os; os.system('rm -rf /')\"",
        "python3 -c \"run(['rm', '-rf', '/'])\"",
        "perl -e 'system(\"rm -rf /\")'",
        "find / -delete",
        "find ~ -type f -exec rm -f {} +",
        "mkfs.ext4 /dev/sda1",
        "mkfs -t ext4 $disk",
        "wipefs -a /dev/sdb",
        "dd if=/dev/zero of=/dev/sda",
        "cat x > /dev/sda",
        "echo x | tee /dev/nvme0n1",
        "cp x /dev/mapper/root",
        "shred /dev/../dev/sda",
        "echo b > /proc/sysrq-trigger",
        ":(){ :|:& };:",
        "f(){ f|f& };f",
        "b() { b & b & }; b",
        "kill -9 -1",
        "kill -- -1",
        "kill -s KILL -1",
        "kill -1 -1",
        "kill -1",
        "killall5",
        "shutdown -h now",
        "sudo -n reboot",
        "/sbin/halt",
        "systemctl --force poweroff",
        "init 0",
        "telinit 6",
        "chmod -R 777 /",
        "chown -R me:me /etc",
        "chgrp --recursive me /usr/*",
        "echo 'abc",
        'ls "x',
        "ls $(foo",
        "if true; then",
        "ls )",
        "a\0b",
        "a\ud800",
        nested_shells("ls", 8),
        "echo " + "$(" * 2000 + "ls" + ")" * 2000,
    ],
)
def test_the_floor_refuses_whoever_approves(command: str, context: ToolContext):
    """Neither the operator's --yolo nor a person's yes lifts it, and nobody is even asked."""
    person = Person(Decision.SESSION)
    context.ask, context.yolo = person, True
    verdict = decide(command, context)
    assert not verdict.run
    assert verdict.message.startswith("Refused, and no approval can change that")
    assert person.asked == []


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf build",
        "rm -rf /tmp/x",
        "rm -rf ~/project/dist",
        "rm -rf /home/me/project/build",
        'rm -rf "$BUILD/"',
        "rm -r *",
        'X=$(mktemp -d); rm -rf "$X/"',
        "cd /tmp && rm -rf *",
        "rm /etc/x",
        "echo 'never run rm -rf /'",
        "git commit -m 'rm -rf / is bad'",
        "grep -rn 'rm -rf /' .",
        "cat > a <<'E'\nit's fine: rm -rf /\nE",
        "chmod -R u+w .",
        "chown -R me ~/x",
        "find . -delete",
        "find / -name '*.pyc' -delete",
        "mkfs.ext4 disk.img",
        "dd if=/dev/zero of=disk.img",
        "echo x > /dev/null",
        "kill -9 1234",
        "kill -1 1234",
        "shutdown -c",
        "reboot --help",
        "systemctl status x",
        "npm run init 0",
        "sudo apt-get install halt",
        "timeout 5 echo reboot",
        "make reboot",
        "ssh host reboot",
        "python3 - <<'E'\nprint(\"it's\")\nE",
        "echo a{1..3} !x",
        "f() { if [ $1 = 0 ]; then echo 1; else echo $(( $(f 0) + $(f 0) )); fi; }",
        "{rm,-rf,/w/canary}",
        "python3 -c 'x = bytes(range(256)) * 8 /* 2 */'",
        "bash 'a b'\"; rm -rf /\"/x",
        "/usr/bin/* x",
        "python3 -c '" + "a" * 60_000 + "'",
        "a=xx;" + "a=$a$a;" * 60 + "echo $a",
    ],
)
def test_the_floor_has_nothing_against_ordinary_work(command: str, tmp_path: Path):
    """It cannot be lifted, so it must not be wrong about quoted text, scratch folders and lookalikes."""
    assert floor(command, tmp_path) is None


def test_the_floor_knows_the_folder_the_command_starts_in():
    assert floor("rm -rf *", Path("/"))
    assert floor("rm -rf ../*", Path("/home/me"))
    assert floor("rm -rf *", Path("/home/me/project")) is None
    assert floor("rm -rf *") is None


@pytest.mark.parametrize("case", CASES["destructive"], ids=lambda case: case["command"])
def test_nothing_destructive_runs_when_nobody_can_be_asked(case: dict[str, str], context: ToolContext):
    assert not decide(case["command"], context).run


@pytest.mark.parametrize("command", ["cat .env", "cat ~/.ssh/id_rsa", "cat /proc/self/environ", "grep -r KEY ."])
def test_reading_secrets_needs_a_yes(command: str, context: ToolContext):
    (context.cwd / ".env").touch()
    verdict = decide(command, context)
    assert verdict.reading.read_only
    assert not verdict.run
    context.ask = Person(Decision.ONCE)
    assert decide(command, context).run


def test_a_command_that_only_reads_runs_unasked(context: ToolContext):
    context.ask = person = Person(Decision.DENY)
    assert decide("ls -la | head -3", context).run
    assert person.asked == []


def test_nobody_to_ask_means_no_and_says_what_to_do(context: ToolContext):
    verdict = decide("touch x", context)
    assert not verdict.run
    assert "`touch` is not on the list of programs that only read" in verdict.message
    assert "--yolo" in verdict.message
    assert "interactive terminal" in verdict.message


def test_yolo_runs_without_asking(context: ToolContext):
    context.yolo, context.ask = True, (person := Person(Decision.DENY))
    assert decide("touch x", context).run
    assert person.asked == []


def test_the_person_sees_the_exact_command_the_reason_and_the_folder(context: ToolContext):
    context.ask = person = Person(Decision.DENY)
    verdict = decide("touch x  # harmless", context)
    assert not verdict.run
    assert "said no" in verdict.message
    (request,) = person.asked
    assert (request.tool, request.command) == ("terminal", "touch x  # harmless")
    assert "`touch` is not on the list" in request.why
    assert str(context.cwd) in request.why


def test_once_holds_for_one_call(context: ToolContext):
    context.ask = person = Person(Decision.ONCE)
    assert decide("touch x", context).run
    assert decide("touch x", context).run
    assert len(person.asked) == 2


def test_a_yes_for_the_session_holds_for_exactly_this_command_in_this_folder(context: ToolContext, tmp_path: Path):
    """Another spelling, folder or session asks again."""
    context.ask = person = Person(Decision.SESSION)
    for _ in range(3):
        assert decide("rm -r build", context).run
    assert len(person.asked) == 1
    decide("rm -r build ", context)
    decide("rm -r build", context, tmp_path / "other")
    decide("rm -r build", ToolContext(home=context.home, cwd=context.cwd, ask=person))
    assert len(person.asked) == 4


def test_hidden_characters_are_shown_and_announced(context: ToolContext):
    context.ask = person = Person(Decision.DENY)
    decide("ls \u202ex\u202c\r", context)
    assert "hidden characters" in person.asked[0].why
    assert person.asked[0].command == "ls \u202ex\u202c\r"


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("ls -la", "ls -la"),
        ("echo 'grün 日本 🎉'\nls", "echo 'grün 日本 🎉'\nls"),
        ("rm x\rls", "rm x<U+000D>ls"),
        ("a\x1b[2Kb\tc\x7f", "a<U+001B>[2Kb<U+0009>c<U+007F>"),
        ("a\u200bb\u202ec\u2066d\ufeffe", "a<U+200B>b<U+202E>c<U+2066>d<U+FEFF>e"),
        ("a\u00a0b\u3164c\u2800d\ufe0fe\U000e0041", "a<U+00A0>b<U+3164>c<U+2800>d<U+FE0F>e<U+E0041>"),
        ("a\u2028b\x85c\ud800\ue000", "a<U+2028>b<U+0085>c<U+D800><U+E000>"),
    ],
)
def test_what_a_person_cannot_see_is_made_visible(command: str, shown: str):
    assert visible(command) == shown
