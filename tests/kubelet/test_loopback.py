import http.client
import json
import socket
import time
from collections.abc import Iterator
from email.message import Message
from http import HTTPStatus

import pytest

from kubelet.loopback import (
    HEALTH_PATH,
    MANIFEST_PATH,
    READINESS_PATH,
    Answer,
    LoopbackServer,
    Pages,
    Readiness,
)

BOUND_S = 10
WIRE = b'{"manifest_version":"1.1.0"}'
ETAG = "ab" * 32
QUOTED = f'"{ETAG}"'
HOST = ("Host", "127.0.0.1:8700")
KNOWN = [MANIFEST_PATH, HEALTH_PATH, READINESS_PATH]


class State:
    """What a daemon would say of itself."""

    def __init__(self) -> None:
        self.published: tuple[bytes, str] | None = (WIRE, ETAG)
        self.ready = Readiness(ready=True, subsystems={"relay": "connected"})
        self.bug: Exception | None = None

    def manifest(self) -> tuple[bytes, str] | None:
        return self.published

    def readiness(self) -> Readiness:
        if self.bug is not None:
            raise self.bug
        return self.ready


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def pages(state: State) -> Pages:
    return Pages(state.manifest, state.readiness)


def get(pages: Pages, path: str, *headers: tuple[str, str]) -> Answer:
    return pages.answer("GET", path, [HOST, *headers])


def test_the_manifest_is_the_very_bytes_that_were_published(pages: Pages) -> None:
    answer = get(pages, MANIFEST_PATH)
    assert (answer.status, answer.body, answer.headers) == (HTTPStatus.OK, WIRE, {"ETag": QUOTED})


def test_before_the_first_manifest_there_is_none(pages: Pages, state: State) -> None:
    state.published = None
    answer = get(pages, MANIFEST_PATH)
    assert answer.status == HTTPStatus.NOT_FOUND
    assert json.loads(answer.body) == {"error": "no manifest has been published yet"}
    assert answer.body.count(b"\n") == 1


@pytest.mark.parametrize(
    "known", [QUOTED, f"W/{QUOTED}", "*", f'"other", {QUOTED}', f'"other",W/{QUOTED},"third"']
)
def test_a_manifest_that_the_asker_has_is_not_sent_again(pages: Pages, known: str) -> None:
    answer = get(pages, MANIFEST_PATH, ("If-None-Match", known))
    assert (answer.status, answer.body) == (HTTPStatus.NOT_MODIFIED, b"")
    assert answer.headers == {"ETag": QUOTED}


@pytest.mark.parametrize("known", ["", '"other"', ETAG, f'"{ETAG}'])
def test_a_manifest_that_the_asker_has_not_is_sent(pages: Pages, known: str) -> None:
    assert get(pages, MANIFEST_PATH, ("If-None-Match", known)).body == WIRE


def test_the_daemon_is_healthy_while_it_answers(pages: Pages, state: State) -> None:
    state.ready = Readiness(ready=False, subsystems={})
    answer = get(pages, HEALTH_PATH)
    assert (answer.status, json.loads(answer.body)) == (HTTPStatus.OK, {"status": "ok"})


@pytest.mark.parametrize(("ready", "status"), [(True, 200), (False, 503)])
def test_readiness_is_told_by_status_and_by_subsystem(
    pages: Pages, state: State, *, ready: bool, status: int
) -> None:
    state.ready = Readiness(ready=ready, subsystems={"relay": "connecting", "broker": "connected"})
    answer = get(pages, READINESS_PATH)
    assert answer.status == status
    assert json.loads(answer.body) == {
        "ready": ready,
        "subsystems": {"relay": "connecting", "broker": "connected"},
    }


def test_state_is_read_anew_for_every_request(pages: Pages, state: State) -> None:
    get(pages, MANIFEST_PATH)
    state.published = (b"{}", "cd" * 32)
    answer = get(pages, MANIFEST_PATH, ("If-None-Match", QUOTED))
    assert (answer.status, answer.body) == (HTTPStatus.OK, b"{}")


