"""What holds for every test: a home of its own, no settings of the machine, no way out of it."""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings

from hermes_agent import log

# Two shared cores: how long one example takes says nothing.
hypothesis_settings.register_profile("hermes", deadline=None, print_blob=True)
hypothesis_settings.load_profile("hermes")

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

FOREIGN_VARIABLES = (
    "ALL_PROXY",
    "API_SERVER_CORS_ORIGINS",
    "API_SERVER_ENABLED",
    "API_SERVER_HOST",
    "API_SERVER_KEY",
    "API_SERVER_MODEL_NAME",
    "API_SERVER_PORT",
    "HERMES_MODEL",
    "HERMES_YOLO_MODE",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NOTIFY_SOCKET",
    "NO_PROXY",
    "OPENAI_API_KEY",
    "OPENAI_BASE_URL",
)


@pytest.fixture(autouse=True)
def hermes_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """An empty home, not made yet, which `HERMES_HOME` names; child processes inherit it and find this work tree."""
    folder = tmp_path_factory.mktemp("home")
    home = folder / ".hermes"
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("HERMES_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [SOURCE, SOURCE / "hermes_agent" / "_old_names"])))
    for name in FOREIGN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    yield home
    log.close()


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes run without coverage: for tests of what a child imports, or of its time."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)


@pytest.fixture(scope="session")
def project() -> Path:
    """The root of the work tree."""
    return ROOT


def _refuse_the_network(event: str, arguments: tuple[object, ...]) -> None:
    if event in {"socket.connect", "socket.sendto", "socket.sendmsg"}:
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # a path is a local socket
    elif event in {"socket.getaddrinfo", "socket.gethostbyname"}:
        host = arguments[0]
    else:
        return
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if isinstance(host, str) and not _is_this_machine(host):
        raise RuntimeError(f"a test tried to reach {host}: only this machine may be reached")


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host in {"", "localhost", "ip6-localhost"} or host.endswith(".localhost")


sys.addaudithook(_refuse_the_network)
