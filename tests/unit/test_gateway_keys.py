"""Keys are kept as digests, mean what the file says and nothing else, and end when they are revoked."""

from __future__ import annotations

import hashlib
import hmac
import json
import multiprocessing
import os
import stat

import pytest

from hermes_agent.errors import SettingsError, UsageError
from hermes_agent.gateway import keys
from hermes_agent.gateway.keys import OPEN, OWNER, KeyRing, Principal, Scope
from hermes_agent.settings import Secret

CONFIGURED = "k-CANARY-5dJ2mZq8Xw1TfLr9"


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def path_of(home):
    return home / "gateway" / "keys.json"


def bearer(key):
    return f"Bearer {key}"


class TestTheOwnersKey:
    def test_it_is_made_once_and_lets_the_owner_in(self, home):
        ring = KeyRing(home, None)
        key = ring.ensure_owner()
        assert len(key) == 43
        assert ring.authenticate(bearer(key)) == OWNER
        assert OWNER.scopes == frozenset(Scope)
        assert ring.ensure_owner() is None
        assert KeyRing(home, None).ensure_owner() is None

    def test_it_is_stored_as_a_digest_in_private_files(self, home):
        before = os.umask(0)
        try:
            key = KeyRing(home, None).ensure_owner()
        finally:
            os.umask(before)
        (entry,) = json.loads(path_of(home).read_text(encoding="utf-8"))
        assert entry["sha256"] == hashlib.sha256(key.encode()).hexdigest()
        assert stat.S_IMODE(path_of(home).parent.stat().st_mode) == 0o700
        for file in path_of(home).parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert key not in file.read_text(encoding="utf-8")

    def test_a_configured_key_takes_its_place(self, home):
        old = KeyRing(home, None).ensure_owner()
        ring = KeyRing(home, Secret(CONFIGURED))
        assert ring.ensure_owner() is None
        assert ring.authenticate(bearer(CONFIGURED)) == OWNER
        assert ring.authenticate(bearer(old)) is None

    def test_with_a_configured_key_none_is_made(self, home):
        assert KeyRing(home, Secret(CONFIGURED)).ensure_owner() is None
        assert not home.exists()

    def test_without_any_key_nobody_gets_in(self, home):
        ring = KeyRing(home, None)
        assert ring.authenticate(bearer(CONFIGURED)) is None
        assert ring.authenticate(None) is None


class TestIssuedKeys:
    def test_a_key_means_what_it_was_issued_for(self, home):
        ring = KeyRing(home, None)
        key = ring.issue("rex", [Scope.DM, Scope.READ], ["work"])
        who = ring.authenticate(bearer(key))
        assert who == Principal("rex", frozenset({Scope.DM, Scope.READ}), frozenset({"work"}))
        assert who.may_use("work")
        assert not who.may_use("default")
        assert KeyRing(home, None).authenticate(bearer(key)) == who

    def test_the_right_to_run_includes_messages_and_nothing_else_is_included(self):
        runner = Principal("a", frozenset({Scope.RUN}))
        assert [scope for scope in Scope if runner.may(scope)] == [Scope.RUN, Scope.DM]
        for scope in set(Scope) - {Scope.RUN}:
            assert [other for other in Scope if Principal("a", frozenset({scope})).may(other)] == [scope]
        assert all(OPEN.may(scope) for scope in Scope)
        assert OPEN.may_use("any")

    @pytest.mark.parametrize("name", ["", " ", "owner", "local", "a\nb"])
    def test_some_names_cannot_be_given(self, home, name):
        with pytest.raises(UsageError, match="cannot be the name"):
            KeyRing(home, None).issue(name, [Scope.READ])

    def test_a_name_has_one_key_and_a_key_has_a_scope(self, home):
        ring = KeyRing(home, None)
        ring.issue("rex", [Scope.READ])
        with pytest.raises(UsageError, match="already"):
            ring.issue("rex", [Scope.READ])
        with pytest.raises(UsageError, match="at least one scope"):
            ring.issue("max", [])

    def test_the_list_shows_everything_but_digests(self, home):
        ring = KeyRing(home, None)
        ring.issue("rex", [Scope.READ], ["work"])
        (entry,) = ring.list()
        assert (entry.name, entry.scopes, entry.profiles, entry.sha256) == ("rex", ("read",), ("work",), "")
        assert entry.id
        assert entry.created > 1_700_000_000

    def test_a_revoked_key_ends_at_once_and_its_name_is_free(self, home):
        ring = KeyRing(home, None)
        key = ring.issue("rex", [Scope.READ])
        assert ring.revoke("rex")
        assert ring.authenticate(bearer(key)) is None
        assert not ring.revoke("rex")
        assert ring.authenticate(bearer(ring.issue("rex", [Scope.READ])))

    def test_several_processes_may_issue_at_once(self, home):
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=issue_five, args=(home, number)) for number in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0, 0, 0]
        assert sorted(entry.name for entry in KeyRing(home, None).list()) == [
            f"{number}-{count}" for number in range(3) for count in range(5)
        ]

    def test_a_scope_of_a_newer_version_grants_nothing(self, home):
        ring = KeyRing(home, None)
        key = ring.issue("rex", [Scope.READ])
        edit(home, lambda entry: entry.update(scopes=["read", "fly"]))
        assert KeyRing(home, None).authenticate(bearer(key)).scopes == {Scope.READ}


