"""One trial: lives that are ended at chosen points, and what is found after each of them.

The conversation is cut into windows, one a message. A trial begins with the image of a store in
which all earlier windows ran undisturbed, kills lives inside its window, lets the client come
back until the next window is done as well, and checks the store after every life.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from hermes_agent.agent.run import MAX_CRASH_RESUMES
from hermes_agent.errors import HermesError
from hermes_agent.store import leases
from hermes_agent.testing.crash import checks
from hermes_agent.testing.crash.checks import Findings, Image
from hermes_agent.testing.crash.child import FINISHED, STALE, Plan, prepare
from hermes_agent.testing.crash.scenario import MESSAGES, Outside

RESTARTS = 3
"""After so many undisturbed lives every turn must have ended."""
MAX_TRIES = 10
CROWD = 8
THIEVES = 3
WINDOWS = range(len(MESSAGES) + 1)
"""Window 0 is the process that takes the first message and dies; window n runs message n."""

Ended = dict[str, Any]
"""How a life ended: `how` (ended, killed, frozen, hung), `code` and `pid`."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One sequence of deaths."""

    window: int
    kills: tuple[int, ...] = ()
    """Failpoint hits at which the first lives are killed, one a life."""
    point: str = ""
    """The first of them counts only the hits of this point."""
    kind: str = "kill"
    mutant: str = ""

    def __str__(self) -> str:
        kills = ",".join(map(str, self.kills))
        mutant = f" mutant={self.mutant}" if self.mutant else ""
        return f"{self.kind} window={self.window} point={self.point or 'any'} kills={kills}{mutant}"


@dataclass(slots=True)
class Outcome:
    """What a trial came to."""

    trial: Trial
    deaths: list[str] = field(default_factory=list[str])
    """The points at which lives were killed, in order."""
    violations: list[str] = field(default_factory=list[str])
    lost: int = 0
    kept: Path | None = None
    """Where the folder of a failed trial lies."""

    def take(self, found: Findings) -> None:
        self.violations += [text for text in found.violations if text not in self.violations]
        self.lost += found.lost


class BenchBroken(HermesError):
    """The conversation of the self-test does not even run undisturbed."""


