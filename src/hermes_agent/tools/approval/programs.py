"""The programs that only read, and with which arguments.

A rule gets a program's arguments and answers why they are not proven harmless, or ""
when they are. What no rule names is not on the list: unknown programs, sub-commands
and options never pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hermes_agent.tools.approval.words import Word

Rule = Callable[[str, Sequence[Word]], str]


def check(program: str, args: Sequence[Word]) -> str:
    """Why this call is not proven to read only; "" when it is."""
    rule = RULES.get(program)
    if rule is None:
        return f"`{program}` is not on the list of programs that only read"
    return rule(program, args)


def _anything(_program: str, _args: Sequence[Word]) -> str:
    """The program has no option that writes, runs or sets anything."""
    return ""


def _nothing(program: str, args: Sequence[Word]) -> str:
    return f"`{program}` with arguments may change something" if args else ""


def _version(program: str, args: Sequence[Word]) -> str:
    if [word.text for word in args] in (["--version"], ["-V"]):
        return ""
    return f"`{program}` may do anything; only `{program} --version` is known to read"


def _unsure(program: str, args: Sequence[Word]) -> str:
    """Why it cannot be seen which options these words become."""
    for word in args:
        if word.wild:
            return f"`{word.text}` may become an option of `{program}`"
    return ""


def _options(short: str, valued: str = "", long: str = "", operands: int | None = None) -> Rule:
    """Only these options: letters without a value, letters that take one, long names; at most so many operands."""
    names = frozenset(f"--{name}" for name in long.split())

    def rule(program: str, args: Sequence[Word]) -> str:
        unsure = _unsure(program, args)
        if unsure:
            return unsure
        count = 0
        for word in args:
            text = word.text
            if text[:1] != "-" or text == "-":
                count += 2 if word.glob else 1
            elif text[:2] == "--":
                if text != "--" and text.split("=", 1)[0] not in names:
                    return f"`{program} {text}` is not known to only read"
            else:
                for letter in text[1:]:
                    if letter in valued:
                        break
                    if letter not in short:
                        return f"`{program} -{letter}` is not known to only read"
        if operands is not None and count > operands:
            return f"`{program}` with more than {operands} operand writes to a file"
        return ""

    return rule


_DIGITS = "0123456789"
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _letters_but(letters: str) -> str:
    return "".join(letter for letter in _LETTERS if letter not in letters) + _DIGITS


_FIND_WORDS = frozenset(
    "-H -L -P -maxdepth -mindepth -xdev -mount -depth -daystart -follow -noleaf -regextype "
    "-name -iname -path -ipath -wholename -iwholename -lname -ilname -regex -iregex -type -xtype -size -empty "
    "-newer -anewer -cnewer -newermt -newerct -mtime -mmin -ctime -cmin -atime -amin -used -perm -user -group "
    "-uid -gid -nouser -nogroup -links -inum -samefile -fstype -readable -writable -executable -true -false "
    "-print -print0 -printf -ls -prune -quit -o -or -a -and -not".split()
)
_NUMBER = re.compile(r"-\d+[A-Za-z]?|-[0-7ugoarwx=+,]+")


def _find(program: str, args: Sequence[Word]) -> str:
    unsure = _unsure(program, args)
    if unsure:
        return unsure
    for word in args:
        text = word.text
        if text[:1] == "-" and text not in _FIND_WORDS and not _NUMBER.fullmatch(text):
            return f"`find {text}` is not known to only read"
    return ""


_SED_ADDRESS = r"(?:\d+|\$|/(?:[^/\\\n]|\\[^\n])+/)"
_SED_PRINT = rf"(?:{_SED_ADDRESS}(?:,\+?{_SED_ADDRESS})?!?[pd]|\d*q)"
_SED_CHANGE = r"s(?P<d>[/|,#])(?:(?!(?P=d))[^\\\n]|\\[^\n])*(?P=d)(?:(?!(?P=d))[^\\\n]|\\[^\n])*(?P=d)[gpI\d]*"
_SED_SCRIPT = re.compile(rf"{_SED_CHANGE}|{_SED_PRINT}(?:;\s*{_SED_PRINT})*")
_SED_FLAGS = frozenset({"-n", "-E", "-r", "-s", "-u", "-nE", "-En", "-nr", "-rn", "--quiet", "--regexp-extended"})


def _sed(program: str, args: Sequence[Word]) -> str:
    unsure = _unsure(program, args)
    if unsure:
        return unsure
    script = None
    for word in args:
        text = word.text
        if text[:1] == "-" and text != "-":
            if text not in _SED_FLAGS:
                return f"`sed {text}` is not known to only read"
        elif script is None:
            script = word
    if script is None or script.names or script.glob or not _SED_SCRIPT.fullmatch(script.text):
        return "only `sed` scripts that print or replace are known to read"
    return ""


def _date(program: str, args: Sequence[Word]) -> str:
    unsure = _unsure(program, args)
    if unsure:
        return unsure
    value = False
    for word in args:
        text = word.text
        if value:
            value = False
        elif text in ("-d", "--date", "-r", "--reference"):
            value = True
        elif not re.fullmatch(
            r"\+.*|-[uRI]|--(utc|universal|rfc-email|iso-8601|rfc-3339|date|reference)(=.*)?", text, re.DOTALL
        ):
            return f"`date {text}` may set the clock"
    return ""


_FORMAT = re.compile(r"(?:[^%]|%%|%[-+ #0]*(?:\d+|\*)?(?:\.\d+)?[sdiuxXofFeEgGcbq])*", re.DOTALL)


def _printf(program: str, args: Sequence[Word]) -> str:
    unsure = _unsure(program, args)
    if unsure:
        return unsure
    first = args[0] if args else None
    if first is None or first.names or first.text[:1] == "-" or not _FORMAT.fullmatch(first.text):
        return "this `printf` may set a variable"
    return ""


_TESTS = frozenset(
    "-e -f -d -r -w -x -s -L -h -z -n -b -c -p -S -u -g -k -O -G -N -t -nt -ot -ef "
    "-eq -ne -lt -gt -le -ge -a -o".split()
)


def _test(program: str, args: Sequence[Word]) -> str:
    unsure = _unsure(program, args)
    if unsure:
        return unsure
    for word in args:
        text = word.text
        if word.glob or (text[:1] == "-" and text not in _TESTS and not re.fullmatch(r"-\d+", text)):
            return f"`{program} … {text}` is not known to only read"
    return ""


def _bracket(program: str, args: Sequence[Word]) -> str:
    if not args or args[-1].text != "]":
        return "`[` without `]` cannot be read"
    return _test(program, args[:-1])


_PS_WORD = re.compile(r"aux|ax|-[eAaf]{1,2}l?|-[eA]?[opuCU]|--(forest|no-headers|sort=[\w+,%-]+|pid=\d+)|\d+")
_PS_FIELDS = re.compile(r"(?!.*environ)[a-z%][\w%,=]*")


def _ps(program: str, args: Sequence[Word]) -> str:
    fields = False
    for word in args:
        text = word.text
        if not word.plain or not (_PS_FIELDS if fields else _PS_WORD).fullmatch(text):
            return f"`{program} {text}` may show the environment of processes"
        fields = text[:1] == "-" and text[-1] in "oCuU"
    return ""


def _command(program: str, args: Sequence[Word]) -> str:
    if args and args[0].text in ("-v", "-V") and not _unsure(program, args):
        return ""
    return f"`{program}` runs another program"


def _sleep(program: str, args: Sequence[Word]) -> str:
    if len(args) == 1 and re.fullmatch(r"[0-9]{1,2}(\.[0-9]+)?s?|\.[0-9]+s?", args[0].text):
        return ""
    return f"`{program}` takes one time below 100 seconds"


def _exit(_program: str, args: Sequence[Word]) -> str:
    if not args or (len(args) == 1 and args[0].text.isdecimal()):
        return ""
    return "`exit` takes one number"


def _cd(_program: str, args: Sequence[Word]) -> str:
    if not args or (len(args) == 1 and args[0].text[:1] != "-" and not args[0].glob and not args[0].wild):
        return ""
    return "where this `cd` leads cannot be read"


_GIT_LOG = _options(
    "pswzbcmiEFPMC" + _DIGITS,
    "nUSGLMCX",
    "oneline graph all decorate no-decorate stat shortstat numstat name-only name-status summary patch no-patch "
    "format pretty abbrev-commit no-abbrev-commit abbrev date since until after before author committer grep "
    "max-count skip reverse first-parent merges no-merges follow cached staged color no-color word-diff unified "
    "diff-filter find-renames find-copies ignore-all-space ignore-space-change ignore-blank-lines branches tags "
    "remotes left-right cherry-pick topo-order date-order relative-date raw check minimal patience histogram "
    "no-ext-diff no-textconv count parents children not quiet exit-code merge-base compact-summary dirstat "
    "function-context no-renames full-index source boundary ancestry-path",
)
_GIT_LISTS = frozenset({"--list", "--contains", "--no-contains", "--merged", "--no-merged", "--points-at"})
_GIT_BRANCH = _options(
    "arv", "", "list all remotes verbose show-current contains no-contains merged no-merged points-at sort format "
    "color no-color column no-column ignore-case abbrev no-abbrev",
)  # fmt: skip
_GIT_TAG = _options(
    "ln" + _DIGITS, "", "list contains no-contains merged no-merged points-at sort format color column no-column"
)


def _git_list(rule: Rule, extra: frozenset[str]) -> Rule:
    """A sub-command that lists, but makes or moves something when it is given a name."""
    lists = _GIT_LISTS | extra

    def check_list(program: str, args: Sequence[Word]) -> str:
        names = any(word.text[:1] != "-" for word in args)
        if names and not any(word.text.split("=", 1)[0] in lists for word in args):
            return f"`{program}` with a name makes something"
        return rule(program, args)

    return check_list


def _remote(program: str, args: Sequence[Word]) -> str:
    texts = [word.text for word in args]
    if not texts or texts in (["-v"], ["--verbose"]) or (texts[0] == "get-url" and not _unsure(program, args)):
        return ""
    return f"this `{program}` is not known to only read"


def _under(name: str, rule: Rule, *, optional: bool = False) -> Rule:
    """The first argument must be `name`, the rule holds for the rest; `optional` when it may be left out."""

    def check_under(program: str, args: Sequence[Word]) -> str:
        if args and args[0].text == name:
            return rule(program, args[1:])
        if optional and (not args or args[0].text[:1] == "-"):
            return rule(program, args)
        return f"this `{program}` is not known to only read"

    return check_under


_GIT: dict[str, Rule] = {
    "status": _options("sbvz", "u", "short branch long porcelain show-stash untracked-files ignored ahead-behind "
                       "no-ahead-behind verbose column no-column no-renames"),
    "diff": _GIT_LOG,
    "log": _GIT_LOG,
    "show": _GIT_LOG,
    "rev-list": _GIT_LOG,
    "shortlog": _options("sne", "", "numbered summary email all no-merges since until"),
    "branch": _git_list(_GIT_BRANCH, frozenset()),
    "tag": _git_list(_GIT_TAG, frozenset({"-l"})),
    "blame": _options("swlbtefpMC" + _DIGITS, "L", "porcelain line-porcelain date show-email show-name show-number"),
    "rev-parse": _options("q", "", "abbrev-ref short verify show-toplevel show-prefix git-dir is-inside-work-tree "
                          "symbolic-full-name all branches tags git-common-dir absolute-git-dir quiet "
                          "is-bare-repository show-cdup"),
    "ls-files": _options("cdmoiskutzvf", "xX", "cached deleted modified others ignored stage unmerged "
                         "exclude-standard full-name error-unmatch directory no-empty-directory eol exclude"),
    "ls-tree": _options("drtlz", "", "name-only name-status long full-name full-tree abbrev object-only"),
    "cat-file": _options("ptse"),
    "describe": _options("", "", "tags always all long abbrev match exclude first-parent exact-match contains"),
    "merge-base": _options("a", "", "all is-ancestor fork-point independent octopus"),
    "name-rev": _options("", "", "name-only tags refs always all"),
    "for-each-ref": _options("", "", "format sort count contains no-contains merged no-merged points-at"),
    "show-ref": _options("sd", "", "head heads tags verify hash dereference abbrev quiet"),
    "count-objects": _options("vH", "", "verbose human-readable"),
    "check-ignore": _options("vqn", "", "verbose quiet non-matching no-index"),
    "remote": _remote,
    "stash": _under("list", _GIT_LOG),
    "worktree": _under("list", _options("v", "", "porcelain verbose")),
    "reflog": _under("show", _GIT_LOG, optional=True),
    "version": _nothing,
    "--version": _nothing,
}  # fmt: skip


def git_place(args: Sequence[Word]) -> tuple[str, Sequence[Word]] | None:
    """The folder of `-C` ("" when there is none) and what follows git's own options; None for any other option."""
    folder, at = "", 0
    while at < len(args) and args[at].text[:1] == "-" and args[at].text != "--version":
        if args[at].text in ("--no-pager", "-P", "--no-optional-locks", "--literal-pathspecs"):
            at += 1
        elif args[at].text == "-C" and not folder and at + 1 < len(args):
            word = args[at + 1]
            if word.wild or word.glob or not word.text:
                return None
            folder, at = word.text, at + 2
        else:
            return None
    return folder, args[at:]


