"""An old module name is the new module."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest

import hermes_agent
from hermes_agent import old_names

SOURCE = Path(hermes_agent.__file__).parent
TOP_NAMES = sorted({old.partition(".")[0] for old in old_names.TARGETS})


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter whose path holds `folder` and our source, but not the old names."""
    path = os.pathsep.join([str(folder), str(SOURCE.parent)])
    environ = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(("old", "new"), old_names.TARGETS.items())
def test_an_old_name_is_the_new_module(old, new):
    assert importlib.import_module(old) is importlib.import_module(new)


@pytest.mark.parametrize(("old", "new"), old_names.TARGETS.items())
def test_a_patch_through_either_name_is_seen_through_both(old, new):
    through_old, through_new = importlib.import_module(old), importlib.import_module(new)
    with patch(f"{old}.__doc__", "patched"):
        assert through_new.__doc__ == "patched"
    with patch(f"{new}.__doc__", "patched"):
        assert through_old.__doc__ == "patched"


def test_there_is_one_forwarding_file_for_each_old_name_and_packages_are_empty():
    folder = Path(old_names.FOLDER)
    files = {path.relative_to(folder) for path in folder.rglob("*.py")}
    forwarding = {path for path in files if path.name != "__init__.py"}
    assert {".".join(path.with_suffix("").parts) for path in forwarding} == set(old_names.TARGETS)
    packages = files - forwarding
    assert {path.parent for path in packages} == {path.parent for path in forwarding} | {Path()}
    assert all((folder / path).read_bytes() == b"" for path in packages)


def test_threads_that_import_at_the_same_time_never_see_an_empty_module(tmp_path, monkeypatch):
    """The second thread comes while the first still runs the forwarding file; it sees every name and can patch."""
    (tmp_path / "slow_new.py").write_text("import slow_gate\nslow_gate.wait()\nVALUE = 1\n_private = 2\n")
    (tmp_path / "slow_old.py").write_text("from hermes_agent.old_names import become\nbecome(__name__)\n")
    (tmp_path / "slow_gate.py").write_text(
        "import threading\nreached, opened = threading.Event(), threading.Event()\n"
        "def wait():\n    reached.set()\n    assert opened.wait(30)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(old_names.TARGETS, "slow_old", "slow_new")
    gate = importlib.import_module("slow_gate")
    seen = []

    def import_old():
        import slow_old  # noqa: PLC0415 - the statement under test

        seen.append((slow_old.VALUE, slow_old._private, slow_old))

    first, second = threading.Thread(target=import_old), threading.Thread(target=import_old)
    try:
        first.start()
        assert gate.reached.wait(30)
        second.start()
        wait_until_blocked(second)
        gate.opened.set()
        first.join(30)
        second.join(30)
        assert [item[:2] for item in seen] == [(1, 2)] * 2
        new = sys.modules["slow_new"]
        assert sys.modules["slow_old"] is new
        for _, _, module in seen:
            module.VALUE = "patched"
            assert new.VALUE == "patched"
            new.VALUE = 1
            assert module.VALUE == 1
            module.extra = True
            del module.extra
            assert not hasattr(new, "extra")
    finally:
        gate.opened.set()
        for name in ("slow_old", "slow_new", "slow_gate"):
            sys.modules.pop(name, None)


def wait_until_blocked(thread: threading.Thread) -> None:
    """Return once the thread waits for another one's import."""
    deadline = time.monotonic() + 30
    while thread.ident not in importlib._bootstrap._blocking_on:  # pyright: ignore[reportAttributeAccessIssue]
        assert time.monotonic() < deadline, "the thread never came to the import"
        time.sleep(0.001)


def test_activating_makes_the_old_names_importable_before_anything_on_the_path(tmp_path):
    """A stranger that only lies on the path loses against an activated name."""
    for name in TOP_NAMES:
        (tmp_path / f"{name}.py").write_text("raise AssertionError('a stranger was imported')")
    code = (
        "import sys; from hermes_agent import old_names; old_names.activate(); old_names.activate()\n"
        "assert sys.path.count(old_names.FOLDER) == 1 and sys.path[0] == old_names.FOLDER\n"
        "from tools.registry import registry\n"
        "from hermes_agent.tools import registry as ours\n"
        "assert registry is ours.registry\n"
        "old_names.activate()\n"
    )
    done = run_python(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", TOP_NAMES)
def test_activating_names_the_stranger_that_holds_a_name(tmp_path, name):
    (tmp_path / f"{name}.py").touch()
    code = (
        f"import {name}\n"
        "from hermes_agent import errors, old_names\n"
        "try: old_names.activate()\n"
        "except errors.UsageError as error: print(error)"
    )
    done = run_python(code, tmp_path)
    assert done.stdout.startswith(f"the module name {name!r} is taken by {tmp_path / name}.py; ")


def test_activating_names_a_stranger_that_an_import_hook_would_bring(tmp_path):
    """Editable installs of other projects may answer for a name before the path is searched."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tools.py").touch()
    code = (
        "import sys; from importlib.util import spec_from_file_location\n"
        "class Hook:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        return spec_from_file_location(name, 'elsewhere/tools.py') if name == 'tools' else None\n"
        "sys.meta_path.insert(0, Hook())\n"
        "from hermes_agent import errors, old_names\n"
        "try: old_names.activate()\n"
        "except errors.UsageError as error: print(error)"
    )
    done = run_python(code, tmp_path)
    assert done.stdout.startswith(f"the module name 'tools' is taken by {tmp_path}/elsewhere/tools.py; ")


def imported_names(file: Path) -> set[str]:
    """Every absolute module name that a file imports, by statement or through `import_module`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names |= {str(part.value) for part in node.args if isinstance(part, ast.Constant)}
    return names


def test_the_core_imports_no_old_name():
    files = [path for path in SOURCE.rglob("*.py") if "_old_names" not in path.parts]
    assert len(files) > 20
    guilty = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in files
        for name in imported_names(path)
        if name.partition(".")[0] in TOP_NAMES or name.startswith("hermes_agent._old_names")
    }
    assert guilty == set()
