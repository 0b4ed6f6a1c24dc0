"""Measure hermes-agent against hand-written floors: `python -m bench [NAME ...] [--reps N] [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from bench import api, starts, stores, turns
from bench.figures import Figure, machine, table
from bench.plan import Benchmark, Plan, Unavailable

BENCHMARKS: dict[str, Benchmark] = {
    item.name: item for item in (*turns.BENCHMARKS, *starts.BENCHMARKS, *stores.BENCHMARKS, *api.BENCHMARKS)
}


def main(arguments: list[str] | None = None) -> int:
    """Run the named benchmarks, all by default; 1 when one of them could not run."""
    options = _parser().parse_args(arguments)
    plan = Plan(options.reps, options.small, options.disk, options.memory)
    facts = machine(plan.disk, plan.memory)
    figures: list[Figure] = []
    failed = False
    for name in options.names or BENCHMARKS:
        began = time.perf_counter()
        print(f"{name} ({BENCHMARKS[name].about}) ...", end=" ", file=sys.stderr, flush=True)
        try:
            figures += BENCHMARKS[name].run(plan)
        except Unavailable as error:
            failed = True
            print(f"not measured: {error}", file=sys.stderr)
        else:
            print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
    print("; ".join(f"{key} {value}" for key, value in facts.items()), "\n\n", table(figures), sep="")
    if options.json:
        found = {"machine": facts, "figures": [figure.as_json() for figure in figures]}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure hermes-agent against its floors.")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *BENCHMARKS], help=", ".join(BENCHMARKS))
    parser.add_argument("--reps", type=int, default=5, help="rounds of each rotation (default 5)")
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    parser.add_argument("--small", action="store_true", help="the smallest form; its numbers mean nothing")
    parser.add_argument("--disk", type=Path, default=_first("/var/tmp"), help="a folder on a real disk")
    parser.add_argument("--memory", type=Path, default=_first("/dev/shm"), help="a folder on a memory file system")
    return parser


def _first(wanted: str) -> Path:
    return Path(wanted) if Path(wanted).is_dir() else Path(tempfile.gettempdir())


if __name__ == "__main__":
    sys.exit(main())
