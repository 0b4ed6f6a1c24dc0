"""The API keys of one home: who a key stands for and what it may do.

Only SHA-256 digests are kept, in `gateway/keys.json` (mode 0600, replaced in one step);
a key itself is returned once, by the call that makes it. What another process changes
in the file counts within a second. What a key may do stands in that file alone: nothing
a client sends adds to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import itertools
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from hermes_agent import home as home_module
from hermes_agent import log as log_module
from hermes_agent.errors import SettingsError, UsageError
from hermes_agent.settings import Secret
from hermes_agent.tools.atomic_write import atomic_write

OWNER_NAME = "owner"
_RESERVED = frozenset({OWNER_NAME, "local"})
_LOOK_EVERY = 0.5
"""Seconds between two looks at the file's date."""
_LONGEST_KEY = 1024
_SHORTEST_KEY = 16
_FEWEST_CHARACTERS = 6
"""A random key of 16 hexadecimal digits has fewer different ones once in millions."""
_SAMPLE_WORDS = """
    a access admin an any api bearer change default demo dummy enter example fake gateway generate generated here
    hermes insert it key letmein local long me must my new openai owner password placeholder please put random real
    replace sample secret secure server set sk some strong super test the this to todo token use value very with you
    your
"""
_FEWEST_OWN_CHARACTERS = 4
"""What must be left of a key without the words and signs that samples in documents are made of."""

_log = log_module.get("gateway")


class Scope(StrEnum):
    """What a key may do."""

    READ = "read"
    """Read sessions, runs, models."""
    RUN = "run"
    """Start work, and all that `dm` allows."""
    DM = "dm"
    """Talk in a session and follow the deliveries of its own messages: for other bots."""
    APPROVE = "approve"
    """Answer approvals."""
    ADMIN = "admin"
    """Keys, deletion, metrics, health in detail."""


