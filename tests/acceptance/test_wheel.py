"""What is installed works as in the work tree: the command, the old names, and the contract tests.

The fresh environments have no packages of their own: a `.pth` file lends them those of
the environment that runs the tests. Such a line only extends the path, the `.pth` files
behind it are not read, so an editable install of this project there cannot be found.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

from hermes_agent.old_names import TARGETS
from hermes_agent.version import VERSION

pytestmark = pytest.mark.xdist_group("wheel")  # the environments are made once

CONTRACTS = os.environ.get("HERMES_CONTRACTS", "")


class Place(NamedTuple):
    """A fresh environment and an empty folder to start programs from."""

    bin: Path
    site_packages: Path
    empty: Path
    environ: dict[str, str]

    def run(self, program: str, *arguments: str, timeout: float = 300) -> str:
        """Run a program of the environment from the empty folder; what it printed, if it succeeded."""
        done = subprocess.run(
            [self.bin / program, *arguments],
            cwd=self.empty,
            env=self.environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


def run_here(*arguments: str | Path, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def fresh_place(folder: Path) -> Place:
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    (site_packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site_packages / "lent_packages.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    (folder / "empty").mkdir()
    own = ("PYTHON", "PYTEST", "COVERAGE", "COV_", "VIRTUAL_ENV")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    environ["HERMES_HOME"] = str(folder / "home")
    return Place(folder / "venv" / "bin", site_packages, folder / "empty", environ)


@pytest.fixture(scope="module")
def installed(project, tmp_path_factory) -> Place:
    """An environment with the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    place = fresh_place(folder)
    run_here("-m", "hatchling", "build", "--target", "wheel", "--directory", folder / "dist", cwd=project)
    (wheel,) = (folder / "dist").glob("*.whl")
    python = place.bin / "python"
    run_here("-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel, cwd=folder)
    return place


@pytest.fixture(scope="module")
def editable(project, tmp_path_factory) -> Place:
    """An environment with the work tree."""
    folder = tmp_path_factory.mktemp("editable")
    place = fresh_place(folder)
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--editable"]
    run_here("-m", "pip", "--python", place.bin / "python", "install", *options, project, cwd=folder)
    return place


def origin_of_each_old_name(place: Place) -> list[str]:
    code = (
        "import importlib\n"
        f"for old, new in {TARGETS!r}.items():\n"
        "    module = importlib.import_module(old)\n"
        "    assert module is importlib.import_module(new), old\n"
        "    print(module.__file__)\n"
    )
    return place.run("python", "-c", code).splitlines()


def test_the_installed_command_says_its_version(installed):
    assert installed.run("hermes", "--version").split()[-1] == VERSION


def test_the_program_can_be_started_as_a_module(installed):
    assert installed.run("python", "-m", "hermes_agent", "--version").split()[-1] == VERSION


def test_the_wheel_brings_the_old_names(installed):
    files = origin_of_each_old_name(installed)
    assert len(files) == len(TARGETS)
    assert all(Path(file).is_relative_to(installed.site_packages / "hermes_agent") for file in files)


def test_the_wheel_brings_every_file_of_the_package(installed, project):
    def files(root: Path) -> set[Path]:
        return {path.relative_to(root) for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"}

    assert files(installed.site_packages / "hermes_agent") == files(project / "src" / "hermes_agent")
    assert (installed.site_packages / "hermes_agent_old_names.pth").read_text() == "hermes_agent/_old_names\n"


def test_the_editable_install_lists_both_folders(editable, project):
    source = project / "src"
    listed = {line for path in editable.site_packages.glob("*.pth") for line in path.read_text().splitlines()}
    assert {str(source), str(source / "hermes_agent" / "_old_names")} <= listed
    assert all(Path(file).is_relative_to(source) for file in origin_of_each_old_name(editable))


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_the_contract_tests_pass_from_an_empty_folder(kind, request):
    """The tests of the folder in HERMES_CONTRACTS, with no conftest of ours; without it, what they lean on most."""
    place = request.getfixturevalue(kind)
    if not CONTRACTS:
        place.run("python", "-c", "from run_agent import AIAgent; from hermes_state import SessionDB")
        return
    arguments = ["-m", "pytest", "-p", "no:cacheprovider", "--noconftest", f"--rootdir={CONTRACTS}", CONTRACTS]
    assert " passed" in place.run("python", *arguments).splitlines()[-1]
