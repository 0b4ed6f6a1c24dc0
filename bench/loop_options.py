"""What both processes that run a turn are told, and how they measure it."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Options:
    """One turn to run."""

    port: int
    folder: Path
    steps: int
    calls: int
    nap: float
    """Seconds that each tool call sleeps."""
    synchronous: str
    stream: bool
    """The answers are asked for, and read, piece by piece."""
    unsafe: bool
    """The tool declares no effect class, so a row says that it was started."""


def parse() -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--calls", type=int, default=1)
    parser.add_argument("--nap", type=float, default=0.0)
    parser.add_argument("--synchronous", default="FULL")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--unsafe", action="store_true")
    return Options(**vars(parser.parse_args()))


class Measured:
    """Wall and CPU time of a block."""

    def __enter__(self) -> Self:
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall = time.perf_counter() - self._wall
        self.cpu = time.process_time() - self._cpu

    def result(self, ok: bool, *, commits: int, marks: list[float]) -> dict[str, Any]:
        """What the process reports; `marks` is the CPU time at each model call."""
        if not ok:
            raise SystemExit("the turn did not end as the script says")
        return {"wall": self.wall, "cpu": self.cpu, "commits": commits, "marks": marks}