class Server:
    """The process that forks lives; everything they need is imported in it, and no store is ever open."""

    def __init__(self) -> None:
        source = str(Path(__file__).parents[3])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hermes_agent.testing.crash.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": source, "PATH": os.defpath, "HOME": "/", "LANG": "C.UTF-8"},
            start_new_session=True,  # Ctrl-C is for the plan, which then ends this process
        )

    def ask(self, **request: Any) -> list[Ended]:
        """Send one request and wait for its reply."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise BenchBroken("the process that forks the lives ended; its message stands above")
        return json.loads(line)

    def live(self, folder: Path, *plans: Plan) -> list[Ended]:
        """Live one life, or several at once."""
        return self.ask(folder=str(folder), plans=[msgspec.to_builtins(plan) for plan in plans])

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)
        if self._process.stdout is not None:
            self._process.stdout.close()


class Bench:
    """Runs trials, one after the other, all in the same folder so that their paths are the same."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._folder = base / "trial"
        self._server = Server()
        self._runs = 0
        self._kept = 0
        self.points: list[list[str]] = []
        """Names of the failpoints that each window hits when nobody disturbs it."""
        self._before: list[Image | None] = []
        """The store before each window, and what the transcript must be after each."""
        self._expected: list[list[tuple[Any, ...]]] = []
        try:
            self._learn()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process that forks."""
        self._server.close()

    # -- the undisturbed run -----------------------------------------------------

    def _learn(self) -> None:
        """Run the conversation without a kill, keep the image after each window and count its points."""
        prepare(self._folder)
        image: Image | None = None
        for window in WINDOWS:
            shutil.copytree(self._folder, self._base / f"before-{window}")
            self._before.append(image)
            self.points.append(self._count(window))
            image, found = checks.look(self._folder, image)
            if found.violations or image is None:
                raise BenchBroken("the undisturbed conversation fails: " + "; ".join(found.violations))
            if window:
                self._expected.append(checks.transcript(self._folder, image))

    def _count(self, window: int) -> list[str]:
        outside = Outside(self._folder / "outside")
        plan = Plan(phase="main" if window else "queue", until=max(window, 1), life=window + 1, count=True)
        ended = self._server.live(self._folder, plan)[0]
        if (ended["how"], ended["code"]) not in (("ended", FINISHED), ("killed", -9)):
            raise BenchBroken(f"the undisturbed life {plan} {ended['how']} {ended['code']}: {self._stderr()}")
        names = [record["name"] for record in outside.read("points")]
        (self._folder / "outside" / "points").unlink(missing_ok=True)
        return names

    def _restore(self, source: Path) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(source, self._folder)

    def _stderr(self) -> str:
        path = self._folder / "outside" / "stderr"
        return path.read_text(errors="replace")[-600:].strip() if path.exists() else ""

    # -- one trial -----------------------------------------------------------------

    def run(self, trial: Trial) -> Outcome:
        """Run one trial; its folder is kept when something is broken.

        How often threads pass some points depends on their speed: a kill that was not reached is tried again.
        """
        outcome = self._run(trial)
        for _ in range(MAX_TRIES if trial.kind == "kill" and not trial.mutant else 0):
            if outcome.deaths or outcome.violations:
                break
            outcome = self._run(trial)
        return outcome

    def _run(self, trial: Trial) -> Outcome:
        self._restore(self._base / f"before-{trial.window}")
        outcome = Outcome(trial)
        kinds: dict[str, Callable[[Trial, Outcome, Image | None], Image | None]] = {
            "kill": self._kill,
            "poison": self._poison,
            "zombie": self._zombie,
            "crowd": self._crowd,
            "steal": self._crowd,
            "line": self._line,
            "twice": self._twice,
        }
        image = kinds[trial.kind](trial, outcome, self._before[trial.window])
        image = self._come_back(trial, outcome, image)
        if image is not None and not outcome.violations:
            outcome.violations += self._unequal(trial, image)
            self._runs += 1
            if self._runs % 4 == 1:
                outcome.violations += checks.old_fence_is_refused(self._folder)
        if outcome.violations and not trial.mutant:
            self._kept += 1
            outcome.kept = self._base / f"failed-{self._kept}"
            self._folder.rename(outcome.kept)
        return outcome

    def _live(self, trial: Trial, outcome: Outcome, image: Image | None, plan: Plan) -> tuple[Image | None, Ended]:
        """Live one life and look at what it leaves."""
        plan.mutant = trial.mutant
        ended = self._server.live(self._folder, plan)[0]
        return self._look(outcome, image, ended), ended

    def _look(self, outcome: Outcome, image: Image | None, ended: Ended) -> Image | None:
        died = ""
        if ended["how"] == "killed":
            died = Outside(self._folder / "outside").read("deaths")[-1]["point"]
            outcome.deaths.append(died)
        elif ended["how"] == "hung":
            outcome.violations.append(f"I7: a life hung: {self._stderr()}")
        image, found = checks.look(self._folder, image, died)
        outcome.take(found)
        return image

    @staticmethod
    def _until(trial: Trial) -> int:
        """How many messages the client sends: to the end of the window, and most often one more.

        A trial with one kill goes on only in a third of the cases, for the time it takes.
        """
        further = trial.kind != "kill" or len(trial.kills) > 1 or zlib.crc32(str(trial).encode()) % 3 == 0
        return min(max(trial.window, 1) + further, len(MESSAGES))

    def _kill(self, trial: Trial, outcome: Outcome, image: Image | None) -> Image | None:
        for number, kill in enumerate(trial.kills):
            queue = number == 0 and trial.window == 0
            plan = Plan(phase="queue" if queue else "main", until=self._until(trial), kill=kill, life=20 + number)
            plan.point = trial.point if number == 0 else ""
            image, ended = self._live(trial, outcome, image, plan)
            if ended["how"] != "killed" or outcome.violations:
                break
        return image

    def _poison(self, trial: Trial, outcome: Outcome, image: Image | None) -> Image | None:
        """Die as soon as the turn is resumed, until it is given up."""
        image = self._kill(trial, outcome, image)
        for number in range(MAX_CRASH_RESUMES + 2):
            plan = Plan(until=self._until(trial), kill=1, point="turn.resumed", life=number)
            image, ended = self._live(trial, outcome, image, plan)
            if ended["how"] != "killed":
                break
        return image

    def _zombie(self, trial: Trial, outcome: Outcome, image: Image | None) -> Image | None:
        """Freeze a life whose lease can be taken, let another do the work, and wake the first one up."""
        plan = Plan(until=self._until(trial), freeze=trial.kills[0], point=trial.point, ttl=0.0, mutant=trial.mutant)
        frozen = self._server.live(self._folder, plan)[0]
        image = self._come_back(trial, outcome, image)
        if frozen["how"] == "frozen":
            ended = self._server.ask(wake=frozen["pid"], signal=signal.SIGCONT)[0]
            if ended["code"] not in (FINISHED, STALE):
                outcome.violations.append(f"I8: a life that was overtaken ended with {ended}: {self._stderr()}")
            image, found = checks.look(self._folder, image)
            outcome.take(found)
        return image

    def _line(self, trial: Trial, outcome: Outcome, image: Image | None) -> Image | None:
        """Hold a life in its turn, let another take the next message and die, then let the first go on, or kill it."""
        plan = Plan(until=trial.window, freeze=trial.kills[0], point=trial.point, mutant=trial.mutant)
        frozen = self._server.live(self._folder, plan)[0]
        image, _ = self._live(trial, outcome, image, Plan(phase="line", until=self._until(trial), life=2))
        if frozen["how"] == "frozen":
            last = signal.SIGKILL if trial.kills[0] % 2 else signal.SIGCONT
            ended = self._server.ask(wake=frozen["pid"], signal=last)[0]
            if last is signal.SIGCONT and ended["code"] != FINISHED:
                outcome.violations.append(f"I7: a life that was only held up ended with {ended}: {self._stderr()}")
            image, found = checks.look(self._folder, image)
            outcome.take(found)
        return image

    def _crowd(self, trial: Trial, outcome: Outcome, image: Image | None) -> Image | None:
        """Kill a life and let many resume the session at once; thieves may take the lease from each other."""
        image = self._kill(trial, outcome, image)
        thieves = trial.kind == "steal"
        plan = Plan(phase="recover", mutant=trial.mutant, apart=thieves, ttl=0.0 if thieves else leases.TTL)
        crowd = [plan] * (THIEVES if thieves else CROWD)
        for ended in self._server.live(self._folder, *crowd):
            if ended["code"] != FINISHED and not (thieves and ended["code"] == STALE):
                outcome.violations.append(f"I11: one of {len(crowd)} at once ended with {ended}: {self._stderr()}")
        image, found = checks.look(self._folder, image)
        outcome.take(found)
        return image

    def _twice(self, trial: Trial, outcome: Outcome, image: Image | None) -> Image | None:
        """Recover the image of a killed life, put it back, and recover it again."""
        image = self._kill(trial, outcome, image)
        copy = self._base / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self._folder, copy)
        states: list[list[tuple[Any, ...]]] = []
        for _ in range(2):
            self._restore(copy)
            recovered = self._come_back(trial, outcome, image)
            if recovered is not None:
                states.append(checks.transcript(self._folder, recovered) + checks.ledger(recovered))
        if len(states) == 2 and states[0] != states[1]:
            outcome.violations.append(f"I14: two recoveries of one image differ: {_difference(*states)}")
        return image

    def _come_back(self, trial: Trial, outcome: Outcome, image: Image | None) -> Image | None:
        """Let the client come back, undisturbed, until nothing is left to do."""
        for number in range(RESTARTS):
            if outcome.violations:
                return image
            image, ended = self._live(trial, outcome, image, Plan(until=self._until(trial), life=10 + number))
            if ended["how"] == "ended" and ended["code"] == FINISHED:
                outcome.violations += checks.settled(image)
                return image
        outcome.violations.append(f"I7: {RESTARTS} undisturbed lives did not end the turns: {self._stderr()}")
        return image

    def _unequal(self, trial: Trial, image: Image) -> Iterator[str]:
        """Compare with the undisturbed run, unless a turn was given up."""
        if any(turn["reason"] == "poison" for turn in image.turns):
            return
        expected = self._expected[self._until(trial) - 1]
        found = checks.transcript(self._folder, image)
        known = [a if "?" not in b else b for a, b in zip(expected, found, strict=False)] + expected[len(found) :]
        if found != known:
            yield f"I16: the transcript is not the undisturbed one: {_difference(known, found)}"


def _difference(expected: list[tuple[Any, ...]], found: list[tuple[Any, ...]]) -> str:
    for number, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return f"line {number} is {str(b)[:200]} and not {str(a)[:200]}"
    return f"{len(found)} lines and not {len(expected)}"