def _git(_program: str, args: Sequence[Word]) -> str:
    place = git_place(args)
    if place is None:
        return "this option of `git` may run another program"
    rest = place[1]
    rule = _GIT.get(rest[0].text) if rest else None
    if rule is None:
        return f"`git {rest[0].text}` is not known to only read" if rest else "`git` alone is not known to only read"
    if any("%G" in word.text or "%(sig" in word.text for word in rest):
        return "this format makes `git` run gpg"
    return rule(f"git {rest[0].text}", rest[1:])


_RG = _options(
    _letters_but("z") + ".",
    "ABCEMTdefgjmrt",
    "files hidden no-ignore no-ignore-vcs glob iglob type type-not type-list context after-context before-context "
    "count count-matches files-with-matches files-without-match fixed-strings ignore-case smart-case case-sensitive "
    "line-number no-line-number max-count max-depth max-filesize max-columns multiline multiline-dotall no-heading "
    "heading only-matching pcre2 quiet regexp replace sort sortr stats text word-regexp line-regexp invert-match "
    "json color colors column vimgrep with-filename no-filename follow null no-messages trim passthru version help "
    "no-config unrestricted crlf",
)
_SORT = _options(
    "bcCdfghimMnrRsuVz",
    "ktS",
    "key field-separator numeric-sort reverse unique human-numeric-sort version-sort ignore-case check stable "
    "zero-terminated general-numeric-sort month-sort random-sort ignore-leading-blanks dictionary-order merge",
)
_DIFF = _options(
    _letters_but("lFIUWxXSCD"),
    "UCxXFIWS",
    "brief unified context recursive ignore-all-space ignore-space-change ignore-blank-lines ignore-case new-file "
    "side-by-side color width exclude strip-trailing-cr report-identical-files suppress-common-lines text minimal "
    "no-dereference label",
)
_TREE = _options(
    "adfgilpqrstuvxhnACDFJUX",
    "LIP",
    "dirsfirst gitignore noreport du prune filelimit charset inodes device sort matchdirs ignore-case",
)
_FILE = _options("bikLhNnprv0", "", "brief mime mime-type mime-encoding dereference no-dereference version")

