"""Real HTTP on this machine for the tests of the model client: requests, servers that misbehave, TLS, a proxy."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress

import pytest

from hermes_agent.cancellation import Cancellation
from hermes_agent.errors import ProviderError
from hermes_agent.providers.base import Request
from hermes_agent.providers.openai_chat import OpenAIChat
from hermes_agent.providers.openai_client import OpenAI

KEY = "sk-test-CANARY1234567890"
ASK = [{"role": "user", "content": "h\u00e9 \U0001f600"}]


def client_of(fake, **options):
    return OpenAI(api_key=KEY, base_url=fake.base_url, **options)


def create(client, **kwargs):
    return client.chat.completions.create(**{"model": "m", "messages": ASK, **kwargs})


def complete(fake, *, on_event=None, cancellation=None, **options):
    provider = OpenAIChat(lambda: client_of(fake, **options), name="fake")
    return provider.complete(Request("m", ASK), on_event, cancellation or Cancellation())


def failing(fake, **options):
    with pytest.raises(ProviderError) as caught:
        complete(fake, **options)
    return caught.value


def one_shot(*answers):
    """A server that gives each connection one prepared answer, bytes as they are; returns its port and a log."""
    server = socket.create_server(("127.0.0.1", 0))
    log = []

    def serve():
        with server:
            for answer in answers:
                connection, _ = server.accept()
                with connection:
                    log.append(read_request(connection))
                    for piece in answer if isinstance(answer, list) else [answer]:
                        connection.sendall(piece) if isinstance(piece, bytes) else piece(connection)

    threading.Thread(target=serve, daemon=True).start()
    return server.getsockname()[1], log


def read_request(connection):
    raw = b""
    while b"\r\n\r\n" not in raw:
        data = connection.recv(65536)
        if not data:
            return raw
        raw += data
    head, _, body = raw.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def http(body, content_type="application/json", status="200 OK", extra=""):
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


WHOLE = b'{"choices":[{"message":{"content":"fine"},"finish_reason":"stop"}]}'


# A throw-away key and certificate for 127.0.0.1, made for these tests only.
PEM = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQghsZmFRCP9nAy7ofq
pejrArgA93RwwYp/UPZefnJCmkChRANCAARyamUQZiWBF2hEmuSI+fQ/52dmhxNx
O2e1ZOzFDOgWOLpU7WBUE/qgl0+7BB5Tpcqc3pMJ/AE4pA64f9G3Lo3I
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBqzCCAVGgAwIBAgIUZz5NRBjdQU7Y0hdeBOrdLL1wZvMwCgYIKoZIzj0EAwIw
HDEaMBgGA1UEAwwRaGVybWVzLWFnZW50IHRlc3QwIBcNMjYxMTMwMjA0NTM0WhgP
MjEyNjExMDYyMDQ1MzRaMBwxGjAYBgNVBAMMEWhlcm1lcy1hZ2VudCB0ZXN0MFkw
EwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEcmplEGYlgRdoRJrkiPn0P+dnZocTcTtn
tWTsxQzoFji6VO1gVBP6oJdPuwQeU6XKnN6TCfwBOKQOuH/Rty6NyKNvMG0wHQYD
VR0OBBYEFFDJVa7oeqLDpLVSU1ZvQKXDQmxFMB8GA1UdIwQYMBaAFFDJVa7oeqLD
pLVSU1ZvQKXDQmxFMA8GA1UdEwEB/wQFMAMBAf8wGgYDVR0RBBMwEYcEfwAAAYIJ
bG9jYWxob3N0MAoGCCqGSM49BAMCA0gAMEUCIAXegtknVjwBGPHsV1gOKQYHUL2r
2KHORGFlnJK27eaiAiEA7cdSR7zl1eMJowzEZbyZ88mAcdcEDPSsf57GEUpYLCw=
-----END CERTIFICATE-----
"""


def certificate(folder):
    path = folder / "tls.pem"
    path.write_text(PEM, encoding="ascii")
    return path


def tls_front(port, folder):
    """Put TLS in front of a server on this machine; returns the port to use instead."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(folder))
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        with server:
            raw, _ = server.accept()
            try:
                near = context.wrap_socket(raw, server_side=True)
            except OSError:
                raw.close()
                return
            forward(near, socket.create_connection(("127.0.0.1", port)))

    threading.Thread(target=serve, daemon=True).start()
    return server.getsockname()[1]


def forward(near, far):
    """Copy between two sockets until one side closes."""

    def copy(source, target):
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for side in (source, target):
            with suppress(OSError):
                socket.socket.shutdown(side, socket.SHUT_RDWR)

    back = threading.Thread(target=copy, args=(far, near), daemon=True)
    back.start()
    copy(near, far)
    back.join()
    near.close()
    far.close()


def forward_proxy():
    """A proxy for one CONNECT or one plain request; returns its address and what it was asked."""
    server = socket.create_server(("127.0.0.1", 0))
    asked = []

    def serve():
        with server:
            near, _ = server.accept()
            head = read_request(near)
            asked.append(head)
            method, target, _ = head.split(b"\r\n")[0].split(b" ")
            authority = target if method == b"CONNECT" else target.split(b"/")[2]
            host, _, port = authority.partition(b":")
            far = socket.create_connection((host.decode(), int(port)))
            if method == b"CONNECT":
                near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                far.sendall(head.replace(target, b"/" + target.split(b"/", 3)[3], 1))
            forward(near, far)

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}", asked
