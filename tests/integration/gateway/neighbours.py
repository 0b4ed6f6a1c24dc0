"""A second profile beside the one that a gateway runs for."""

from __future__ import annotations

import os
from pathlib import Path

from hermes_agent.gateway.keys import KeyRing

TEAM_KEY = "team-key-93c1e7d05b8f42a6"


def config(base_url: str, *, key: str = TEAM_KEY, more: str = "") -> str:
    return (
        f"model: {{default: fake, provider: custom, base_url: '{base_url}', api_key: sk-team-model}}\n"
        f"platforms: {{api_server: {{key: {key}}}}}\nagent: {{api_max_retries: 1}}\n{more}"
    )


def make(root: Path, base_url: str, name: str = "team") -> Path:
    """Make the profile and return its home."""
    home = root / "profiles" / name
    home.mkdir(parents=True)
    write(home, config(base_url))
    return home


def write(home: Path, text: str) -> None:
    """Write its config.yaml as another file, as editors do."""
    fresh = home / "config.fresh"
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, home / "config.yaml")


def ring(home: Path) -> KeyRing:
    """Its keys, as `hermes -p NAME gateway keys` sees them."""
    return KeyRing(home, None)
