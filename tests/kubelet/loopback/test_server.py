import http.client
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from email.message import Message

import pytest

from kubelet.loopback import (
    HEALTH_PATH,
    MANIFEST_PATH,
    MAX_CONNECTIONS,
    READINESS_PATH,
    THREAD_NAME,
    TIMEOUT_S,
    LoopbackServer,
)
from tests.fakes.loopback_state import ETAG, QUOTED, WIRE, LoopbackState

pytestmark = pytest.mark.integration

BOUND_S = 30


@contextmanager
def serving(state: LoopbackState, port: int = 0, timeout_s: float = TIMEOUT_S) -> Iterator[LoopbackServer]:
    server = LoopbackServer(state.manifest, state.readiness, port, timeout_s=timeout_s)
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server(state: LoopbackState) -> Iterator[LoopbackServer]:
    with serving(state) as server:
        yield server


def ask(
    server: LoopbackServer, method: str, path: str, headers: dict[str, str] | None = None
) -> tuple[int, Message, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=BOUND_S)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def send_raw(server: LoopbackServer, request: bytes) -> bytes:
    # No byte more than the server reads: what it leaves unread becomes a reset that can outrun its answer.
    with socket.create_connection(("127.0.0.1", server.port), timeout=BOUND_S) as connection:
        connection.sendall(request)
        with connection.makefile("rb") as answer:
            return answer.read()


def test_the_manifest_comes_over_the_wire_as_published_and_nothing_is_logged(
    server: LoopbackServer, capfd: pytest.CaptureFixture[str]
) -> None:
    status, headers, body = ask(server, "GET", MANIFEST_PATH)
    assert (status, body) == (200, WIRE)
    assert capfd.readouterr() == ("", "")
    assert headers["ETag"] == QUOTED
    assert headers["Content-Type"] == "application/json"
    assert headers["Content-Length"] == str(len(WIRE))
    assert headers["Cache-Control"] == "no-store"
    assert headers["Server"] == "edge-kubelet"
    assert headers.keys().count("Server") == 1


def test_head_sends_the_headers_of_get_and_no_body(server: LoopbackServer) -> None:
    answer = send_raw(server, b"HEAD " + MANIFEST_PATH.encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 200 ")
    assert f"Content-Length: {len(WIRE)}\r\n".encode() in answer
    assert answer.endswith(b"\r\n\r\n")


def test_an_unchanged_manifest_costs_no_body_on_the_wire(server: LoopbackServer) -> None:
    status, headers, body = ask(server, "GET", MANIFEST_PATH, {"If-None-Match": QUOTED})
    assert (status, body) == (304, b"")
    assert headers["ETag"] == QUOTED
    assert headers["Content-Type"] is None


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(b"SECRETMARK\r\n\r\n", b"400", id="one word"),
        pytest.param(b"SECRETMARK /healthz\r\n\r\n", b"400", id="no version"),
        pytest.param(b"GET /SECRETMARK HTTP/SECRETMARK\r\n\r\n", b"400", id="not a version"),
        pytest.param(b"GET /SECRETMARK HTTP/9.9\r\n\r\n", b"505", id="a future version"),
        pytest.param(b"GET /SECRETMARK HTTP/1.1\r\n\r\n", b"421", id="no host"),
        pytest.param(b"GET /SECRETMARK HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404", id="no such page"),
        pytest.param(b"GET /SECRETMARK".ljust(65537, b"x"), b"414", id="a line without end"),
        pytest.param(
            b"GET /SECRETMARK HTTP/1.1\r\n" + b"x: ".ljust(65537, b"x"), b"431", id="a header without end"
        ),
        pytest.param(b"GET /SECRETMARK HTTP/1.1\r\n" + b"x: y\r\n" * 101, b"431", id="headers without end"),
    ],
)
def test_what_came_in_is_neither_answered_nor_logged(
    server: LoopbackServer, capfd: pytest.CaptureFixture[str], request_bytes: bytes, status: bytes
) -> None:
    answer = send_raw(server, request_bytes)
    assert answer.startswith(b"HTTP/1.0 " + status + b" ")
    assert b"SECRETMARK" not in answer
    assert b"Python" not in answer
    assert capfd.readouterr() == ("", "")


