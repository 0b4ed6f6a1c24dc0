"""`hermes gateway`: the API server of a profile, in the foreground, in the background, or under systemd."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from hermes_agent import home as home_module
from hermes_agent import settings as settings_module
from hermes_agent.cli import gateway_keys
from hermes_agent.cli.screen import Stream, one_line
from hermes_agent.cli.session_table import ago
from hermes_agent.gateway import pid_file
from hermes_agent.gateway.pid_file import GatewayError, Record
from hermes_agent.settings import Settings
from hermes_agent.store import processes

START_SECONDS = 10.0
_CLOSING_SECONDS = 15.0
"""What a gateway may need to stop beyond its drain."""
_LOOK_EVERY = 0.05


def _run() -> int:
    from hermes_agent.gateway import server  # noqa: PLC0415 - `status` and `stop` need no server

    settings = _settings()
    return server.serve(settings.home, settings, Stream(sys.stdout).write)


def _start() -> int:
    out = Stream(sys.stdout)
    settings = _settings()
    running = pid_file.read(settings.home)
    if running is not None:
        out.write(f"runs already at {running.url} (pid {running.pid})\n")
        return 0
    _make_owner_key(settings, out)
    record = _spawn(settings.home)
    out.write(f"listening on {record.url} (pid {record.pid}); end it with: {_command(settings.home)} stop\n")
    return 0


def _spawn(home: Path) -> Record:
    """Start a gateway that outlives this process and wait until it listens."""
    said = home_module.private_folder(home, "logs") / "gateway.out"
    with home_module.open_private(said, "wb") as file:
        process = subprocess.Popen(
            [*_program(home), "gateway", "run"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        record = pid_file.read(home)
        if record is not None:
            return record
        if process.poll() is not None:
            lines = said.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
            raise GatewayError(one_line(last).removeprefix("hermes: "))
        time.sleep(_LOOK_EVERY)
    raise GatewayError(
        f"after {START_SECONDS:.0f} s it does not listen yet (pid {process.pid}); it may still: see {said} "
        f"and {home}/logs/agent.log"
    )


def _stop() -> int:
    out = Stream(sys.stdout)
    settings = _settings(quiet=True)
    record = pid_file.read(settings.home)
    if record is None:
        out.write("no gateway runs\n")
        return 0
    _end(record, settings, out)
    return 0


def _end(record: Record, settings: Settings, out: Stream) -> None:
    """Ask a gateway to stop and wait until it has. Raises `GatewayError` if it does not."""
    if processes.is_alive(record.identity) is not True:
        raise GatewayError(f"the gateway at {record.url} runs where its process cannot be seen; stop it there")
    try:
        os.kill(record.pid, signal.SIGTERM)
    except PermissionError:
        raise GatewayError(f"the gateway (pid {record.pid}) belongs to another user") from None
    except ProcessLookupError:
        pass
    until = time.monotonic() + settings.gateway.drain_timeout + _CLOSING_SECONDS
    while processes.is_alive(record.identity):
        if time.monotonic() > until:
            raise GatewayError(f"the gateway (pid {record.pid}) still runs; the same command again stops it at once")
        time.sleep(_LOOK_EVERY)
    out.write(f"stopped (pid {record.pid})\n")


def _restart() -> int:
    settings = _settings(quiet=True)
    record = pid_file.read(settings.home)
    if record is not None:
        _end(record, settings, Stream(sys.stdout))
    return _start()


def _status(as_json: bool) -> int:
    out = Stream(sys.stdout)
    home = home_module.hermes_home()
    record = pid_file.read(home)
    facts: dict[str, Any] = {"running": record is not None, "profile": home_module.profile_of(home), "home": str(home)}
    if record is not None:
        facts |= {
            "pid": record.pid,
            "url": record.url,
            "host": record.host,
            "port": record.port,
            "version": record.version,
            "started_at": record.started_at,
        }
    if as_json:
        out.raw(json.dumps(facts, indent=2) + "\n")
    elif record is not None:
        about = f"pid {record.pid}, version {record.version}, started {ago(record.started_at)}"
        out.write(f"runs at {record.url} ({about}) for {home}\n")
    else:
        out.write(f"no gateway runs for {home}\n")
    return 0 if record is not None else 1


def _install(dry_run: bool) -> int:
    out = Stream(sys.stdout)
    settings = _settings()
    unit = unit_text(settings.home, settings.gateway.drain_timeout)
    place = unit_path(settings.home)
    if dry_run:
        out.write(f"# {place}\n{unit}")
        return 0
    if shutil.which("systemctl") is None:
        raise GatewayError(
            f"systemd is not here; start it in the background with: {_command(settings.home)} start "
            "(install --dry-run prints the unit)"
        )
    _make_owner_key(settings, out)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(unit, encoding="utf-8")
    _systemctl("daemon-reload")
    out.write(
        f"wrote {place}\nEnable it with:\n  systemctl --user enable --now {place.name}\n"
        "and let it run while nobody is logged in with:\n  loginctl enable-linger\n"
    )
    return 0


def _uninstall() -> int:
    out = Stream(sys.stdout)
    place = unit_path(home_module.hermes_home())
    if not place.exists():
        out.write(f"there is no {place}\n")
        return 0
    _systemctl("disable", "--now", place.name)
    place.unlink()
    _systemctl("daemon-reload")
    out.write(f"removed {place}\n")
    return 0


def unit_path(home: Path) -> Path:
    """Where the systemd user unit of a home's gateway stands."""
    profile = home_module.profile_of(home)
    name = "hermes-gateway" if profile == home_module.DEFAULT_PROFILE else f"hermes-gateway-{profile}"
    return Path.home() / ".config" / "systemd" / "user" / f"{name}.service"


