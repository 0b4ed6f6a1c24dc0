"""Check that requirements.lock says all that pyproject.toml asks for, and nothing of one machine.

Everything that the project needs here, directly or through another package, is
pinned within the bounds, with hashes, and installed as pinned; no line names an
index, a folder or an address. Reads only files and what is installed: no network.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)(?: ; (?P<marker>.+))?")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def read_pins(text: str, problems: list[str]) -> dict[str, str]:
    """The pinned version of each package; lines that are neither a pin, a hash nor a comment are problems."""
    pins: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        words = line.partition("#")[0].strip()
        if not words:
            continue
        pin, *hashes = re.split(r"\s+(?=--hash)", words)
        found = PIN.fullmatch(pin)
        if not found:
            problems.append(f"not a pin: {words[:60]}")
            continue
        if not hashes or not all(HASH.fullmatch(item) for item in hashes):
            problems.append(f"{found['name']} has no sha256 hash")
        pins[canonicalize_name(found["name"])] = found["version"]
    return pins


def check() -> list[str]:
    """Every problem, as a sentence."""
    problems: list[str] = []
    pins = read_pins((ROOT / "requirements.lock").read_text(encoding="utf-8"), problems)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    waiting = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    waiting += project["dependency-groups"]["dev"]
    todo = [(Requirement(text), "pyproject.toml") for text in waiting]
    seen: set[tuple[str, str]] = set()
    while todo:
        need, by = todo.pop()
        name = canonicalize_name(need.name)
        if name not in pins:
            problems.append(f"{need} (for {by}) is not in requirements.lock")
            continue
        if not need.specifier.contains(pins[name], prereleases=True):
            problems.append(f"{by} asks for {need}, requirements.lock has {pins[name]}")
        for extra in {"", *need.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            todo += [(deeper, name) for deeper in needs_of(name, extra, pins[name], problems)]
    return problems


def needs_of(name: str, extra: str, pinned: str, problems: list[str]) -> list[Requirement]:
    """What one installed package needs here."""
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        problems.append(f"{name} is not installed: run make test")
        return []
    if package.version != pinned:
        problems.append(f"{name} {package.version} is installed, requirements.lock has {pinned}")
    environment = {**default_environment(), "extra": extra}
    needs = [Requirement(text) for text in package.requires or ()]
    return [need for need in needs if need.marker is None or need.marker.evaluate(environment)]


if __name__ == "__main__":
    found = check()
    print("\n".join(found) if found else "requirements.lock: complete, bounded and hashed")
    sys.exit(bool(found))
