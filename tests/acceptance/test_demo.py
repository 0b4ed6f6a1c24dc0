"""`hermes demo`: it holds what it promises, and notices when something does not hold."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from hermes_agent.cli import demo
from hermes_agent.cli.screen import Stream
from hermes_agent.store.session_db import SessionDB
from tests.acceptance.hermes import COMMAND, Hermes


def test_the_demo_shows_the_kill_and_that_nothing_was_lost_or_done_twice(hermes_home: Path, tmp_path: Path):
    hermes = Hermes(hermes_home)
    begun = time.monotonic()
    done = hermes.run("demo", env={"TMPDIR": str(tmp_path), "OPENAI_API_KEY": "unused", "HERMES_MODEL": "unused"})
    assert done.code == 0, done.out
    assert time.monotonic() - begun < 30
    story = [
        "$ hermes chat -q",
        "✗ terminal  python3 -m unittest",
        "✓ patch  prices.py",
        "✓ terminal  python3 -m unittest",
        "… terminal  sh release.sh 1.1",
        "— killed the process with SIGKILL in the middle of step 5 —",
        "$ hermes chat -r",
        "? terminal  sh release.sh 1.1",
        "I look before I repeat anything",
        "Done. The discount",
        "✓ each of the 7 steps is stored once, in order",
        "✓ the release happened once",
        "✓ the project's tests pass",
        "Nothing was lost and nothing was done twice.",
    ]
    at = 0
    for line in story:
        found = done.out.find(line, at)
        assert found >= 0, f"{line!r} is missing in:\n{done.out}"
        at = found + len(line)
    assert "--yolo lets it run commands" in done.out
    assert not hermes_home.exists()
    assert list(tmp_path.iterdir()) == []


def _release_again(place: demo.Place) -> None:
    with place.witness.open("a") as file:
        file.write("released 1.1\n")


def _break_the_project(place: demo.Place) -> None:
    (place.project / "prices.py").write_text("def total(prices, discount=0):\n    return 0\n")


def _answer_twice(place: demo.Place) -> None:
    with SessionDB(place.home / "state.db") as db:
        session = db.resolve_session("latest")
        db.append_message(session, "assistant", db.get_messages(session)[-1]["content"])


def _ask_twice(place: demo.Place) -> None:
    with SessionDB(place.home / "state.db") as db:
        db.append_message(db.resolve_session("latest"), "user", demo.MESSAGE)


TAMPERINGS: list[tuple[Callable[[demo.Place], None], str]] = [
    (_release_again, "the release happened once"),
    (_break_the_project, "the project's tests pass"),
    (_answer_twice, "each of the 7 steps"),
    (_ask_twice, "the message is stored once"),
]


def test_the_demo_notices_what_does_not_hold(tmp_path: Path):
    """A demo that was played to its good end is copied, tampered with, and looked at again."""
    played = tmp_path / "played"
    played.mkdir()
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        assert demo.play(demo.build(played), Stream(nowhere)) == 0
    for tamper, fails in TAMPERINGS:
        copy = tmp_path / tamper.__name__
        subprocess.run(["cp", "-R", str(played), str(copy)], check=True)
        place = demo.Place(copy / "project", copy / "home", copy / "script.json")
        session = Hermes(place.home).session()
        assert all(check.holds for check in demo.verify(place, session))
        tamper(place)
        assert next(check.what for check in demo.verify(place, session) if not check.holds).startswith(fails)


def test_a_demo_whose_release_never_begins_fails(tmp_path: Path):
    place = demo.build(tmp_path)
    place.script.write_text('{"replies": [{"text": "I would rather not."}]}')
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        assert demo.play(place, Stream(nowhere)) == 1


def test_ctrl_c_ends_the_demo_and_cleans_up(hermes_home: Path, tmp_path: Path):
    hermes = Hermes(hermes_home)
    process = subprocess.Popen(
        [*COMMAND, "demo"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=hermes.environment({"TMPDIR": str(tmp_path)}),
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if b"search_files" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert list(tmp_path.iterdir()) == []
