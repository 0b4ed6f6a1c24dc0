"""A command counts as read-only only when its syntax tree proves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_agent.tools.approval import secret_files
from hermes_agent.tools.approval.reading import locate, read_command

CASES = json.loads((Path(__file__).parent.parent / "data" / "shell_commands.json").read_text("utf-8"))


@pytest.mark.parametrize("case", CASES["destructive"], ids=lambda case: case["command"])
def test_a_command_that_destroys_something_is_never_read_only(case: dict[str, str], tmp_path: Path):
    """Whatever the command's spelling, it needs a yes, and the reason is a sentence."""
    reading = read_command(case["command"], tmp_path)
    assert not reading.read_only
    assert len(reading.why) > 10


def test_at_least_45_percent_of_everyday_commands_run_unasked(tmp_path: Path):
    """Safety that asks for everything is switched off by people; no command that changes something is among them."""
    everyday = CASES["everyday"]
    unasked = [case for case in everyday if read_command(case["command"], tmp_path).read_only]
    assert [case["command"] for case in unasked if not case["reads"]] == []
    assert len(unasked) >= 0.45 * len(everyday), f"{len(unasked)} of {len(everyday)}"


@pytest.mark.parametrize(
    "command",
    [
        "ls\nls -l",
        "true || ! grep -q x y && exit 3",
        "cat < a.txt 2>&1 >/dev/null | tail -n 3 # the end",
        'echo "$HOME/x" \'a b\' a\\ b "cost: 5$" "a\\"b"',
        "find . \\( -name a -o -name 'b c' \\) -mtime -1 -size +10k -perm -u+x -printf '%p\\n'",
        "sed -n '/a b/,/c/p' x; sed 's/a\\/b/c/g' x; sed -n '3p;$p' x; sed 5q x",
        "sort -t, -k2,2nr a | uniq -c",
        "git --no-pager -C sub log -n 3 --format='%h %s' -- a",
        "git branch --list 'a*' && git tag -l && git stash list && git remote -v && git worktree list --porcelain",
        "git reflog; git reflog show -n 2; git rev-parse --abbrev-ref HEAD; git blame -L 1,5 x",
        "[ ! -e x -a -n 'a b' ] || test 1 -lt 2",
        "date -d yesterday +%F; date -u -r x",
        "printf '%-10s|%5.2f%%\\n' a 1.5",
        "ps -eo pid,ppid,cmd --sort=-rss | head; ps -ef; ps -p 1",
        "command -v docker; type ls; sleep 1.5; :",
        "cat a?[0-9]*.txt; wc -l *",
        "cd ~/x && ls && cd .. && pwd",
    ],
)
def test_what_only_reads_is_proven(command: str, tmp_path: Path):
    assert read_command(command, tmp_path).why == ""


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("rm x", "`rm` is not on the list of programs that only read"),
        ("ls &", "it runs something in the background"),
        ("ls |& cat", "it uses `|&`"),
        ("echo $(ls)", "it runs a command inside `$(…)` or backticks"),
        ("cat <(ls)", "it runs a command inside `<(…)`"),
        ("echo ${HOME}", "it changes text inside `${…}`"),
        ("echo $((x))", "it computes inside `$((…))`"),
        ("ls > a", "`> a` writes to a file"),
        ("ls 2>>a", "`2>>a` writes to a file"),
        ("ls >& a", "`>& a` writes to a file"),
        ("ls >/dev/null/../x", "`>/dev/null/../x` writes to a file"),
        ("PATH=. ls", "it sets a variable"),
        ("export A=b", "it sets a variable"),
        ("f() { ls; }", "it defines a function"),
        ("(ls)", "it uses a subshell"),
        ("while true; do ls; done", "it uses a loop"),
        ("if ls; then ls; fi", "it uses a condition"),
        ("[[ -f x ]]", "it uses `[[ ]]`"),
        ("cat <<E\na\nE", "it feeds text to a program with `<<`"),
        ("cat <<< a", "it feeds text to a program with `<<<`"),
        ("'ls'", "the program's name is not written plainly"),
        ("l\\s", "the program's name is not written plainly"),
        ("$HOME/x", "the program's name is not written plainly"),
        ("./ls", "`./ls` is not on the list of programs that only read"),
        ("echo $SECRET", "the value of `$SECRET` is not known"),
        ("ls\r", "it holds the hidden character U+000D"),
        ("ls\u00a0-x", "it holds the hidden character U+00A0"),
        ("echo \u202ea", "it holds the hidden character U+202E"),
        ("echo 'a", "its syntax could not be read"),
        ("", "there is nothing to run"),
        ("# note", "there is nothing to run"),
        ("cat /dev/sda", "`/dev/sda` is a device"),
        ("cat /tmp/../dev/sda", "`/tmp/../dev/sda` is a device"),
        ("cat < /dev/tcp/127.0.0.1/80", "`/dev/tcp/127.0.0.1/80` is a device"),
        ("cd a" + "; cd a" * 5, "it changes the folder too often"),
        ("echo 'a\\nb' > b | ls", "`> b` writes to a file"),
        (">/dev/null", "there is nothing to run"),
        (">/dev/null; ls", "a redirection without a program"),
        ("[ -f $(ls) ]", "it runs a command inside `$(…)` or backticks"),
        ('echo "$(ls)"', "it runs a command inside `$(…)` or backticks"),
        ("cat < *", "`< *` is not one known file"),
        ("ls" + " && ls" * 3000, "it is nested too deeply to be read"),
        ("echo " + "a" * 30_000, "it is too long to be read"),
    ],
)
def test_the_reason_names_the_first_thing_that_was_not_proven(command: str, why: str):
    assert read_command(command) == read_command(command)
    assert (read_command(command).read_only, read_command(command).why) == (False, why)