EVERY_SCOPE = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks."""

    name: str
    scopes: frozenset[Scope]
    profiles: frozenset[str] | None = None
    """The profiles it may use; None is every one."""

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or (scope is Scope.DM and Scope.RUN in self.scopes)

    def may_use(self, profile: str) -> bool:
        return self.profiles is None or profile in self.profiles

    def within(self, profile: str, own: str) -> Principal:
        """Who it is in a profile that it may use; `own` is the one whose key it has.

        Another profile can have a key of the same name for somebody else; owners are one person.
        """
        name = self.name if profile == own or self.name == OWNER_NAME else f"{own}/{self.name}"
        return replace(self, name=name, profiles=frozenset({profile}))


OWNER = Principal(OWNER_NAME, EVERY_SCOPE)
OPEN = Principal("local", EVERY_SCOPE)
"""Whoever asks where no keys are in use: an application that mounts the handlers itself."""


class KeyEntry(Struct, frozen=True):
    """One key as the file has it; the key itself is nowhere."""

    id: str
    name: str
    sha256: str
    scopes: tuple[str, ...]
    profiles: tuple[str, ...] | None
    """The profiles it is for: None is every one, and an empty list that of the home, whatever it is called."""
    created: float

    def principal(self, own: str) -> Principal:
        """Whom it stands for, in the home of the profile `own`."""
        # A scope that a newer version knows grants nothing here.
        scopes = frozenset(Scope(scope) for scope in self.scopes if scope in EVERY_SCOPE)
        return Principal(self.name, scopes, None if self.profiles is None else frozenset(self.profiles or (own,)))


class KeyRing:
    """The keys of `home`, and the one of its settings.

    The configured key is the owner's: where there is one, an owner key in the file does
    not count. Raises `SettingsError` for a configured key that could be guessed and for a
    key file that cannot be read; a file that breaks later lets nobody in.
    """

    def __init__(self, home: Path, configured: Secret | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._home = home
        self._own = home_module.profile_of(home)
        self._path = home / "gateway" / "keys.json"
        self._clock = clock
        self._configured = None
        if configured is not None:
            log_module.add_secrets([configured.reveal()])
            _refuse_weak(configured.reveal())
            self._configured = _digest(configured.reveal())
        self._seen: tuple[int, int, int] | None = None
        self._entries: tuple[KeyEntry, ...] = ()
        self._accepted: tuple[tuple[bytes, Principal], ...] = ()
        self._read()
        self._look_at = clock() + _LOOK_EVERY

    @property
    def is_configured(self) -> bool:
        """The owner's key is the one of the settings."""
        return self._configured is not None

    def authenticate(self, header: str | bytes | None) -> Principal | None:
        """Who an `Authorization` header stands for; None for anything but `Bearer` and a known key."""
        if self._clock() >= self._look_at:
            self._look()
        key = bearer_key(header)
        if key is None:
            return None
        digest = _digest(key)
        found = self._find(digest)
        if found is None and self._look():  # it may have been made a moment ago
            found = self._find(digest)
        return found

    def _find(self, digest: bytes) -> Principal | None:
        found = None
        for known, principal in self._accepted:  # all of them: the time says nothing about which one fits
            if hmac.compare_digest(known, digest):
                found = principal
        return found

    def ensure_owner(self) -> str | None:
        """Make the owner's key where there is none; returns it, to be shown once, or None."""
        if self._configured is not None:
            return None
        with self._changing() as entries:
            if any(entry.name == OWNER_NAME for entry in entries):
                return None
            return self._add(entries, OWNER_NAME, Scope, None)

    def rotate_owner(self) -> str:
        """Put a new key in the place of the owner's and return it, to be shown once.

        Raises `UsageError` where the owner's key is a configured one.
        """
        if self._configured is not None:
            raise UsageError("the owner's key is API_SERVER_KEY: change it where it is set and restart the gateway")
        with self._changing() as entries:
            return self._add([entry for entry in entries if entry.name != OWNER_NAME], OWNER_NAME, Scope, None)

    def issue(self, name: str, scopes: Iterable[Scope], profiles: Iterable[str] | None = None) -> str:
        """Make a key for `name` and return it, to be shown once; without `profiles` it is for every one.

        Raises `UsageError` for a name that is taken or cannot be one.
        """
        wanted = tuple(scopes)
        # "profile/name" is how a key of ours is called in another profile.
        if not name.strip() or not name.isprintable() or name in _RESERVED or "/" in name:
            raise UsageError(f"{name!r} cannot be the name of a key")
        if not wanted:
            raise UsageError("a key needs at least one scope: " + ", ".join(Scope))
        with self._changing() as entries:
            if any(entry.name == name for entry in entries):
                raise UsageError(f"there is a key named {name!r} already; revoke it first")
            return self._add(entries, name, wanted, profiles)

    def revoke(self, name: str) -> bool:
        """Forget the key of `name`; False if there is none. The configured key is not in the file and stays."""
        with self._changing() as entries:
            kept = [entry for entry in entries if entry.name != name]
            if len(kept) == len(entries):
                return False
            self._write(kept)
        _log.info("key.revoked", principal=name)
        return True

    def list(self) -> tuple[KeyEntry, ...]:
        """The keys of the file, without their digests."""
        self._look()
        return tuple(structs.replace(entry, sha256="") for entry in self._entries)

    def _add(
        self, entries: Iterable[KeyEntry], name: str, scopes: Iterable[Scope], profiles: Iterable[str] | None
    ) -> str:
        key = secrets.token_urlsafe(32)
        log_module.add_secrets([key])
        entry = KeyEntry(
            id=secrets.token_hex(6),
            name=name,
            sha256=_digest(key).hex(),
            scopes=tuple(dict.fromkeys(str(Scope(scope)) for scope in scopes)),
            profiles=None if profiles is None else tuple(dict.fromkeys(profiles)),
            created=round(time.time(), 3),
        )
        self._write([*entries, entry])
        _log.info("key.issued", principal=name, key_id=entry.id, scopes=entry.scopes)
        return key

    @contextlib.contextmanager
    def _changing(self) -> Iterator[tuple[KeyEntry, ...]]:
        """The entries as they are now, with every other process kept from changing them."""
        folder = home_module.private_folder(self._home, "gateway")
        with home_module.open_private(folder / "keys.lock", "wb", encoding=None) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read()
            yield self._entries

    def _write(self, entries: Iterable[KeyEntry]) -> None:
        data = msgspec.json.format(msgspec.json.encode(tuple(entries)), indent=2)
        atomic_write(self._path, data + b"\n", mode=home_module.FILE_MODE)
        self._read()

    def _look(self) -> bool:
        """Read the file again if it is another one; what cannot be read lets nobody in. False if it is the same."""
        self._look_at = self._clock() + _LOOK_EVERY
        try:
            mark = _mark(os.stat(self._path))
        except OSError:
            mark = None
        if mark == self._seen:
            return False
        try:
            self._read()
        except SettingsError as error:
            self._accept((), mark)
            _log.failure("keys.unreadable", error)
        return True

    def _read(self) -> None:
        try:
            with open(self._path, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_mode & 0o077:
                    with contextlib.suppress(OSError):
                        os.fchmod(file.fileno(), home_module.FILE_MODE)
                    _log.warning("keys.mode", found=oct(found.st_mode & 0o777))
                entries = msgspec.json.decode(file.read(), type=tuple[KeyEntry, ...])
        except FileNotFoundError:
            self._accept((), None)
            return
        except OSError as error:
            raise SettingsError(f"{self._path}: cannot be read: {error.strerror}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SettingsError(f"{self._path}: not a list of keys: {error}") from error
        self._accept(entries, _mark(found))

    def _accept(self, entries: tuple[KeyEntry, ...], seen: tuple[int, int, int] | None) -> None:
        accepted: list[tuple[bytes, Principal]] = []
        if self._configured is not None:
            accepted.append((self._configured, OWNER))
        for entry in entries:
            if self._configured is not None and entry.name == OWNER_NAME:
                continue
            with contextlib.suppress(ValueError):  # a digest that is no hexadecimal number fits no key
                accepted.append((bytes.fromhex(entry.sha256), entry.principal(self._own)))
        self._entries, self._accepted, self._seen = entries, tuple(accepted), seen


def bearer_key(header: str | bytes | None) -> str | None:
    """The key in an `Authorization: Bearer KEY` header, or None for whatever cannot be one."""
    if not header or not header.isascii():
        return None
    text = header.decode("ascii") if isinstance(header, bytes) else header
    scheme, _, key = text.partition(" ")
    if scheme.lower() != "bearer" or not key or len(key) > _LONGEST_KEY or not key.isprintable() or " " in key:
        return None
    return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("ascii")).digest()


def _mark(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_mtime_ns, found.st_size, found.st_ino


def _refuse_weak(key: str) -> None:
    """Raise `SettingsError` for a key that a header cannot carry or that somebody could guess."""
    how = 'make one with: python -c "import secrets; print(secrets.token_urlsafe(32))"'
    if bearer_key(f"Bearer {key}") is None and len(key) >= _SHORTEST_KEY:
        raise SettingsError(
            f"API_SERVER_KEY may hold only visible ASCII characters, at most {_LONGEST_KEY}, and no spaces; {how}"
        )
    if len(key) < _SHORTEST_KEY:
        raise SettingsError(f"API_SERVER_KEY is shorter than {_SHORTEST_KEY} characters; {how}")
    if len(set(key)) < _FEWEST_CHARACTERS or _is_run(key):
        raise SettingsError(f"API_SERVER_KEY is too regular and could be guessed; {how}")
    words = re.split(r"[\W_]+", key.lower())
    if sum(len(word) for word in words if not _is_sample(word)) < _FEWEST_OWN_CHARACTERS:
        raise SettingsError(f"API_SERVER_KEY is a sample as documents have it, known to everybody; {how}")


def _is_sample(word: str) -> bool:
    """True for `api` and for `changeme`, a word put together from such words."""
    known = "|".join(sorted(_SAMPLE_WORDS.split(), reverse=True))  # the longer of two that begin alike is tried first
    return re.fullmatch(f"(?:{known})*+", word) is not None


def _is_run(key: str) -> bool:
    """True for one short piece again and again, and for characters in their order, as 0123456789abcdef."""
    repeated = any(key == (key[:size] * len(key))[: len(key)] for size in range(1, len(key) // 2 + 1))
    steps = sum(ord(b) - ord(a) in {0, 1, -1} for a, b in itertools.pairwise(key))
    return repeated or steps > len(key) * 3 // 4
