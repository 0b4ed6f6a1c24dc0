"""The rules of choosing tools by toolset, and of the built-in tools as a whole."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hermes_agent.errors import UsageError
from hermes_agent.tools import builtin, toolsets
from hermes_agent.tools.registry import Effect, Registry, ToolEntry

BUILTIN = ["patch", "read_file", "search_files", "skills_list", "terminal", "todo", "write_file"]


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    builtin.register_builtin(registry)
    return registry


def names(registry: Registry, enabled: list[str] | None, disabled: list[str] | None = None) -> list[str]:
    return [entry.name for entry in toolsets.resolve(enabled, disabled or [], registry)]


def tool(name: str, toolset: str, **more: Any) -> ToolEntry:
    return ToolEntry(
        name=name, toolset=toolset, description="", parameters={}, handler=lambda _args, **_kw: "ok", **more
    )


@pytest.mark.parametrize(
    ("enabled", "disabled", "expected"),
    [
        (None, [], BUILTIN),
        ([], [], []),
        (["todo"], [], ["todo"]),
        (["skills"], [], ["skills_list"]),
        (["file"], [], ["patch", "read_file", "search_files", "write_file"]),
        (["todo", "file", "todo"], ["file"], ["todo"]),
        (["coding"], [], BUILTIN),
        (["hermes-cli"], [], BUILTIN),
        (["hermes-api-server"], ["terminal"], [name for name in BUILTIN if name != "terminal"]),
        (["debugging"], [], ["patch", "read_file", "search_files", "terminal", "write_file"]),
        (["safe"], [], []),
        (["hermes-webhook"], [], []),
        (None, ["hermes-cli"], []),
    ],
)
def test_a_choice_gives_the_tools_that_exist(
    registry: Registry, enabled: list[str] | None, disabled: list[str], expected: list[str]
) -> None:
    assert names(registry, enabled, disabled) == expected


def test_an_unknown_toolset_is_refused_with_the_nearest_name(registry: Registry) -> None:
    with pytest.raises(UsageError, match="Did you mean 'terminal'"):
        names(registry, ["terminl"])
    with pytest.raises(UsageError, match="Did you mean 'todo'"):
        names(registry, None, ["todos"])
    with pytest.raises(UsageError, match="There are: all, browser"):
        names(registry, ["qqqqqqqq"])


def test_a_plugin_can_add_a_tool_and_a_toolset(registry: Registry) -> None:
    registry.register(tool("a_tool", "weather"))
    registry.register(tool("z_tool", "todo"))
    assert names(registry, ["weather"]) == ["a_tool"]
    assert names(registry, ["todo"]) == ["todo", "z_tool"]
    assert "a_tool" in names(registry, None)


def test_a_tool_that_is_not_available_is_left_out(registry: Registry) -> None:
    registry.register(tool("web_search", "web", available=lambda: False))
    assert names(registry, ["web"]) == []


def test_the_order_does_not_depend_on_the_order_of_registration(registry: Registry) -> None:
    other = Registry()
    for entry in reversed(registry.entries()):
        other.register(entry)
    assert names(other, None) == names(registry, None)


def test_registering_again_keeps_what_was_changed(registry: Registry) -> None:
    """A plugin may have taken a name, an embedder may have replaced a handler."""
    mine = registry.register(tool("todo", "todo"))
    builtin.register_builtin(registry)
    assert registry.get_entry("todo") is mine


def test_definitions_are_what_a_model_is_sent() -> None:
    (definition,) = toolsets.get_tool_definitions(enabled_toolsets=["todo"])
    assert definition["type"] == "function"
    assert definition["function"]["name"] == "todo"
    assert definition["function"]["parameters"]["type"] == "object"
    assert len(toolsets.get_tool_definitions()) >= len(BUILTIN)
    assert toolsets.get_tool_definitions(["file"], ["file"]) == []


def test_requirements_are_listed_by_toolset() -> None:
    assert toolsets.check_toolset_requirements().items() >= {"file": True, "skills": True, "todo": True}.items()


def test_every_builtin_tool_says_what_repeating_it_does(registry: Registry) -> None:
    effects = {entry.name: entry.effect for entry in registry.entries() if isinstance(entry.effect, Effect)}
    assert effects["read_file"] is effects["search_files"] is effects["todo"] is effects["skills_list"] is Effect.PURE
    assert effects["write_file"] is Effect.IDEMPOTENT
    assert effects["patch"] is Effect.UNSAFE
    assert registry.get_entry("todo_list") is registry.get_entry("todo")


def test_every_builtin_schema_is_sound(registry: Registry) -> None:
    for entry in registry.entries():
        properties = entry.parameters["properties"]
        assert set(entry.parameters.get("required", [])) <= set(properties)
        assert entry.description
        assert all("type" in schema for schema in properties.values())


def test_loading_the_tools_loads_nothing_heavy(unmeasured: None) -> None:
    """Start-up time: what only a call needs is imported by the call."""
    heavy = "{'asyncio', 'difflib', 'inspect', 'logging', 'subprocess', 'tempfile', 'urllib.request', 'uuid'}"
    # What the tools' own floor below imports is not theirs to save.
    script = (
        "import json, re, pathlib, sys, hermes_agent.tools.registry, hermes_agent.tools.context, hermes_agent.errors\n"
        "import hermes_agent.store.encoding\n"
        "before = set(sys.modules)\n"
        "from hermes_agent.tools import patch, read_file, search_files, skills_list, todo, write_file\n"
        f"print(sorted({heavy} & (set(sys.modules) - before)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
