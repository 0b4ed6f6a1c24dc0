"""`hermes profile`: homes that share nothing, each with its own settings, keys, sessions and gateway."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, cast

import click

from hermes_agent import home as home_module
from hermes_agent import settings as settings_module
from hermes_agent.cli import gateway as gateway_command
from hermes_agent.cli.screen import Stream
from hermes_agent.errors import UsageError
from hermes_agent.gateway import pid_file
from hermes_agent.home import DEFAULT_PROFILE

Facts = dict[str, Any]

_SECRET_NAMES = ("api_key", "authorization", "key", "password", "secret", "token")
_SECRET_ENDINGS = ("_key", "_password", "_secret", "_token")


def _list(as_json: bool) -> int:
    root = _root()
    chosen = home_module.chosen_profile(root)
    found = [_facts(root, name, chosen) for name in home_module.profiles(root)]
    if as_json:
        _print_json(found)
        return 0
    width = max(len(facts["name"]) for facts in found)
    for facts in found:
        gateway = f"  gateway at {facts['gateway']}" if facts["gateway"] else ""
        _print(f"{'*' if facts['chosen'] else ' '} {facts['name']:<{width}}  {facts['home']}{gateway}")
    return 0


def _show(name: str | None, as_json: bool) -> int:
    root = _root()
    facts = _facts(root, name or home_module.profile_of(home_module.hermes_home()), home_module.chosen_profile(root))
    settings = settings_module.load(Path(facts["home"]), settings_module.shared_environment())
    facts |= {"model": settings.model.default, "provider": settings.model.provider}
    if as_json:
        _print_json(facts)
        return 0
    for label, value in facts.items():
        shown = {True: "yes", False: "no", "": "-", None: "-"}.get(value, value)
        _print(f"{label:<9}{shown}")
    return 0


def _facts(root: Path, name: str, chosen: str) -> Facts:
    home = home_module.profile_home(root, name)
    record = pid_file.read(home)
    return {"name": name, "home": str(home), "chosen": name == chosen, "gateway": record.url if record else None}


def _create(name: str, clone: bool) -> int:
    root = _root()
    _refuse_taken(root, name)
    folder = home_module.private_folder(root, home_module.PROFILES)
    fresh = home_module.private_folder(folder, f".new-{name}-{os.getpid()}")
    left_out: list[str] = []
    try:
        if clone:
            left_out = _clone(home_module.hermes_home(), fresh)
        os.rename(fresh, folder / name)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    _print(f"made the profile {name!r} in {folder / name}")
    if left_out:
        _print(f"keys were not copied: {', '.join(left_out)}")
    _print(f"work in it with: hermes -p {name}, or for good: hermes profile use {name}")
    return 0


def _clone(source: Path, target: Path) -> list[str]:
    """Copy what is no secret and no memory of a conversation; returns what was left out."""
    settings_module.load(source)  # explains what cannot be read
    if (source / "SOUL.md").is_file():
        _write(target / "SOUL.md", (source / "SOUL.md").read_bytes())
    left_out = [".env"] if (source / ".env").exists() else []
    if not (source / "config.yaml").is_file():
        return left_out
    from ruamel.yaml import YAML  # noqa: PLC0415 - only where a file is copied

    yaml = YAML()
    yaml.width = 4096
    yaml.preserve_quotes = True
    document: Any = yaml.load((source / "config.yaml").read_bytes())  # pyright: ignore[reportUnknownMemberType]
    left_out += _take_secrets(document, "")
    text = io.BytesIO()
    yaml.dump(document, text)  # pyright: ignore[reportUnknownMemberType]
    _write(target / "config.yaml", text.getvalue())
    return left_out


def _take_secrets(value: Any, path: str) -> list[str]:
    """Remove every key that is written out; one that is a `${NAME}` says nothing. Returns their places."""
    taken: list[str] = []
    if isinstance(value, list):
        for at, item in enumerate(cast("list[Any]", value)):
            taken += _take_secrets(item, f"{path}[{at}]")
    if isinstance(value, dict):
        mapping = cast("dict[Any, Any]", value)
        for name, item in list(mapping.items()):
            place = f"{path}.{name}" if path else str(name)
            known = str(name).lower().replace("-", "_")
            named_so = known in _SECRET_NAMES or known.endswith(_SECRET_ENDINGS)
            if named_so and isinstance(item, (str, int)) and "${" not in str(item):
                del mapping[name]
                taken.append(place)
            else:
                taken += _take_secrets(item, place)
    return taken


def _write(path: Path, data: bytes) -> None:
    with home_module.open_private(path, "wb") as file:
        file.write(data)


def _use(name: str) -> int:
    root = _root()
    home = home_module.profile_home(root, name)
    home_module.choose_profile(root, name)
    _print(f"hermes without -p now works in the profile {name!r}: {home}")
    return 0


def _rename(name: str, new_name: str) -> int:
    root = _root()
    home = _named_home(root, name)
    _refuse_taken(root, new_name)
    with pid_file.held(home):
        os.rename(home, home.with_name(new_name))
    if home_module.chosen_profile(root) == name:
        home_module.choose_profile(root, new_name)
    _print(f"the profile {name!r} is called {new_name!r} now: {home.with_name(new_name)}")
    _warn_of_unit(home)
    return 0


def _delete(name: str, yes: bool) -> int:
    root = _root()
    home = _named_home(root, name)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"this deletes all of {home} for good; say so with --yes")
        if not click.confirm(f"Delete all of {home}, its sessions and keys too?", default=False):
            _print("nothing was deleted")
            return 1
    with pid_file.held(home):
        gone = home.with_name(f".deleted-{name}-{os.getpid()}")
        os.rename(home, gone)
    if home_module.chosen_profile(root) == name:
        home_module.choose_profile(root, DEFAULT_PROFILE)
    if gone.is_symlink():
        gone.unlink()
    else:
        shutil.rmtree(gone)
    _print(f"deleted the profile {name!r}")
    _warn_of_unit(home)
    return 0


def _warn_of_unit(home: Path) -> None:
    unit = gateway_command.unit_path(home)
    if unit.exists():
        _print(f"its gateway was installed for systemd; disable it with: systemctl --user disable --now {unit.name}")
        _print(f"and delete {unit}")


def _named_home(root: Path, name: str) -> Path:
    """The home of a profile that is not the root itself."""
    if name == DEFAULT_PROFILE:
        raise UsageError(f"the profile {DEFAULT_PROFILE!r} is {root} itself and stays as it is")
    return home_module.profile_home(root, name)


def _refuse_taken(root: Path, name: str) -> None:
    if name == DEFAULT_PROFILE or os.path.lexists(root / home_module.PROFILES / name):
        raise UsageError(f"there is a profile {name!r} already")
    if not home_module.is_profile_name(name):
        raise UsageError(f"{name!r} is no name for a profile: a to z, 0 to 9, - and _, at most 64, the first no sign")


def _root() -> Path:
    return home_module.root_of(home_module.hermes_home())


def _print(text: str) -> None:
    Stream(sys.stdout).write(text + "\n")


def _print_json(value: Any) -> None:
    Stream(sys.stdout).raw(json.dumps(value, indent=2) + "\n")


def _name(argument: str = "name") -> click.Argument:
    return click.Argument([argument])


_JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON.")

command = click.Group("profile", help="Keep several homes apart, each with its own settings, keys and sessions.")
for _made in (
    click.Command(
        "list", params=[_JSON], callback=_list, help="All profiles; * marks the one that is used without -p."
    ),
    click.Command(
        "create",
        params=[
            _name(),
            click.Option(["--clone"], is_flag=True, help="Copy the settings of the current profile, without its keys."),
        ],
        callback=_create,
        help="Make a profile.",
    ),
    click.Command(
        "show",
        params=[click.Argument(["name"], required=False), _JSON],
        callback=_show,
        help="Where a profile lies and what it uses; the current one if none is named.",
    ),
    click.Command("use", params=[_name()], callback=_use, help="Work in this profile wherever -p is not given."),
    click.Command("rename", params=[_name(), _name("new_name")], callback=_rename, help="Give a profile another name."),
    click.Command(
        "delete",
        params=[_name(), click.Option(["--yes", "-y"], is_flag=True, help="Do not ask.")],
        callback=_delete,
        help="Delete a profile with all that lies in it.",
    ),
):
    command.add_command(_made)