@pytest.mark.parametrize("path", KNOWN)
def test_head_is_answered_like_get(pages: Pages, path: str) -> None:
    assert pages.answer("HEAD", path, [HOST]) == get(pages, path)


@pytest.mark.parametrize("path", KNOWN)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "BREW"])
def test_any_other_method_on_a_known_path_is_not_allowed(pages: Pages, path: str, method: str) -> None:
    answer = pages.answer(method, path, [HOST])
    assert (answer.status, answer.headers) == (HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "*",
        "/healthz/",
        "/HEALTHZ",
        "/.well-known/",
        "/.well-known/../healthz",
        "/%68ealthz",
        "healthz",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_any_other_path_is_not_found(pages: Pages, path: str, method: str) -> None:
    answer = pages.answer(method, path, [HOST])
    assert (answer.status, json.loads(answer.body)) == (HTTPStatus.NOT_FOUND, {"error": "Not Found"})


def test_a_query_does_not_matter(pages: Pages) -> None:
    assert get(pages, HEALTH_PATH + "?verbose=1") == get(pages, HEALTH_PATH)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:1", "localhost", "LocalHost:65535", "[::1]", "[::1]:8700", " localhost "],
)
def test_our_own_names_are_answered(pages: Pages, host: str) -> None:
    assert pages.answer("GET", HEALTH_PATH, [("hOsT", host)]).status == HTTPStatus.OK


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param([], id="none"),
        pytest.param([""], id="empty"),
        pytest.param(["evil.example"], id="rebound"),
        pytest.param(["localhost.evil.example"], id="prefix"),
        pytest.param(["evil.localhost"], id="suffix"),
        pytest.param(["127.0.0.1.evil.example:80"], id="address as prefix"),
        pytest.param(["127.0.0.1:80@evil.example"], id="user part"),
        pytest.param(["127.0.0.1:"], id="empty port"),
        pytest.param(["127.0.0.1:123456"], id="long port"),
        pytest.param(["127.0.0.1:\u0661"], id="digit of another script"),
        pytest.param(["127x0x0x1"], id="dots are dots"),
        pytest.param(["0.0.0.0"], id="any address"),  # noqa: S104 - a name, not a binding
        pytest.param(["localhost\nx"], id="second line"),
        pytest.param(["localhost, evil.example"], id="list"),
        pytest.param(["localhost", "localhost"], id="two"),
    ],
)
@pytest.mark.parametrize("path", [*KNOWN, "/"])
def test_a_request_under_any_other_name_is_misdirected(pages: Pages, path: str, hosts: list[str]) -> None:
    answer = pages.answer("GET", path, [("Host", host) for host in hosts])
    assert answer.status == HTTPStatus.MISDIRECTED_REQUEST
    assert json.loads(answer.body) == {"error": "Misdirected Request"}


@pytest.mark.parametrize(
    "origin", ["http://localhost", "http://127.0.0.1:8700", "https://[::1]:3000", "HTTP://LOCALHOST"]
)
def test_a_page_from_this_machine_may_ask(pages: Pages, origin: str) -> None:
    assert get(pages, HEALTH_PATH, ("Origin", origin)).status == HTTPStatus.OK


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "", "localhost", "http://localhost.evil.example", "file://localhost",
     "http://localhost/", "http://evil.example http://localhost"],
)  # fmt: skip
def test_a_page_from_anywhere_else_may_not(pages: Pages, origin: str) -> None:
    assert get(pages, HEALTH_PATH, ("Origin", origin)).status == HTTPStatus.FORBIDDEN
    ours = ("Origin", "http://localhost")
    assert get(pages, HEALTH_PATH, ours, ("Origin", origin)).status == HTTPStatus.FORBIDDEN


@pytest.fixture
def server(state: State) -> Iterator[LoopbackServer]:
    server = LoopbackServer(state.manifest, state.readiness)
    server.start()
    yield server
    server.close()


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


