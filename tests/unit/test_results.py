"""The rules of tool results: one shape from any return value, and a size that never surprises."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from hermes_agent.errors import ToolError
from hermes_agent.tools import read_file, results
from hermes_agent.tools.context import ToolContext
from hermes_agent.tools.results import ResultBudget, TurnBudget, maybe_persist_tool_result, normalise

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.fixture
def budget(tmp_path: Path) -> ResultBudget:
    return ResultBudget(spill_dir=tmp_path / "cache" / "spillover")


def persist(content: Any, budget: ResultBudget, *, call: str = "t1.2.0", threshold: int | None = None) -> Any:
    return maybe_persist_tool_result(
        content=content, tool_name="terminal", tool_use_id=call, env=None, config=budget, threshold=threshold
    )


def spill_files(budget: ResultBudget) -> list[Path]:
    assert budget.spill_dir is not None
    return sorted(budget.spill_dir.iterdir()) if budget.spill_dir.exists() else []


# --- one shape from any return value -------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", "text"),
        ("", "(no output)"),
        (None, "(no output)"),
        ([], "(no output)"),
        (b"", "(no output)"),
        (b"caf\xff", "caf\ufffd"),
        ("caf\ud83d!", "caf\ufffd!"),
        ("a\0b", "a\u2400b"),
        (0, "0"),
        (False, "false"),
        ({}, "{}"),
        ({"a": "ü\udc80"}, '{"a": "ü\ufffd"}'),
        ([1, 2], "[1, 2]"),
        ([{"type": "folder", "name": "x"}], '[{"type": "folder", "name": "x"}]'),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
        ([{"type": "text", "text": ""}], "(no output)"),
        ([{"type": "text", "text": "one"}, IMAGE], [{"type": "text", "text": "one"}, IMAGE]),
        ([{"type": "text", "text": ""}, IMAGE], [IMAGE]),
        ({"content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}, "one\ntwo"),
        ({"content": []}, "(no output)"),
        ({"content": [1]}, '{"content": [1]}'),
        ({"content": [{"type": "text", "text": "bad"}], "isError": True}, '{"error": "bad"}'),
        ([{"type": "image", "data": "AA==", "mimeType": "image/png"}], [IMAGE]),
        ({"error": {"code": -32603, "message": "no"}}, '{"error": {"code": -32603, "message": "no"}}'),
    ],
)
def test_every_return_value_becomes_one_content(value: Any, expected: Any) -> None:
    assert normalise(value) == expected


def test_an_error_with_an_image_is_still_marked_as_an_error() -> None:
    got = normalise({"content": [{"type": "text", "text": "bad"}, IMAGE], "isError": True})
    assert isinstance(got, list)
    assert '"error"' in got[0]["text"]
    assert got[1:] == [{"type": "text", "text": "bad"}, IMAGE]


def test_other_kinds_of_parts_are_kept_as_json_text() -> None:
    got = normalise([{"type": "resource", "resource": {"uri": "x"}}, {"type": "text", "text": "one"}])
    assert got == '{"type": "resource", "resource": {"uri": "x"}}\none'


def test_every_exception_has_an_error_text() -> None:
    assert json.loads(results.error_result(ValueError("bad"))) == {"error": "bad"}
    assert json.loads(results.error_result(KeyboardInterrupt())) == {"error": "KeyboardInterrupt"}


def test_a_handler_answers_mistakes_and_file_errors_with_an_error(tmp_path: Path) -> None:
    def run(args: dict[str, Any], _context: ToolContext) -> dict[str, Any]:
        if args["what"] == "tool":
            raise ToolError("say it better")
        if args["what"] == "disk":
            raise OSError(28, "No space left on device", "/x")
        raise ZeroDivisionError

    handler = results.json_handler(run)
    context = ToolContext(home=tmp_path, cwd=tmp_path)
    assert handler({"what": "tool"}, context=context) == '{"error": "say it better"}'
    assert handler({"what": "disk"}, context=context) == '{"error": "No space left on device: /x"}'
    with pytest.raises(ZeroDivisionError):
        handler({"what": "bug"}, context=context)


# --- the budget of one result ------------------------------------------------------------


def test_a_result_up_to_its_threshold_is_unchanged(budget: ResultBudget) -> None:
    exact = "x" * 100_000
    assert persist(exact, budget) is exact
    assert persist("x" * 10_000_000, budget, threshold=0) == "x" * 10_000_000
    assert persist("x" * 500, budget, threshold=500) == "x" * 500
    assert spill_files(budget) == []


def test_a_longer_result_is_saved_whole_before_it_is_shortened(budget: ResultBudget) -> None:
    """Head and tail stay; how much is left out and where all of it is stand between."""
    lines = [f"line {n}" for n in range(50_000)]
    text = "\n".join(lines)
    got = persist(text, budget)
    (path,) = spill_files(budget)
    assert path.read_text() == text
    assert path.name == "t1.2.0.txt"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert str(path) in got
    assert "line 0\nline 1\n" in got
    assert got.rstrip().endswith("line 49999\n</spilled_result>")
    assert "read_file" in got
    shown = got.count("line ")
    assert 100 < shown < 250
    head, _, tail = got.partition("\n[... ")
    left_out = int(tail.split()[0])
    kept_head, kept_tail = head.split("for that.\n")[1], tail.split("...]\n")[1].removesuffix("\n</spilled_result>")
    assert left_out == len(text) - len(kept_head) - len(kept_tail)
    assert len(got) < 2_500


def test_the_saved_result_can_be_read_with_read_file(budget: ResultBudget, tmp_path: Path) -> None:
    """Also when a command printed bytes that are no text, and all in one line."""
    output = bytes(range(256)).decode("utf-8", "replace") * 1000
    got = persist(json.dumps({"output": output, "exit_code": 0, "error": None}), budget)
    assert '"exit_code": 0' in got
    assert 'field "output"' in got
    assert "\0" not in got
    (path,) = spill_files(budget)
    assert path.read_bytes().decode() == output
    context = ToolContext(home=tmp_path, cwd=tmp_path)
    page = json.loads(read_file.TOOL.handler({"path": str(path), "offset": 2}, context=context))
    assert page["content"].startswith("2|\x0b\x0c\r\x0e")
    assert page["total_lines"] == 1001


def test_a_repeated_call_writes_the_same_file(budget: ResultBudget) -> None:
    first, second = persist("x" * 200_000, budget), persist("x" * 200_000, budget)
    assert first == second
    assert len(spill_files(budget)) == 1


def test_a_saved_result_is_never_overwritten_by_another(budget: ResultBudget) -> None:
    """Providers repeat their ids; an older transcript may name the file."""
    persist("x" * 200_000, budget, call="call_1")
    persist("y" * 200_000, budget, call="call_1")
    assert {path.read_text()[0] for path in spill_files(budget)} == {"x", "y"}


@pytest.mark.parametrize("call", ["../../etc/passwd", "a/b", "", ".", "x" * 500, "ü", "a\0b", "\udc80"])
def test_no_id_leads_out_of_the_folder(budget: ResultBudget, call: str) -> None:
    persist("x" * 200_000, budget, call=call)
    persist("x" * 200_000, budget, call=call + "?")
    files = spill_files(budget)
    assert len(files) == 2
    assert all(len(path.name) < 150 and path.name.isascii() for path in files)


def test_without_a_place_to_write_the_preview_says_that_the_rest_is_lost(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file" / "spillover"):
        got = persist("x" * 200_000, ResultBudget(spill_dir=folder))
        assert "could not be saved" in got
        assert len(got) < 2_500


def test_images_stay_and_only_text_is_saved(budget: ResultBudget) -> None:
    parts = [{"type": "text", "text": "x" * 60_000}, IMAGE, {"type": "text", "text": "y" * 60_000}]
    got = persist(parts, budget)
    assert [part["type"] for part in got] == ["text", "image_url"]
    assert spill_files(budget)[0].read_text() == "x" * 60_000 + "\n" + "y" * 60_000


def test_an_envelope_is_unwrapped_and_other_json_is_laid_out(budget: ResultBudget) -> None:
    persist(json.dumps({"result": "a\n" * 100_000, "_meta": {}}), budget, call="envelope")
    persist(json.dumps({"rows": [{"n": n} for n in range(20_000)]}), budget, call="rows")
    persist(json.dumps({"result": {"rows": list(range(30_000))}}), budget, call="structured")
    persist("{broken" + "x" * 200_000, budget, call="broken")
    files = {path.stem: path.read_text() for path in spill_files(budget)}
    assert files["envelope"] == "a\n" * 100_000
    assert files["rows"].count("\n") > 20_000
    assert json.loads(files["structured"])["rows"][-1] == 29_999
    assert files["broken"].startswith("{broken")


def test_half_a_surrogate_pair_does_not_stop_the_saving(budget: ResultBudget) -> None:
    persist("\ud83d" + "x" * 200_000, budget)
    assert spill_files(budget)[0].read_text(encoding="utf-8").startswith("\ufffdxx")


def test_a_text_that_shrinks_when_unwrapped_is_shown_whole(tmp_path: Path) -> None:
    """Escapes make JSON several times longer than what it says."""
    budget = ResultBudget(per_result=2_000, spill_dir=tmp_path / "spill")
    got = persist('{"output": "' + "\\n" * 1_000 + '"}', budget)
    assert "\n" * 900 in got


# --- the budgets of a window and of a batch ----------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "per_result", "per_turn"),
    [(1_000, 8_000, 16_000), (32_000, 19_200, 38_400), (128_000, 76_800, 153_600), (1_000_000, 100_000, 200_000)],
)
def test_budgets_follow_the_window_within_bounds(tokens: int, per_result: int, per_turn: int) -> None:
    budget = ResultBudget.for_window(tokens, None)
    assert (budget.per_result, budget.per_turn) == (per_result, per_turn)


def test_the_threshold_of_a_tool() -> None:
    turn = TurnBudget(ResultBudget())
    assert turn.threshold_for("terminal", None) == 100_000
    assert turn.threshold_for("terminal", 30_000) == 30_000
    assert turn.threshold_for("terminal", 1_000_000) == 100_000
    assert turn.threshold_for("terminal", 500) == 500
    assert turn.threshold_for("mcp__server__tool", None) == 50_000
    assert turn.threshold_for("read_file", 0) == 200_000
    assert turn.threshold_for("todo", 0) == 0


def test_a_batch_keeps_its_budget_before_anything_is_stored(budget: ResultBudget) -> None:
    """Twenty results of 90,000 characters: the first two stay, the others are spilled as they come."""
    turn = TurnBudget(budget)
    rows: list[Any] = []
    for n in range(20):
        limit = turn.threshold_for("read_file", 0)
        rows.append(persist(f"{n} " + "x" * 90_000, budget, call=f"t.1.{n}", threshold=limit))
        turn.add(rows[-1])
    assert [len(row) > 50_000 for row in rows] == [True, True] + [False] * 18
    assert sum(map(len, rows)) < budget.per_turn + 20 * 2_500
    assert len(spill_files(budget)) == 18


def test_a_spent_budget_still_lets_short_results_through() -> None:
    turn = TurnBudget(ResultBudget())
    turn.add("x" * 300_000)
    assert turn.threshold_for("terminal", None) == 2_000
    assert turn.threshold_for("todo", 0) == 0
    turn.add([{"type": "text", "text": "x"}, IMAGE])
    assert turn.threshold_for("terminal", 100) == 100
