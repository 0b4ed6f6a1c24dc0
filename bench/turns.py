"""Turns of tool steps against a scripted model: CPU, its rise, parallel tools, and what is written."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from bench import children
from bench.children import Result, column
from bench.figures import Figure, Reach
from bench.model_server import ModelServer
from bench.plan import Benchmark, Plan, Unavailable

CALLS = 8
NAP = 0.05
_SYSCALLS = ("fsync", "fdatasync", "pwrite64", "pwritev")


def _turn(plan: Plan, side: str, steps: int, *arguments: object, memory: bool = False, calls: int = 1) -> Result:
    """One turn in a process of its own, against a server of its own; `server` is the CPU spent there."""
    tool = "nap" if side == "our_loop" and ("--nap" in arguments or "--unsafe" in arguments) else "todo"
    with plan.folder(memory=memory) as folder, ModelServer(steps=steps, calls=calls, tool=tool) as server:
        given = ("--port", server.port, "--folder", folder, "--steps", steps, "--calls", calls, *arguments)
        result = children.module(side, *given, home=folder)
        return {**result, "server": server.turn_cpu()}


def _loop(plan: Plan, name: str, steps: int, *arguments: object) -> list[Figure]:
    rounds = children.rotate(
        plan.rounds(9 if steps <= 100 else 1),
        {
            "ours": lambda: _turn(plan, "our_loop", steps, *arguments),
            "floor": lambda: _turn(plan, "floor_loop", steps, *arguments),
        },
    )
    ours, floor = rounds["ours"], rounds["floor"]
    scale = 1000 / steps
    return [
        Figure(f"{name} CPU", "ms a step", column(ours, "cpu", scale), column(floor, "cpu", scale), Reach(2)),
        Figure(f"{name} wall", "ms a step", column(ours, "wall", scale), column(floor, "wall", scale)),
        Figure(f"{name} server CPU", "ms a step", column(ours, "server", scale), column(floor, "server", scale)),
    ]


def loop_100(plan: Plan) -> list[Figure]:
    return _loop(plan, "loop-100", plan.size(100, 3))


def loop_100_streamed(plan: Plan) -> list[Figure]:
    return _loop(plan, "loop-100-streamed", plan.size(100, 3), "--stream")


def loop_1000(plan: Plan) -> list[Figure]:
    return _loop(plan, "loop-1000", plan.size(1000, 4))


def rise(plan: Plan) -> list[Figure]:
    """How much dearer a step is for each step before it, with no disk in the way."""
    steps = plan.size(1000, 20)
    given = ("--synchronous", "NORMAL")
    rounds = children.rotate(
        plan.rounds(3),
        {
            "ours": lambda: _turn(plan, "our_loop", steps, *given, memory=True),
            "floor": lambda: _turn(plan, "floor_loop", steps, *given, memory=True),
        },
    )
    ours, floor = ([_slope(result["marks"]) * 1e6 for result in rounds[side]] for side in ("ours", "floor"))
    return [Figure("rise", "µs CPU per earlier step", ours, floor, Reach(3, alone=True))]


def _slope(marks: Sequence[float]) -> float:
    """Least squares of a step's cost over its number."""
    costs = [after - before for before, after in itertools.pairwise(marks)]
    middle, mean = (len(costs) - 1) / 2, fmean(costs)
    top = sum((number - middle) * (cost - mean) for number, cost in enumerate(costs))
    return top / sum((number - middle) ** 2 for number in range(len(costs)))


def parallel(plan: Plan) -> list[Figure]:
    steps = plan.size(5, 1)
    given = ("--nap", NAP if not plan.small else 0.001)
    rounds = children.rotate(
        plan.rounds(9),
        {
            "ours": lambda: _turn(plan, "our_loop", steps, *given, calls=CALLS),
            "floor": lambda: _turn(plan, "floor_loop", steps, *given, calls=CALLS),
        },
    )
    ours, floor = rounds["ours"], rounds["floor"]
    scale = 1000 / steps
    return [
        Figure("parallel-8 wall", "ms a batch", column(ours, "wall", scale), column(floor, "wall", scale), Reach(1.15)),
        Figure("parallel-8 CPU", "ms a batch", column(ours, "cpu", scale), column(floor, "cpu", scale)),
    ]


