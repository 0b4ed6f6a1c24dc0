"""The kill plan: which trials are run, in which order, and what they came to."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TypeVar

from hermes_agent.testing.crash.bench import WINDOWS, Bench, Outcome, Trial
from hermes_agent.testing.crash.mutants import MUTANTS, Mutant

MAX_FAILURES = 5
"""After so many broken trials a campaign has said enough."""
MUTANT_TRIALS = 150
"""A mutant that lives through so many trials was not caught."""
_OF_A_TOOL = ("executor.dispatched", "executor.returned", "tool.", "terminal.")
"""Beginnings of the points that lie on a tool's own thread."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much a campaign does."""

    windows: range = WINDOWS
    every: int = 1
    """Every failpoint, or every n-th."""
    doubles: int = 100
    """Trials that kill again during recovery, at least."""
    kills: int = 0
    """With more of them until so many lives were killed."""
    poison: int = 5
    twice: int = 20
    zombie: int = 30
    line: int = 20
    crowd: int = 8
    steal: int = 8


SHORT = Size()
LONG = Size(doubles=400, poison=20, twice=80, zombie=120, line=80, crowd=40, steal=40)


@dataclass(slots=True)
class Tally:
    """One line of the table: a kind of trial."""

    name: str
    trials: int = 0
    kills: int = 0
    violations: int = 0
    lost: int = 0


@dataclass(slots=True)
class Catch:
    """What became of a mutant."""

    name: str
    what: str
    caught_by: str = ""
    """The invariant that it broke, and how; "" when it was not caught."""
    trials: int = 0
    kills: int = 0


@dataclass(slots=True)
class Report:
    """What a campaign found."""

    seed: int
    points: int = 0
    """Failpoint hits of the undisturbed conversation."""
    names: int = 0
    """Different failpoints among them."""
    tallies: list[Tally] = field(default_factory=list[Tally])
    failures: list[Outcome] = field(default_factory=list[Outcome])
    catches: list[Catch] = field(default_factory=list[Catch])

    @property
    def kills(self) -> int:
        return sum(tally.kills for tally in self.tallies)

    @property
    def lost(self) -> int:
        return sum(tally.lost for tally in self.tallies)

    @property
    def good(self) -> bool:
        return not self.failures and all(catch.caught_by for catch in self.catches)


T = TypeVar("T")
Say = Callable[[str], None]


class Campaign:
    """Trials on several benches at once, one thread each."""

    def __init__(self, base: Path, seed: int, jobs: int = 1, say: Say = lambda _: None) -> None:
        self._seed = seed
        self._say = say
        self._lock = threading.Lock()
        self._benches: list[Bench] = []
        try:
            for number in range(jobs):
                self._benches.append(Bench(base / f"bench-{number}"))
        except BaseException:
            self.close()
            raise
        points = self._benches[0].points
        self.report = Report(seed, sum(map(len, points)), len(set(itertools.chain(*points))))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for bench in self._benches:
            bench.close()

    def kill(self, size: Size) -> None:
        """Run the trials of the product itself."""
        bench, rng = self._benches[0], _random(self._seed)
        self._series("every failpoint once", iter(starts(bench, size.windows)[:: size.every]))
        for kind, title in _TITLES.items():
            trials = others(bench, rng, size.windows, kind)
            self._series(title, itertools.islice(trials, getattr(size, kind)))
        self._series("and again during recovery", self._doubles(bench, rng, size))

    def hunt(self, names: Iterable[str] = tuple(MUTANTS)) -> None:
        """Put each mutant in and run trials until a check sees it."""
        todo = iter(list(names))

        def work(bench: Bench) -> None:
            while (name := self._next(todo)) is not None:
                catch = hunt(bench, name, self._seed)
                with self._lock:
                    self.report.catches.append(catch)
                self._say(f"mutant {name}: {catch.caught_by or 'NOT CAUGHT'}")

        self._everywhere(work)
        order = list(MUTANTS)
        self.report.catches.sort(key=lambda catch: order.index(catch.name))

    # -- inside ------------------------------------------------------------------

    def _doubles(self, bench: Bench, rng: random.Random, size: Size) -> Iterator[Trial]:
        trials = doubles(bench, rng, size.windows)
        yield from itertools.islice(trials, size.doubles)
        while self.report.kills < size.kills:
            yield next(trials)

    def _series(self, name: str, trials: Iterator[Trial]) -> None:
        tally = Tally(name)
        self.report.tallies.append(tally)

        def work(bench: Bench) -> None:
            while len(self.report.failures) < MAX_FAILURES and (trial := self._next(trials)) is not None:
                outcome = bench.run(trial)
                with self._lock:
                    self._count(tally, outcome)

        self._everywhere(work)
        self._say(f"{name}: {tally.trials} trials, {tally.kills} kills, {tally.violations} violations")

    def _count(self, tally: Tally, outcome: Outcome) -> None:
        tally.trials += 1
        tally.kills += len(outcome.deaths)
        tally.lost += outcome.lost
        if outcome.violations:
            tally.violations += len(outcome.violations)
            self.report.failures.append(outcome)

    def _next(self, source: Iterator[T]) -> T | None:
        with self._lock:
            return next(source, None)

    def _everywhere(self, work: Callable[[Bench], None]) -> None:
        """Do the work on all benches and raise what any of them raised."""
        errors: list[BaseException] = []

        def guarded(bench: Bench) -> None:
            try:
                work(bench)
            except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(bench,), daemon=True) for bench in self._benches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            raise error


