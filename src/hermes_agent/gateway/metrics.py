"""What a gateway counts, as Prometheus text."""

from __future__ import annotations

import threading
from collections.abc import Iterable

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
"""Upper bounds of the histograms, in seconds."""

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Counts seconds by size; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        place = next((i for i, bound in enumerate(BUCKETS) if seconds <= bound), len(BUCKETS))
        with self._lock:
            self._counts[place] += 1
            self._sum += seconds

    def lines(self, name: str, labels: Labels = ()) -> Iterable[str]:
        """Its samples."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        seen = 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), counts, strict=True):
            seen += count
            yield sample(f"{name}_bucket", (*labels, ("le", bound)), seen)
        yield sample(f"{name}_sum", labels, total)
        yield sample(f"{name}_count", labels, seen)

    def quantile(self, part: float) -> float:
        """The bound below which that part of all lies; 0 when there is nothing."""
        with self._lock:
            counts = list(self._counts)
        wanted, seen = part * sum(counts), 0
        for bound, count in zip((*BUCKETS, BUCKETS[-1]), counts, strict=True):
            seen += count
            if seen and seen >= wanted:
                return bound
        return 0.0


class Counts:
    """Counters by one label; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, int] = {}

    def add(self, value: str, count: int = 1) -> None:
        with self._lock:
            self._found[value] = self._found.get(value, 0) + count

    def total(self) -> int:
        with self._lock:
            return sum(self._found.values())

    def lines(self, name: str, label: str, labels: Labels = ()) -> Iterable[str]:
        """Its samples."""
        with self._lock:
            found = dict(self._found)
        for value, count in sorted(found.items()):
            yield sample(name, (*labels, (label, value)), count)


def head(name: str, kind: str, about: str) -> list[str]:
    """The lines that describe a metric."""
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def sample(name: str, labels: Labels, value: float) -> str:
    """One line of the text format."""
    named = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{{{named}}} {value!r}" if named else f"{name} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