# -- what a step writes --------------------------------------------------------


def writes(plan: Plan) -> list[Figure]:
    """Counted by strace as the difference of a long and a short turn, so that start and end fall out."""
    if shutil.which("strace") is None:
        raise Unavailable("strace is not installed")
    long, short = plan.size(50, 4), plan.size(10, 2)
    floor = _written(plan, "floor_loop", long, short)
    ours = _written(plan, "our_loop", long, short)
    unsafe = _written(plan, "our_loop", long, short, "--unsafe")
    normal = _written(plan, "our_loop", long, short, "--synchronous", "NORMAL")
    kinds = (("commits", 2.05), ("syncs", 2.05), ("pwrites", 36.0))
    return [
        *(Figure(kind, "a step", [ours[kind]], [floor[kind]], Reach(most, alone=True)) for kind, most in kinds),
        *(
            Figure(f"{kind}, unsafe tool", "a step", [unsafe[kind]], [floor[kind]], Reach(most + 1, alone=True))
            for kind, most in kinds[:2]
        ),
        Figure("syncs, NORMAL", "a step", [normal["syncs"]], (), Reach(0.05, alone=True)),
    ]


def _written(plan: Plan, side: str, long: int, short: int, *arguments: object) -> dict[str, float]:
    most, least = _traced(plan, side, long, *arguments), _traced(plan, side, short, *arguments)
    return {kind: (most[kind] - least[kind]) / (long - short) for kind in most}


def _traced(plan: Plan, side: str, steps: int, *arguments: object) -> dict[str, int]:
    tool = "nap" if "--unsafe" in arguments else "todo"
    with plan.folder() as folder, ModelServer(steps=steps, tool=tool) as server:
        counts = folder / "calls"
        before = ["strace", "-f", "--seccomp-bpf", "-qq", "-c", "-o", str(counts), "-e", f"trace={','.join(_SYSCALLS)}"]
        given = ("--port", server.port, "--folder", folder, "--steps", steps, *arguments)
        commits = children.module(side, *given, home=folder, before=before)["commits"]
        calls = _counts(counts)
    return {
        "commits": commits,
        "syncs": calls.get("fsync", 0) + calls.get("fdatasync", 0),
        "pwrites": calls.get("pwrite64", 0) + calls.get("pwritev", 0),
    }


def _counts(table: Path) -> dict[str, int]:
    """Calls by name from strace's summary: `% seconds usecs calls [errors] name`."""
    found: dict[str, int] = {}
    for line in table.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if len(words) >= 5 and words[-1] in _SYSCALLS:
            found[words[-1]] = int(words[3])
    return found


def _promises(name: str) -> tuple[str, ...]:
    return tuple(f"{name} {what}" for what in ("CPU", "wall", "server CPU"))


BENCHMARKS = (
    Benchmark("loop-100", "a turn of 100 tool steps", _promises("loop-100"), loop_100),
    Benchmark(
        "loop-100-streamed", "the same, with streamed answers", _promises("loop-100-streamed"), loop_100_streamed
    ),
    Benchmark("loop-1000", "a turn of 1,000 tool steps", _promises("loop-1000"), loop_1000),
    Benchmark("rise", "what an earlier step costs a later one", ("rise",), rise),
    Benchmark(
        "writes",
        "commits, syncs and writes of a step",
        ("commits", "syncs", "pwrites", "commits, unsafe tool", "syncs, unsafe tool", "syncs, NORMAL"),
        writes,
    ),
    Benchmark("parallel", "8 tools of 50 ms at once", ("parallel-8 wall", "parallel-8 CPU"), parallel),
)
