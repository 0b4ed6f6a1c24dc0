"""Whole processes, from exec to exit: the version, and one answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench import children
from bench.children import Result, column
from bench.figures import Figure, Reach
from bench.model_server import ModelServer
from bench.plan import Benchmark, Plan, Unavailable

HERE = Path(__file__).resolve().parent


def _hermes() -> str:
    """The installed command beside the Python that runs this."""
    found = Path(sys.executable).with_name("hermes")
    if not found.exists():
        raise Unavailable(f"{found} is missing: install the project into this environment")
    return str(found)


def _run(home: Path, says: str, *command: str, **variables: str) -> Result:
    """Run a command and take its time; its output must begin with `says`."""
    output = home / "output"
    timed = [sys.executable, "-I", "-S", str(HERE / "timed.py"), str(output), *command]
    done = subprocess.run(
        timed, cwd=home, env=children.environment(home, **variables), capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout)
    said = output.read_text(encoding="utf-8", errors="replace")
    if result["status"] or not said.startswith(says):
        raise RuntimeError(f"{' '.join(command)} ended with {result['status']} and said: {said[-2000:]}")
    return result


def version(plan: Plan) -> list[Figure]:
    hermes = _hermes()
    with plan.folder() as home:
        rounds = children.rotate(
            plan.rounds(25),
            {
                "ours": lambda: _run(home, "hermes ", hermes, "--version"),
                "floor": lambda: _run(home, "", sys.executable, "-I", "-S", "-c", "pass"),
                "site": lambda: _run(home, "", sys.executable, "-c", "pass"),
            },
            warm_up=True,
        )
    ours, floor, site = rounds["ours"], rounds["floor"], rounds["site"]
    return [
        Figure("version CPU", "ms", column(ours, "cpu", 1e3), column(floor, "cpu", 1e3), Reach(3)),
        Figure("version wall", "ms", column(ours, "wall", 1e3), column(floor, "wall", 1e3)),
        Figure("python -c pass CPU", "ms", column(site, "cpu", 1e3), column(floor, "cpu", 1e3)),
    ]


def answer(plan: Plan) -> list[Figure]:
    hermes = _hermes()
    with plan.folder() as home, ModelServer() as server:
        script = home / "script.json"
        script.write_text(json.dumps({"replies": [{"text": "ok"}]}), encoding="utf-8")
        offline = (hermes, "-z", "hi", "--provider", "scripted", "--script", str(script))
        online = (hermes, "-z", "hi", "--base-url", server.url, "-m", "bench")
        floor = (sys.executable, str(HERE / "floor_answer.py"), "--url", server.url, "--store", str(home / "floor.db"))
        rounds = children.rotate(
            plan.rounds(11),
            {
                "scripted": lambda: _run(home, "ok", *offline),
                "http": lambda: _run(home, "ok", *online, OPENAI_API_KEY="none"),
                "floor": lambda: _run(home, "ok", *floor, "hi"),
            },
            warm_up=True,
        )
    figures: list[Figure] = []
    for side, name in (("scripted", "answer"), ("http", "answer over HTTP")):
        for key, unit, scale, reach in (
            ("wall", "ms", 1e3, Reach(2.5)),
            ("cpu", "ms", 1e3, None),
            ("peak", "MB", 1, Reach(45, alone=True)),
        ):
            title = {"wall": "wall", "cpu": "CPU", "peak": "peak memory"}[key]
            ours, least = column(rounds[side], key, scale), column(rounds["floor"], key, scale)
            figures.append(Figure(f"{name} {title}", unit, ours, least, reach))
    return figures


BENCHMARKS = (
    Benchmark("version", "hermes --version", ("version CPU", "version wall", "python -c pass CPU"), version),
    Benchmark(
        "answer",
        "hermes -z, one short answer",
        (
            "answer wall",
            "answer CPU",
            "answer peak memory",
            "answer over HTTP wall",
            "answer over HTTP CPU",
            "answer over HTTP peak memory",
        ),
        answer,
    ),
)