def test_the_manifest_comes_over_the_wire_as_published(server: LoopbackServer) -> None:
    status, headers, body = ask(server, "GET", MANIFEST_PATH)
    assert (status, body) == (200, WIRE)
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


def test_a_method_that_nobody_knows_is_not_allowed_over_the_wire_either(server: LoopbackServer) -> None:
    status, headers, body = ask(server, "BREW", HEALTH_PATH)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert json.loads(body) == {"error": "Method Not Allowed"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"Host": "evil.example"}, 421), ({"Origin": "http://evil.example"}, 403), ({}, 200)],
)
def test_strangers_are_refused_over_the_wire(
    server: LoopbackServer, headers: dict[str, str], status: int
) -> None:
    assert ask(server, "GET", HEALTH_PATH, headers)[0] == status


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


def test_a_request_that_is_served_is_not_logged(
    server: LoopbackServer, capfd: pytest.CaptureFixture[str]
) -> None:
    ask(server, "GET", HEALTH_PATH)
    assert capfd.readouterr() == ("", "")


def test_a_bug_is_answered_with_500_and_reported(
    server: LoopbackServer, state: State, capfd: pytest.CaptureFixture[str]
) -> None:
    state.bug = ValueError("a bug of ours")
    status, _, body = ask(server, "GET", READINESS_PATH)
    assert (status, json.loads(body)) == (500, {"error": "Internal Server Error"})
    assert "a bug of ours" in capfd.readouterr().err


def test_a_silent_connection_holds_up_nobody(server: LoopbackServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=BOUND_S):
        assert ask(server, "GET", HEALTH_PATH)[0] == 200


def test_a_silent_connection_is_closed_after_the_timeout(
    state: State, capfd: pytest.CaptureFixture[str]
) -> None:
    server = LoopbackServer(state.manifest, state.readiness, timeout_s=0.01)
    server.start()
    try:
        assert send_raw(server, b"") == b""
    finally:
        server.close()
    assert capfd.readouterr().err == ""


def test_connections_beyond_the_limit_are_dropped_until_one_ends(state: State) -> None:
    server = LoopbackServer(state.manifest, state.readiness, max_connections=1)
    server.start()
    try:
        silent = socket.create_connection(("127.0.0.1", server.port), timeout=BOUND_S)
        with silent, pytest.raises(ConnectionError):
            ask(server, "GET", HEALTH_PATH)
        end = time.monotonic() + BOUND_S
        while _status_or_none(server) != 200:
            assert time.monotonic() < end
    finally:
        server.close()


def _status_or_none(server: LoopbackServer) -> int | None:
    try:
        return ask(server, "GET", HEALTH_PATH)[0]
    except ConnectionError:
        return None


def test_only_the_loopback_address_is_bound(server: LoopbackServer) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=BOUND_S)


def test_a_port_that_is_taken_is_the_callers_to_decide_on(server: LoopbackServer, state: State) -> None:
    second = LoopbackServer(state.manifest, state.readiness, server.port)
    with pytest.raises(OSError, match="in use"):
        second.start()
    second.close()


def test_close_frees_the_port_for_the_next_start(state: State) -> None:
    first = LoopbackServer(state.manifest, state.readiness)
    first.start()
    port = first.port
    assert port > 0
    assert ask(first, "GET", HEALTH_PATH)[0] == 200
    first.close()
    first.close()
    with pytest.raises(ConnectionRefusedError):
        ask(first, "GET", HEALTH_PATH)
    second = LoopbackServer(state.manifest, state.readiness, port)
    second.start()
    try:
        assert second.port == port
        assert ask(second, "GET", HEALTH_PATH)[0] == 200
    finally:
        second.close()


def test_starting_looks_up_no_name(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(_name: str = "") -> str:
        raise AssertionError("a look-up can take a minute on a node without DNS")

    monkeypatch.setattr(socket, "getfqdn", look_up)
    server = LoopbackServer(state.manifest, state.readiness)
    server.start()
    server.close()
