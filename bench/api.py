"""The gateway as a process, asked by many clients at once: its answers, their price, and what it takes when idle."""

from __future__ import annotations

from bench import children
from bench.children import Result, column
from bench.figures import Figure, Reach
from bench.model_server import ModelServer
from bench.plan import Benchmark, Plan

_FIGURES = (
    # name, unit, key, scale, limit, whether it is a least one
    ("api 1 client", "answers a second", "rate 1", 1, 100, True),
    ("api 8 clients", "answers a second", "rate 8", 1, 250, True),
    ("api 32 clients", "answers a second", "rate 32", 1, 400, True),
    ("api 32 clients p50", "ms", "p50 32", 1e3, 80, False),
    ("api 32 clients p99", "ms", "p99 32", 1e3, 250, False),
    ("api 1 client CPU", "ms a turn", "cpu 1", 1e3, 4, False),
    ("api 32 clients CPU", "ms a turn", "cpu 32", 1e3, 2.5, False),
    ("api start to ready", "ms", "ready", 1e3, 600, False),
    ("api first turn", "ms", "first", 1e3, 100, False),
    ("api idle memory", "MB", "memory", 1, 60, False),
    ("api memory growth", "MB a hundred sessions", "growth", 1, 0.5, False),
    ("api idle CPU", "% of a core", "idle", 1e2, 0.5, False),
)


def api(plan: Plan) -> list[Figure]:
    given = ("--turns", plan.size(100, 4), "--sessions", plan.size(200, 8), "--idle", plan.size(50, 1) / 10)

    def run(side: str) -> Result:
        with plan.folder() as folder, ModelServer() as server:
            arguments = ("--side", side, "--folder", folder, "--model", server.port, *given)
            return children.module("api_run", *arguments, home=folder)

    rounds = children.rotate(plan.rounds(), {"ours": lambda: run("ours"), "floor": lambda: run("floor")})
    return [
        Figure(
            name,
            unit,
            column(rounds["ours"], key, scale),
            column(rounds["floor"], key, scale),
            Reach(limit, alone=True, at_least=at_least),
        )
        for name, unit, key, scale, limit, at_least in _FIGURES
    ]


BENCHMARKS = (
    Benchmark("api", "the gateway under 1, 8 and 32 clients, and idle", tuple(name for name, *_ in _FIGURES), api),
)
