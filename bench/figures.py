"""What a benchmark yields: samples of ours and of the floor, their ratio, and the target."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Reach:
    """A target: `value` is a limit of the ratio or, with `alone`, of our own samples."""

    value: float
    alone: bool = False
    at_least: bool = False

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{sign} {self.value:g}" + ("" if self.alone else " x")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of some samples."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        return cls(statistics.median(samples), min(samples), max(samples), len(samples))

    def __str__(self) -> str:
        if self.low == self.high:
            return number(self.median)
        return f"{number(self.median)} ({number(self.low)} to {number(self.high)})"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity; sample k of `ours` and of `floor` come from the same round of one rotation."""

    name: str
    unit: str
    ours: Sequence[float]
    floor: Sequence[float] = ()
    reach: Reach | None = None
    ratios: list[float] = field(init=False)

    def __post_init__(self) -> None:
        pairs = zip(self.ours, self.floor, strict=True) if self.floor else ()
        object.__setattr__(self, "ratios", [a / b for a, b in pairs if b > 0])

    @property
    def reached(self) -> bool | None:
        """Whether the median keeps the target; None without one."""
        reach = self.reach
        if reach is None:
            return None
        median = statistics.median(self.ours if reach.alone else self.ratios)
        return median >= reach.value if reach.at_least else median <= reach.value

    def as_json(self) -> dict[str, Any]:
        spread = Spread.of(self.ratios) if self.ratios else None
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": list(self.ours),
            "floor": list(self.floor),
            "ratio": None
            if spread is None
            else {"median": spread.median, "min": spread.low, "max": spread.high, "n": spread.n},
            "reach": None if self.reach is None else str(self.reach),
            "reached": self.reached,
        }


def number(value: float) -> str:
    """Three digits that mean something, never in powers of ten."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(figures: Sequence[Figure]) -> str:
    """The figures as a Markdown table."""
    lines = ["| figure | ours | floor | ratio | n | reach | |", "|---|---|---|---|---|---|---|"]
    for figure in figures:
        verdict = {None: "", True: "reached", False: "**missed**"}[figure.reached]
        cells = [
            f"{figure.name}, {figure.unit}",
            str(Spread.of(figure.ours)),
            str(Spread.of(figure.floor)) if figure.floor else "-",
            str(Spread.of(figure.ratios)) if figure.ratios else "-",
            str(len(figure.ours)),
            str(figure.reach or "-"),
            verdict,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def machine(disk: Path, memory: Path) -> dict[str, str]:
    """Where and when the figures were taken."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": " ".join(f"{value:.1f}" for value in os.getloadavg()),
        "disk": f"{disk} ({_file_system(disk)})",
        "memory": f"{memory} ({_file_system(memory)})",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _file_system(folder: Path) -> str:
    """The type of the mount that holds `folder`."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return "unknown"
    at = os.path.realpath(folder)
    holds = [(point, kind) for point, kind in mounts if at == point or at.startswith(point.rstrip("/") + "/")]
    return max(holds, key=lambda mount: len(mount[0]))[1] if holds else "unknown"
