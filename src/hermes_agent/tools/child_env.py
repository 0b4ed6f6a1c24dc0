"""The environment of a child process: a fixed list of names, what the operator declared, and who is calling.

Never the agent's own environment: keys in it do not reach what a model runs.
"""

from __future__ import annotations

import os

from hermes_agent.tools.context import ToolContext

_NAMES = ("PATH", "HOME", "LANG", "LANGUAGE", "TERM", "TMPDIR", "USER", "LOGNAME", "SHELL", "TZ")

_GIT = {
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "core.pager": "cat",
    "diff.ignoreSubmodules": "all",
    "log.showSignature": "false",
    "safe.bareRepository": "explicit",
}


def build(context: ToolContext, *, quiet_git: bool = False) -> dict[str, str]:
    """The variables a child of this call gets; `quiet_git` keeps git from running programs by itself."""
    # The one place besides the settings that looks at the environment: it is what a child inherits.
    own = os.environ
    env = {name: own[name] for name in (*_NAMES, *context.env_passthrough) if name in own}
    env.update({name: value for name, value in own.items() if name.startswith("LC_")})
    # A relative entry would let a file in the working folder stand in for a program.
    places = [place for place in env.get("PATH", "").split(os.pathsep) if os.path.isabs(place)]
    env["PATH"] = os.pathsep.join(places) or os.defpath
    env["PWD"] = str(context.cwd)
    env["HERMES_HOME"] = str(context.home)
    if context.call_id:
        env["HERMES_CALL_ID"] = context.call_id
    if quiet_git:
        env.update(GIT_OPTIONAL_LOCKS="0", GIT_PAGER="cat", GIT_NO_LAZY_FETCH="1", GIT_CONFIG_COUNT=str(len(_GIT)))
        for at, (name, value) in enumerate(_GIT.items()):
            env[f"GIT_CONFIG_KEY_{at}"] = name
            env[f"GIT_CONFIG_VALUE_{at}"] = value
    return env