def test_a_bug_is_answered_with_500_and_reported(
    server: LoopbackServer, state: LoopbackState, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    state.bug = ValueError("a bug of ours")
    status, _, body = ask(server, "GET", READINESS_PATH)
    assert (status, json.loads(body)) == (500, {"error": "Internal Server Error"})
    assert [report.exc_value for report in reported] == [state.bug]


def test_a_silent_connection_does_not_delay_another(server: LoopbackServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=BOUND_S):
        assert ask(server, "GET", HEALTH_PATH)[0] == 200


def test_a_silent_connection_is_closed_after_the_timeout(
    state: LoopbackState, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(state, timeout_s=0.01) as server:
        assert send_raw(server, b"") == b""
    assert capfd.readouterr().err == ""


def test_a_connection_that_sends_a_byte_now_and_then_is_closed_after_the_timeout_too(
    state: LoopbackState,
) -> None:
    with (
        serving(state, timeout_s=0.1) as server,
        socket.create_connection(("127.0.0.1", server.port)) as slow,
    ):
        slow.sendall(b"GET /readyz HTTP/1.1\r\nx: ")
        slow.settimeout(0.01)
        assert any(_is_closed_after_a_byte(slow) for _ in range(500))


def _is_closed_after_a_byte(slow: socket.socket) -> bool:
    try:
        slow.sendall(b"y")
        return slow.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_an_answer_that_is_not_read_does_not_hold_its_thread(state: LoopbackState) -> None:
    state.published = b"x" * (1 << 26), ETAG
    with (
        serving(state, timeout_s=0.1) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=BOUND_S) as deaf,
    ):
        deaf.sendall(b"GET " + MANIFEST_PATH.encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        end = time.monotonic() + BOUND_S
        while _serving_threads():
            assert time.monotonic() < end


def test_connections_that_are_held_shut_out_no_request(server: LoopbackServer) -> None:
    with ExitStack() as held:
        for _ in range(4 * MAX_CONNECTIONS):
            slow = held.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=BOUND_S))
            slow.sendall(b"GET /readyz HTTP/1.1\r\nHost: ")
        for _ in range(3):
            assert ask(server, "GET", READINESS_PATH)[0] in {200, 503}
        assert len(_serving_threads()) <= MAX_CONNECTIONS


def test_without_a_thread_left_what_is_asked_is_still_answered(
    server: LoopbackServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_thread_left(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread_left)
    for _ in range(2 * MAX_CONNECTIONS):
        assert ask(server, "GET", HEALTH_PATH)[0] == 200
    assert capfd.readouterr().err == ""


class Pauses(threading.Event):
    """The event that ends the server, which shows whether the server waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.seen.set()
        return super().wait(timeout)


def test_without_a_descriptor_left_the_server_pauses_and_then_answers(
    server: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = Pauses()
    monkeypatch.setattr(server, "_closing", pauses)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as connection:
        connection.settimeout(BOUND_S)
        free = os.dup(connection.fileno())
        os.close(free)
        # All descriptors below the lowest free one are in use.
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            connection.connect(("127.0.0.1", server.port))
            assert pauses.seen.wait(BOUND_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        connection.sendall(b"GET " + HEALTH_PATH.encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1024).startswith(b"HTTP/1.0 200 ")


def _serving_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def test_only_the_loopback_address_is_bound(server: LoopbackServer) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=BOUND_S)


def test_a_port_that_is_taken_is_the_callers_to_decide_on(
    server: LoopbackServer, state: LoopbackState
) -> None:
    second = LoopbackServer(state.manifest, state.readiness, server.port)
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{server.port}: Address already in use"):
        second.start()
    second.close()


def test_close_frees_the_port_for_the_next_start(state: LoopbackState) -> None:
    first = LoopbackServer(state.manifest, state.readiness)
    first.start()
    port = first.port
    assert port > 0
    assert ask(first, "GET", HEALTH_PATH)[0] == 200
    first.close()
    first.close()
    with pytest.raises(ConnectionRefusedError):
        ask(first, "GET", HEALTH_PATH)
    with serving(state, port) as second:
        assert second.port == port
        assert ask(second, "GET", HEALTH_PATH)[0] == 200


def test_starting_looks_up_no_name(state: LoopbackState, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(_name: str = "") -> str:
        raise AssertionError("a look-up can take a minute on a node without DNS")

    monkeypatch.setattr(socket, "getfqdn", look_up)
    with serving(state):
        pass
