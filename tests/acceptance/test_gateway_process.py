"""The gateway as a process: where it listens, that there is one for a home, and how it ends.

The application it serves is a stand-in, so that a test says when a turn begins and ends.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from hermes_agent.gateway import pid_file
from hermes_agent.gateway.keys import KeyRing
from hermes_agent.store import processes
from tests.acceptance.hermes import COMMAND, Done, Hermes, wait_for
from tests.acceptance.world import Run

STAND_IN = Path(__file__).with_name("gateway_stub")
LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:(\d+))\n")


class Place(Hermes):
    """A home whose gateways serve the stand-in on a free port."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.variables = {
            "API_SERVER_PORT": "0",
            "PYTHONPATH": os.pathsep.join([str(STAND_IN), os.environ["PYTHONPATH"]]),
        }

    def gateway(self, *arguments: str, command: list[str] = COMMAND, **env: str) -> Run:
        """Start one in the foreground."""
        return Run(self, arguments or ("gateway", "run"), command=command, env=env)

    @property
    def pid_path(self) -> Path:
        return self.home / "gateway" / "gateway.pid"

    def log(self) -> list[dict[str, Any]]:
        path = self.home / "logs" / "agent.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def logged(self, action: str) -> list[dict[str, Any]]:
        return [line for line in self.log() if line["action"] == action]


@pytest.fixture
def place(hermes_home: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("API_SERVER_")] + ["NOTIFY_SOCKET"]:
        monkeypatch.delenv(name, raising=False)
    found = Place(hermes_home)
    yield found
    for path in hermes_home.rglob("gateway.pid"):  # of a test that failed half way
        record = pid_file.read(path.parent.parent)
        if record is not None:
            os.kill(record.pid, signal.SIGKILL)


def url_of(run: Run) -> str:
    found = LISTENING.fullmatch(run.line())
    assert found is not None
    return found.group(1)


def ask(url: str, path: str = "/", method: str = "GET") -> Any:
    with urllib.request.urlopen(urllib.request.Request(url + path, method=method), timeout=10) as answer:
        body = answer.read()
    return json.loads(body) if body else None


def stop(run: Run, number: signal.Signals = signal.SIGTERM) -> Done:
    run.signal(number)
    return run.end()


# -- where it listens -----------------------------------------------------------------


def test_the_first_line_is_the_address_and_a_client_is_answered_there(place: Place):
    with place.gateway() as run:
        assert ask(url_of(run))["home"] == str(place.home)
        assert stop(run).code == 0


def test_the_bare_command_and_the_old_module_name_run_it_too(place: Place):
    for arguments, command in (
        (("gateway",), COMMAND),
        (("gateway", "run"), [sys.executable, "-m", "hermes_cli.main"]),
    ):
        with place.gateway(*arguments, command=command) as run:
            ask(url_of(run))
            assert stop(run).code == 0


def test_the_pid_file_is_there_while_it_listens_and_only_its_owner_can_read_it(place: Place):
    with place.gateway() as run:
        url = url_of(run)
        record = pid_file.read(place.home)
        assert record is not None
        assert (record.pid, record.url) == (run.pid, url)
        assert processes.is_alive(record.identity)
        assert stat.S_IMODE(place.pid_path.stat().st_mode) == 0o600
        stop(run)
    assert not place.pid_path.exists()


def test_the_owner_key_is_printed_by_the_first_start_alone(place: Place):
    with place.gateway() as run:
        url_of(run)
        key = re.fullmatch(r"owner key, shown only now: (\S+)\n?", run.line())  # while it runs
        assert key is not None
        assert key.group(1) not in stop(run).out
    assert KeyRing(place.home, None).authenticate(f"Bearer {key.group(1)}") is not None
    with place.gateway() as run:
        url_of(run)
        assert "key" not in stop(run).out
    assert key.group(1) not in (place.home / "logs" / "agent.log").read_text()


