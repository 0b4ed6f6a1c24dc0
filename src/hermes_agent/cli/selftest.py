"""`hermes selftest`: what an installation can prove about itself.

`crash` kills the program at every failpoint of a scripted conversation and checks what it left.
Needs no model, no key and no network.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import click

from hermes_agent.errors import HermesError
from hermes_agent.testing.crash import campaign
from hermes_agent.testing.crash.bench import Outcome
from hermes_agent.testing.crash.campaign import Campaign, Report, Tally

_DEFAULT_SEED = 20261


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def selftest() -> None:
    """Check this installation by killing the agent again and again."""


@selftest.command()
@click.option("--short", is_flag=True, help="Every failpoint once, some double kills, all mutants; about a minute.")
@click.option("--kills", type=click.IntRange(min=1), help="Go on until so many processes were killed.")
@click.option("--seed", type=int, default=_DEFAULT_SEED, show_default=True, help="Where the random kills begin.")
@click.option("--mutants/--no-mutants", default=True, help="Also show that deliberate faults are caught.")
@click.option(
    "--keep", type=click.Path(file_okay=False, path_type=Path), help="Work below this folder; failed trials stay there."
)
@click.option("--jobs", type=click.IntRange(1, 16), help="Trials at once; as many as there are processors, at most 4.")
def crash(*, short: bool, kills: int | None, seed: int, mutants: bool, keep: Path | None, jobs: int | None) -> int:
    """Kill the agent at every failpoint, resume it, and check that nothing was lost or done twice."""
    size = campaign.SHORT if short or kills else campaign.LONG
    if kills:
        size = dataclasses.replace(campaign.SHORT if short else campaign.LONG, kills=kills)
    base = campaign.workplace(keep)
    failures: list[Outcome] = []
    try:
        with Campaign(base, seed, jobs or min(os.cpu_count() or 1, 4), _progress) as run:
            report = run.report
            failures = report.failures
            run.kill(size)
            if mutants:
                run.hunt()
    finally:
        campaign.clean_up(base, failures)
    for line in table(report):
        click.echo(line)
    return 0 if report.good else 1


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(text, err=True)


def table(report: Report) -> list[str]:
    """The report as lines for a person."""
    lines = [
        f"crash self-test: {report.points} failpoint hits of {report.names} kinds, seed {report.seed}",
        "",
        f"{'scenario':<38}{'trials':>8}{'kills':>8}{'violations':>12}{'rows lost':>11}",
    ]
    trials = sum(tally.trials for tally in report.tallies)
    failed = sum(tally.violations for tally in report.tallies)
    total = Tally("all", trials, report.kills, failed, report.lost)
    lines += [
        f"{tally.name:<38}{tally.trials:>8}{tally.kills:>8}{tally.violations:>12}{tally.lost:>11}"
        for tally in (*report.tallies, total)
    ]
    if report.catches:
        lines += ["", f"{'mutant':<30}{'trials':>7}{'kills':>7}  caught by"]
        for catch in report.catches:
            caught = catch.caught_by if len(catch.caught_by) <= 76 else catch.caught_by[:75] + "…"
            lines.append(f"{catch.name:<30}{catch.trials:>7}{catch.kills:>7}  {caught or 'NOT CAUGHT: ' + catch.what}")
    for outcome in report.failures:
        died = ", ".join(outcome.deaths) or "nowhere"
        lines += ["", f"FAILED {outcome.trial} (seed {report.seed}); killed at {died}; kept in {outcome.kept}"]
        lines += [f"  {violation}" for violation in outcome.violations]
    caught = sum(1 for catch in report.catches if catch.caught_by)
    verdict = f"{report.kills} kills, {failed} violations, {report.lost} acknowledged rows lost"
    if report.catches:
        verdict += f", {caught} of {len(report.catches)} mutants caught"
    return [*lines, "", f"{'passed' if report.good else 'FAILED'}: {verdict}"]


command = selftest

if __name__ == "__main__":
    try:
        sys.exit(selftest.main(standalone_mode=False))
    except (click.ClickException, HermesError) as error:
        sys.exit(str(error))