def unit_text(home: Path, drain_timeout: float) -> str:
    """The systemd user unit; it names no key."""
    words = " ".join(_quoted(word) for word in [*_program(home), "gateway", "run"])
    return f"""\
[Unit]
Description=Hermes gateway, profile {home_module.profile_of(home)}
After=network-online.target

[Service]
Type=notify
Environment={_quoted(f"HERMES_HOME={home_module.root_of(home)}", variables=False)}
ExecStart={words}
WorkingDirectory=%h
UMask=0077
Restart=on-failure
RestartSec=2
KillMode=mixed
TimeoutStartSec=120
TimeoutStopSec={drain_timeout + _CLOSING_SECONDS:.0f}

[Install]
WantedBy=default.target
"""


def _quoted(word: str, *, variables: bool = True) -> str:
    """A word as a unit file has it; systemd fills in `$` in a command, and `%` everywhere."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text.replace("$", "$$") if variables else text}"'


def _systemctl(*arguments: str) -> None:
    """Ask the user's service manager; where there is none the person reads what to type."""
    program = shutil.which("systemctl")
    if program is not None:
        subprocess.run([program, "--user", *arguments], capture_output=True, check=False, timeout=60)


def _program(home: Path) -> list[str]:
    return [sys.executable, "-m", "hermes_agent", "-p", home_module.profile_of(home)]


def _command(home: Path) -> str:
    """What a person types for this home's gateway."""
    profile = home_module.profile_of(home)
    return f"hermes{'' if profile == home_module.DEFAULT_PROFILE else f' -p {profile}'} gateway"


def _settings(*, quiet: bool = False) -> Settings:
    settings = settings_module.load(home_module.hermes_home())
    for warning in () if quiet else settings.warnings:
        Stream(sys.stderr).write(f"hermes: warning: {one_line(warning)}\n")
    return settings


def _make_owner_key(settings: Settings, out: Stream) -> None:
    """Make the owner's key here, on the person's screen, and not where only a log would see it."""
    from hermes_agent.gateway import server  # noqa: PLC0415 - `status` and `stop` need no server
    from hermes_agent.gateway.keys import KeyRing  # noqa: PLC0415 - as above

    ring = KeyRing(settings.home, settings.api_server.key)
    server.check_place(settings.api_server, ring)
    key = ring.ensure_owner()
    if key is not None:
        out.write(server.owner_key(key))


def _only_run(ctx: click.Context) -> int:
    return _run() if ctx.invoked_subcommand is None else 0


command = click.Group(
    "gateway",
    callback=click.pass_context(_only_run),
    invoke_without_command=True,
    help="Serve the API of this home, or of the profile that -p names. Without a command it runs in the foreground.",
)
for _made in (
    click.Command("run", callback=_run, help="Serve in the foreground until Ctrl-C or SIGTERM."),
    click.Command("start", callback=_start, help="Serve in the background; returns when it listens."),
    click.Command("stop", callback=_stop, help="Let running turns end, then stop."),
    click.Command("restart", callback=_restart, help="Stop, then start."),
    click.Command(
        "status",
        params=[click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object.")],
        callback=_status,
        help="Say where it listens; the exit code is 1 if it does not.",
    ),
    click.Command(
        "install",
        params=[click.Option(["--dry-run"], is_flag=True, help="Print the unit and change nothing.")],
        callback=_install,
        help="Write a systemd user unit that keeps it running.",
    ),
    click.Command("uninstall", callback=_uninstall, help="Stop and remove the systemd user unit."),
    gateway_keys.command,
):
    command.add_command(_made)
