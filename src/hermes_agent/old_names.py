"""The module names that plugins and embedders know from the upstream agent.

`_old_names/` is a folder for `sys.path` with one forwarding file a name. Importing
an old name gives the new module object itself, so a patch made through either name
is seen by both. Packages (`agent`, `tools`) are empty and only lead to such files.
The core never imports an old name.

`agent` and `tools` are common names. A program with modules of its own under such a
name keeps them: the folder joins at the end of `sys.path`. `activate` puts it first,
for processes that are ours from the start and load plugins.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from hermes_agent.errors import UsageError

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_old_names")

TARGETS = {
    "agent.agent_runtime_helpers": "hermes_agent.agent.agent_runtime_helpers",
    "agent.model_metadata": "hermes_agent.agent.model_metadata",
    "agent.tool_dispatch_helpers": "hermes_agent.agent.tool_dispatch_helpers",
    "agent.tool_executor": "hermes_agent.agent.tool_executor",
    "gateway.config": "hermes_agent.gateway.config",
    "gateway.platforms.api_server": "hermes_agent.gateway.platforms.api_server",
    "hermes_cli.main": "hermes_agent.cli.main",
    "hermes_state": "hermes_agent.store.session_db",
    "model_tools": "hermes_agent.tools.model_tools",
    "run_agent": "hermes_agent.agent.run",
    "tools.registry": "hermes_agent.tools.registry",
}
"""Each old name and the module that it is."""


def activate() -> None:
    """Make every old name importable and ours in this process.

    Puts the folder first on `sys.path`. Raises `UsageError` naming the module and its
    file if a stranger holds a name already: forwarding would then reach the wrong code.
    """
    for name in sorted({old.partition(".")[0] for old in TARGETS}):
        stranger = _stranger(name)
        if stranger:
            raise UsageError(
                f"the module name {name!r} is taken by {stranger}; "
                "install hermes-agent in an environment of its own (pipx does) or rename that module"
            )
    if sys.path[:1] != [FOLDER]:
        sys.path[:] = [FOLDER, *(entry for entry in sys.path if entry != FOLDER)]


def become(old: str) -> None:
    """Turn the module that runs under the name `old` into its target; a forwarding file's only call.

    A thread that imports `old` at the same time may be handed the forwarding module in
    place of the target, so that one passes on every read and write from then on.
    """
    stub = sys.modules[old]
    target = importlib.import_module(TARGETS[old])
    stub.__class__ = _passing_on(target)
    sys.modules[old] = target


def _passing_on(target: ModuleType) -> type[ModuleType]:
    class PassingOn(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            return getattr(target, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(target, name, value)

        def __delattr__(self, name: str) -> None:
            delattr(target, name)

    return PassingOn


def _stranger(name: str) -> str:
    """Who holds the top-level name instead of us, as a place a person can look at; empty if nobody does."""
    module = sys.modules.get(name)
    if module is not None:
        return "" if _is_ours(module, name) else _place(getattr(module, "__spec__", None), module)
    for finder in sys.meta_path:
        if finder is PathFinder:
            break  # it searches sys.path, where we are first
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(name, [FOLDER]) if find_spec else None
        if spec is not None and not _inside(spec.origin):
            return _place(spec, None)
    return ""


def _is_ours(module: ModuleType, name: str) -> bool:
    return module is sys.modules.get(TARGETS.get(name, "")) or _inside(getattr(module, "__file__", None))


def _inside(file: str | None) -> bool:
    return bool(file) and os.path.realpath(str(file)).startswith(os.path.realpath(FOLDER) + os.sep)


def _place(spec: Any, module: ModuleType | None) -> str:
    """The file of a module; for a folder without `__init__.py`, the folder."""
    file = getattr(module, "__file__", None) or getattr(spec, "origin", None)
    folders = getattr(spec, "submodule_search_locations", None) or ["a module without a file"]
    return str(file or next(iter(folders)))