RULES: dict[str, Rule] = {
    **dict.fromkeys(
        "ls cat head tail wc pwd echo stat du df which type id whoami groups uname arch nproc uptime free cmp cut tr "
        "basename dirname realpath readlink true false : seq nl tac rev md5sum sha1sum sha224sum sha256sum sha384sum "
        "sha512sum b2sum cksum sum jq column comm join paste fold fmt expand unexpand hexdump od strings grep egrep "
        "fgrep factor expr numfmt printenv getconf lscpu".split(),
        _anything,
    ),
    **dict.fromkeys("env hostname tty locale who users".split(), _nothing),
    **dict.fromkeys(
        "python python3 node ruby perl bash gcc g++ cc clang make cmake pip pip3 npm uv java docker".split(), _version
    ),
    "[": _bracket,
    "base64": _options("diDw" + _DIGITS, "", "decode ignore-garbage wrap"),
    "cd": _cd,
    "command": _command,
    "date": _date,
    "diff": _DIFF,
    "exit": _exit,
    "file": _FILE,
    "find": _find,
    "git": _git,
    "printf": _printf,
    "ps": _ps,
    "rg": _RG,
    "sed": _sed,
    "sleep": _sleep,
    "sort": _SORT,
    "test": _test,
    "tree": _TREE,
    "uniq": _options("cdDuiz", "fsw", "count repeated unique ignore-case", operands=1),
}

NAMES_ONLY = frozenset(
    "echo printf ls stat du df find tree test [ basename dirname realpath readlink which type command cd pwd date "
    "seq sleep file tr exit expr".split()
)
"""Programs that show at most the names and sizes of the files they are given, never what is in them."""
