"""The program is killed at its failpoints, and what it leaves keeps every promise; deliberate faults do not.

The short form of `hermes selftest crash`: fewer points, all mutants.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hermes_agent.cli import selftest
from hermes_agent.testing.crash import bench, campaign, checks
from hermes_agent.testing.crash.campaign import Campaign, Catch, Report, Size, Tally
from hermes_agent.testing.crash.child import prepare
from hermes_agent.testing.crash.mutants import MUTANTS
from hermes_agent.testing.crash.scenario import MESSAGES, Outside

NOTHING = Size(windows=range(1), every=1000, doubles=0, poison=0, twice=0, zombie=0, line=0, crowd=0, steal=0)


@pytest.fixture(scope="module")
def plan():
    """Two benches; the conversation ran undisturbed on each."""
    base = campaign.workplace()
    try:
        with Campaign(base, 7, jobs=2) as running:
            yield running
    finally:
        campaign.clean_up(base, ())


def told(report: Report) -> str:
    return "\n".join(selftest.table(report))


def test_nothing_is_lost_or_done_twice(plan: Campaign):
    """Single and double kills, dead and overtaken owners, many who resume: no invariant breaks."""
    plan.kill(Size(every=7, doubles=12, poison=1, twice=4, zombie=6, line=6, crowd=2, steal=3))
    assert not plan.report.failures, told(plan.report)
    assert plan.report.lost == 0
    assert plan.report.kills > len(plan.report.tallies) + plan.report.points // 7


def test_every_deliberate_fault_is_caught(plan: Campaign):
    """The checks have teeth: no mutant of the protocol lives through its trials."""
    plan.hunt()
    caught = {catch.name: catch.caught_by for catch in plan.report.catches}
    assert caught.keys() == MUTANTS.keys()
    assert all(caught.values()), told(plan.report)


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(bench.Trial(1, (1, 20), "runner.admitted"), id="a prompt that was not stored yet stays the same"),
        pytest.param(bench.Trial(7, (1, 1), "loop.after_proposals"), id="arguments without JSON are refused again"),
        pytest.param(bench.Trial(5, (1,), "loop.after_model", "line"), id="each turn counts its own steps"),
        pytest.param(bench.Trial(2, (1,), "loop.before_model", "poison"), id="a turn is given up after three resumes"),
        pytest.param(bench.Trial(3, (1,), "executor.finished_kept", "twice"), id="two recoveries of one image agree"),
    ],
)
def test_what_a_kill_has_found_stays_found(plan: Campaign, trial: bench.Trial):
    """Sequences of deaths that once broke an invariant, or nearly."""
    outcome = plan._benches[0].run(trial)
    assert outcome.violations == []
    assert outcome.deaths


def test_kill_points_stand_on_both_sides_of_every_step(plan: Campaign):
    """Admission, lease, reply, dispatch, result and end of a turn can each be cut just before and just after."""
    names = {name for points in plan._benches[0].points for name in points}
    for before, after in (
        ("store.before_commit", "store.after_commit"),
        ("lease.acquired", "lease.released"),
        ("runner.before_accept", "runner.accepted"),
        ("runner.before_admit", "runner.admitted"),
        ("loop.before_model", "loop.after_model"),
        ("loop.before_proposals", "loop.after_proposals"),
        ("executor.before_start", "executor.started"),
        ("executor.dispatched", "executor.returned"),
        ("executor.before_row", "executor.after_row"),
        ("turn.before_end", "turn.after_end"),
    ):
        assert {before, after} <= names
    assert "executor.finished_kept" in names


def test_a_life_can_be_played_by_hand(tmp_path: Path):
    """`python -m hermes_agent.testing.crash.child DIR PLAN` dies where the plan says, and the next life finishes."""
    folder = tmp_path / "trial"

    def live(**plan: object) -> int:
        command = [sys.executable, "-m", "hermes_agent.testing.crash.child", str(folder), json.dumps(plan)]
        return subprocess.run(command, check=False, timeout=60, env=os.environ).returncode

    assert live(until=1, kill=1, point="tool.after_effect") == -9
    image, found = checks.look(folder, None, "tool.after_effect")
    assert found.violations == []
    assert image is not None
    assert [call["state"] for call in image.calls] == ["started"]

    assert live(until=2) == 0
    image, found = checks.look(folder, image)
    assert found.violations == []
    assert image is not None
    assert [call["state"] for call in image.calls] == ["unknown", "done"]
    assert [record["text"] for record in Outside(folder / "outside").read("acks")] == list(MESSAGES[:2])


def test_a_store_that_lost_its_session_is_noticed(tmp_path: Path):
    """Records of witnesses without a store are violations, not an empty success."""
    prepare(tmp_path / "trial")
    outside = Outside(tmp_path / "trial" / "outside")
    outside.note("acks", text="hello", turn="")
    outside.note("effects", kind="append", call="turn.1.0", name="x")
    image, found = checks.look(tmp_path / "trial", None)
    assert image is None
    assert [text.split(":")[0] for text in found.violations] == ["I1", "I5"]
    assert list(checks.settled(image)) == ["I7: there is no session"]


def test_a_broken_trial_keeps_its_folder(plan: Campaign):
    """A trial whose transcript is not the expected one is put aside, with all that is needed to look at it."""
    worker = plan._benches[0]
    for lines in worker._expected:
        lines.insert(0, ("row", "user", "something else"))
    try:
        outcome = worker.run(bench.Trial(1, (1,), "loop.after_model"))
    finally:
        for lines in worker._expected:
            del lines[0]
    assert [text.split(":")[0] for text in outcome.violations] == ["I16"]
    assert outcome.deaths == ["loop.after_model"]
    assert outcome.kept is not None
    assert (outcome.kept / "home" / "state.db").exists()


# -- the command ---------------------------------------------------------------------------


def test_the_command_prints_a_table_and_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """All well: exit code 0, one line a scenario, the seed, and nothing left behind."""
    monkeypatch.setattr(campaign, "SHORT", NOTHING)
    given = ["crash", "--short", "--no-mutants", "--seed", "5", "--jobs", "1", "--keep", str(tmp_path)]
    result = CliRunner().invoke(selftest.selftest, given, standalone_mode=False)
    assert result.exception is None
    assert result.return_value == 0
    assert "seed 5" in result.output
    assert "every failpoint once" in result.output
    assert "passed: 1 kills, 0 violations, 0 acknowledged rows lost" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_mutant_that_is_not_caught_fails_the_command(monkeypatch: pytest.MonkeyPatch):
    """A harness without teeth is a failure too: exit code 1 and the mutants by name."""
    monkeypatch.setattr(campaign, "SHORT", NOTHING)
    monkeypatch.setattr(campaign, "MUTANT_TRIALS", 0)
    result = CliRunner().invoke(selftest.selftest, ["crash", "--short", "--jobs", "1"], standalone_mode=False)
    assert result.return_value == 1
    assert "NOT CAUGHT: " + MUTANTS["unsafe_rerun"].what in result.output
    assert f"0 of {len(MUTANTS)} mutants caught" in result.output


def test_more_kills_are_made_until_there_are_enough(monkeypatch: pytest.MonkeyPatch):
    """`--kills N` goes on with double kills until N processes were killed."""
    monkeypatch.setattr(campaign, "LONG", NOTHING)
    given = ["crash", "--kills", "6", "--no-mutants", "--jobs", "1"]
    result = CliRunner().invoke(selftest.selftest, given, standalone_mode=False)
    assert result.return_value == 0
    verdict = result.output.splitlines()[-1]
    assert int(verdict.split()[1]) >= 6


def test_a_failure_names_all_that_is_needed_to_repeat_it():
    """Seed, trial, the points of death, the kept folder and the broken invariant stand in the table."""
    trial = bench.Trial(3, (2, 9), "executor.started")
    outcome = bench.Outcome(trial, ["executor.started"], ["I4: it ran twice"], kept=Path("/kept/failed-1"))
    caught = Catch("m", "a fault", "I1: seen", 1, 1)
    report = Report(11, tallies=[Tally("x", 1, 1, 1)], failures=[outcome], catches=[caught])
    text = told(report)
    for part in ("seed 11", "window=3", "point=executor.started", "kills=2,9", "/kept/failed-1", "I4: it ran twice"):
        assert part in text
    assert "FAILED: 1 kills, 1 violations" in text
    assert not report.good


def test_a_life_that_cannot_run_at_all_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """When even the undisturbed conversation fails, the self-test says so and how."""
    monkeypatch.setattr(bench, "prepare", lambda folder: (prepare(folder), (folder / "script.json").write_text("{}")))
    with pytest.raises(bench.BenchBroken, match="undisturbed"):
        bench.Bench(tmp_path / "bench")
