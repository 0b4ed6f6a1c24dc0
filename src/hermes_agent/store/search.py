"""Finding messages by their words, in all sessions: what people type is never a syntax error.

Words are found through the index. Text that the index does not cut into words (Chinese,
Japanese, Korean, Thai, symbols) is looked for as it stands in the rows used last, within
fixed bounds; the answer says which way it was found and whether all was looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, cast

import apsw

from hermes_agent.store import encoding, messages, sessions
from hermes_agent.store.database import Database

MARKS = (">>>", "<<<")
"""Around what was found, in a snippet."""

_MAX_QUERY = 1000
_MAX_TERMS = 32
_RANKED = 5000
"""Hits that are ranked; of more than these, those in the sessions made last."""
_SCAN_ROWS = 20_000
_SCAN_BYTES = 64 * 1024 * 1024
_SNIPPET_WORDS = 24
_SNIPPET_CHARS = 80
"""Characters on each side of what was found without the index."""


class Hit(NamedTuple):
    """One message that was found."""

    session_id: str
    title: str | None
    source: str
    role: str
    timestamp: float
    id: int
    seq: int
    active: bool
    snippet: str


class Found(NamedTuple):
    """The answer to a search."""

    hits: list[Hit]
    has_more: bool
    """There are more hits behind these."""
    scanned: bool
    """Rows were read one by one, since the index cannot tell; else words were looked up."""
    complete: bool
    """Every row was looked at; else older ones were left out."""


class Scope(NamedTuple):
    """Where to look; None: everywhere."""

    session_id: str | None = None
    source: str | None = None


def search(
    database: Database,
    query: str,
    *,
    limit: int = 20,
    offset: int = 0,
    session_id: str | None = None,
    source: str | None = None,
) -> Found:
    """Messages that hold the words of `query`, the best first and the newer one of two that are as good.

    All words must occur, `OR` between words begins an alternative, `NOT` before a word
    excludes it, "…" is a phrase, `word*` a beginning. Anything else is text. Raises
    `UnknownSession` for a session that is not there.
    """
    alternatives = _parse(encoding.clean_text(query))
    scope = Scope(session_id, source)

    def work(conn: apsw.Connection) -> Found:
        key = sessions.known(conn, session_id).key if session_id is not None else None
        if not alternatives:
            return Found([], has_more=False, scanned=False, complete=True)
        if not any(term.unspaced for group in alternatives for term in group):
            found = _by_words(conn, alternatives, scope, key, limit, offset)
            if found.hits or offset or query.isascii():
                return found
        return _by_scan(conn, alternatives, scope, key, limit, offset)

    return database.read(work)


# -- what was asked ----------------------------------------------------------------


class _Term(NamedTuple):
    text: str
    prefix: bool
    excluded: bool

    @property
    def unspaced(self) -> bool:
        """Whether the index cannot find it: it has no word, or is of a script without spaces between words."""
        return _UNSPACED.search(self.text) is not None or not any(map(str.isalnum, self.text))


_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3021-\u30ff\u3100-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff66-\uffdc\U0001aff0-\U0001b16f"
    "\U00020000-\U0003ffff]"
)
_TOKEN = re.compile(r'"([^"]*)"?(\*?)|(\S+?)(\*?)(?=[\s"]|$)')


def _parse(query: str) -> list[list[_Term]]:
    """The alternatives, each a list of terms with at least one that is not excluded."""
    if len(query) > _MAX_QUERY:
        query = query[:_MAX_QUERY].rpartition(" ")[0] or query[:_MAX_QUERY]
    groups: list[list[_Term]] = [[]]
    excluded, count = False, 0
    for phrase, phrase_star, word, word_star in _TOKEN.findall(query):
        if word == "OR":
            groups.append([])
        elif word == "NOT":
            excluded = True
        elif word != "AND" and (phrase or word).strip() and count < _MAX_TERMS:
            groups[-1].append(_Term((phrase or word).strip(), bool(phrase_star or word_star), excluded))
            excluded, count = False, count + 1
    # punctuation beside words is left out, as the index leaves it out
    groups = [[term for term in group if any(map(str.isalnum, term.text))] or group for group in groups]
    groups = [group for group in groups if not all(term.excluded for term in group)]
    if groups:
        return groups
    # nothing but operators: then they are meant as words
    words = query.replace('"', " ").split()[:_MAX_TERMS]
    return [[_Term(word, prefix=False, excluded=False) for word in words]] if words else []


# -- by the index --------------------------------------------------------------------


def _by_words(
    conn: apsw.Connection, alternatives: list[list[_Term]], scope: Scope, key: int | None, limit: int, offset: int
) -> Found:
    match = " OR ".join(f"({_conjunction(group)})" for group in alternatives)
    where, values = ["messages_fts MATCH :match"], {"match": match, **_bounds(key)}
    if key is not None:
        where.append("rowid > :first AND rowid <= :last")
    if scope.source is not None:
        where.append(f"(rowid >> {messages.SEQ_BITS}) IN (SELECT key FROM sessions WHERE source = :source)")
    ranked = (
        f"SELECT rowid AS found, rank AS score FROM messages_fts WHERE {' AND '.join(where)}"
        f" ORDER BY rowid DESC LIMIT {_RANKED + 1}"
    )
    rows = conn.execute(
        f"SELECT {_HIT}, count(*) OVER () FROM ({ranked}) JOIN messages m ON m.id = found"
        f" JOIN sessions s ON s.key = m.id >> {messages.SEQ_BITS}"
        " ORDER BY score, m.timestamp DESC, m.id DESC LIMIT :limit OFFSET :offset",
        {**values, "source": scope.source, "limit": limit + 1, "offset": offset},
    ).fetchall()
    hits = [_hit(row[:-1], _marked_by_index(conn, match, cast("int", row[4]))) for row in rows[:limit]]
    complete = not rows or cast("int", rows[0][-1]) <= _RANKED
    return Found(hits, has_more=len(rows) > limit, scanned=False, complete=complete)


def _conjunction(group: list[_Term]) -> str:
    wanted = " AND ".join(_quoted(term) for term in group if not term.excluded)
    return " NOT ".join([wanted, *(_quoted(term) for term in group if term.excluded)])


def _quoted(term: _Term) -> str:
    """A term as text of the index's own language: in quotes, nothing in it has a meaning."""
    return '"' + term.text.replace('"', '""') + '"' + (" *" if term.prefix else "")