@pytest.mark.parametrize(
    "command",
    [
        "ls \\ -x",  # the tree drops a space that is quoted for the shell
        'echo "a"#;rm x',
        "ls <2>&1",
        "echo a{b,c}",
    ],
)
def test_what_the_two_readings_see_differently_is_not_read_only(command: str):
    assert not read_command(command).read_only


@pytest.mark.parametrize(
    "command",
    [
        "find . -fprint x",
        "find . -fls x",
        "find * -name x",
        "find $PWD -name x",
        "find . -exec ls {} +",
        "sort -uo a b",
        "sort --output=a b",
        "sort --out a b",
        "sort --compress-program=sh a",
        "sort -T x a",
        "uniq a b",
        "uniq a*",
        "date 01010000",
        "date -s x",
        "date --set x",
        "env ls",
        "hostname x",
        "sed -i s/a/b/ x",
        "sed -n '1e ls' x",
        "sed 's/a/b/e' x",
        "sed 's/a/b/w y' x",
        "sed -f x y",
        "sed -n 5p x -i",
        'sed "$HOME" x',
        "file -C -m x",
        "diff -l a b",
        "diff --paginate a b",
        "tree -o x",
        "tree -R -H . -L 1",
        "rg --pre sh x",
        "rg --hostname-bin sh x",
        "rg -z x",
        "printf -v a b",
        "printf %n a",
        "test -v 'a[$(ls)]'",
        "test -R a",
        "[ -f * ]",
        "[ -f x",
        "ps e",
        "ps auxe",
        "ps -eo environ",
        "ps -o environ",
        "command ls",
        "python3 x.py",
        "python3 -m pip --version",
        "node -e 1",
        "sleep 1000",
        "sleep",
        "exit $?",
        "cd -",
        "cd *",
        "base64 -o x y",
        "git",
        "git -c a=b log",
        "git --exec-path=x log",
        "git -p log",
        "git branch x",
        "git branch -D x",
        "git tag x",
        "git tag -d x",
        "git remote add a b",
        "git remote -v update",
        "git stash",
        "git stash list --output=x",
        "git diff --ext-diff",
        "git diff --output=x",
        "git diff --outp=x",
        "git log --format=%G?",
        "git log --show-signature",
        "git cat-file --textconv x",
        "git reflog expire --all",
        "git config a b",
        "git grep -O x",
        "git worktree add x",
        "git for-each-ref --format='%(signature)'",
        "git show --textconv",
        "git submodule status",
        "git worktree prune",
        "printf $HOME",
        "test $USER = a",
        "date $USER",
        "sed $USER x",
        "sort $USER",
        "git -C a -C b log",
    ],
)
def test_an_option_or_sub_command_that_may_write_or_run_something_is_not_read_only(command: str):
    assert not read_command(command).read_only


def test_words_have_their_quotes_resolved():
    reading = read_command('cat \'a b\' "c\\"d" e\\ f $HOME/g < h; echo i')
    assert reading.words == ("a b", 'c"d', "e f", "$HOME/g", "h", "i")
    assert reading.reads == ("a b", 'c"d', "e f", "$HOME/g", "h")


def test_words_of_a_command_that_was_not_proven_are_still_told():
    assert "/x/.env" in read_command("rm -f '/x/.env'").words


