"""A platform's settings as plugins and embedders write them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hermes_agent.gateway.config import ChannelOverride, HomeChannel, PlatformConfig


def test_one_argument_is_enough_and_objects_share_nothing():
    one, other = PlatformConfig(enabled=True), PlatformConfig(enabled=True)
    assert one == other
    assert (one.reply_to_mode, one.gateway_restart_notification, one.typing_indicator) == ("first", True, True)
    one.extra["port"] = 1
    one.channel_overrides["c"] = ChannelOverride()
    assert (other.extra, other.channel_overrides) == ({}, {})


@pytest.mark.usefixtures("unmeasured")
def test_the_old_name_opens_and_imports_nothing_else(hermes_home):
    code = (
        "import sys; from gateway.config import PlatformConfig; PlatformConfig(enabled=True)\n"
        "print(sorted({'aiohttp', 'asyncio', 'apsw', 'ruamel', 'hermes_agent.settings'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert not hermes_home.exists()


def test_unknown_keys_become_extra_and_what_stands_there_wins():
    found = PlatformConfig.from_dict({"enabled": True, "host": "a", "port": 1, "extra": {"port": 2}})
    assert found == PlatformConfig(enabled=True, extra={"host": "a", "port": 2})


def test_a_key_without_a_value_means_the_default():
    assert PlatformConfig.from_dict({"enabled": None, "reply_to_mode": None, "extra": None}) == PlatformConfig()


def test_a_round_trip_changes_nothing():
    found = PlatformConfig(
        enabled=True,
        token="t",
        api_key="k",
        home_channel=HomeChannel("slack", "c1", name="general"),
        channel_overrides={"c1": ChannelOverride(model="m")},
        extra={"host": "h"},
    )
    assert PlatformConfig.from_dict(found.to_dict()) == found
    assert found.to_dict()["home_channel"]["chat_id"] == "c1"


def test_printing_shows_no_secret():
    assert "s3cret" not in repr(PlatformConfig(token="s3cret", api_key="s3cret", extra={"key": "s3cret"}))
