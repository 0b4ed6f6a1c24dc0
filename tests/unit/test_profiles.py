"""Which home belongs to which profile, and how a command line names one."""

from __future__ import annotations

import os
import stat

import pytest

from hermes_agent import home as home_module
from hermes_agent.cli import options
from hermes_agent.errors import UsageError


@pytest.fixture
def root(hermes_home):
    """A root with the profiles `work` and `lab`."""
    for name in ("work", "lab"):
        home_module.private_folder(hermes_home, "profiles", name)
    return hermes_home


@pytest.mark.parametrize("name", ["a", "0", "work", "a-b_c", "x" * 64])
def test_a_good_name(name):
    assert home_module.is_profile_name(name)


@pytest.mark.parametrize("name", ["", "-a", "_a", "A", "a b", "a/b", "..", ".", "ä", "a\n", "x" * 65])
def test_a_name_that_no_profile_can_have_is_never_a_path(root, name):
    assert not home_module.is_profile_name(name)
    (root.parent / "b").mkdir()
    assert home_module.find_profile(root, name) is None


def test_the_root_is_the_default_profile(root):
    assert home_module.root_of(root) == root
    assert home_module.profile_of(root) == "default"
    assert home_module.find_profile(root, "default") == root


def test_a_named_profile_knows_its_root(root):
    home = home_module.profile_home(root, "work")
    assert home == root / "profiles" / "work"
    assert home_module.root_of(home) == root
    assert home_module.profile_of(home) == "work"


def test_the_default_comes_first_and_what_is_no_profile_is_not_listed(root):
    for name in (".new-x-1", "Bad Name", "default"):
        (root / "profiles" / name).mkdir()
    (root / "profiles" / "file").touch()
    assert home_module.profiles(root) == ["default", "lab", "work"]
    assert home_module.profiles(root / "nowhere") == ["default"]


def test_an_unknown_profile_is_refused_with_the_nearest_names(root):
    with pytest.raises(UsageError, match=r"there is no profile 'wrok'; there is: work\. "):
        home_module.profile_home(root, "wrok")
    with pytest.raises(UsageError, match=r"there is: default, lab, work\. "):
        home_module.profile_home(root, "zzz")


def test_entering_makes_it_the_home_of_this_process_and_its_children(root):
    assert home_module.enter_profile("work") == root / "profiles" / "work"
    assert home_module.hermes_home() == root / "profiles" / "work"
    assert os.environ["HERMES_HOME"] == str(root / "profiles" / "work")


def test_from_within_a_profile_every_other_is_reached(root):
    home_module.enter_profile("work")
    assert home_module.enter_profile("lab") == root / "profiles" / "lab"
    assert home_module.enter_profile("default") == root


def test_the_chosen_profile_is_used_where_none_is_named_until_another_is_chosen(root):
    home_module.choose_profile(root, "work")
    assert stat.S_IMODE((root / "active_profile").stat().st_mode) == 0o600
    assert home_module.enter_profile(None) == root / "profiles" / "work"
    home_module.choose_profile(root, "default")
    os.environ["HERMES_HOME"] = str(root)
    assert home_module.enter_profile(None) == root


def test_a_named_profile_and_a_home_within_one_win_over_the_chosen_one(root):
    home_module.choose_profile(root, "work")
    assert home_module.enter_profile("lab") == root / "profiles" / "lab"
    assert home_module.enter_profile(None) == root / "profiles" / "lab"


def test_a_chosen_profile_that_is_gone_is_named_and_never_replaced_by_another(root):
    home_module.choose_profile(root, "gone")
    with pytest.raises(UsageError, match="'gone' that was chosen is gone"):
        home_module.enter_profile(None)
    assert home_module.enter_profile(None, may_be_gone=True) == root
    assert home_module.enter_profile("default") == root


def test_nothing_is_made_by_looking(hermes_home):
    assert home_module.enter_profile(None) == hermes_home
    assert home_module.chosen_profile(hermes_home) == "default"
    assert not hermes_home.exists()


@pytest.mark.parametrize(
    ("line", "name", "rest"),
    [
        ("", None, ""),
        ("-z hi", None, "-z hi"),
        ("-p work", "work", ""),
        ("-p work -z hi", "work", "-z hi"),
        ("chat -q hi --profile work", "work", "chat -q hi"),
        ("gateway run --profile=work", "work", "gateway run"),
        ("gateway -pwork run", "work", "gateway run"),
        ("-p a -p b", "b", ""),
        ("-z -p", None, "-z -p"),
        ("-z --profile -p work", "work", "-z --profile"),
        ("-c -p work", "work", "-c"),
        ("-c -p work name", "work", "-c name"),
        ("-c name -p work", "work", "-c name"),
        ("demo -- -p work", None, "demo -- -p work"),
        ("-Q -p work", "work", "-Q"),
        ("--profiles x", None, "--profiles x"),
    ],
)
def test_the_profile_is_taken_from_any_place_but_not_from_a_value(line, name, rest):
    assert options.take_profile(line.split()) == (name, rest.split())


@pytest.mark.parametrize("line", ["-p", "chat --profile", "--profile=", "-p -z hi", "-p --"])
def test_a_missing_name_is_said(line):
    with pytest.raises(UsageError, match="needs the name of a profile"):
        options.take_profile(line.split())
