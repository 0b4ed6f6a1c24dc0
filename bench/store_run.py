"""Our store and the floor's side by side in one measured process: append, resume, fill up, close.

Both take turns every few milliseconds, so that whatever slows the machine down slows both.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from bench import children
from bench.floor_store import FloorStore
from bench.messages import Message, messages
from hermes_agent.store.session_db import SessionDB

BIG = "big"
BLOCKS = 100
READS = 10


class Store(Protocol):
    """What the two stores have in common here."""

    def create(self, session: str, /) -> object: ...
    def append(self, session: str, message: Message, /) -> object: ...
    def append_all(self, session: str, messages: Sequence[Message], /) -> object: ...
    def read(self, session: str, /) -> list[Message]: ...
    def close(self) -> None: ...


class Ours:
    """Our store under the floor's names."""

    def __init__(self, path: Path) -> None:
        db = SessionDB(path)
        self.create: Callable[[str], object] = db.create_session
        self.append_all: Callable[[str, Sequence[Message]], object] = db.append_messages_batch
        self.read: Callable[[str], list[Message]] = db.get_messages_as_conversation
        self.close = db.close
        self._append = db.append_message

    def append(self, session: str, message: Message) -> object:
        return self._append(session, **message)


def _fill(stores: Mapping[str, Store], rows: int) -> dict[str, list[float]]:
    """Append `rows` rows to each, a block to one and then to the other; CPU seconds an append, by block."""
    clock, source, size = time.process_time, messages(), max(rows // BLOCKS, 1)
    costs: dict[str, list[float]] = {side: [] for side in stores}
    for number in range(rows // size):
        block = list(itertools.islice(source, size))
        for side in _turned(stores, number):
            append, began = stores[side].append, clock()
            for message in block:
                append(BIG, message)
            costs[side].append((clock() - began) / size)
    return costs


def _read(stores: Mapping[str, Store], rows: int) -> dict[str, list[float]]:
    """CPU seconds of reading the session as dicts, again and again, one store after the other."""
    clock = time.process_time
    costs: dict[str, list[float]] = {side: [] for side in stores}
    for number in range(READS):
        for side in _turned(stores, number):
            began = clock()
            found = stores[side].read(BIG)
            costs[side].append(clock() - began)
            if len(found) != rows:
                raise SystemExit(f"{len(found)} of {rows} rows came back")
            del found
    return costs


def _turned(stores: Mapping[str, Store], number: int) -> list[str]:
    return list(stores) if number % 2 == 0 else list(stores)[::-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--total", type=int, required=True, help="rows in the end, in further sessions of 1,000")
    options = parser.parse_args()
    paths = {side: options.folder / f"{side}.db" for side in ("ours", "floor")}
    stores: dict[str, Store] = {"ours": Ours(paths["ours"]), "floor": FloorStore(paths["floor"])}
    for store in stores.values():
        store.create(BIG)
    appends = _fill(stores, options.rows)
    reads = _read(stores, options.rows)
    for store in stores.values():
        source = messages(seed=2)
        for number in range((options.total - options.rows) // 1000):
            store.create(f"s{number}")
            store.append_all(f"s{number}", list(itertools.islice(source, 1000)))
        store.close()
    sizes = {side: sum(file.stat().st_size for file in path.parent.glob(f"{side}.db*")) for side, path in paths.items()}
    children.report({"append": appends, "resume": reads, "size": sizes})


if __name__ == "__main__":
    main()
