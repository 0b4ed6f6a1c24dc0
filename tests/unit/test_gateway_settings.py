"""What config.yaml and the environment say about the gateway and its API server."""

from __future__ import annotations

import textwrap

import pytest

from hermes_agent import settings as settings_module
from hermes_agent.errors import SettingsError
from hermes_agent.settings import ApiServerSettings, GatewaySettings, Secret


@pytest.fixture
def read(tmp_path):
    """Load settings from the text of config.yaml and an environment."""

    def read(config: str = "", **environ: str) -> settings_module.Settings:
        (tmp_path / "config.yaml").write_text(textwrap.dedent(config), encoding="utf-8")
        return settings_module.load(tmp_path, environ)

    return read


def test_the_defaults_serve_this_machine_only(read):
    found = read()
    assert found.api_server == ApiServerSettings()
    assert (found.api_server.host, found.api_server.port, found.api_server.key) == ("127.0.0.1", 8642, None)
    assert not found.api_server.allow_remote
    assert found.gateway == GatewaySettings()
    assert (found.gateway.running_turns, found.gateway.max_queue, found.gateway.session_queue) == (64, 1024, 32)
    assert (found.gateway.drain_timeout, found.gateway.heartbeat) == (30, 10)


def test_every_key_of_the_file_arrives(read):
    found = read("""
        gateway:
          max_concurrent_runs: 5
          max_queue: 6
          session_queue: 7
          turn_timeout: 8
          drain_timeout: 0
          heartbeat: 2.5
        platforms:
          telegram: {enabled: true}
          api_server:
            enabled: false
            key: k
            host: 127.0.0.2
            port: 0
            cors_origins: [http://a, http://b]
            model_name: m
            allowed_hosts: box.local
            allow_remote: true
            allow_unsandboxed_remote: true
    """)
    assert found.warnings == ()
    assert found.gateway == GatewaySettings(5, 6, 7, 8.0, 0.0, 2.5)
    assert found.gateway.running_turns == 5
    assert found.api_server == ApiServerSettings(
        enabled=False,
        key=Secret("k"),
        host="127.0.0.2",
        port=0,
        cors_origins=("http://a", "http://b"),
        model_name="m",
        allowed_hosts=("box.local",),
        allow_remote=True,
        allow_unsandboxed_remote=True,
    )
    assert Secret("k") in found.secrets
    assert "'k'" not in repr(found)


def test_every_variable_arrives(read):
    found = read(
        API_SERVER_ENABLED="0",
        API_SERVER_KEY="k",
        API_SERVER_HOST="::1",
        API_SERVER_PORT="9",
        API_SERVER_CORS_ORIGINS="http://a, http://b,",
        API_SERVER_MODEL_NAME="m",
    )
    assert found.api_server == ApiServerSettings(
        enabled=False,
        key=Secret("k"),
        host="::1",
        port=9,
        cors_origins=("http://a", "http://b"),
        model_name="m",
    )
    assert Secret("k") in found.secrets


@pytest.mark.parametrize(
    "config",
    [
        "platforms: {api_server: {port: 2}}",
        "platforms: {api_server: {extra: {port: 2}}}",
        "platforms: {api_server: {port: 3, extra: {port: 2}}}",
        "gateway: {api_server: {port: 2}}",
        "{gateway: {port: 4, api_server: {port: 3}}, platforms: {api_server: {port: 2}}}",
    ],
)
def test_every_place_of_the_file_wins_over_the_variable(read, config):
    found = read(config, API_SERVER_PORT="1", API_SERVER_HOST="h")
    assert (found.api_server.port, found.api_server.host) == (2, "h")


@pytest.mark.parametrize("value", ["0", "null"])
def test_no_limit_means_our_own(read, value):
    found = read(f"gateway: {{api_server: {{max_concurrent_runs: {value}}}}}")
    assert found.gateway.running_turns == 64


@pytest.mark.parametrize(
    ("config", "place", "near"),
    [
        ("gateway: {max_queu: 3}", "gateway.max_queu", "max_queue"),
        ("gateway: {api_server: {hots: x}}", "gateway.api_server.hots", "host"),
        ("platforms: {api_server: {allow_remotes: 1}}", "platforms.api_server.allow_remotes", "allow_remote"),
        ("platforms: {api_server: {extra: {prot: 1}}}", "platforms.api_server.extra.prot", "port"),
        ("platforms: {api_sever: {}}", "platforms.api_sever", "api_server"),
        ("platform: {}", "platform", "platforms"),
    ],
)
def test_a_misspelt_key_is_reported_with_the_nearest_known_one(read, tmp_path, config, place, near):
    assert read(config).warnings == (f"{tmp_path}/config.yaml: unknown setting {place!r}; did you mean {near!r}?",)


def test_keys_of_other_versions_are_accepted_silently(read):
    config = """
        gateway: {delivery_ledger: true, multiplex_profiles: true}
        platforms:
          discord: {token: t}
          api_server: {reply_to_mode: first, extra: {tool_progress_events: false, model_routes: {}}}
    """
    assert read(config).warnings == ()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("gateway: [1]", "gateway is [1]; expected a mapping"),
        ("platforms: x", "platforms is 'x'; expected a mapping"),
        ("platforms: {api_server: 1}", "platforms.api_server is 1; expected a mapping"),
        ("platforms: {api_server: {port: 70000}}", "platforms.api_server.port is 70000; expected"),
        ("platforms: {api_server: {key: [s3cret]}}", "platforms.api_server.key is not usable; expected text"),
        ("gateway: {heartbeat: 0}", "gateway.heartbeat is 0; expected"),
        ("gateway: {max_queue: true}", "gateway.max_queue is True; expected a whole number"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_by_its_place(read, config, sentence):
    with pytest.raises(SettingsError) as error:
        read(config)
    assert sentence in str(error.value)


@pytest.mark.parametrize("port", ["x", "-1", "65536", "\uff18"])
def test_a_port_that_is_none_is_named_by_its_variable(read, port):
    with pytest.raises(SettingsError, match=r"API_SERVER_PORT is .*; expected a port, 0 to 65535"):
        read(API_SERVER_PORT=port)


def test_a_key_may_be_filled_in_from_a_variable(read):
    found = read("platforms: {api_server: {key: '${MINE}', cors_origins: '${PAGES}'}}", MINE="k", PAGES="a,b")
    assert found.api_server.key == Secret("k")
    assert found.api_server.cors_origins == ("a", "b")


def test_the_service_manager_is_named_by_the_process_alone(read, tmp_path):
    (tmp_path / ".env").write_text("NOTIFY_SOCKET=/elsewhere\n")
    (tmp_path / ".env").chmod(0o600)
    assert read().notify_socket == ""
    assert read(NOTIFY_SOCKET="@x").notify_socket == "@x"


def test_another_profile_is_not_told_the_key_of_this_process(monkeypatch):
    monkeypatch.setenv("API_SERVER_KEY", "ours")
    monkeypatch.setenv("OPENAI_API_KEY", "everybody's")
    shared = settings_module.shared_environment()
    assert "API_SERVER_KEY" not in shared
    assert shared["OPENAI_API_KEY"] == "everybody's"