def test_no_key_is_made_where_one_is_configured(place: Place):
    with place.gateway(API_SERVER_KEY="7Jq2vT9xPz4LmW8sRk3N") as run:
        url_of(run)
        assert stop(run).out == ""
    assert not (place.home / "gateway" / "keys.json").exists()


def test_a_second_gateway_of_the_same_home_is_refused_with_one_line(place: Place):
    with place.gateway() as run:
        url = url_of(run)
        second = place.run("gateway", "run")
        assert (second.code, second.out) == (1, "")
        assert second.err.count("\n") == 1
        assert f"runs for {place.home} already (pid {run.pid}, {url})" in second.err
        assert ask(url)["draining"] is False
        assert pid_file.read(place.home) is not None
        assert stop(run).code == 0


def test_what_a_killed_gateway_left_behind_is_in_nobodys_way(place: Place):
    with place.gateway() as run:
        url_of(run)
        run.kill()
        assert place.pid_path.exists()
        assert place.run("gateway", "status").code == 1
        with place.gateway() as next_one:
            ask(url_of(next_one))
            assert stop(next_one).code == 0


def test_a_taken_port_is_one_line_and_exit_1(place: Place):
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = place.run("gateway", "run", env={"API_SERVER_PORT": str(other.getsockname()[1])})
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(r"hermes: port \d+ of 127.0.0.1 is taken by another program; .*\n", done.err)
    assert not (place.home / "gateway" / "keys.json").exists()


def test_a_port_that_becomes_free_in_time_is_used(place: Place):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run = place.gateway(API_SERVER_PORT=str(port))
        wait_for(lambda: place.logged("gateway.port_taken"))
    with run:
        assert url_of(run) == f"http://127.0.0.1:{port}"
        assert stop(run).code == 0


def test_it_does_not_listen_to_other_machines_unasked(place: Place):
    done = place.run("gateway", "run", env={"API_SERVER_HOST": "0.0.0.0"})
    assert done.code == 2
    assert "other machines" in done.err
    place.config("platforms: {api_server: {enabled: false}}")
    done = place.run("gateway", "run")
    assert (done.code, done.err) == (
        1,
        "hermes: the API server is switched off: API_SERVER_ENABLED or platforms.api_server.enabled\n",
    )


def test_a_store_that_cannot_be_opened_is_one_line_and_leaves_nothing_running(place: Place):
    done = place.run("gateway", "run", env={"STAND_IN": "broken"})
    assert done.code == 1
    assert re.fullmatch(r"hermes: .*state\.db is damaged\. .*\n", done.err)
    assert "owner key, shown only now" in done.out
    assert not place.pid_path.exists()


# -- how it ends ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_running_turns_end_and_answers_meanwhile(place: Place, number: signal.Signals):
    with place.gateway() as run:
        url = url_of(run)
        ask(url, "/begin", "POST")
        run.signal(number)
        wait_for(lambda: ask(url)["draining"])
        assert pid_file.read(place.home) is not None
        ask(url, "/end", "POST")
        done = run.end()
    assert (done.code, done.err) == (0, "")
    assert [line["action"] for line in place.log() if line["action"].startswith("gateway.")][-3:] == [
        "gateway.draining",
        "gateway.drained",
        "gateway.stopped",
    ]


def test_a_second_signal_does_not_wait_for_turns(place: Place):
    place.config("gateway: {drain_timeout: 1000}")
    with place.gateway() as run:
        url = url_of(run)
        ask(url, "/begin", "POST")
        run.signal(signal.SIGTERM)
        wait_for(lambda: ask(url)["draining"])
        assert stop(run).code == 1
    assert place.logged("gateway.drained")[0]["clean"] is False
    assert not place.pid_path.exists()


def test_a_third_signal_ends_even_what_is_stuck(place: Place):
    with place.gateway(STAND_IN="stuck") as run:
        url = url_of(run)
        ask(url, "/begin", "POST")
        for count in (1, 2):
            run.signal(signal.SIGTERM)
            wait_for(lambda count=count: len(place.logged("gateway.signal")) == count)
        wait_for(lambda: place.logged("gateway.drained"))
        assert stop(run).code == 1
    assert len(place.logged("gateway.signal")) == 3
    assert not place.pid_path.exists()


