"""Stopping a request at any moment, TLS, and proxies, against real HTTP on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager

import pytest

from hermes_agent import settings
from hermes_agent.cancellation import Cancellation
from hermes_agent.errors import SettingsError, TurnInterrupted
from hermes_agent.providers import transport
from hermes_agent.providers.openai_client import OpenAI
from hermes_agent.testing.fake_openai import FakeOpenAI, hold, text
from tests.integration.http_here import KEY, certificate, client_of, complete, create, forward_proxy, tls_front


def stopped(ask, when):
    """Run `ask` and cancel once `when` returns; the seconds from the cancel to the end."""
    cancellation = Cancellation()
    at = []

    def stop():
        when()
        at.append(time.monotonic())
        cancellation.cancel("enough")

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(TurnInterrupted, match="enough"):
        ask(cancellation)
    seconds = time.monotonic() - at[0]
    thread.join()
    return seconds


_ELSEWHERE = (
    "threading.Thread(target=threading.Event().wait, daemon=True).start();"
    " signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])"
)
"""Has the system deliver the signal to a thread that nobody waits in."""


class TestStopping:
    @pytest.mark.parametrize("streaming", [False, True])
    def test_a_blocked_read_ends_and_its_connection_is_not_used_again(self, streaming):
        held = hold("so far")
        on_event = (lambda event: None) if streaming else None
        with FakeOpenAI([held, text("next")]) as fake:
            seconds = stopped(
                lambda c: complete(fake, on_event=on_event, cancellation=c), lambda: held.reached.wait(20)
            )
            assert seconds < 5
            assert complete(fake).content == "next"
            assert fake.connections == 2

    def test_a_turn_that_was_stopped_before_sends_nothing(self):
        cancellation = Cancellation()
        cancellation.cancel("enough")
        with FakeOpenAI([text("a")]) as fake:
            with pytest.raises(TurnInterrupted, match="enough"):
                create(client_of(fake), cancellation=cancellation)
            assert fake.requests == []

    def test_a_stop_after_the_answer_leaves_the_connection_alone(self):
        cancellation = Cancellation()
        with FakeOpenAI([text("a")], repeat=True) as fake:
            complete(fake, cancellation=cancellation)
            cancellation.cancel()
            complete(fake)
            assert fake.connections == 1

    def test_an_abort_that_comes_late_leaves_the_connection_to_its_next_user(self):
        class Late(Cancellation):
            @contextmanager
            def aborting(self, abort):
                aborts.append(abort)
                yield

        aborts = []
        held = hold("a", then=text("b"))
        with FakeOpenAI([text("first"), held]) as fake:
            complete(fake, cancellation=Late())
            reply = []
            thread = threading.Thread(target=lambda: reply.append(complete(fake, on_event=lambda event: None)))
            thread.start()
            assert held.reached.wait(20)
            aborts[0]()
            held.release()
            thread.join(20)
            assert (reply[0].content, fake.connections) == ("ab", 1)

    def test_a_connect_that_nobody_answers_ends(self):
        # A full accept queue leaves the next connect waiting for ever.
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen(0)
            address = server.getsockname()
            waiting = []
            for _ in range(8):
                queued = socket.socket()
                queued.setblocking(False)
                queued.connect_ex(address)
                waiting.append(queued)
            client = OpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{address[1]}/v1")
            began = threading.Event()
            connect = transport._connect

            def noted(*args):
                began.set()
                connect(*args)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(transport, "_connect", noted)
                seconds = stopped(lambda c: create(client, cancellation=c), began.wait)
            assert seconds < 5
            for queued in waiting:
                queued.close()

    def test_a_name_that_does_not_resolve_in_time_ends(self, monkeypatch):
        asked, answer = threading.Event(), threading.Event()

        def slow(*args, **kwargs):
            asked.set()
            answer.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure")

        monkeypatch.setattr(socket, "getaddrinfo", slow)
        client = OpenAI(api_key=KEY, base_url="http://slow.localhost/v1")
        assert stopped(lambda c: create(client, cancellation=c), asked.wait) < 5
        answer.set()

    def test_a_tls_handshake_that_nobody_answers_ends(self):
        arrived, leave = threading.Event(), threading.Event()
        server = socket.create_server(("127.0.0.1", 0))

        def accept():
            connection, _ = server.accept()
            connection.recv(1)
            arrived.set()
            leave.wait()
            connection.close()
            server.close()

        thread = threading.Thread(target=accept)
        thread.start()
        client = OpenAI(api_key=KEY, base_url=f"https://127.0.0.1:{server.getsockname()[1]}/v1")
        assert stopped(lambda c: create(client, cancellation=c), arrived.wait) < 5
        leave.set()
        thread.join()

    @pytest.mark.parametrize("scheme", ["http", "https"])
    @pytest.mark.parametrize("meanwhile", ["", _ELSEWHERE])
    def test_a_signal_handler_on_the_main_thread_ends_it(self, scheme, meanwhile, tmp_path):
        """Also where the signal interrupts no wait, as one does that comes just before the wait begins."""
        code = """
            import signal, sys, threading
            from hermes_agent.cancellation import Cancellation
            from hermes_agent.errors import TurnInterrupted
            from hermes_agent.providers.openai_client import OpenAI
            cancellation = Cancellation()
            signal.signal(signal.SIGINT, lambda *_: cancellation.cancel("ctrl-c"))
            client = OpenAI(api_key="k", base_url=sys.argv[1])
            try:
                for chunk in client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x"}], stream=True, cancellation=cancellation
                ):
                    MEANWHILE
                    print("blocked", flush=True)
            except TurnInterrupted as stop:
                print(stop, flush=True)
        """.replace("MEANWHILE", meanwhile)
        with FakeOpenAI([hold("so far")]) as fake:
            port = fake.port if scheme == "http" else tls_front(fake.port, tmp_path)
            environment = {**os.environ, "SSL_CERT_FILE": str(certificate(tmp_path))}
            command = [sys.executable, "-c", textwrap.dedent(code), f"{scheme}://127.0.0.1:{port}/v1"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
                assert child.stdout.readline() == "blocked\n"
                child.send_signal(signal.SIGINT)
                assert child.stdout.readline() == "ctrl-c\n"
                assert child.wait(10) == 0


class TestTlsAndProxies:
    CODE = """
        import sys
        from hermes_agent.providers.openai_client import OpenAI
        from hermes_agent.errors import ProviderError
        client = OpenAI(api_key="k", base_url=sys.argv[1], proxy=sys.argv[2] or None)
        try:
            print(client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}]).model)
        except ProviderError as error:
            print(error.reason, error)
    """

    def ask(self, url, proxy="", **environment):
        command = [sys.executable, "-c", textwrap.dedent(self.CODE), url, proxy]
        run = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **environment}, check=True, timeout=60
        )
        return run.stdout.strip()

    def test_a_trusted_certificate_is_accepted(self, tmp_path):
        with FakeOpenAI([text("ok")]) as fake:
            port = tls_front(fake.port, tmp_path)
            assert self.ask(f"https://127.0.0.1:{port}/v1", SSL_CERT_FILE=str(certificate(tmp_path))) == "m"

    def test_an_unknown_certificate_is_refused_and_nothing_is_sent(self, tmp_path):
        with FakeOpenAI([text("ok")]) as fake:
            said = self.ask(f"https://127.0.0.1:{tls_front(fake.port, tmp_path)}/v1")
            assert said.startswith("connection 127.0.0.1:")
            assert "certificate was not accepted" in said
            assert fake.requests == []

    def test_a_plain_request_goes_through_the_proxy_with_its_password(self):
        proxy, asked = forward_proxy()
        with FakeOpenAI([text("ok")]) as fake:
            assert self.ask(fake.base_url, f"http://us%40er:pw@{proxy}") == "m"
            assert len(fake.requests) == 1
        assert asked[0].startswith(f"POST {fake.base_url}/chat/completions HTTP/1.1".encode())
        assert b"Proxy-Authorization: Basic dXNAZXI6cHc=" in asked[0]

    def test_tls_goes_through_the_proxy_in_a_tunnel(self, tmp_path):
        proxy, asked = forward_proxy()
        with FakeOpenAI([text("ok")]) as fake:
            port = tls_front(fake.port, tmp_path)
            said = self.ask(f"https://127.0.0.1:{port}/v1", proxy, SSL_CERT_FILE=str(certificate(tmp_path)))
        assert said == "m"
        assert asked[0].startswith(f"CONNECT 127.0.0.1:{port} HTTP/1.1".encode())
        assert b"Authorization: Bearer" not in asked[0]

    @pytest.mark.parametrize("proxy", ["https://proxy:1", "socks5://proxy:1"])
    def test_a_proxy_of_another_kind_is_refused(self, proxy):
        with pytest.raises(SettingsError, match="proxies"):
            OpenAI(api_key="k", base_url="https://x/v1", proxy=proxy)

    @pytest.mark.parametrize(
        ("url", "environ", "expected"),
        [
            ("https://api.example.com/v1", {"HTTPS_PROXY": "http://p:1"}, "http://p:1"),
            ("https://api.example.com/v1", {"HTTPS_PROXY": "http://p:1", "https_proxy": "http://q:1"}, "http://q:1"),
            ("http://api.example.com/v1", {"HTTPS_PROXY": "http://p:1"}, None),
            ("http://api.example.com/v1", {"ALL_PROXY": "http://p:1"}, "http://p:1"),
            ("https://api.example.com/v1", {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "example.com"}, None),
            ("https://api.example.com/v1", {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "a, .example.com"}, None),
            ("https://api.example.com/v1", {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "*"}, None),
            ("https://api.example.com:8/v1", {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "api.example.com:8"}, None),
            ("https://badexample.com/v1", {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "example.com"}, "http://p:1"),
            ("http://127.0.0.1:8080/v1", {"HTTP_PROXY": "http://p:1"}, None),
            ("http://localhost:8080/v1", {"HTTP_PROXY": "http://p:1"}, None),
        ],
    )
    def test_the_proxy_variables_mean_what_they_mean_elsewhere(self, tmp_path, url, environ, expected):
        assert settings.load(tmp_path, environ).proxies.for_url(url) == expected
