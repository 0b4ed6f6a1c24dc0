"""The log file: what a line holds, what it never holds, and how it rotates."""

from __future__ import annotations

import json
import multiprocessing
import stat

import pytest

from hermes_agent import log

CANARY = "sk-test-CANARY1234567890"


def lines(home, name="agent.log"):
    return [json.loads(line) for line in (home / "logs" / name).read_text(encoding="utf-8").splitlines()]


def test_nothing_is_opened_before_the_first_record(hermes_home):
    log.configure(hermes_home)
    logger = log.get("store")
    logger.debug("below.the.level")
    assert not hermes_home.exists()


def test_a_line_holds_action_and_fields(hermes_home):
    log.configure(hermes_home)
    log.get("store").info("migration.applied", number=3, names=("a", "b"), path=hermes_home, more={"x": None})
    (line,) = lines(hermes_home)
    assert line.pop("time").endswith("Z")
    assert line.pop("pid") > 0
    assert line == {
        "level": "info",
        "log": "store",
        "action": "migration.applied",
        "number": 3,
        "names": ["a", "b"],
        "path": str(hermes_home),
        "more": {"x": None},
    }


def test_folder_and_file_are_private(hermes_home):
    log.get("x").info("y")
    folder = hermes_home / "logs"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "agent.log").stat().st_mode) == 0o600


def test_the_level_decides_what_is_kept(hermes_home):
    log.configure(hermes_home, level="warning")
    logger = log.get("x")
    for write in (logger.debug, logger.info, logger.warning, logger.error):
        write("went")
    assert [line["level"] for line in lines(hermes_home)] == ["warning", "error"]


def test_a_failure_is_kept_with_its_traceback(hermes_home):
    try:
        raise ValueError(f"refused {CANARY}")
    except ValueError as error:
        log.get("x").failure("worker.died", error, session_id="s")
    (line,) = lines(hermes_home)
    assert (line["level"], line["session_id"]) == ("error", "s")
    assert 'raise ValueError(f"refused {CANARY}")' in line["traceback"]
    assert line["traceback"].endswith("ValueError: refused ***\n")


def test_a_registered_secret_stands_nowhere_in_the_file(hermes_home):
    log.add_secrets(["plain-secret", ""])
    log.get("plain-secret").info("plain-secret", a="x plain-secret y", b=["plain-secret"], c={"plain-secret": 1})
    text = (hermes_home / "logs" / "agent.log").read_text()
    assert text.count("***") == 5
    assert "plain-secret" not in text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"key {CANARY}.", "key ***."),
        ("Authorization: Bearer abcdef.ghi-jkl", "Authorization: Bearer ***"),
        ('{"api_key": "abcdefgh"}', '{"api_key": "***"}'),
        ("PASSWORD=hunter22&x=1", "PASSWORD=***&x=1"),
        ("a task-specific word", "a task-specific word"),
        ("no secrets here", "no secrets here"),
    ],
)
def test_what_looks_like_a_key_is_blotted_out(text, clean):
    assert log.redact(text) == clean


def test_the_longer_of_two_secrets_goes_first():
    assert log.redact("secret-longer", ["secret-", "secret-longer"]) == "***"


def test_broken_unicode_does_not_stop_the_record(hermes_home):
    log.get("x").info("y", text="\ud800")
    assert lines(hermes_home)[0]["text"] == "?"


def test_the_file_rotates_and_keeps_only_so_many(hermes_home):
    log.configure(hermes_home, max_size_mb=1 / 1024, backup_count=2)
    for number in range(40):
        log.get("x").info("y", number=number, filler="f" * 100)
    folder = hermes_home / "logs"
    assert sorted(path.name for path in folder.glob("agent.log*")) == [
        "agent.log",
        "agent.log.1",
        "agent.log.2",
        "agent.log.lock",
    ]
    assert all(path.stat().st_size <= 1024 for path in folder.iterdir())
    kept = [line["number"] for name in ("agent.log.2", "agent.log.1", "agent.log") for line in lines(hermes_home, name)]
    assert kept == list(range(kept[0], 40))


def test_without_backups_the_file_starts_anew(hermes_home):
    log.configure(hermes_home, max_size_mb=1 / 1024, backup_count=0)
    for number in range(12):
        log.get("x").info("y", number=number, filler="f" * 100)
    assert sorted(path.name for path in (hermes_home / "logs").iterdir()) == ["agent.log", "agent.log.lock"]
    assert lines(hermes_home)[-1]["number"] == 11


def test_a_process_that_finds_the_file_moved_away_goes_on_in_the_new_one(hermes_home):
    one, other = log._LogFile(), log._LogFile()
    for file in (one, other):
        file.configure(hermes_home, log.LEVELS["info"], 600, 3)
    other.record("info", "x", "first", {})
    one.record("info", "x", "second", {"filler": "f" * 400})
    one.record("info", "x", "third", {"filler": "f" * 300})  # moves the file away
    other.record("info", "x", "fourth", {})
    for file in (one, other):
        file.reset()
    assert [line["action"] for line in lines(hermes_home, "agent.log.1")] == ["first", "second"]
    assert [line["action"] for line in lines(hermes_home)] == ["third", "fourth"]


def write_many(home, name):
    log.configure(home, max_size_mb=1 / 1024, backup_count=300)
    for number in range(200):
        log.get(name).info("y", number=number)
    log.close()


def test_processes_that_write_at_once_lose_no_line_over_rotations(hermes_home):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=write_many, args=(hermes_home, name)) for name in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    found = [line for path in (hermes_home / "logs").glob("agent.log*") for line in lines(hermes_home, path.name)]
    assert sorted((line["log"], line["number"]) for line in found) == [(name, n) for name in "ab" for n in range(200)]


def test_a_log_that_cannot_be_written_stops_nobody(hermes_home):
    hermes_home.mkdir()
    (hermes_home / "logs").touch()
    log.get("x").info("lost")
    (hermes_home / "logs").unlink()
    log.get("x").info("kept")
    assert [line["action"] for line in lines(hermes_home)] == ["kept"]


def test_a_registered_secret_is_blotted_out_of_any_text_until_the_log_is_closed():
    log.add_secrets(["plain-secret", "plain-secret-and-more", "short"])
    assert log.redact("plain-secret, plain-secret-and-more, short", ["another one"]) == "***, ***, short"
    assert log.redact("another one: plain-secret", ["another one"]) == "***: ***"
    log.close()
    assert log.redact("plain-secret") == "plain-secret"
