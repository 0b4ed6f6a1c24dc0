"""What acceptance tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_agent.testing.fake_openai import FakeOpenAI
from tests.acceptance.hermes import Hermes
from tests.acceptance.world import World


@pytest.fixture
def fake():
    """A strict fake model server; no request may be refused."""
    with FakeOpenAI() as server:
        yield server
        assert server.violations == []


@pytest.fixture
def hermes(hermes_home: Path, fake: FakeOpenAI) -> Hermes:
    """The command, in an empty home whose model is the fake server."""
    return Hermes(hermes_home, fake)


@pytest.fixture
def world(hermes_home: Path):
    """An empty home whose model is a strict fake server; no request may be refused."""
    with FakeOpenAI() as fake, World(hermes_home, fake) as found:
        yield found
        assert fake.violations == []