def issue_five(home, number):
    for count in range(5):
        KeyRing(home, None).issue(f"{number}-{count}", [Scope.READ])


def edit(home, change):
    entries = json.loads(path_of(home).read_text(encoding="utf-8"))
    for entry in entries:
        change(entry)
    path_of(home).write_text(json.dumps(entries), encoding="utf-8")


class TestChangesByOthers:
    def test_a_rotated_key_is_refused_in_less_than_a_second_and_the_new_one_works(self, home):
        clock = Clock()
        ring = KeyRing(home, None, clock=clock)
        old = ring.ensure_owner()
        clock.now = 0.6
        assert ring.authenticate(bearer(old))
        other = KeyRing(home, None)
        other.revoke("owner")
        new = other.ensure_owner()
        clock.now = 1.2
        assert ring.authenticate(bearer(old)) is None
        assert ring.authenticate(bearer(new)) == OWNER

    def test_a_removed_file_lets_nobody_in_but_the_configured_key(self, home):
        clock = Clock()
        key = KeyRing(home, None).issue("rex", [Scope.READ])
        ring = KeyRing(home, Secret(CONFIGURED), clock=clock)
        assert ring.authenticate(bearer(key))
        path_of(home).unlink()
        clock.now = 0.6
        assert ring.authenticate(bearer(key)) is None
        assert ring.authenticate(bearer(CONFIGURED)) == OWNER

    def test_the_file_is_looked_at_twice_a_second_at_most_and_read_only_when_it_changed(self, home, monkeypatch):
        clock = Clock()
        ring = KeyRing(home, None, clock=clock)
        key = ring.ensure_owner()
        looks, reads = [], []
        look, read = ring._look, ring._read
        monkeypatch.setattr(ring, "_look", lambda: (looks.append(1), look()))
        monkeypatch.setattr(ring, "_read", lambda: (reads.append(1), read()))
        for tick in range(1, 1001):
            clock.now = tick / 100
            assert ring.authenticate(bearer(key))
        assert len(looks) == 20
        assert reads == []

    @pytest.mark.parametrize("damage", ["", "{", "[1]", '[{"id": "x"}]', "\xff"])
    def test_a_file_that_breaks_lets_nobody_in_and_is_named_at_the_next_start(self, home, damage):
        clock = Clock()
        key = KeyRing(home, None).issue("rex", [Scope.READ])
        ring = KeyRing(home, Secret(CONFIGURED), clock=clock)
        path_of(home).write_text(damage, encoding="latin-1")
        clock.now = 0.6
        assert ring.authenticate(bearer(key)) is None
        assert ring.authenticate(bearer(CONFIGURED)) == OWNER
        with pytest.raises(SettingsError, match=r"keys\.json: not a list of keys"):
            KeyRing(home, None)

    def test_a_digest_that_is_none_fits_no_key(self, home):
        ring = KeyRing(home, None)
        key = ring.issue("rex", [Scope.READ])
        edit(home, lambda entry: entry.update(sha256="no digest"))
        assert KeyRing(home, None).authenticate(bearer(key)) is None

    def test_a_file_that_others_can_read_is_made_private(self, home):
        KeyRing(home, None).ensure_owner()
        path_of(home).chmod(0o644)
        KeyRing(home, None)
        assert stat.S_IMODE(path_of(home).stat().st_mode) == 0o600


