"""The rules of the task list and of the list of skills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_agent.tools import skills_list, todo
from hermes_agent.tools.context import ToolContext
from hermes_agent.tools.registry import Effect


@pytest.fixture
def context(tmp_path: Path) -> ToolContext:
    return ToolContext(home=tmp_path, cwd=tmp_path)


def call(context: ToolContext, **args: Any) -> dict[str, Any]:
    return json.loads(todo.TOOL.handler(args, context=context))


def item(key: str, status: str = "pending", content: str = "do it") -> dict[str, str]:
    return {"id": key, "content": content, "status": status}


def test_the_whole_list_comes_back_with_its_summary(context: ToolContext) -> None:
    given = [item("a", "completed"), item("b", "in_progress"), item("c"), item("d", "cancelled")]
    got = call(context, todos=given)
    assert got["todos"] == given
    assert got["summary"] == {"total": 4, "pending": 1, "in_progress": 1, "completed": 1, "cancelled": 1}
    assert call(context) == got


def test_a_list_replaces_the_old_one_and_merge_changes_items_by_id(context: ToolContext) -> None:
    call(context, todos=[item("a"), item("b")])
    got = call(context, todos=[{"id": "b", "status": "completed"}, item("c")], merge=True)
    assert got["todos"] == [item("a"), item("b", "completed"), item("c")]
    assert call(context, todos=[item("z")])["todos"] == [item("z")]
    assert call(context, todos=[])["todos"] == []


def test_each_session_has_its_own_list(context: ToolContext, tmp_path: Path) -> None:
    call(context, todos=[item("a")])
    assert call(ToolContext(home=tmp_path, cwd=tmp_path))["todos"] == []


def test_items_without_an_id_get_one_that_is_free(context: ToolContext) -> None:
    got = call(context, todos=[item("2"), {"content": "x", "status": "pending"}, {"content": "y"}])
    assert [entry["id"] for entry in got["todos"]] == ["2", "3", "4"]
    assert got["todos"][2]["status"] == "pending"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("no json", "list"),
        ({"id": "a"}, "list"),
        (["a"], "object"),
        ([{"id": "a", "status": "pending"}], "content"),
        ([item("a", "done")], "pending, in_progress"),
        ([item("a", content="x" * 4001)], "4000"),
        ([item(str(n)) for n in range(257)], "256"),
    ],
)
def test_a_refused_list_leaves_the_old_one(context: ToolContext, bad: object, says: str) -> None:
    call(context, todos=[item("a")])
    assert says in call(context, todos=bad)["error"]
    assert call(context)["todos"] == [item("a")]


def test_a_list_sent_as_json_text_is_accepted(context: ToolContext) -> None:
    assert call(context, todos=json.dumps([item("a")]))["todos"] == [item("a")]


def test_the_list_is_rebuilt_from_the_last_result_that_shows_one(context: ToolContext) -> None:
    def row(content: str, **names: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": "x", "content": content, **names}

    first = todo.TOOL.handler({"todos": [item("a")]}, context=context)
    second = todo.TOOL.handler({"todos": [item("b", content="ü")]}, context=context)
    rows = [
        row(first, name="todo"),
        row(second + "\n\n[a note from the user]", tool_name="todo_list"),
        row('{"error": "no"}', name="todo"),
        row("{broken", name="todo"),
        row(first, name="other"),
        {"role": "user", "content": first},
        {"role": "tool", "name": "todo", "content": None},
    ]
    assert todo.restore(rows) == [item("b", content="ü")]
    assert todo.restore(rows[:1]) == [item("a")]
    assert todo.restore([]) == []


def test_the_list_is_pure_and_stays_whole() -> None:
    assert todo.TOOL.effect is Effect.PURE
    assert todo.TOOL.inline
    assert todo.TOOL.aliases == ("todo_list",)


# --- skills_list -------------------------------------------------------------------------------


def skills(context: ToolContext, **args: Any) -> dict[str, Any]:
    return json.loads(skills_list.TOOL.handler(args, context=context))


def add_skill(context: ToolContext, place: str, text: str) -> None:
    folder = context.home / "skills" / place
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text(text, encoding="utf-8")


def test_without_skills_the_list_is_empty(context: ToolContext) -> None:
    assert skills(context) == {"success": True, "skills": [], "categories": []}


def test_skills_are_listed_by_category_and_name(context: ToolContext) -> None:
    add_skill(
        context, "web/fetch", '---\nname: "fetch-page"\ndescription: Gets: a page\nmeta:\n  x: 1\n---\nname: no\n'
    )
    add_skill(
        context, "code/review", "\ufeff---\r\nname: 'review'\r\ndescription: >\r\n  Reads\r\n  a change\r\n---\r\n"
    )
    add_skill(context, "code/plain", "# no front matter\nname: no\n")
    add_skill(context, ".hidden/x", "---\nname: x\n---\n")
    (context.home / "skills" / "empty" / "no skill").mkdir(parents=True)
    (context.home / "skills" / "file").touch()
    got = skills(context)
    assert got["categories"] == ["code", "web"]
    assert got["skills"] == [
        {"name": "plain", "description": "", "category": "code"},
        {"name": "review", "description": "Reads a change", "category": "code"},
        {"name": "fetch-page", "description": "Gets: a page", "category": "web"},
    ]
    assert [skill["name"] for skill in skills(context, category="web")["skills"]] == ["fetch-page"]
    assert "code, web" in skills(context, category="wbe")["error"]


def test_long_names_and_descriptions_are_cut(context: ToolContext) -> None:
    add_skill(context, "a/b", f"---\nname: {'n' * 100}\ndescription: {'d' * 2000}\n---\n")
    (skill,) = skills(context)["skills"]
    assert (len(skill["name"]), len(skill["description"])) == (64, 1024)
