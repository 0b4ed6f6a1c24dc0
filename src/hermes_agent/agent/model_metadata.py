"""What is known about models without asking them."""

from __future__ import annotations

from typing import Any

DEFAULT_CONTEXT = 128_000
"""Window in tokens that is assumed when nothing names another."""


def fetch_model_metadata() -> dict[str, Any]:
    """Facts by model name, learned from servers; none are learned before a server was asked."""
    return {}
