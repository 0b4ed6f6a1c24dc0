"""The screen a person sees when no model is configured."""

from __future__ import annotations

from pathlib import Path

NO_MODEL = """\
No model is configured. There are three ways to name one:

  1. On the command line
         hermes --base-url http://127.0.0.1:11434/v1 -m MODEL

  2. In the environment
         export OPENAI_BASE_URL=https://api.openai.com/v1
         export OPENAI_API_KEY=...          (keys are never given on the command line)
         hermes -m MODEL

  3. In {home}/config.yaml
         model:
           default: MODEL
           base_url: https://api.openai.com/v1
     with the key in {home}/.env
         OPENAI_API_KEY=...

Any server that speaks the OpenAI chat API will do, also one on this machine.
To watch hermes work without a model and without a key:  hermes demo
"""


def no_model(home: Path) -> str:
    """The screen for this home."""
    return NO_MODEL.format(home=_short(home))


def _short(home: Path) -> str:
    try:
        return f"~/{home.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(home)
