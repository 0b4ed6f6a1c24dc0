"""The session store alone: appends, resume and size against the floor, and commits that many share."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from bench import children
from bench.children import Result, column
from bench.figures import Figure, Reach
from bench.plan import Benchmark, Plan, Unavailable

SESSIONS = 16
SLOWER = 0.002
"""Seconds that slow_sync.c adds to each sync."""


def store(plan: Plan) -> list[Figure]:
    rows, total = plan.size(10_000, 100), plan.size(100_000, 1_100)

    def run(until: int) -> Result:
        with plan.folder(memory=True) as folder:
            given = ("--folder", folder, "--rows", rows, "--total", until)
            return children.module("store_run", *given, home=folder)

    runs = [run(total if number == 0 else rows) for number in range(plan.rounds(3))]

    def joined(what: str, side: str, scale: float) -> list[float]:
        return [value * scale for result in runs for value in result[what][side]]

    def growth(side: str) -> list[float]:
        return [_last_against_first(result["append"][side]) for result in runs]

    def pair(what: str, scale: float) -> tuple[list[float], list[float]]:
        return joined(what, "ours", scale), joined(what, "floor", scale)

    sizes = [[runs[0]["size"][side] / 1e6] for side in ("ours", "floor")]
    return [
        Figure("append", "µs CPU", *pair("append", 1e6), Reach(1.5)),
        Figure(
            "append, last tenth against the first",
            "times",
            growth("ours"),
            growth("floor"),
            Reach(1.25, alone=True),
        ),
        Figure("resume", "ms CPU", *pair("resume", 1e3), Reach(1)),
        Figure("file", "MB", sizes[0], sizes[1], Reach(1.5)),
    ]


def _last_against_first(costs: Sequence[float]) -> float:
    tenth = max(len(costs) // 10, 1)
    return fmean(costs[-tenth:]) / fmean(costs[:tenth])


def group_commit(plan: Plan) -> list[Figure]:
    if shutil.which("cc") is None:
        raise Unavailable("cc, a C compiler, is not installed")
    rows = plan.size(100, 4)
    with plan.folder() as folder:
        library = folder / "slow_sync.so"
        source = Path(__file__).with_name("slow_sync.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)

        def run(alone: bool, slow: bool) -> Result:
            with plan.folder() as home:
                given = ("--folder", home, "--sessions", SESSIONS, "--rows", rows, *(("--alone",) if alone else ()))
                variables = {"LD_PRELOAD": str(library)} if slow else {}
                return children.module("append_run", *given, home=home, variables=variables)

        rounds = children.rotate(
            plan.rounds(),
            {
                "shared": lambda: run(alone=False, slow=False),
                "alone": lambda: run(alone=True, slow=False),
                "shared, slow": lambda: run(alone=False, slow=True),
                "alone, slow": lambda: run(alone=True, slow=True),
            },
        )
    if max(column(rounds["alone, slow"], "rate")) > 1 / SLOWER:
        raise RuntimeError("slow_sync.c did not slow the syncs down")
    figures: list[Figure] = []
    for name, least, disk in (("", 2.5, ""), (", slow", 5, ", slow syncs")):
        shared, alone = rounds["shared" + name], rounds["alone" + name]
        figures += [
            Figure(
                f"16 sessions{disk}",
                "rows a second",
                column(shared, "rate"),
                column(alone, "rate"),
                Reach(least, at_least=True),
            ),
            Figure(
                f"16 sessions{disk}, rows a commit",
                "rows",
                column(shared, "rows"),
                column(alone, "rows"),
                Reach(6, alone=True, at_least=True),
            ),
        ]
    return figures


BENCHMARKS = (
    Benchmark(
        "store",
        "append, resume and size of the session store",
        ("append", "append, last tenth against the first", "resume", "file"),
        store,
    ),
    Benchmark(
        "group-commit",
        "16 sessions that append at once",
        (
            "16 sessions",
            "16 sessions, rows a commit",
            "16 sessions, slow syncs",
            "16 sessions, slow syncs, rows a commit",
        ),
        group_commit,
    ),
)