def _bounds(key: int | None) -> dict[str, str | int]:
    return {"first": messages.row_id(key or 0, 0), "last": messages.row_id(key or 0, messages.MAX_SEQ)}


def _marked_by_index(conn: apsw.Connection, match: str, row_id: int) -> str:
    rows = conn.execute(
        f"SELECT snippet(messages_fts, 0, ?, ?, '…', {_SNIPPET_WORDS}) FROM messages_fts"
        " WHERE messages_fts MATCH ? AND rowid = ?",
        (*MARKS, match, row_id),
    )
    return "".join(cast("str", text) for (text,) in rows)


# -- row by row ------------------------------------------------------------------------


def _by_scan(
    conn: apsw.Connection, alternatives: list[list[_Term]], scope: Scope, key: int | None, limit: int, offset: int
) -> Found:
    """The newest hit of each session, the session used last first; then the next one of each."""
    test, values = _condition(alternatives)
    found: list[tuple[int, int, int]] = []
    rows, size, counts = 0, 0, Counter[int]()
    for place, row_id, length, matches in _tested(conn, _by_use(conn, scope, key), test, values):
        rows, size = rows + 1, size + length
        if rows > _SCAN_ROWS or size > _SCAN_BYTES:
            break
        if matches:
            found.append((counts[place], place, -row_id))
            counts[place] += 1
    found.sort()
    words = [term.text for group in alternatives for term in group if not term.excluded]
    hits = [hit for _, _, row_id in found[offset : offset + limit] for hit in _read(conn, -row_id, words)]
    complete = rows <= _SCAN_ROWS and size <= _SCAN_BYTES
    return Found(hits, has_more=len(found) > offset + limit, scanned=True, complete=complete)


def _by_use(conn: apsw.Connection, scope: Scope, key: int | None) -> list[int]:
    rows = conn.execute(
        "SELECT key FROM sessions WHERE (?1 IS NULL OR key = ?1) AND (?2 IS NULL OR source = ?2)"
        " ORDER BY last_active DESC, key DESC",
        (key, scope.source),
    )
    return [cast("int", found) for (found,) in rows]


def _tested(
    conn: apsw.Connection, session_keys: list[int], test: str, values: dict[str, str]
) -> Iterator[tuple[int, int, int, int]]:
    """Each row, the newest of a session first: the session's place in the list, id, length, whether it matches."""
    sql = (
        f"SELECT id, octet_length(wire), role <> 'system' AND content IS NOT NULL AND ({test})"
        " FROM messages WHERE id > :first AND id <= :last ORDER BY id DESC"
    )
    for place, session_key in enumerate(session_keys):
        for row_id, length, matches in conn.execute(sql, {**values, **_bounds(session_key)}):
            yield place, cast("int", row_id), cast("int", length), cast("int", matches)


def _condition(alternatives: list[list[_Term]]) -> tuple[str, dict[str, str]]:
    """The query as a condition on `content`, with its values."""
    values: dict[str, str] = {}
    groups: list[str] = []
    for group in alternatives:
        parts: list[str] = []
        for term in group:
            name = f"t{len(values)}"
            values[name] = "%" + re.sub(r"([\\%_])", r"\\\1", term.text) + "%"
            parts.append(f"content {'NOT ' if term.excluded else ''}LIKE :{name} ESCAPE '\\'")
        groups.append(" AND ".join(parts))
    return " OR ".join(f"({group})" for group in groups), values


def _read(conn: apsw.Connection, row_id: int, words: list[str]) -> Iterator[Hit]:
    rows = conn.execute(
        f"SELECT {_HIT}, m.content FROM messages m JOIN sessions s ON s.key = m.id >> {messages.SEQ_BITS}"
        " WHERE m.id = ?",
        (row_id,),
    )
    for *values, content in rows:
        yield _hit(tuple(values), _marked(str(content), words))


def _marked(text: str, words: list[str]) -> str:
    """The surroundings of the first place where one of the words stands, with marks around all of them."""
    any_word = re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)), re.IGNORECASE)
    first = any_word.search(text)
    start = max(0, (first.start() if first else 0) - _SNIPPET_CHARS)
    end = (first.end() if first else 0) + _SNIPPET_CHARS
    inside = any_word.sub(lambda hit: MARKS[0] + hit[0] + MARKS[1], text[start:end])
    return ("…" if start else "") + inside + ("…" if end < len(text) else "")


_HIT = "s.id, s.title, s.source, m.role, m.id, m.timestamp, m.active"


def _hit(values: tuple[object, ...], snippet: str) -> Hit:
    session_id, title, source, role, row_id, timestamp, active = cast(
        "tuple[str, str | None, str, str, int, float, int]", values
    )
    return Hit(session_id, title, source, role, timestamp, row_id, row_id & messages.MAX_SEQ, bool(active), snippet)