def test_turns_that_do_not_end_in_the_time_they_have_are_left_to_the_next_start(place: Place):
    place.config("gateway: {drain_timeout: 0.05}")
    with place.gateway() as run:
        ask(url_of(run), "/begin", "POST")
        assert stop(run).code == 1
    assert not place.pid_path.exists()


# -- what surrounds it ---------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the environment of a process as a file")
def test_children_cannot_read_the_keys_in_its_environment(place: Place):
    with place.gateway() as run:
        assert ask(url_of(run))["dumpable"] == 0
        stop(run)


def test_the_service_manager_hears_when_it_is_ready_and_when_it_stops(place: Place, tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        with place.gateway(NOTIFY_SOCKET=str(tmp_path / "notify")) as run:
            assert manager.recv(100) == b"READY=1"
            ask(url_of(run))
            run.signal(signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            assert run.end().code == 0


def test_what_libraries_report_goes_to_the_log_and_not_to_the_screen(place: Place):
    with place.gateway() as run:
        with pytest.raises(urllib.error.HTTPError):
            ask(url_of(run), "/crash")
        assert stop(run).err == ""
    (line,) = place.logged("request.crashed")
    assert "LookupError" in line["traceback"]
    (line,) = place.logged("library.failure")
    assert line["library"] == "asyncio"
    assert "ZeroDivisionError" in line["traceback"]


def test_profiles_have_gateways_of_their_own(place: Place):
    assert place.run("profile", "create", "work").code == 0
    with place.gateway() as one, place.gateway("gateway", "-p", "work", "run") as other:
        assert ask(url_of(one))["home"] == str(place.home)
        assert ask(url_of(other))["home"] == str(place.home / "profiles" / "work")
        listed = json.loads(place.run("profile", "list", "--json").out)
        assert all(facts["gateway"] for facts in listed)
        keys = {re.findall("now: (.+)", run.line())[0] for run in (one, other)}
        assert len(keys) == 2
        for run in (one, other):
            stop(run)


# -- in the background ---------------------------------------------------------------------


def test_start_returns_when_it_listens_and_stop_when_it_has_ended(place: Place):
    started = place.run("gateway", "start")
    assert (started.code, started.err) == (0, "")
    record = pid_file.read(place.home)
    assert record is not None
    assert re.search("owner key, shown only now: .+\n", started.out)
    assert f"listening on {record.url} (pid {record.pid}); end it with: hermes gateway stop\n" in started.out
    assert ask(record.url)["home"] == str(place.home)
    assert "owner key" not in (place.home / "logs" / "gateway.out").read_text()

    again = place.run("gateway", "start")
    assert (again.code, again.out) == (0, f"runs already at {record.url} (pid {record.pid})\n")
    status = place.run("gateway", "status")
    assert status.code == 0
    assert status.out.startswith(f"runs at {record.url} (pid {record.pid}, version ")

    assert place.run("gateway", "restart").code == 0
    fresh = pid_file.read(place.home)
    assert fresh is not None
    assert fresh.pid != record.pid

    stopped = place.run("gateway", "stop")
    assert (stopped.code, stopped.out) == (0, f"stopped (pid {fresh.pid})\n")
    assert processes.is_alive(fresh.identity) is False
    assert place.run("gateway", "stop").out == "no gateway runs\n"
    assert place.run("gateway", "status").code == 1


def test_status_is_readable_by_programs(place: Place):
    empty = place.run("gateway", "status", "--json")
    assert (empty.code, json.loads(empty.out)) == (
        1,
        {"running": False, "profile": "default", "home": str(place.home)},
    )
    with place.gateway() as run:
        url = url_of(run)
        found = place.run("gateway", "status", "--json")
        facts = json.loads(found.out)
        assert (found.code, facts["running"], facts["pid"], facts["url"]) == (0, True, run.pid, url)
        stop(run)


def test_start_says_why_it_could_not(place: Place):
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = place.run("gateway", "start", env={"API_SERVER_PORT": str(other.getsockname()[1])})
    assert done.code == 1
    assert re.fullmatch(r"hermes: port \d+ of 127.0.0.1 is taken by another program; .*\n", done.err)


def test_stop_spares_a_process_that_was_only_given_the_pid(place: Place):
    with subprocess.Popen(["sleep", "60"]) as stranger:
        try:
            place.pid_path.parent.mkdir(parents=True)
            mine = processes.identity().split("|")
            forged = pid_file.Record(stranger.pid, "|".join([*mine[:2], str(stranger.pid), "1"]), "h", 1, "0", 0.0)
            place.pid_path.write_text(json.dumps({name: getattr(forged, name) for name in forged.__struct_fields__}))
            assert place.run("gateway", "stop").out == "no gateway runs\n"
            assert stranger.poll() is None
        finally:
            stranger.kill()


# -- systemd -------------------------------------------------------------------------------


@pytest.fixture
def systemctl(tmp_path: Path):
    """A program of that name that writes down what it is asked; returns the PATH to it and the file."""
    said = tmp_path / "asked"
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(said))}\n')
    program.chmod(0o700)
    return str(program.parent), said


