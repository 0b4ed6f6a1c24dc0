"""What acceptance tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_agent.testing.fake_openai import FakeOpenAI
from tests.acceptance.world import World


@pytest.fixture
def world(hermes_home: Path):
    """An empty home whose model is a strict fake server; no request may be refused."""
    with FakeOpenAI() as fake, World(hermes_home, fake) as found:
        yield found
        assert fake.violations == []
