"""What people type finds what they mean, whatever signs are in it; what cannot be found by words is looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_agent import errors
from hermes_agent.store import messages, search
from hermes_agent.store.search import MARKS, Found
from hermes_agent.store.session_db import SessionDB


@pytest.fixture
def db(tmp_path: Path):
    with SessionDB(tmp_path / "state.db") as opened:
        yield opened


def fill(db: SessionDB, session_id: str, *texts: Any, source: str = "test", **fields: Any) -> None:
    db.create_session(session_id, source, **fields)
    db.append_messages_batch(session_id, [{"role": "user", "content": text} for text in texts])


def look(db: SessionDB, query: str, **where: Any) -> Found:
    return search.search(db.database, query, **where)


def texts(db: SessionDB, query: str, **where: Any) -> list[str]:
    """What was found, without the marks."""
    return [hit.snippet.replace(MARKS[0], "").replace(MARKS[1], "") for hit in look(db, query, **where).hits]


NOTES = ("the wrong-book list", "TODO: fix the parser", "see scripts/deploy.sh", "ask user@example.com")


class TestWords:
    @pytest.mark.parametrize(
        ("query", "found"),
        [
            ("notes OR wrong-book OR mistakes", 0),
            ("wrong-book", 0),
            ("wrong book", 0),
            ("TODO: fix", 1),
            ("todo fix", 1),
            ("scripts/deploy.sh", 2),
            ("user@example.com", 3),
            ('"fix the parser"', 1),
            ('"fix the pars"*', 1),
            ("pars*", 1),
            ("wrong-bo*", 0),
            ("content:parser OR parser", 1),
            ("(parser", 1),
            ("parser)", 1),
            ('"the parser', 1),
            ("fix AND parser", 1),
            ("the NOT list", 1),
            ("the NOT fix", 0),
            ("+deploy.sh", 2),
            ("^see", 2),
            ("{parser}", 1),
            ("parser -", 1),
            ("- parser", 1),
            ("NOT wrong-book OR deploy.sh", 2),
            ("parser AND", 1),
            ("OR parser", 1),
            ("parser OR", 1),
            ("parser\0", 1),
            ("NEAR(fix parser)  OR parser", 1),
            ("fix\n\tparser", 1),
        ],
    )
    def test_each_finds_its_message(self, db, query, found):
        fill(db, "s", *NOTES)
        assert texts(db, query) == [NOTES[found]]
        assert look(db, query).scanned is False

    @pytest.mark.parametrize("query", ["parser list", '"parser fix"', "pars", "parser NOT fix", "book-wrong"])
    def test_what_is_not_there_is_not_found(self, db, query):
        fill(db, "s", *NOTES)
        assert look(db, query) == Found([], has_more=False, scanned=False, complete=True)

    @pytest.mark.parametrize("query", ["", " ", '"', '""', '" "', "\n"])
    def test_nothing_finds_nothing(self, db, query):
        fill(db, "s", *NOTES)
        assert look(db, query).hits == []

    def test_operators_alone_are_words(self, db):
        fill(db, "s", "this or that", "not here and there")
        assert texts(db, "OR") == ["this or that"]
        assert texts(db, "NOT") == texts(db, "AND NOT") == ["not here and there"]

    @given(
        query=st.text(max_size=40)
        | st.lists(
            st.sampled_from(
                ['"', "*", "OR", "AND", "NOT", "NEAR", "(", ")", "a", "parser", "^", ":", "-", "语", "%", "_"]
            ),
            max_size=12,
        ).map(" ".join)
    )
    @settings(max_examples=300)
    def test_no_query_is_an_error(self, tmp_path_factory, query):
        with SessionDB(tmp_path_factory.getbasetemp() / "any" / "state.db") as db:
            if not db.list_sessions():
                fill(db, "s", *NOTES)
            found = look(db, query)
        for hit in found.hits:
            assert hit.session_id == "s"

    @given(
        st.text(
            st.characters(codec="utf-8", exclude_categories=("Cs", "Cc"), exclude_characters='"'),
            min_size=1,
            max_size=12,
        )
    )
    @settings(max_examples=150)
    def test_what_was_written_is_found_as_a_phrase(self, tmp_path_factory, text):
        """Whatever signs it is made of."""
        with SessionDB(tmp_path_factory.mktemp("own") / "state.db") as db:
            fill(db, "s", "other", f"x {text} y", "different")
            found = look(db, f'"{text}"')
        if any(map(str.isalnum, text)):
            assert 2 in {hit.seq for hit in found.hits}

    def test_letters_that_the_index_takes_for_none_are_looked_for(self, db):
        fill(db, "s", "written in \u19b0\u19b1 here")
        found = look(db, "\u19b0\u19b1")
        assert len(found.hits) == 1
        assert found.scanned

    @pytest.mark.parametrize(
        "query", ["parser " * 2000, "語" * 60_000, "(" * 5000 + "parser", "parser OR " * 3000, '"' + "parser " * 9000]
    )
    def test_a_query_of_any_length_is_answered(self, db, query):
        fill(db, "s", *NOTES)
        assert look(db, query) is not None
        assert (texts(db, query) == [NOTES[1]]) == (query.startswith("parser"))


class TestHits:
    def test_a_hit_says_where_it_stands(self, db):
        fill(db, "s", "first", "say hello to them", source="cli", title="Greetings")
        [hit] = look(db, "hello").hits
        [_, row] = db.get_messages("s")
        assert hit == search.Hit(
            "s", "Greetings", "cli", "user", row["timestamp"], row["id"], 2, True, "say >>>hello<<< to them"
        )  # fmt: skip
        assert hit.seq == hit.id & messages.MAX_SEQ

    def test_all_roles_are_searched_but_instructions(self, db):
        db.create_session("s", "test")
        for role in ("user", "assistant", "tool", "system"):
            db.append_message("s", role, f"needle from {role}")
        assert {hit.role for hit in look(db, "needle").hits} == {"user", "assistant", "tool"}
        assert {hit.role for hit in look(db, "needle 🙂 针").hits} == set()
        db.append_message("s", "system", "针")
        assert look(db, "针").hits == []

    def test_the_better_one_comes_first_and_the_newer_of_two_that_are_as_good(self, db):
        for name, text in (("a", "needle"), ("b", "needle " + "hay " * 30), ("c", "needle")):
            fill(db, name, text)
        assert [hit.session_id for hit in look(db, "needle").hits] == ["c", "a", "b"]

    def test_pages_do_not_overlap(self, db):
        fill(db, "s", *(f"needle {i}" for i in range(7)))
        for query in ("needle", "needle OR 针"):
            pages = [look(db, query, limit=3, offset=offset) for offset in (0, 3, 6)]
            assert [page.has_more for page in pages] == [True, True, False]
            assert sorted(hit.seq for page in pages for hit in page.hits) == [1, 2, 3, 4, 5, 6, 7]
        assert look(db, "needle", offset=100).hits == []

    def test_it_can_be_kept_to_a_session_or_a_source(self, db):
        fill(db, "s", "needle 针", source="cli")
        fill(db, "t", "needle 针", source="web")
        for query in ("needle", "针"):
            assert [hit.session_id for hit in look(db, query, session_id="s").hits] == ["s"]
            assert [hit.session_id for hit in look(db, query, source="web").hits] == ["t"]
            assert look(db, query, session_id="s", source="web").hits == []
            assert len(look(db, query).hits) == 2
        with pytest.raises(errors.UnknownSession):
            look(db, "needle", session_id="nobody")

    def test_archived_sessions_are_found(self, db):
        fill(db, "s", "needle")
        db.update_session("s", archived=True)
        assert len(look(db, "needle").hits) == 1

    def test_so_many_hits_are_ranked_and_the_answer_says_when_there_were_more(self, db, monkeypatch):
        for name in ("old", "new"):
            fill(db, name, *["needle"] * 6)
        monkeypatch.setattr(search, "_RANKED", 8)
        found = look(db, "needle", limit=5)
        assert {hit.session_id for hit in found.hits} == {"new"}
        assert (found.complete, found.has_more) == (False, True)
        monkeypatch.setattr(search, "_RANKED", 12)
        assert look(db, "needle").complete is True

    def test_what_was_deleted_is_not_found_and_the_rest_is(self, db):
        for name in ("s", "t"):
            fill(db, name, f"needle 针 of {name}", title=f"title {name}")
        db.delete_session("s", scrub=False)
        for query in ("needle", "针", "OR 针 needle"):
            assert [hit.session_id for hit in look(db, query).hits] == ["t"]


class TestTextWithoutSpaces:
    def test_it_is_found_inside_a_sentence_as_often_as_it_is_there(self, db):
        fill(db, "s", *(f"我们今天讨论了记忆断裂的问题 {i}" for i in range(20)), *["看 记忆断裂 吧"] * 2)
        fill(db, "t", "記憶について", "여기 한국어 검색을 해", "これは日本語です", "ภาษาไทยง่าย", "no such thing")
        db.append_message("t", "tool", "工具也看到 记忆断裂 了")
        for again in range(2):
            for query, count in (
                ("记忆断裂", 23), ("記憶", 1), ("한국어 검색", 1), ("日本語", 1), ("ไทย", 1), ("断", 23), ("无此", 0),
            ):  # fmt: skip
                found = look(db, query, limit=100)
                assert len(found.hits) == count, query
                assert (found.scanned, found.complete) == (True, True)
            if not again:
                db.close()
                db = SessionDB(db.db_path)
        db.close()

    def test_alternatives_and_exclusions_hold_there_too(self, db):
        fill(db, "s", "去广西玩", "桂林山水", "漓江的船", "旅游计划", "plain words", "桂林 and 漓江")
        assert len(look(db, "广西 OR 桂林 OR 漓江 OR 旅游").hits) == 5
        assert texts(db, "桂 NOT 漓江") == ["桂林山水"]
        assert texts(db, "桂林 漓江") == ["桂林 and 漓江"]
        assert texts(db, "PLAIN OR 广西") == ["plain words", "去广西玩"]

    def test_each_session_shows_its_newest_hit_before_any_shows_its_second(self, db):
        fill(db, "old", "很久以前去过桂林")
        fill(db, "busy", *(f"桂林 {i}" for i in range(500)))
        found = look(db, "桂林", limit=3)
        assert [(hit.session_id, hit.seq) for hit in found.hits] == [("busy", 500), ("old", 1), ("busy", 499)]
        assert found.has_more

    def test_the_snippet_is_around_the_hit(self, db):
        fill(db, "s", "前" * 500 + "桂林" + "后" * 500)
        [hit] = look(db, "桂林").hits
        assert hit.snippet == "…" + "前" * 80 + ">>>桂林<<<" + "后" * 80 + "…"

    def test_signs_that_are_no_words_are_looked_for_as_they_stand(self, db):
        fill(db, "s", "well done 🙂", "100% sure", "a_b", "back\\slash", "C++ or C")
        for query, text in (
            ("🙂", "well done 🙂"),
            ("%", "100% sure"),
            ("_", "a_b"),
            ("\\", "back\\slash"),
            ("++", "C++ or C"),
        ):
            assert texts(db, query) == [text]
            assert look(db, query).scanned

    def test_only_so_many_rows_are_read_and_the_answer_says_so(self, db, monkeypatch):
        fill(db, "old", "桂林")
        fill(db, "new", *["桂林"] * 10)
        monkeypatch.setattr(search, "_SCAN_ROWS", 10)
        found = look(db, "桂林")
        assert len(found.hits) == 10
        assert found.complete is False
        monkeypatch.setattr(search, "_SCAN_ROWS", 11)
        assert (len(look(db, "桂林").hits), look(db, "桂林").complete) == (11, True)
        monkeypatch.setattr(search, "_SCAN_BYTES", 100)
        assert look(db, "桂林").complete is False
