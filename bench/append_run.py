"""Several sessions that append at once, as a measured process.

With `--alone` a lock around each append makes every row a commit of its own; without, the
store may take into one commit whatever waits.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from bench import children
from bench.messages import messages
from hermes_agent.store.session_db import SessionDB


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sessions", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    db = SessionDB(options.folder / "state.db")
    names = [f"s{number}" for number in range(options.sessions)]
    for name in names:
        db.create_session(name)
    gate: AbstractContextManager[object] = threading.Lock() if options.alone else nullcontext()
    ready = threading.Barrier(len(names) + 1)

    def append(name: str) -> None:
        rows = list(itertools.islice(messages(), options.rows))
        ready.wait()
        for row in rows:
            with gate:
                db.append_message(name, **row)

    threads = [threading.Thread(target=append, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    ready.wait()
    before, began = db.commits, time.perf_counter()
    for thread in threads:
        thread.join()
    wall, commits = time.perf_counter() - began, db.commits - before
    rows = options.sessions * options.rows
    stored = sum(db.message_count(name) for name in names)
    db.close()
    if stored != rows:
        raise SystemExit(f"{stored} of {rows} rows are stored")
    children.report({"rate": rows / wall, "rows": rows / commits})


if __name__ == "__main__":
    main()