def git(folder: Path, *args: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *identity, *args], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init")
    (folder / "a").write_text("a\n")
    git(folder, "add", "a")
    git(folder, "commit", "-m", "a")
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("diff.x.textconv", "touch x"),
        ("filter.x.clean", "touch x"),
        ("diff.external", "touch x"),
        ("include.path", "x"),
        ("gpg.program", "x"),
        ("remote.origin.promisor", "true"),
    ],
)
def test_git_is_not_read_only_where_the_repository_makes_it_run_programs(key: str, value: str, repository: Path):
    """Also below the top folder, in a linked work tree, and reached by `cd` or `-C`."""
    (repository / "sub").mkdir()
    git(repository, "worktree", "add", "../linked")
    places = [
        ("git status", repository),
        ("git status", repository / "sub"),
        ("git status", repository.parent / "linked"),
        ("cd repository && git diff", repository.parent),
        ("git -C repository diff", repository.parent),
        ("ls", repository),
    ]
    assert [read_command(command, cwd).read_only for command, cwd in places] == [True] * 6
    git(repository, "config", key, value)
    assert [read_command(command, cwd).read_only for command, cwd in places] == [False] * 5 + [True]


@pytest.mark.parametrize("marker", ["nonsense", "gitdir: ../nowhere", "gitdir: ../elsewhere"])
def test_git_is_not_read_only_where_its_configuration_cannot_be_found(marker: str, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config").write_bytes(b"\xff")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".git").write_text(marker)
    assert read_command("git status", tmp_path / "linked").why == "the repository's configuration could not be read"


def test_git_is_not_read_only_with_submodules(repository: Path):
    (repository / ".git" / "modules").mkdir()
    assert "submodules" in read_command("git status", repository).why


def test_paths_are_located_as_the_shell_would(tmp_path: Path):
    home = Path(os.path.expanduser("~"))
    assert locate(tmp_path, "a", "../b") == tmp_path / "b"
    assert locate(tmp_path, "~/a") == locate(tmp_path, "$HOME/a") == home / "a"
    assert locate(tmp_path, "$PWD/a") == tmp_path / "a"


@pytest.mark.parametrize(
    "command",
    [
        "cat .env",
        "cat ~/.env",
        "cat $HOME/.env",
        "cat ./sub/../.env",
        "cat .env.local",
        "cat < .env",
        "head -5 prod.env",
        "cat .en?",
        "cat .e*",
        "cat .[e]nv",
        "cat ~/.ssh/id_ed25519",
        "cat ~/.ssh/config",
        "cat ~/.ss?/*",
        "cat id_rsa",
        "cd ~/.ssh && cat config",
        "cd ~ && cat .netrc",
        "grep x .env",
        "grep -e x .env",
        "grep -f.env x",
        "wc --files0-from=.env",
        "cat /proc/1/environ",
        "cat /proc/self/environ",
        "cat /proc/*/environ",
        "cat /proc/self/env*",
        "cat /etc/shadow",
        "cd /proc/self && cat environ",
        "sort ~/.aws/credentials",
        "jq . auth.json",
        "cat server.pem",
        "cat link",
        "grep -r x .",
        "grep -rn x",
        "rg -uu x",
        "rg --hidden x",
        "diff -r . sub",
        "git show HEAD:.env",
        "cat [[:alpha:]]*",
        "cat *b/../.e*",
        "grep -r x su?",
        "grep -r x missing",
        "cat ~/.hermes/.env",
    ],
)
def test_reading_secrets_is_noticed(command: str, tmp_path: Path):
    """By name, through patterns, links, folders and searches of whole trees."""
    home = Path(os.path.expanduser("~"))
    (home / ".ssh").mkdir(exist_ok=True)
    (home / ".ssh" / "config").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / ".env").touch()
    (tmp_path / "sub" / "key.pem").touch()
    (tmp_path / "link").symlink_to(home / ".ssh" / "config")
    reading = read_command(command, tmp_path)
    assert reading.read_only
    assert secret_files.shown_by(reading, tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "ls -la .env",
        "test -f .env && echo .env",
        "cat .env.example",
        "grep -rn 'process.env' sub",
        "cat *.txt",
        "rg x",
        "cat sub/environment.py",
        "cat keys.py secrets.py",
        "cat /proc/meminfo",
        "git log -3",
        "stat ~/.ssh",
        "grep -r x a.txt sub",
    ],
)
def test_names_and_ordinary_files_are_no_secrets(command: str, tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".env").touch()
    (tmp_path / "a.txt").touch()
    reading = read_command(command, tmp_path)
    assert reading.read_only
    assert secret_files.shown_by(reading, tmp_path) == ""


def test_a_search_through_too_many_files_is_not_called_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secret_files, "_MANY", 20)
    for number in range(21):
        (tmp_path / str(number)).touch()
    assert "too many files" in secret_files.shown_by(read_command("grep -r x .", tmp_path), tmp_path)


def test_the_tool_is_listed_without_loading_the_parser(unmeasured: None):
    """Start-up does not pay for reading commands or starting processes."""
    heavy = ("tree_sitter", "subprocess", "psutil")
    script = f"import sys, hermes_agent.tools.terminal; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout == "[]\n"
