"""The measured processes: a clean environment, one rotation, one JSON line each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARK = "RESULT "
_LIMIT_SECONDS = 900

Result = dict[str, Any]


def environment(home: Path, **more: str) -> dict[str, str]:
    """Nothing of the caller's environment but where programs and modules are found."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    return {**kept, "HOME": str(home), "HERMES_HOME": str(home), "NO_COLOR": "1", **more}


def module(
    name: str, *arguments: object, home: Path, before: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Result:
    """Run `python -m bench.NAME` and return what it reported; `before` is a command put in front."""
    command = [*before, sys.executable, "-m", f"bench.{name}", *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(home, **(variables or {})),
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(lines[-1].removeprefix(MARK))


def report(result: Result) -> None:
    """Hand the result to the process that started this one."""
    print(MARK + json.dumps(result), flush=True)


def rotate(rounds: int, sides: Mapping[str, Callable[[], Result]], *, warm_up: bool = False) -> dict[str, list[Result]]:
    """Run every side once a round, the order turned round each time; a warm-up round is thrown away."""
    results: dict[str, list[Result]] = {name: [] for name in sides}
    for number in range(-1 if warm_up else 0, rounds):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in order:
            result = sides[name]()
            if number >= 0:
                results[name].append(result)
    return results


def column(results: Sequence[Result], key: str, scale: float = 1.0) -> list[float]:
    """One value of each result."""
    return [result[key] * scale for result in results]
