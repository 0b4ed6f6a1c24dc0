"""What the settings say, who wins, and which key goes to which server."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from hermes_agent import settings as settings_module
from hermes_agent.errors import SettingsError
from hermes_agent.settings import Endpoint, Secret


@pytest.fixture
def read(tmp_path):
    """Load settings from the text of config.yaml, of .env, and an environment."""

    def read(config: str = "", dotenv: str = "", **environ: str) -> settings_module.Settings:
        if config:
            (tmp_path / "config.yaml").write_text(textwrap.dedent(config), encoding="utf-8")
        if dotenv:
            (tmp_path / ".env").write_text(textwrap.dedent(dotenv), encoding="utf-8")
            (tmp_path / ".env").chmod(0o600)
        return settings_module.load(tmp_path, environ)

    return read


def test_without_any_file_everything_has_its_default(read, tmp_path):
    found = read()
    assert found == settings_module.Settings(home=tmp_path)
    assert found.agent.api_max_retries == 3
    assert found.terminal.timeout == 180
    assert found.database.synchronous == "full"
    assert found.endpoint() is None


@pytest.mark.usefixtures("unmeasured")
def test_without_any_file_neither_reader_is_imported(tmp_path):
    """Start-up does not pay for YAML."""
    code = (
        "import pathlib, sys; from hermes_agent import settings; settings.load(pathlib.Path(sys.argv[1]), {})\n"
        "print({'ruamel', 'dotenv', 'difflib', 'logging', 'json'} & {name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_key_of_the_file_arrives(read):
    found = read("""
        model: {default: m, provider: custom, base_url: http://h/v1, api_key: k, context_length: 9, max_tokens: 8}
        providers:
          lab: {base_url: http://lab/v1, api_key: kk, model: lab-model, transport: chat_completions}
          empty:
        agent: {max_turns: 7, api_max_retries: 0, disabled_toolsets: [web]}
        toolsets: [file, terminal]
        terminal: {timeout: 2, cwd: /tmp, env_passthrough: [A, B]}
        approvals: {timeout: 1.5, deny: ["rm *"]}
        tool_output: {max_bytes: 1, max_lines: 2, max_line_length: 3}
        file_read_max_chars: 4
        database: {synchronous: normal, wal_autocheckpoint: 5, journal_size_limit: 0}
        logging: {level: debug, max_size_mb: 0.5, backup_count: 0}
    """)
    assert found.warnings == ()
    assert (found.model.default, found.model.provider, found.model.base_url) == ("m", "custom", "http://h/v1")
    assert (found.model.api_key, found.model.context_length, found.model.max_tokens) == (Secret("k"), 9, 8)
    assert found.providers["lab"] == settings_module.ProviderSettings("http://lab/v1", Secret("kk"), "", "lab-model")
    assert found.providers["empty"] == settings_module.ProviderSettings()
    assert found.agent == settings_module.AgentSettings(7, 0, ("web",))
    assert found.toolsets == ("file", "terminal")
    assert found.terminal == settings_module.TerminalSettings(2.0, "/tmp", ("A", "B"))
    assert found.approvals == settings_module.ApprovalSettings(1.5, ("rm *",))
    assert found.tool_output == settings_module.ToolOutputSettings(1, 2, 3)
    assert found.file_read_max_chars == 4
    assert found.database == settings_module.DatabaseSettings("normal", 5, 0)
    assert found.logging == settings_module.LoggingSettings("debug", 0.5, 0)


def test_the_model_may_be_a_bare_name(read):
    assert read("model: some/name").model.default == "some/name"


def test_a_key_without_a_value_means_the_default(read):
    assert read("agent:\n  max_turns:\n  api_max_retries: null\ntoolsets:\nmodel:\n") == read()


def test_broken_yaml_is_refused_with_file_and_line(read, tmp_path):
    with pytest.raises(SettingsError) as caught:
        read("model: m\nagent:\n  [oops\nlogging: {}\n")
    problem = "expected ',' or ']', but got ':' while parsing a flow sequence that starts in line 3"
    assert str(caught.value) == f"{tmp_path}/config.yaml:4: not valid YAML: {problem}"


@pytest.mark.parametrize(("text", "place"), [("a: 1\na: 2\n", ":2:"), ("a: \x01\n", ": not valid YAML")])
def test_a_doubled_key_and_a_control_character_are_refused(read, text, place):
    with pytest.raises(SettingsError, match=rf"config.yaml{place}"):
        read(text)


def test_a_file_that_is_not_text_or_cannot_be_read_is_named(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"model: \xff\xfe")
    with pytest.raises(SettingsError, match=r"config.yaml: not UTF-8 text"):
        settings_module.load(tmp_path, {})
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(SettingsError, match=r"config.yaml: cannot be read: Is a directory"):
        settings_module.load(tmp_path, {})


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("agent: {max_turns: many}", "agent.max_turns is 'many'; expected a whole number"),
        ("agent: {max_turns: 0}", "agent.max_turns is 0; expected a whole number >= 1"),
        ("agent: {max_turns: true}", "agent.max_turns is True; expected a whole number"),
        ("agent: 3", "agent is 3; expected a mapping"),
        ("terminal: {timeout: 1h}", "terminal.timeout is '1h'; expected a number"),
        ("toolsets: file", "toolsets is 'file'; expected a list"),
        ("toolsets: [1]", "toolsets is [1]; expected text"),
        ("model: {default: 4}", "model.default is 4; expected text"),
        ("model: [a]", "model is ['a']; expected a mapping"),
        ("providers: [a]", "providers is ['a']; expected a mapping"),
        ("providers: {lab: {base_url: 1}}", "providers.lab.base_url is 1; expected text"),
        ("logging: {level: loud}", "logging.level is 'loud'; expected one of debug, info, warning, error"),
        ("[1, 2]", "expected `key: value` lines, got [1, 2]"),
    ],
)
def test_a_value_of_the_wrong_kind_names_key_value_and_what_is_expected(read, tmp_path, config, sentence):
    with pytest.raises(SettingsError) as caught:
        read(config)
    assert str(caught.value) == f"{tmp_path}/config.yaml: {sentence}"


def test_a_wrong_key_is_refused_without_showing_it(read):
    with pytest.raises(SettingsError) as caught:
        read("model: {api_key: [sk-canary]}")
    assert str(caught.value).endswith("model.api_key is not usable; expected text")


@pytest.mark.parametrize(
    ("config", "place", "near"),
    [
        ("modle: m", "modle", "model"),
        ("agent: {max_turn: 3}", "agent.max_turn", "max_turns"),
        ("model: {baseurl: http://h}", "model.baseurl", "base_url"),
        ("compresion: {}", "compresion", "compression"),
    ],
)
def test_a_misspelt_key_is_reported_with_the_nearest_known_one(read, tmp_path, config, place, near):
    assert read(config).warnings == (f"{tmp_path}/config.yaml: unknown setting {place!r}; did you mean {near!r}?",)


def test_keys_of_other_versions_are_accepted_silently(read):
    found = read("""
        _config_version: 50
        compression: {enabled: true}
        approvals: {mode: smart}
        terminal: {backend: local, docker_image: x}
        gateway: {api_server: {port: 1}}
        somebody_elses_key: 1
    """)
    assert found.warnings == ()


def test_variables_in_values_are_filled_from_the_environment_and_the_env_file(read):
    found = read(
        "model: {default: 'pre-${NAME}-${OTHER}', max_tokens: '${LIMIT}'}\ntoolsets: ['${NAME}', plain, '$NAME']",
        "OTHER=from-file\nNAME=loses",
        NAME="env",
        LIMIT="12",
    )
    assert (found.model.default, found.model.max_tokens) == ("pre-env-from-file", 12)
    assert found.toolsets == ("env", "plain", "$NAME")


def test_a_variable_that_is_not_set_is_reported_and_the_default_holds(read, tmp_path):
    found = read("model: {default: m, api_key: '${NO_KEY}'}")
    assert found.model.api_key is None
    assert found.warnings == (f"{tmp_path}/config.yaml: model.api_key uses ${{NO_KEY}}, which is not set",)


def test_a_variable_of_the_wrong_kind_is_refused_without_showing_it(read):
    with pytest.raises(SettingsError, match=r"model.max_tokens is not usable; expected a whole number"):
        read("model: {max_tokens: '${LIMIT}'}", LIMIT="canary")


def test_the_env_file_is_taken_literally(read):
    found = read("", "export OPENAI_API_KEY='a$b ${C}'\n# a comment\nEMPTY=\nNOTHING\n", C="filled")
    assert found.openai.api_key == Secret("a$b ${C}")
    assert found.warnings == ()


def test_a_broken_line_of_the_env_file_is_reported_with_its_number(read, tmp_path):
    assert read("", "A=1\n=2\n").warnings == (f"{tmp_path}/.env:2: not a NAME=value line",)


def test_an_env_file_that_others_can_read_is_reported(read, tmp_path):
    read("", "A=1")
    (tmp_path / ".env").chmod(0o644)
    path = tmp_path / ".env"
    assert read().warnings == (f"{path} can be read by other users; run: chmod 600 {path}",)


def test_the_process_wins_over_the_env_file_and_both_over_the_config(read):
    config = "model: from-config"
    assert read(config).model.default == "from-config"
    assert read(config, "HERMES_MODEL=from-file").model.default == "from-file"
    assert read(config, "HERMES_MODEL=from-file", HERMES_MODEL="from-process").model.default == "from-process"


@pytest.mark.parametrize(("value", "lifted"), [("1", True), ("true", True), ("0", False), ("", False), ("no", False)])
def test_the_variable_lifts_approvals(read, value, lifted):
    assert read(HERMES_YOLO_MODE=value).yolo is lifted


# Where the model is asked, and with which key.


def test_the_variables_alone_name_an_endpoint(read):
    found = read(OPENAI_BASE_URL="http://h/v1", OPENAI_API_KEY="k", HERMES_MODEL="m")
    assert found.endpoint() == Endpoint("http://h/v1", "m", Secret("k"))


def test_a_key_alone_means_openai(read):
    assert read(OPENAI_API_KEY="k").endpoint(model="m") == Endpoint("https://api.openai.com/v1", "m", Secret("k"))


def test_the_config_wins_over_the_variable_and_keeps_its_own_key(read):
    found = read("model: {default: m, base_url: http://c/v1, api_key: own}", OPENAI_BASE_URL="http://h/v1")
    assert found.endpoint() == Endpoint("http://c/v1", "m", Secret("own"))


def test_an_exported_key_is_not_sent_to_another_server_that_the_config_names(read):
    config = "model: {default: m, base_url: http://c/v1}"
    assert read(config, OPENAI_API_KEY="k").endpoint() == Endpoint("http://c/v1", "m", None)
    same_place = read(config, OPENAI_API_KEY="k", OPENAI_BASE_URL="http://c/v1/").endpoint()
    assert same_place == Endpoint("http://c/v1", "m", Secret("k"))


def test_an_exported_key_is_sent_where_it_belongs(read):
    found = read("model: {default: m, base_url: https://api.openai.com/v1}", OPENAI_API_KEY="k")
    assert found.endpoint() == Endpoint("https://api.openai.com/v1", "m", Secret("k"))


def test_the_key_in_our_env_file_is_for_the_configured_server(read):
    found = read("model: {default: m, base_url: http://c/v1}", "OPENAI_API_KEY=k", OPENAI_API_KEY="exported")
    assert found.endpoint() == Endpoint("http://c/v1", "m", Secret("k"))
    assert found.endpoint(base_url="http://t/v1") == Endpoint("http://t/v1", "m", Secret("exported"))


def test_a_typed_address_gets_the_variables_key_and_never_the_key_of_another_server(read):
    config = "model: {default: m, base_url: http://c/v1, api_key: own}"
    assert read(config).endpoint(base_url="http://t/v1") == Endpoint("http://t/v1", "m", None)
    typed = read(config, OPENAI_API_KEY="k").endpoint(base_url="http://t/v1", model="tm")
    assert typed == Endpoint("http://t/v1", "tm", Secret("k"))
    assert read(config).endpoint(base_url="http://c/v1/") == Endpoint("http://c/v1/", "m", Secret("own"))
    assert read(config).endpoint(base_url="http://t/v1", api_key="typed") == Endpoint(
        "http://t/v1", "m", Secret("typed")
    )


PROVIDERS = """
    model: {default: m, provider: lab}
    providers:
      lab: {base_url: http://lab/v1, key_env: LAB_KEY, model: lab-model}
      other: {base_url: http://other/v1, api_key: ok, model: other-model}
"""


def test_a_named_provider_brings_address_key_and_model(read):
    found = read(PROVIDERS, "LAB_KEY=lk")
    assert found.endpoint() == Endpoint("http://lab/v1", "m", Secret("lk"), "lab")
    assert found.endpoint(provider="other") == Endpoint("http://other/v1", "other-model", Secret("ok"), "other")
    assert found.endpoint(provider="other", model="x").model == "x"
    assert found.endpoint(base_url="http://other/v1") == Endpoint("http://other/v1", "m", Secret("ok"))


def test_the_offline_provider_needs_no_address_and_gets_no_key(read):
    found = read(OPENAI_API_KEY="k", OPENAI_BASE_URL="http://h/v1")
    assert found.endpoint(provider="scripted") == Endpoint("", "", None, "scripted")


def test_openai_is_known_by_name(read):
    found = read(OPENAI_API_KEY="k").endpoint(provider="openai", model="m")
    assert found == Endpoint("https://api.openai.com/v1", "m", Secret("k"), "openai")


def test_an_unknown_provider_is_refused_with_the_known_ones(read):
    found = read(PROVIDERS)
    with pytest.raises(SettingsError, match="the provider 'labb'; known providers: lab, openai, other, scripted"):
        found.endpoint(provider="labb")


def test_an_unknown_provider_in_the_config_does_not_matter_where_an_address_stands_beside_it(read):
    found = read("model: {default: m, provider: strange, base_url: http://c/v1, api_key: k}")
    assert found.endpoint() == Endpoint("http://c/v1", "m", Secret("k"), "strange")
    alone = read("model: {default: m, provider: strange, api_key: k}")
    assert alone.endpoint(base_url="http://t/v1") == Endpoint("http://t/v1", "m", None)


# Secrets and proxies.


def test_no_secret_is_shown_by_printing(read):
    found = read(
        "model: {api_key: canary-1}\nproviders: {lab: {api_key: canary-2}}",
        "SOME_TOKEN=canary-3",
        OPENAI_API_KEY="canary-4",
        HTTPS_PROXY="http://me:canary-5@proxy",
    )
    assert "canary" not in f"{found!r} {found} {found.endpoint()!r}"
    assert {secret.reveal() for secret in found.secrets} == {
        "canary-1",
        "canary-2",
        "canary-3",
        "canary-4",
        "http://me:canary-5@proxy",
    }


@pytest.mark.parametrize(
    ("scheme", "host", "expected"),
    [
        ("https", "api.example.com", "http://secure"),
        ("http", "api.example.com", "http://plain"),
        ("http", "127.0.0.1", None),
        ("http", "localhost", None),
        ("http", "[::1]", None),
        ("https", "inner.test", None),
        ("https", "a.inner.test", None),
        ("https", "notinner.test", "http://secure"),
        ("https", "10.0.0.1", None),
        ("https", "ported.test", None),
    ],
)
def test_the_proxy_of_the_environment_serves_all_but_this_machine_and_the_exceptions(read, scheme, host, expected):
    exceptions = ".inner.test, 10.0.0.1,ported.test:81"
    found = read(https_proxy="http://secure", HTTP_PROXY="http://plain", NO_PROXY=exceptions)
    assert found.proxies.for_host(scheme, host, 81) == expected
    assert found.proxies.for_url(f"{scheme}://{host}:81/v1") == expected


def test_one_proxy_for_everything_serves_where_no_other_is_named(read):
    found = read(ALL_PROXY="http://all", HTTP_PROXY="http://plain")
    assert found.proxies.for_url("https://a.test") == "http://all"
    assert found.proxies.for_url("http://a.test") == "http://plain"


def test_a_star_switches_every_proxy_off(read):
    found = read(HTTPS_PROXY="http://secure", no_proxy="*")
    assert found.proxies.for_host("https", "api.example.com", 443) is None
