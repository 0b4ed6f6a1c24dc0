"""The home folder and the modes of what lies in it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hermes_agent import home as home_module
from hermes_agent.errors import StoreReadOnly


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=["open umask", "usual umask", "strict umask"])
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_variable_names_the_home():
    assert home_module.hermes_home({"HERMES_HOME": "/srv/agent"}) == Path("/srv/agent")


@pytest.mark.parametrize("value", [None, "", "  "])
def test_without_the_variable_the_home_is_in_the_users_folder(value):
    environ = {} if value is None else {"HERMES_HOME": value}
    assert home_module.hermes_home(environ) == Path("~/.hermes").expanduser()


def test_a_relative_or_tilde_home_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert home_module.hermes_home({"HERMES_HOME": "here"}) == tmp_path / "here"
    assert home_module.hermes_home({"HERMES_HOME": "~/h"}) == Path("~/h").expanduser()


def test_naming_the_home_creates_nothing(hermes_home):
    assert home_module.hermes_home() == hermes_home
    assert not hermes_home.exists()


@pytest.mark.usefixtures("umask")
def test_every_folder_that_is_made_is_private(tmp_path):
    folder = home_module.private_folder(tmp_path / "home", "spill", "session")
    assert folder == tmp_path / "home" / "spill" / "session"
    assert [mode(path) for path in (folder, folder.parent, folder.parent.parent)] == [0o700] * 3


def test_an_existing_folder_keeps_the_mode_its_owner_gave_it(tmp_path):
    tmp_path.chmod(0o750)
    home_module.ensure_home(tmp_path)
    assert mode(tmp_path) == 0o750


@pytest.mark.usefixtures("umask")
def test_every_file_that_is_made_is_private(tmp_path):
    assert home_module.create_private_file(tmp_path / "state.db")
    with home_module.open_private(tmp_path / "text", "a") as file:
        file.write("ä")
    with home_module.open_private(tmp_path / "bytes", "wb") as file:
        file.write(b"\xff")
    assert [mode(path) for path in sorted(tmp_path.iterdir())] == [0o600] * 3
    assert (tmp_path / "text").read_text(encoding="utf-8") == "ä"


def test_an_existing_file_is_not_touched(tmp_path):
    (tmp_path / "state.db").write_text("content")
    assert not home_module.create_private_file(tmp_path / "state.db")
    assert (tmp_path / "state.db").read_text() == "content"


@pytest.mark.parametrize(("bits", "readable"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_can_read_is_noticed(tmp_path, bits, readable):
    path = tmp_path / ".env"
    path.touch()
    path.chmod(bits)
    assert home_module.others_can_read(path) is readable


def test_a_home_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreReadOnly, match=r"cannot make the folder .*/file/home"):
        home_module.ensure_home(tmp_path / "file" / "home")
