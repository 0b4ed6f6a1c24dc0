"""What a reader of a turn's text is sent: each word once, and the whole in the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hermes_agent.gateway.words import APART, Words


def play(*steps: str) -> str:
    """All that is sent for pieces (`+…`), settled texts (`=…`) and what is void (`!`)."""
    words = Words()
    sent: list[str] = []
    for step in steps:
        if step == "!":
            words.void()
        else:
            sent.append(words.say(step[1:]) if step[0] == "+" else words.settle(step[1:]))
    return "".join(sent)


def test_pieces_are_sent_as_they_come_and_the_rest_when_it_is_settled():
    assert play("+ab", "+c", "=abcd") == "abcd"
    assert play("=abcd") == "abcd"


def test_two_texts_stand_apart_and_nothing_stands_before_the_first_or_for_an_empty_one():
    assert play("=", "=a", "=", "+b", "=b") == f"a{APART}b"


def test_what_is_said_again_is_not_sent_again():
    assert play("+abc", "!", "+a", "+b", "+cd", "=abcd") == "abcd"


def test_what_is_said_instead_is_sent_whole():
    assert play("+abc", "!", "+xy", "+z", "=xyz") == f"abc{APART}xyz"
    assert play("+abc", "!", "=ab") == f"abc{APART}ab"
    assert play("=first", "+abc", "!", "+x", "=xyz") == f"first{APART}abc{APART}xyz"


def test_what_is_void_before_anything_was_sent_leaves_no_trace():
    assert play("!", "+ab", "=ab") == "ab"


@given(st.lists(st.tuples(st.lists(st.text("ab", max_size=3), max_size=3), st.text("ab", max_size=5)), max_size=5))
def test_each_settled_text_is_the_end_of_what_was_sent_by_then(told):
    words, sent = Words(), ""
    for pieces, text in told:
        for piece in pieces:
            sent += words.say(piece)
            words.void()
        sent += words.settle(text)
        assert sent.endswith(text)