_TITLES = {
    "poison": "in every life",
    "twice": "one image recovered twice",
    "zombie": "an owner frozen, overtaken, woken",
    "line": "a message taken behind a held turn",
    "crowd": "eight resume at once",
    "steal": "three steal the lease from each other",
}


# -- trials ------------------------------------------------------------------------------


def starts(bench: Bench, windows: range, kind: str = "kill") -> list[Trial]:
    """A trial of that kind for each failpoint hit at which one may begin."""
    found: list[Trial] = []
    for window in windows:
        names = bench.points[window]
        hits = range(len(names))
        if kind != "kill" and window == 0:
            continue  # nothing to resume yet
        if kind == "line":
            if window == WINDOWS[-1]:
                continue  # no next message
            hits = range(names.index("runner.admitted"), names.index("runner.settled"))
        freezes = kind in ("zombie", "line")
        found += [
            Trial(window, (names[: hit + 1].count(names[hit]),), names[hit], kind)
            for hit in hits
            if not (freezes and _may_hold_the_file(names, hit))
        ]
    return found


def _may_hold_the_file(names: list[str], hit: int) -> bool:
    """Whether a process that is frozen there may be inside a transaction, so that everybody waits for it."""
    so_far = names[: hit + 1]
    side_by_side = so_far.count("executor.dispatched") - so_far.count("executor.after_row") > 1
    return names[hit] == "store.before_commit" or (side_by_side and names[hit].startswith(_OF_A_TOOL))


def doubles(bench: Bench, rng: random.Random, windows: range) -> Iterator[Trial]:
    """Kills again while an earlier kill is being recovered from, without end."""
    first = starts(bench, windows)
    while True:
        later = [rng.randint(1, 40 if rng.random() < 0.7 else 120) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
        trial = rng.choice(first)
        yield replace(trial, kills=(*trial.kills, *later))


def others(bench: Bench, rng: random.Random, windows: range, kind: str) -> Iterator[Trial]:
    """Trials of another kind, each at a random point, without end."""
    first = starts(bench, windows, kind)
    while True:
        yield rng.choice(first)


def hunt(bench: Bench, name: str, seed: int) -> Catch:
    """Run trials with a mutant until a check sees it; first at the points where it should show."""
    catch = Catch(name, MUTANTS[name].what)
    trials = _trials_of(bench, name, MUTANTS[name], _random(f"{seed} {name}"))
    for trial in itertools.islice(trials, MUTANT_TRIALS):
        outcome = bench.run(trial)
        catch.trials += 1
        catch.kills += len(outcome.deaths)
        if outcome.violations:
            catch.caught_by = outcome.violations[0]
            break
    return catch


def _trials_of(bench: Bench, name: str, mutant: Mutant, rng: random.Random) -> Iterator[Trial]:
    trials = [replace(trial, mutant=name) for trial in starts(bench, WINDOWS, mutant.kind)]
    rng.shuffle(trials)
    focus = [trial for trial in trials if trial.point in mutant.focus]
    # some show only when threads come in a certain order: more than one try at the best points
    yield from focus * 5
    yield from (trial for trial in trials if trial.point not in mutant.focus)


def _random(seed: int | str) -> random.Random:
    return random.Random(seed)  # noqa: S311 - the same kills for the same seed


def workplace(keep: Path | None = None) -> Path:
    """A new folder for trials, in memory where there is such a place."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="hermes-crash-", dir=keep))
    memory = Path("/dev/shm")  # noqa: S108 - a kill of the process needs no disk, and syncs cost ten times the trial
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    return Path(tempfile.mkdtemp(prefix="hermes-crash-", dir=memory if usable else None))


def clean_up(base: Path, failures: Iterable[Outcome]) -> None:
    """Remove what the trials left, except the folders of failed ones."""
    kept = {outcome.kept for outcome in failures if outcome.kept}
    for path in base.glob("bench-*/*"):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)
    if not kept:
        shutil.rmtree(base, ignore_errors=True)