def test_the_unit_starts_this_profile_and_holds_no_secret(place: Place, systemctl: tuple[str, Path]):
    path, said = systemctl
    place.run("profile", "create", "work")
    key = "7Jq2vT9xPz4LmW8sRk3N"
    done = place.run("-p", "work", "gateway", "install", env={"PATH": path, "API_SERVER_KEY": key})
    unit = Path(os.environ["HOME"]) / ".config/systemd/user/hermes-gateway-work.service"
    assert done.code == 0
    assert f"systemctl --user enable --now {unit.name}\n" in done.out
    text = unit.read_text()
    assert key not in text
    lines = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    assert shlex.split(lines["ExecStart"]) == [sys.executable, "-m", "hermes_agent", "-p", "work", "gateway", "run"]
    assert lines["Environment"] == f'"HERMES_HOME={place.home}"'
    assert (lines["Type"], lines["Restart"]) == ("notify", "on-failure")
    assert place.run("-p", "work", "gateway", "uninstall", env={"PATH": path}).code == 0
    assert not unit.exists()
    assert said.read_text().splitlines() == [
        "--user daemon-reload",
        f"--user disable --now {unit.name}",
        "--user daemon-reload",
    ]


def test_without_systemd_nothing_is_installed_but_the_unit_can_be_printed(place: Place, tmp_path: Path):
    done = place.run("gateway", "install", env={"PATH": str(tmp_path)})
    assert done.code == 1
    assert "systemd is not here; start it in the background with: hermes gateway start" in done.err
    printed = place.run("gateway", "install", "--dry-run", env={"PATH": str(tmp_path)})
    assert printed.code == 0
    assert '"-p" "default" "gateway" "run"' in printed.out
    assert not (Path(os.environ["HOME"]) / ".config").exists()
    assert not (place.home / "gateway" / "keys.json").exists()


# -- what is no HTTP -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer CANARY-4711\x00\r\n\r\n",
        b"\x16\x03\x01 CANARY-4711 not http at all\r\n\r\n",
        b"GET /" + b"CANARY-4711" * 2000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: CANARY-4711\r\n\r\n",
    ],
)
def test_what_cannot_be_read_is_neither_repeated_nor_logged(place: Place, sent: bytes):
    with place.gateway() as run:
        address = url_of(run).removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=30) as client:
            client.sendall(sent)
            answer = b""
            while piece := client.recv(65536):
                answer += piece
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
        assert json.loads(body)["error"]["code"] == "invalid_http"
        assert b"CANARY" not in answer
        assert b"aiohttp" not in answer
        stop(run)
    assert "CANARY" not in (place.home / "logs" / "agent.log").read_text()
