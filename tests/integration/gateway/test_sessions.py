"""Sessions over the API."""

from __future__ import annotations

import asyncio
from urllib.parse import urlencode

import pytest

from hermes_agent.testing import replies
from tests.integration.gateway.conftest import reached


async def test_a_session_is_made_read_changed_and_removed(site):
    made = await site.ask("POST", "/api/sessions", {"id": "mine", "title": "Plans", "system_prompt": "be brief"})
    assert made.status == 201
    session = made.json["session"]
    assert (session["id"], session["title"], session["source"]) == ("mine", "Plans", "api_server")
    assert session["has_system_prompt"]
    assert "be brief" not in made.text

    changed = await site.ask("PATCH", "/api/sessions/mine", {"title": "More plans", "pinned": True})
    assert (changed.status, changed.json["session"]["title"], changed.json["session"]["pinned"]) == (
        200, "More plans", True,
    )  # fmt: skip
    assert (await site.ask("GET", "/api/sessions/mine")).json["session"]["pinned"]

    gone = await site.ask("DELETE", "/api/sessions/mine")
    assert (gone.status, gone.json) == (200, {"object": "hermes.session.deleted", "id": "mine", "deleted": True})
    assert (await site.ask("GET", "/api/sessions/mine")).json["error"]["code"] == "session_not_found"
    assert (await site.ask("DELETE", "/api/sessions/mine")).status == 404


async def test_a_taken_id_or_title_is_refused_and_says_whose_it_is(site):
    await site.session(id="a", title="Plans")
    taken = await site.ask("POST", "/api/sessions", {"id": "a"})
    assert (taken.status, taken.json["error"]["code"]) == (409, "session_exists")
    title = await site.ask("POST", "/api/sessions", {"title": "Plans"})
    assert (title.status, title.json["error"]["code"], title.json["error"]["param"]) == (400, "invalid_title", "title")
    assert "a" in title.json["error"]["message"]


@pytest.mark.parametrize("name", ["a/b", "..", ".", "search", "", " ", "x" * 257, "a\nb", "a\\b", "\u200b"])
async def test_an_id_is_safe_in_a_path(site, name):
    answer = await site.ask("POST", "/api/sessions", {"session_id": name})
    assert answer.status in (201, 400)
    if name:
        assert answer.json["error"]["code"] == "invalid_session_id"


async def test_only_what_may_be_changed_is_changed(site):
    await site.session(id="a")
    for body in ({"model": "x"}, {"pinned": "yes"}, {"pinned": 1}, {"title": 5}):
        answer = await site.ask("PATCH", "/api/sessions/a", body)
        assert answer.status == 400, body
        assert answer.json["error"]["param"] in ("model", "pinned", "title")


async def test_the_list_is_newest_first_and_pages(site):
    for i in range(5):
        await site.session(id=f"s{i}", title=f"t{i}")
    first = (await site.ask("GET", "/api/sessions?limit=3")).json
    assert ([row["id"] for row in first["data"]], first["has_more"]) == (["s4", "s3", "s2"], True)
    rest = (await site.ask("GET", "/api/sessions?limit=3&offset=3")).json
    assert ([row["id"] for row in rest["data"]], rest["has_more"]) == (["s1", "s0"], False)
    assert [row["id"] for row in (await site.ask("GET", "/api/sessions?title=t1")).json["data"]] == ["s1"]
    for query in ("limit=0", "limit=x", "limit=201", "offset=-1", "include_hidden=maybe&title=x"):
        assert (await site.ask("GET", f"/api/sessions?{query}")).status == 400, query


async def test_hidden_sessions_show_by_their_title_only(site):
    await site.session(id="h", title="Bot Chat")
    await site.ask("PATCH", "/api/sessions/h", {"hidden": True})
    assert (await site.ask("GET", "/api/sessions?include_hidden=1")).json["data"] == []
    found = (await site.ask("GET", "/api/sessions?title=Bot%20Chat&include_hidden=1")).json["data"]
    assert [row["id"] for row in found] == ["h"]


async def test_messages_come_in_pages_from_either_end(site):
    site.fake.extend([replies.text(f"r{i}") for i in range(3)])
    session = await site.session()
    for i in range(3):
        await site.chat(session, f"m{i}")
    latest = (await site.ask("GET", f"/api/sessions/{session}/messages?limit=2")).json
    assert [row["content"] for row in latest["data"]] == ["m2", "r2"]
    assert latest["pagination"] == {"limit": 2, "offset": 0, "order": "latest", "returned": 2, "total": 6}
    before = (await site.ask("GET", f"/api/sessions/{session}/messages?limit=3&offset=2")).json
    assert [row["content"] for row in before["data"]] == ["r0", "m1", "r1"]
    oldest = (await site.ask("GET", f"/api/sessions/{session}/messages?order=oldest&limit=3&offset=4")).json
    assert [row["content"] for row in oldest["data"]] == ["m2", "r2"]
    assert (await site.ask("GET", f"/api/sessions/{session}/messages?offset=99")).json["data"] == []
    assert (await site.ask("GET", "/api/sessions/nowhere/messages")).status == 404


async def test_a_branch_goes_its_own_way(site):
    site.fake.extend([replies.text("one"), replies.text("two")])
    session = await site.session(title="Trunk")
    await site.chat(session, "a")
    made = await site.ask("POST", f"/api/sessions/{session}/fork", {})
    assert made.status == 201
    branch = made.json["session"]
    assert (branch["parent_session_id"], branch["title"]) == (session, "Trunk #2")
    await site.chat(branch["id"], "b")
    assert [text for _, text in await site.roles(branch["id"])] == ["a", "one", "b", "two"]
    assert [text for _, text in await site.roles(session)] == ["a", "one"]
    assert (await site.ask("POST", "/api/sessions/nowhere/fork", {})).status == 404


async def test_words_are_found_whatever_is_typed(site):
    site.fake.extend([replies.text("the zebra crossed")])
    session = await site.session(title="Animals")
    await site.chat(session, "what did it do?")
    found = (await site.ask("GET", "/api/sessions/search?q=zebra")).json
    hits = [(hit["session_id"], hit["title"], hit["role"]) for hit in found["data"]]
    assert hits == [(session, "Animals", "assistant")]
    for query in ('"', "a AND", "NEAR(", "*", "(zebra", "-", "col:zebra"):
        answer = await site.ask("GET", "/api/sessions/search?" + urlencode({"q": query}))
        assert answer.status == 200, query
    assert (await site.ask("GET", "/api/sessions/search?q=%20")).status == 400


async def test_a_session_in_use_is_not_removed(site):
    held = replies.hold()
    site.fake.extend([held])
    session = await site.session()
    chat = asyncio.create_task(site.chat(session, "hi"))
    await reached(held.reached)
    busy = await site.ask("DELETE", f"/api/sessions/{session}")
    assert (busy.status, busy.json["error"]["code"]) == (409, "session_active_turn")
    held.release()
    assert (await chat).json["message"]["content"] == "released"
    assert (await site.ask("DELETE", f"/api/sessions/{session}")).status == 200
