"""`sanitize` brings any rows into what a strict provider accepts, and leaves everything else alone."""

from __future__ import annotations

import copy
import time
from itertools import chain

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hermes_agent.agent.agent_runtime_helpers import sanitize_api_messages
from hermes_agent.transcript import rows, rules
from hermes_agent.transcript.rules import check_strict, sanitize

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is not a broken rule."""

U = {"role": "user", "content": "u"}
EMPTY = {"role": "assistant", "content": ""}
DONE = {"role": "assistant", "content": "done"}


def asks(*ids, name="todo", arguments="{}"):
    calls = [{"id": i, "type": "function", "function": {"name": name, "arguments": arguments}} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def answer(call_id, content="ok", name="todo", **extra):
    return {"role": "tool", "name": name, "content": content, "tool_call_id": call_id, **extra}


def stub(call_id, name="todo"):
    return answer(call_id, rules.NO_RESULT, name, **{rules.DERIVED: True})


def note(text=rules.NO_REPLY):
    return {"role": "assistant", "content": text, rules.DERIVED: True}


def wire(history):
    return [rows.split(row)[0] for row in history]


def check_pure(history, expected, **options):
    """`sanitize` gives the expected rows, accepted by the strict check, and the input stays as it was."""
    before = copy.deepcopy(history)
    result = sanitize(history, **options)
    assert history == before
    assert result == expected
    assert check_strict(wire(result), alternation=options.get("strict_alternation", True)) is None
    assert sanitize(result, **options) is result


# -- the table: one line, one rule


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        pytest.param(
            [U, asks("a", "b"), answer("a"), U],
            [U, asks("a", "b"), answer("a"), stub("b"), note(), U],
            id="an unanswered call gets a stub",
        ),
        pytest.param(
            [U, asks("a", "b"), answer("b")],
            [U, asks("a", "b"), stub("a"), answer("b")],
            id="the stub stands in call order",
        ),
        pytest.param([U, answer("z"), DONE, U], [U, DONE, U], id="a result without a call is dropped"),
        pytest.param(
            [U, asks("a"), U, answer("a"), U],
            [U, asks("a"), stub("a"), note(), U, note(), U],
            id="a result after another role is too late",
        ),
        pytest.param(
            [U, asks("a"), answer("a", "1"), answer("a", "2"), DONE],
            [U, asks("a"), answer("a", "1"), DONE],
            id="a second result is dropped",
        ),
        pytest.param(
            [U, asks("a", "a"), answer("a", "1"), answer("a", "2"), DONE],
            [U, asks("a"), answer("a", "1"), DONE],
            id="a call said twice is one call",
        ),
        pytest.param(
            [U, asks("a", "b"), answer("b"), answer("a"), DONE],
            [U, asks("a", "b"), answer("a"), answer("b"), DONE],
            id="results are put into call order",
        ),
        pytest.param(
            [U, EMPTY, U],
            [U, {"role": "assistant", "content": rules.NO_REPLY}, U],
            id="an empty reply in the middle gets a text",
        ),
        pytest.param([U, EMPTY], [U], id="an empty reply at the end is dropped"),
        pytest.param(
            [U, EMPTY, {"role": "assistant", "content": [{"type": "text", "text": " "}]}, answer("x")],
            [U],
            id="so are several",
        ),
        pytest.param(
            [{"role": "narrator", "content": "x"}, {"role": ["user"]}, {}, "x", U], [U], id="unknown roles are dropped"
        ),
        pytest.param(
            [U, asks("a", name="b.c"), answer("a", name="zzz")],
            [U, asks("a", name="b_c"), answer("a", name="b_c")],
            id="a bad name is coerced in call and result",
        ),
        pytest.param(
            [U, asks("a", name=""), answer("a", name="")],
            [U, asks("a", name="invalid_tool"), answer("a", name="invalid_tool")],
            id="a blank name too",
        ),
        pytest.param([U, U], [U, note(), U], id="two user rows get a note between them"),
        pytest.param(
            [U, {"role": "system", "content": "s"}, U],
            [U, {"role": "system", "content": "s"}, note(), U],
            id="a system row between them does not count",
        ),
        pytest.param([U, {**DONE, "tool_calls": []}], [U, DONE], id="an empty list of calls is removed"),
        pytest.param([U, {**DONE, "tool_calls": None}, U], [U, DONE, U], id="so is a null"),
        pytest.param([U, {**DONE, "tool_calls": ["x"]}, answer("a")], [U, DONE], id="and a list without a call"),
        pytest.param(
            [U, asks(" a\n"), answer("a ")], [U, asks("a"), answer("a")], id="outer white space of ids does not count"
        ),
        pytest.param(
            [{"role": "user", "content": ""}, DONE, {"role": "user"}],
            [{"role": "user", "content": rules.EMPTY_MESSAGE}, DONE, {"role": "user", "content": rules.EMPTY_MESSAGE}],
            id="an empty user row gets a text",
        ),
        pytest.param(
            [U, asks("a"), answer("a", None)],
            [U, asks("a"), answer("a", rows.NO_OUTPUT)],
            id="a result of nothing says so",
        ),
        pytest.param(
            [U, asks("a"), answer("a", {"k": [1]})],
            [U, asks("a"), answer("a", '{"k":[1]}')],
            id="other JSON becomes its text",
        ),
        pytest.param(
            [{"role": "user", "content": "a\0\ud83d"}],
            [{"role": "user", "content": "a\ufffd\ufffd"}],
            id="NUL and lone surrogates are replaced",
        ),
        pytest.param(
            [{**U, "name": "Jo Ann"}, {**DONE, "name": None}],
            [{**U, "name": "Jo_Ann"}, DONE],
            id="names of speakers are made legal or removed",
        ),
        pytest.param([{**U, "tool_calls": [], "tool_call_id": "a"}], [U], id="what belongs to another role is removed"),
        pytest.param(
            [U, {**asks("a"), "content": []}, answer("a")],
            [U, asks("a"), answer("a")],
            id="an empty list of parts is no content",
        ),
    ],
)
def test_rows_are_put_right(history, expected):
    check_pure(history, expected)


CLEAN = [
    [],
    [U],
    [{"role": "system", "content": "s"}, U, DONE, U],
    [U, asks("c"), answer("c", "1"), asks("c"), answer("c", "2"), DONE, U],
    [U, asks("a", "b"), answer("a"), {k: v for k, v in answer("b").items() if k != "name"}, DONE],
    [U, {**asks("a"), "content": "", "finish_reason": "tool_calls", "_mark": object()}, answer("a")],
    [{"role": "user", "content": [{"type": "text", "text": "é"}, {"type": "image_url", "image_url": {"url": "u"}}]}],
    [U, asks("a", arguments=r'{"a": "\u00e9"}'), answer("a", [{"type": "text", "text": "t"}])],
]


@pytest.mark.parametrize("history", CLEAN)
def test_a_clean_history_comes_back_as_the_same_object(history):
    assert sanitize(history) is history
    assert check_strict(wire(history)) is None


def test_only_changed_rows_are_copied():
    history = [U, DONE, {"role": "user", "content": "a\0"}, asks("a"), answer("a", "1"), DONE]
    result = sanitize(history)
    assert [new is old for new, old in zip(result, history, strict=True)] == [True, True, False, True, True, True]


def test_without_alternation_no_note_is_made():
    check_pure([U, U, asks("a"), answer("a"), U], [U, U, asks("a"), answer("a"), U], strict_alternation=False)


def test_the_note_says_why_the_turn_failed_when_that_is_known():
    failed = {**U, rules.OUTCOME_NOTE: "[the model could not be reached]"}
    check_pure([failed, U], [failed, note("[the model could not be reached]"), U])
    stopped = answer("a", _outcome_note="[stopped by the user]")
    check_pure([U, asks("a"), stopped, U], [U, asks("a"), stopped, note("[stopped by the user]"), U])
    empty = {**EMPTY, rules.OUTCOME_NOTE: "[nothing came]"}
    check_pure([U, empty, U], [U, {**empty, "content": "[nothing came]"}, U])


@pytest.mark.parametrize("last", [[], [answer("b"), answer("a", _outcome_note="[killed]")]])
def test_the_note_is_found_when_the_results_of_its_row_had_to_be_rebuilt(last):
    calls = asks("a", "b") if last else {**asks("a", "b"), rules.OUTCOME_NOTE: "[killed]"}
    result = sanitize([U, calls, *last, U])
    assert [row["role"] for row in result] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    assert result[-2]["content"] == "[killed]"
    assert check_strict(wire(result)) is None


def test_the_reason_of_an_empty_last_reply_stays_for_the_note_that_follows():
    ended = sanitize([U, {**EMPTY, rules.OUTCOME_NOTE: "[nothing came]"}])
    assert wire(ended) == [U]
    assert rules.note_between(ended[-1], U) == note("[nothing came]")


def test_a_request_begins_with_the_bytes_of_the_one_before_also_after_an_empty_reply():
    history = [U, EMPTY]
    sent = sanitize(history)
    first = [*sent, rules.note_between(sent[-1], U), U]
    assert list(map(rows.encode, wire(first))) == list(map(rows.encode, wire(sanitize([*history, U]))))


@pytest.mark.parametrize("before", [None, DONE, {"role": "system", "content": "s"}])
def test_no_note_stands_where_a_user_row_may_follow(before):
    assert rules.note_between(before, U) is None
    assert rules.note_between(U, DONE) is None


def test_blank_ids_get_one_derived_id_in_call_and_result_by_position():
    history = [U, asks("", "x", None), answer(" ", "1"), answer("x", "2"), answer(None, "3"), DONE]
    ids = [rows.derived_id("todo", "{}", 0), "x", rows.derived_id("todo", "{}", 2)]
    expected = [U, asks(*ids), answer(ids[0], "1"), answer("x", "2"), answer(ids[2], "3"), DONE]
    check_pure(history, expected)


def test_a_derived_id_and_a_blank_one_are_a_pair():
    derived = rows.derived_id("todo", "{}", 0)
    check_pure([U, asks(derived), answer("")], [U, asks(derived), answer(derived)])
    check_pure([U, asks(""), answer(derived)], [U, asks(derived), answer(derived)])


def test_a_blank_result_goes_to_the_next_call_that_has_none():
    ids = [rows.derived_id("todo", "{}", index) for index in range(2)]
    history = [U, asks("", ""), answer(ids[0], "1"), answer("", "2")]
    check_pure(history, [U, asks(*ids), answer(ids[0], "1"), answer(ids[1], "2")])


def test_a_blank_result_does_not_answer_a_call_that_has_an_id():
    check_pure([U, asks("a"), answer("", "whose?")], [U, asks("a"), stub("a")])


@pytest.mark.parametrize(("called", "answered"), [("c1|i1", "c1"), ("c1|i1", "i1"), ("c1", "c1|i1"), ("a|i1", "b|i1")])
def test_a_composite_id_is_known_by_either_half(called, answered):
    safe = rows.safe_id(called)
    check_pure([U, asks(called), answer(answered)], [U, asks(safe), answer(safe)])


def test_ids_that_a_strict_provider_refuses_are_made_safe_in_call_and_result():
    long = "x" * 65
    history = [U, asks("f.x:0", long), answer("f.x:0", "1"), answer(long, "2")]
    ids = [rows.safe_id("f.x:0"), rows.safe_id(long)]
    check_pure(history, [U, asks(*ids), answer(ids[0], "1"), answer(ids[1], "2")])


def test_two_ids_never_become_one():
    made = rows.safe_id("a.b")
    history = [U, asks("a.b", made), answer("a.b", "1"), answer(made, "2")]
    check_pure(history, [U, asks(made, made + "_d2"), answer(made, "1"), answer(made + "_d2", "2")])


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ('{"content":"#!/usr/bin/env', '{"_invalid_arguments":"{\\"content\\":\\"#!/usr/bin/env"}'),
        ("[1,2]", '{"_invalid_arguments":"[1,2]"}'),
        ({"a": 1}, '{"a":1}'),
        (None, "{}"),
    ],
)
def test_arguments_that_are_no_object_text_are_sent_inside_one(arguments, sent):
    check_pure([U, asks("a", arguments=arguments), answer("a")], [U, asks("a", arguments=sent), answer("a")])


def test_a_call_in_any_shape_keeps_what_else_it_holds():
    odd = {"id": "a", "function": {"name": "todo", "note": "n\0"}, "extra_content": {"sign": "s\ud800"}}
    flat = {"id": "b", "type": "custom"}
    history = [U, {"role": "assistant", "tool_calls": [odd, 7, flat]}, answer("a"), answer("b")]
    calls = sanitize(history)[1]["tool_calls"]
    assert calls[0] == {
        "id": "a",
        "type": "function",
        "function": {"name": "todo", "arguments": "{}", "note": "n\ufffd"},
        "extra_content": {"sign": "s\ufffd"},
    }
    assert calls[1]["function"] == {"name": rows.UNNAMED_TOOL, "arguments": "{}"}
    assert check_strict(wire(sanitize(history))) is None


@pytest.mark.parametrize(
    ("call", "sent"),
    [
        ({"type": "custom"}, {"type": "function"}),
        (
            {"function": {"name": "todo", "arguments": "{}", "x": "\0"}},
            {"function": {"name": "todo", "arguments": "{}", "x": "\ufffd"}},
        ),
        ({"x": ["\0"]}, {"x": ["\ufffd"]}),
    ],
)
def test_one_fault_in_a_call_is_enough(call, sent):
    legal = asks("a")["tool_calls"][0]
    history = [U, {**asks("a"), "tool_calls": [{**legal, **call}]}, answer("a")]
    check_pure(history, [U, {**asks("a"), "tool_calls": [{**legal, **sent}]}, answer("a")])


def test_a_cut_transcript_is_closed_for_the_request_only():
    durable = [U, {**asks("visible-call"), "content": "looking"}]
    before = copy.deepcopy(durable)
    assert sanitize_api_messages(durable) == [*before, stub("visible-call")]
    assert durable == before


@pytest.mark.parametrize("count", [1, 3, 16, 40])
def test_every_cut_of_a_turn_is_acceptable(count):
    ids = [f"c{n}" for n in range(count)]
    turn = [U, asks(*ids), *map(answer, ids), DONE, U]
    for end in range(len(turn) + 1):
        assert check_strict(wire(sanitize(turn[:end]))) is None
        assert sanitize(turn[:end])[: min(end, 2)] == turn[: min(end, 2)]


def test_the_work_grows_with_the_number_of_rows_only():
    def seconds(count):
        ids = [f"c{n}" for n in range(count)]
        history = [U, asks(*ids), *(answer(each) for each in reversed(ids)), *[U] * count]
        started = time.process_time()
        sanitize(history)
        return time.process_time() - started

    small = min(seconds(400) for _ in range(5))
    assert min(seconds(4000) for _ in range(3)) < 40 * small


# -- any rows at all

TEXTS = st.text(st.sampled_from("ab |\0\ud83d\udc00é\n"), max_size=4)
IDS = st.sampled_from(["a", "b", "c", "a ", "a|i", "i", "", " ", "x.y", "n" * 70, "a\0", None, 1])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=5,
)
PARTS = st.lists(
    st.fixed_dictionaries({}, optional={"type": st.sampled_from(["text", "image_url"]) | ANYTHING, "text": ANYTHING})
    | ANYTHING,
    max_size=3,
)
CONTENT = TEXTS | ANYTHING | PARTS
ARGUMENTS = st.sampled_from(["{}", '{"a":1}', "", "[1]", '{"a":', r'{"a":"\ud800\u0000"}', '{"a":NaN}']) | ANYTHING
NAMES = st.sampled_from(["todo", "a.b", "", " ", "n" * 70, "sh\0ell"]) | ANYTHING
FUNCTIONS = st.fixed_dictionaries({}, optional={"name": NAMES, "arguments": ARGUMENTS, "x": ANYTHING}) | ANYTHING
CALLS = (
    st.lists(
        st.fixed_dictionaries(
            {"id": IDS, "function": FUNCTIONS}, optional={"type": st.just("function") | ANYTHING, "x": ANYTHING}
        )
        | st.fixed_dictionaries({}, optional={"type": TEXTS, "function": FUNCTIONS, "x": ANYTHING})
        | ANYTHING,
        max_size=4,
    )
    | ANYTHING
)
ROLES = (
    st.sampled_from(["user", "assistant", "tool", "assistant", "tool", "system", "developer", "function"]) | ANYTHING
)
ROWS = st.fixed_dictionaries(
    {"role": ROLES},
    optional={
        "content": CONTENT,
        "tool_calls": CALLS,
        "tool_call_id": IDS | ANYTHING,
        "name": NAMES,
        "_outcome_note": CONTENT,
        "reasoning": CONTENT,
    },
)
EXCHANGES = st.lists(IDS, max_size=4).flatmap(
    lambda ids: st.permutations(ids).map(lambda order: [asks(*ids), *map(answer, order)])
)
HISTORIES = st.lists(ROWS.map(lambda row: [row]) | EXCHANGES, max_size=6).map(lambda groups: list(chain(*groups)))


@PATIENT
@given(HISTORIES | st.lists(ROWS | ANYTHING, max_size=4), st.booleans())
@example([asks("a", "b"), answer("a"), {"role": "system", "content": "s"}, answer("b"), U], True)
@example([{"role": "assistant", "tool_calls": [{"type": "function", "function": {}, "x": "\0"}]}], True)
def test_any_rows_become_acceptable_once_and_for_all(history, alternation):
    before = copy.deepcopy(history)
    result = sanitize(history, strict_alternation=alternation)
    assert history == before
    assert check_strict(wire(result), alternation=alternation) is None
    assert sanitize(result, strict_alternation=alternation) is result
    assert all(rows.encode(row) for row in wire(result))


@PATIENT
@given(HISTORIES)
def test_what_is_sent_for_a_history_does_not_depend_on_what_follows_it(history):
    result = wire(sanitize([*history, DONE]))
    longer = wire(sanitize([*history, DONE, U, asks("z"), answer("z"), DONE]))
    assert longer[: len(result)] == result


SAFE_IDS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True)
TURNS = st.builds(
    lambda user, steps, last: [
        {"role": "user", "content": user, "timestamp": 1.0},
        *(row for ids in steps for row in (asks(*ids), *map(answer, ids))),
        {"role": "assistant", "content": last, "reasoning": "r"},
    ],
    st.sampled_from(["hi", "é😀", [{"type": "text", "text": "x"}]]),
    st.lists(SAFE_IDS, max_size=3),
    st.sampled_from(["done", "漢字", [{"type": "text", "text": "y"}]]),
)


@PATIENT
@given(st.lists(TURNS, max_size=3).map(lambda turns: list(chain(*turns))))
def test_a_legal_conversation_is_never_touched(history):
    assert check_strict(wire(history)) is None
    assert sanitize(history) is history


@PATIENT
@given(HISTORIES)
def test_no_recorded_result_of_a_legal_call_is_lost(history):
    legal = [U, asks("k1", "k2"), answer("k2", "two"), answer("k1", "one"), DONE]
    result = sanitize([*history, *legal])
    assert [row["content"] for row in result[-3:-1]] == ["one", "two"]


# -- the strict check by itself


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([U, asks("a")], "did not have response messages: a"),
        ([U, asks("a", "b"), answer("a"), DONE], "did not have response messages: b"),
        ([U, asks("a"), {"role": "system", "content": "s"}, answer("a")], "did not have response messages: a"),
        ([answer("a")], "must be a response to a preceding message"),
        ([U, asks("a"), answer("a"), answer("a")], "must be a response to a preceding message"),
        ([U, asks("a", "b"), answer("b"), answer("a")], "call order: expected 'a', got 'b'"),
        ([U, asks("a", "a"), answer("a"), answer("a")], "Duplicate value for 'tool_call_id'"),
        ([U, asks("a", arguments="[1]"), answer("a")], "expected a JSON object as a string"),
        ([U, asks("a", arguments='{"a":NaN}'), answer("a")], "expected a JSON object as a string"),
        ([U, asks("a", arguments='{"a":'), answer("a")], "expected a JSON object as a string"),
        ([U, asks("a", arguments={}), answer("a")], "expected a JSON object as a string"),
        ([U, asks("a", name="a.b"), answer("a")], "does not match pattern"),
        ([U, asks("a", name="todo\n"), answer("a")], "does not match pattern"),
        ([U, asks("a"), answer("a", name="")], "does not match pattern"),
        ([{**U, "name": "Jo Ann"}], "does not match pattern"),
        ([{"role": "user", "content": "a\0"}], "\\u0000"),
        ([{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}], "not valid UTF-8"),
        ([{"role": "user", "content": "x", "k\ud83d": 1}], "not valid UTF-8"),
        ([U, {**DONE, "tool_calls": []}], "minimum length 1"),
        ([U, EMPTY], "needs text or 'tool_calls'"),
        ([U, {"role": "assistant", "content": " \n"}], "needs text or 'tool_calls'"),
        ([U, {"role": "assistant", "content": [{"type": "text", "text": " "}]}], "needs text or 'tool_calls'"),
        ([U, {"role": "assistant", "content": None}], "expected a string or an array of parts"),
        ([{"role": "user", "content": []}], "minimum length 1"),
        ([{"role": "user", "content": [{}]}], "content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content[0].text"),
        ([U, U], "must alternate"),
        ([U, {"role": "system", "content": "s"}, U], "must alternate"),
        ([U, asks("a"), answer("a"), U], "unexpected role 'user' after role 'tool'"),
        ([{"role": "function", "content": "x"}], "Supported values"),
        (["x"], "expected an object"),
        ([{**U, "tool_calls": []}], "Unknown parameter"),
        ([{**U, "tool_call_id": "a"}], "Unknown parameter"),
        ([U, {"role": "assistant", "tool_calls": [{"id": "a"}]}], "expected 'function'"),
        ([U, {"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}], "Missing required parameter"),
        ([U, asks(""), answer("")], "1 to 64 characters"),
        ([U, asks("n" * 65), answer("n" * 65)], "1 to 64 characters"),
    ],
)
def test_the_first_broken_rule_is_named_in_a_providers_words(messages, words):
    fault = check_strict(messages)
    assert fault is not None
    assert words in fault
    assert check_strict(wire(sanitize([row for row in messages if isinstance(row, dict)]))) is None


def test_alternation_is_a_switch():
    assert check_strict([U, U, asks("a"), answer("a"), U], alternation=False) is None
