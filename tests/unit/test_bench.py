"""Each benchmark runs in its smallest form and yields what it promises; no figure is judged here."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
from bench import __main__ as bench
from bench.children import rotate
from bench.figures import Figure, Reach, Spread, table
from bench.plan import Plan, Unavailable
from bench.turns import _slope

NEEDS = {"writes": "strace", "group-commit": "cc"}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """One round, in memory where the machine has it: nothing here depends on the disk."""
    memory = Path("/dev/shm")
    folder = memory if memory.is_dir() else tmp_path
    return Plan(reps=1, small=True, disk=folder, memory=folder)


@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_a_benchmark_yields_the_figures_it_promises(name: str, plan: Plan, unmeasured: None) -> None:
    benchmark = bench.BENCHMARKS[name]
    needs = NEEDS.get(name)
    if needs is not None and shutil.which(needs) is None:
        with pytest.raises(Unavailable, match=needs):
            benchmark.run(plan)
        return
    figures = benchmark.run(plan)
    assert tuple(figure.name for figure in figures) == benchmark.promises
    if name == "writes":
        # counts are no timings: two commits and two syncs a step, one more of each for an unsafe tool
        counted = {figure.name: figure.ours for figure in figures}
        assert [counted[what] for what in ("commits", "syncs", "syncs, NORMAL")] == [[2], [2], [0]]
        assert [counted[what] for what in ("commits, unsafe tool", "syncs, unsafe tool")] == [[3], [3]]
    for figure in figures:
        assert figure.ours
        assert all(math.isfinite(value) for value in (*figure.ours, *figure.floor))
        assert figure.name == "rise" or all(value >= 0 for value in figure.ours)


def test_the_command_prints_a_table_and_writes_every_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unmeasured: None
) -> None:
    file = tmp_path / "figures.json"
    folders = ["--disk", str(tmp_path), "--memory", str(tmp_path)]
    assert bench.main(["version", "--small", "--reps", "2", "--json", str(file), *folders]) == 0
    found = json.loads(file.read_text())
    assert found["machine"]["python"] == sys.version.split()[0]
    assert [len(figure["ours"]) for figure in found["figures"]] == [2, 2, 2]
    assert found["figures"][0]["ratio"]["n"] == 2
    assert "| version CPU, ms |" in capsys.readouterr().out


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["loop-7"])
    assert "loop-100" in capsys.readouterr().err


def test_every_figure_is_explained(project: Path) -> None:
    text = (project / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for benchmark in bench.BENCHMARKS.values():
        assert f"`{benchmark.name}`" in text
        for name in benchmark.promises:
            assert f"| {name}, " in text, f"the table of the last run lacks {name}"


def test_a_ratio_is_of_the_two_runs_of_one_round() -> None:
    figure = Figure("x", "ms", [2.0, 9.0, 4.0], [1.0, 3.0, 4.0], Reach(2))
    assert Spread.of(figure.ratios) == Spread(2.0, 1.0, 3.0, 3)
    assert figure.reached


@pytest.mark.parametrize(
    ("reach", "reached"),
    [(Reach(1.9), False), (Reach(2), True), (Reach(2.1, at_least=True), False), (Reach(9, alone=True), False)],
)
def test_a_target_is_kept_by_the_median(reach: Reach, reached: bool) -> None:
    figure = Figure("x", "ms", [10.0, 20.0, 30.0], [5.0, 10.0, 30.0], reach)
    assert figure.reached is reached
    assert ("**missed**" in table([figure])) is not reached


def test_each_round_turns_the_order_round_and_the_warm_up_does_not_count() -> None:
    order: list[str] = []

    def side(name: str) -> dict[str, int]:
        order.append(name)
        return {"at": len(order)}

    results = rotate(2, {"a": lambda: side("a"), "b": lambda: side("b")}, warm_up=True)
    assert "".join(order) == "baabba"
    assert [result["at"] for result in results["a"]] == [3, 6]


def test_the_rise_is_the_slope_of_a_steps_cost() -> None:
    marks = [0.0]
    for number in range(50):
        marks.append(marks[-1] + 1.0 + 0.25 * number)
    assert _slope(marks) == pytest.approx(0.25)
