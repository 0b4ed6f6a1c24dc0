"""The click commands: help, explanations of mistakes, and what is not a conversation.

A conversation's command line that is plain and correct never comes here; see `options`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import click

from hermes_agent.cli import options, start
from hermes_agent.cli.options import Option
from hermes_agent.version import VERSION

COMMANDS = {
    "gateway": ("hermes_agent.cli.gateway", "Serve the API: run, start, stop, restart, status, install, uninstall."),
    "profile": ("hermes_agent.cli.profiles", "Keep several homes apart: list, create, show, use, rename, delete."),
    "sessions": ("hermes_agent.cli.sessions", "List the stored sessions, or show one."),
    "demo": ("hermes_agent.cli.demo", "Watch the agent work, be killed and go on; needs no model and no key."),
    "selftest": ("hermes_agent.cli.selftest", "Check this installation by killing the agent again and again."),
}
"""Commands that lie in a module of their own, each under the name `command` there; loaded when they are called."""


class _Commands(click.Group):
    """A group that imports a command's module when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *COMMANDS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        return importlib.import_module(COMMANDS[cmd_name][0]).command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (name, COMMANDS[name][1] if name in COMMANDS else _chat.short_help or "")
            for name in self.list_commands(ctx)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _parameters(table: Iterable[Option]) -> list[click.Parameter]:
    return [_parameter(option) for option in table]


def _parameter(option: Option) -> click.Option:
    fields: dict[str, Any] = {"help": option.help, "default": None}
    if not option.metavar:
        fields["is_flag"] = True
    elif option.choices:
        fields["type"] = click.Choice(option.choices)
    else:
        fields["metavar"] = option.metavar
        fields["type"] = click.IntRange(min=1) if option.count else str
    if option.alone:
        fields |= {"is_flag": False, "flag_value": option.alone}
    return click.Option([*option.flags, option.name], **fields)


def _profile() -> click.Option:
    """For the help alone: the command line comes here without it."""

    def refuse(_ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise click.UsageError("-p stands by itself: -p NAME")

    return click.Option(options.PROFILE, metavar="NAME", help=options.PROFILE_HELP, expose_value=False, callback=refuse)


def _run_top(ctx: click.Context, **values: Any) -> int:
    given = {name: value for name, value in values.items() if value is not None}
    if ctx.invoked_subcommand is None:
        return start.converse(options.request(given))
    if given and ctx.invoked_subcommand != "chat":
        flags = next(option.flags for option in options.TOP if option.name in given)
        raise click.UsageError(f"{flags[0]} does not go with the command {ctx.invoked_subcommand!r}")
    ctx.obj = given
    return 0


def _run_chat(ctx: click.Context, **values: Any) -> int:
    given = {name: value for name, value in values.items() if value is not None}
    return start.converse(options.request({**(ctx.obj or {}), **given}))


_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

_chat = click.Command(
    "chat",
    params=[_profile(), *_parameters(options.CHAT)],
    callback=click.pass_context(_run_chat),
    help="Talk with the agent: interactively, or one message with -q.",
    short_help="Talk with the agent; hermes alone does the same.",
    context_settings=_HELP,
)

hermes = _Commands(
    "hermes",
    params=[_profile(), *_parameters(options.TOP)],
    callback=click.pass_context(_run_top),
    invoke_without_command=True,
    help=(
        "An agent that never loses, repeats or forgets a step.\n\n"
        "Without a command it opens a conversation in this terminal. Keys are read from the environment, "
        "from .env and from config.yaml in HERMES_HOME (default ~/.hermes), never from the command line."
    ),
    context_settings=_HELP,
)
hermes.add_command(_chat)
click.version_option(VERSION, "-V", "--version", prog_name="hermes", message="%(prog)s %(version)s")(hermes)


def run(arguments: list[str]) -> int:
    """Run any command line and return its exit code; a mistake is explained in one line."""
    try:
        code: Any = hermes.main(arguments, prog_name="hermes", standalone_mode=False)
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        place = context.command_path if context is not None else "hermes"
        message = " ".join(error.format_message().split())
        raise start.UsageError(f"{message} See: {place} --help") from None
    return code if isinstance(code, int) else 0
