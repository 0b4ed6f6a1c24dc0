"""`hermes gateway keys`: who may use the API of a home, and for what.

A key that is made is all that stands on standard output, for a script to take; it is
shown once. A gateway that runs knows of every change within a second.
"""

from __future__ import annotations

import json
import shlex
import sys

import click

from hermes_agent import home as home_module
from hermes_agent import settings as settings_module
from hermes_agent.cli.screen import Stream, one_line
from hermes_agent.cli.session_table import ago
from hermes_agent.errors import UsageError
from hermes_agent.gateway.keys import EVERY_SCOPE, OWNER_NAME, KeyEntry, KeyRing, Scope

_IN_CHARGE = "API_SERVER_KEY is in charge: it is the owner's key, and one named owner in the file does not count"


def _list(as_json: bool) -> int:
    ring = _ring()
    own = home_module.profile_of(home_module.hermes_home())
    out = Stream(sys.stdout)
    if as_json:
        found = {"owner_configured": ring.is_configured, "keys": [_fields(entry, own) for entry in ring.list()]}
        out.raw(json.dumps(found, indent=2) + "\n")
        return 0
    lines = [("NAME", "SCOPES", "PROFILES", "MADE")]
    for entry in ring.list():
        scopes = "every" if set(entry.scopes) >= EVERY_SCOPE else ", ".join(entry.scopes)
        profiles = "every" if entry.profiles is None else ", ".join(entry.profiles or (own,))
        lines.append((one_line(entry.name), scopes, profiles, ago(entry.created)))
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines if len(lines) > 1 else ():
        out.write("  ".join(map(str.ljust, line, widths)).rstrip() + "\n")
    if ring.is_configured:
        out.write(_IN_CHARGE + "\n")
    elif len(lines) == 1:
        out.write("no keys yet; the owner's is made when the gateway starts\n")
    return 0


def _fields(entry: KeyEntry, own: str) -> dict[str, object]:
    profiles = None if entry.profiles is None else [*(entry.profiles or (own,))]
    return {
        "id": entry.id, "name": entry.name, "scopes": [*entry.scopes], "profiles": profiles, "created": entry.created,
    }  # fmt: skip


def _add(name: str, scope: tuple[str, ...], profiles: tuple[str, ...], every: bool) -> int:
    if profiles and every:
        raise UsageError("--for and --for-all exclude each other")
    root = home_module.root_of(home_module.hermes_home())
    for each in profiles:
        home_module.profile_home(root, each)
    key = _ring().issue(name, map(Scope, scope), None if every else profiles)
    return _show(
        key, f"the key of {name!r}, shown only now; take it away with: hermes gateway keys revoke {shlex.quote(name)}"
    )


def _revoke(name: str) -> int:
    if name == OWNER_NAME:
        raise UsageError("the owner's key is not taken away but replaced: hermes gateway keys rotate")
    if not _ring().revoke(name):
        raise UsageError(f"there is no key named {name!r}: see hermes gateway keys list")
    Stream(sys.stdout).write(f"the key of {name!r} lets nobody in any more\n")
    return 0


def _rotate() -> int:
    return _show(_ring().rotate_owner(), "the owner's new key, shown only now; the old one lets nobody in any more")


def _show(key: str, about: str) -> int:
    """Show a key once: by itself on standard output, what it is on standard error."""
    Stream(sys.stderr).write(one_line(about) + "\n")
    Stream(sys.stdout).write(key + "\n")
    return 0


def _ring() -> KeyRing:
    home = home_module.hermes_home()
    return KeyRing(home, settings_module.load(home).api_server.key)


command = click.Group("keys", help="Say who may use the API of this home, or of the profile that -p names.")
for _made in (
    click.Command(
        "list",
        params=[click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object.")],
        callback=_list,
        help="The keys by name; what they are themselves is kept nowhere.",
    ),
    click.Command(
        "add",
        params=[
            click.Argument(["name"]),
            click.Option(
                ["--scope"],
                type=click.Choice([scope.value for scope in Scope]),
                multiple=True,
                required=True,
                help="What it may do; may be repeated. "
                "read: look; run: start work; dm: talk in sessions; approve: answer approvals; admin: the rest.",
            ),
            click.Option(
                ["--for", "profiles"],
                multiple=True,
                metavar="PROFILE",
                help="A profile that it is for, instead of this one; may be repeated.",
            ),
            click.Option(["--for-all", "every"], is_flag=True, help="It is for every profile."),
        ],
        callback=_add,
        help="Make a key and print it, once.",
    ),
    click.Command(
        "revoke", params=[click.Argument(["name"])], callback=_revoke, help="Let that key nobody in any more."
    ),
    click.Command("rotate", callback=_rotate, help="Replace the owner's key and print the new one, once."),
):
    command.add_command(_made)