BAD_HEADERS = [
    None,
    "",
    " ",
    "Bearer",
    "Bearer ",
    "Bearer  ",
    CONFIGURED,
    f"Basic {CONFIGURED}",
    f"Token {CONFIGURED}",
    f"BearerX {CONFIGURED}",
    f"Bearer\t{CONFIGURED}",
    f"Bearer  {CONFIGURED}",
    f"Bearer {CONFIGURED} ",
    f"Bearer {CONFIGURED} x",
    f" Bearer {CONFIGURED}",
    f"Bearer {CONFIGURED}\n",
    f"Bearer {CONFIGURED}\x00",
    f"Bearer {CONFIGURED},",
    f'Bearer "{CONFIGURED}"',
    f"Bearer={CONFIGURED}",
    f"Bearer: {CONFIGURED}",
    f"Bearer Bearer {CONFIGURED}",
    f"Bearer {CONFIGURED[:-1]}",
    f"Bearer {CONFIGURED[1:]}",
    f"Bearer {CONFIGURED}x",
    f"Bearer {CONFIGURED.lower()}",
    f"Bearer {CONFIGURED.upper()}",
    f"Bearer {CONFIGURED[:-1]}X",
    f"Bearer {hashlib.sha256(CONFIGURED.encode()).hexdigest()}",
    "Bearer schl\u00fcssel-schl\u00fcssel",
    "Bearer \udce9",
    "Bearer \ud800",
    "Bearer \U0001f600",
    "Bearer null",
    "Bearer undefined",
    "Bearer " + "x" * 10_000,
    "Bearer " + "x" * 2_000_000,
    "Bearer *",
    "Bearer ' OR 1=1 --",
    "Bearer ../../keys.json",
    b"Bearer \xe9",
    b"\xff\xfe",
]


@pytest.mark.parametrize("header", BAD_HEADERS, ids=range(len(BAD_HEADERS)))
def test_nothing_but_bearer_and_the_key_gets_in_and_nothing_raises(home, header):
    assert KeyRing(home, Secret(CONFIGURED)).authenticate(header) is None


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEARER"])
def test_the_scheme_may_be_written_in_any_case_and_as_bytes(home, scheme):
    ring = KeyRing(home, Secret(CONFIGURED))
    assert ring.authenticate(f"{scheme} {CONFIGURED}") == OWNER
    assert ring.authenticate(f"{scheme} {CONFIGURED}".encode()) == OWNER


def test_every_known_key_is_compared_in_constant_time_whatever_was_given(home, monkeypatch):
    ring = KeyRing(home, Secret(CONFIGURED))
    issued = [ring.issue(str(number), [Scope.READ]) for number in range(3)]
    compared = []
    real = hmac.compare_digest

    def watched(a, b):
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(keys.hmac, "compare_digest", watched)
    for given in [CONFIGURED, issued[0], issued[2], CONFIGURED[:5], "x" * 900]:
        compared.clear()
        ring.authenticate(bearer(given))
        assert compared == [(32, 32)] * 4


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "shorter"),
        ("short", "shorter"),
        ("5dJ2mZq8Xw1TfLr", "shorter"),
        ("changeme-changeme", "sample"),
        ("changeitchangeit", "regular"),
        ("your-api-key-here", "sample"),
        ("YOUR_SECRET_TOKEN_HERE", "sample"),
        ("please-change-this-key-123", "sample"),
        ("replace-me-replace-me", "sample"),
        ("hermes-api-server-key", "sample"),
        ("the-the-the-the-my-api", "sample"),
        ("a" * 40, "regular"),
        ("abcabcabcabcabcabcabc", "regular"),
        ("0123456789abcdef", "regular"),
        ("zyxwvutsrqponmlk", "regular"),
        ("schl\u00fcssel-schl\u00fcssel-1", "ASCII"),
        ("5dJ2mZq8 Xw1TfLr9", "ASCII"),
        ("5dJ2mZq8Xw1TfLr9\n", "ASCII"),
        ("5dJ2mZq8Xw1TfLr9" * 100, "ASCII"),
    ],
)
def test_a_configured_key_that_could_be_guessed_is_refused_with_a_way_out(home, key, why):
    with pytest.raises(SettingsError, match=why) as caught:
        KeyRing(home, Secret(key))
    assert "secrets.token_urlsafe" in str(caught.value)
    if len(key) > 6:
        assert key not in str(caught.value)


@pytest.mark.parametrize(
    "key", ["test-key-0123456789abcdef0123456789", "bench-key-0123456789abcdef0123456789", "sk-test-CANARY1234567890"]
)
def test_a_key_with_something_of_its_own_is_taken(home, key):
    assert KeyRing(home, Secret(key)).authenticate(bearer(key)) == OWNER
