"""Would a command that only reads show keys or credentials?

Judged by name, after patterns and links are followed; what cannot be seen counts as a yes.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hermes_agent.tools.approval.reading import Reading, locate

_NAMES = re.compile(
    r"""(?ix)(?:^|[^\w.-])(?:
      [\w-]*\.env (?!\.(?:example|sample|template|dist)\b) (?:\.[\w-]+)*
    | \.envrc | \.ssh | \.gnupg | \.aws | \.azure | \.kube | \.docker | \.vault-token | \.config/(?:gcloud|gh)
    | id_(?:rsa|dsa|ecdsa|ed25519)(?:_sk)? | [\w.-]+\.(?:pem|key|p12|pfx|kdbx|jks|keystore)
    | [._]netrc | \.pgpass | \.my\.cnf | \.npmrc | \.pypirc | \.git-credentials | \.htpasswd
    | \.(?:bash|zsh|python|psql|mysql)_history
    | [\w.-]*credentials? (?:\.\w+)? | secrets? (?:\.(?:json|ya?ml|toml|txt|ini))? | (?:auth|tokens?)\.json
    )(?![\w.-])
    | (?:^|/)etc/g?shadow | (?:^|/)proc/.*\b(?:environ|mem|maps|kcore|auxv)\b | ^environ$"""
)
_MANY = 3_000


def shown_by(reading: Reading, cwd: Path) -> str:
    """Why the command may show a secret; "" when nothing it reads looks like one."""
    places = [locate(cwd, folder) for folder in reading.folders]
    for word in reading.reads:
        for text in _spellings(word):
            if _NAMES.search(text):
                return f"`{text}` may hold secrets"
            for place in places:
                why = _behind(text, place)
                if why:
                    return why
    for tree in reading.trees:
        for place in places:
            why = _inside(tree, place)
            if why:
                return why
    return ""


def _spellings(word: str) -> Iterator[str]:
    """The word, and the path that an option may carry in it."""
    yield word
    if word.startswith("-") and len(word) > 2:
        yield word.partition("=")[2] if "=" in word else word[2:]


def _behind(text: str, place: Path) -> str:
    """Why what the path leads to may hold secrets; "" for a word that is no path."""
    if not text or len(text) > 4_000:
        return ""
    path = locate(place, text)
    if not any(char in text for char in "*?["):
        return _real(str(path))
    if "[:" in text or "[." in text or "[=" in text:
        return f"which files `{text}` means cannot be seen"
    found = 0
    try:
        for name in glob.iglob(str(path).replace("[^", "[!")):
            found += 1
            if found > _MANY:
                return f"`{text}` means too many files to look at"
            why = _real(name)
            if why:
                return why
    except (OSError, ValueError, re.error):
        return f"which files `{text}` means cannot be seen"
    return ""


def _real(path: str) -> str:
    if not os.path.lexists(path):
        return ""
    real = os.path.realpath(path)
    return f"`{real}` may hold secrets" if _NAMES.search(real) else ""


def _inside(tree: str, place: Path) -> str:
    """Why a search through a whole folder may show secrets: a name in it, or too many to look at."""
    left = _MANY
    roots = [str(locate(place, tree))]
    if any(char in tree for char in "*?["):
        roots = glob.glob(roots[0])
    while roots:
        try:
            with os.scandir(roots.pop()) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        return f"`{tree}` holds too many files to see that no secrets are among them"
                    if _NAMES.search(entry.name):
                        return f"`{entry.name}` in `{tree}` may hold secrets"
                    if entry.is_dir(follow_symlinks=False):
                        roots.append(entry.path)
        except NotADirectoryError:
            continue
        except OSError:
            return f"`{tree}` cannot be looked through for secrets"
    return ""
