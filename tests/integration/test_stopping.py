"""A stop counts whenever it comes: before the turn has an agent, while it waits to be tried again, or in its midst."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_agent import settings
from hermes_agent.agent.run import AIAgent
from hermes_agent.delivery.service import Receipt
from hermes_agent.errors import FailureReason
from hermes_agent.gateway.profile import Profile
from hermes_agent.store.deliveries import Incoming
from hermes_agent.store.opening import open_store
from hermes_agent.store.turns import TurnState
from hermes_agent.testing import replies
from hermes_agent.testing.fake_openai import FakeOpenAI

PATIENT = 30.0


class Desk:
    """A delivery service whose agents are made when the test says so."""

    def __init__(self, home: Path, fake: FakeOpenAI) -> None:
        home.mkdir(parents=True)
        (home / "config.yaml").write_text(
            f"model: {{default: fake, provider: custom, base_url: '{fake.base_url}', api_key: sk-test}}\n"
            "agent: {api_max_retries: 1}\n",
            encoding="utf-8",
        )
        self.fake = fake
        self.wanted = threading.Event()
        self.allowed = threading.Event()
        chosen = settings.load(home)
        self.profile = Profile("default", chosen, open_store(chosen), self._make)
        self.service = self.profile.service

    def _make(self, **options: Any) -> AIAgent:
        self.wanted.set()
        assert self.allowed.wait(PATIENT)
        return AIAgent(**options)

    def send(self, **more: Any) -> str:
        return self.service.submit("s", Incoming("me", "hi", **more), {"source": "test"}).turn_id

    def ended(self, turn_id: str) -> Receipt:
        receipt = self.service.wait(turn_id, PATIENT)
        assert receipt is not None
        assert receipt.is_final, receipt
        return receipt


@pytest.fixture
def desk(hermes_home: Path) -> Iterator[Desk]:
    with FakeOpenAI() as fake:
        made = Desk(hermes_home, fake)
        yield made
        assert made.service.drain(PATIENT)
        made.profile.close()


def test_before_the_turn_has_an_agent(desk: Desk):
    turn = desk.send()
    assert desk.wanted.wait(PATIENT)
    asked = desk.service.cancel(turn)
    assert asked is not None
    assert asked.is_stopping
    desk.allowed.set()
    assert desk.ended(turn).state is TurnState.CANCELLED
    assert desk.fake.requests == []


def test_while_it_waits_to_be_tried_again(desk: Desk):
    desk.allowed.set()
    desk.fake.extend([replies.error(429, headers={"Retry-After": "1"})])
    turn = desk.send()
    while (found := desk.service.get(turn)) is not None and found.state is not TurnState.WAITING_RETRY:
        assert not found.is_final
    desk.service.cancel(turn)
    assert desk.ended(turn).state is TurnState.CANCELLED
    assert len(desk.fake.requests) == 1


def test_its_time_can_be_over_before_it_has_an_agent(desk: Desk):
    turn = desk.send(deadline=time.time() + 0.1)
    assert desk.wanted.wait(PATIENT)
    while turn not in desk.service._stops:
        time.sleep(0.01)
    desk.allowed.set()
    receipt = desk.ended(turn)
    assert (receipt.state, receipt.reason) == (TurnState.EXPIRED, FailureReason.DEADLINE)
    assert desk.fake.requests == []


def test_a_second_stop_and_one_that_comes_too_late_change_nothing(desk: Desk):
    desk.allowed.set()
    desk.fake.extend([replies.text("done")])
    turn = desk.send()
    assert desk.ended(turn).reply == "done"
    late = desk.service.cancel(turn)
    assert late is not None
    assert (late.state, late.is_stopping) == (TurnState.DONE, False)
    assert desk.service.cancel("turn_" + "0" * 32) is None
