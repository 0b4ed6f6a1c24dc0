"""What every benchmark gets and what it is: how large, how often, and where files go."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figure


class Unavailable(Exception):
    """This machine lacks what the benchmark needs; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one run of a benchmark is to be done."""

    reps: int
    """Rounds of the rotation; a benchmark with many short runs does more."""
    small: bool
    """The smallest form that yields every figure: for tests, its numbers mean nothing."""
    disk: Path
    """A folder on a real disk."""
    memory: Path
    """A folder on a memory file system, where there is one."""

    def size(self, full: int, least: int) -> int:
        return least if self.small else full

    def rounds(self, at_least: int = 1) -> int:
        return self.reps if self.small else max(self.reps, at_least)

    @contextmanager
    def folder(self, *, memory: bool = False) -> Iterator[Path]:
        """A fresh folder, removed afterwards."""
        with tempfile.TemporaryDirectory(prefix="hermes-bench-", dir=self.memory if memory else self.disk) as name:
            yield Path(name)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One thing that can be measured by name."""

    name: str
    about: str
    promises: tuple[str, ...]
    """Names of the figures that `run` yields, in order."""
    run: Callable[[Plan], Sequence[Figure]]
