import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from schemas.addresses import HostPort
from schemas.endorsement import are_endorsed
from schemas.enrolment import shown_endorsements
from schemas.identity import certificates_in
from tests.fakes.enrolling import Message, Stage, request_of, unproven
from tests.fakes.serving import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 20


# --- the roots


async def test_the_roots_are_served_without_a_token(stage: Stage) -> None:
    response = await stage.http.get("/enroll")
    servers = "".join(stage.ca.servers.roots())
    assert response.status_code == 200
    assert response.text.startswith(stage.ca.root_pem())
    assert response.text.endswith(servers)
    assert response.headers["content-type"].startswith("text/plain")
    stage.ca.rotate_root(overlap_days=30)
    text = (await stage.http.get("/enroll")).text
    assert text.startswith("".join(stage.ca.roots()))
    # Each root that a join token may name endorses the roots of servers.
    for root in stage.ca.roots():
        assert are_endorsed(certificates_in(servers), certificates_in(root), shown_endorsements(text))


async def test_the_roots_of_servers_are_signed_once_for_all_who_ask(stage: Stage) -> None:
    first = (await stage.http.get("/enroll")).text
    stage.ca.servers.root_file.with_name("root.key").rename(stage.ca.root_file.with_name("elsewhere.key"))
    assert (await stage.http.get("/enroll")).text == first
    stage.ca.root_file.with_name("elsewhere.key").rename(stage.ca.root_file.with_name("root.key"))
    stage.ca.servers.rotate()
    changed = (await stage.http.get("/enroll")).text
    assert changed.endswith("".join(stage.ca.servers.roots()))
    assert changed != first


async def test_without_a_root_there_is_nothing_to_show(stage: Stage) -> None:
    (stage.directory / "ca" / "root.pem").unlink()
    response = await stage.http.get("/enroll")
    assert response.status_code == 503
    assert str(stage.directory) not in response.text


# --- what is no request


def as_json(message: Message, **changes: object) -> bytes:
    return json.dumps({**message, **changes}).encode()


async def test_what_is_no_request_is_not_looked_at(stage: Stage) -> None:
    good = request_of(stage.token())
    malformed = {
        "nothing": b"",
        "no JSON": b"{",
        "no object": b"[]",
        "a number": b"1",
        "no text": b"\xff",
        "a key twice": as_json(good)[:-1] + b',"csr":"x"}',
        "not a number": as_json(good)[:-1] + b',"x":NaN}',
        "too deep": b'{"a":' * 2000 + b"1" + b"}" * 2000,
        "a surrogate": as_json(good).replace(b"-----BEGIN", b"\\ud800"),
        "a member more": as_json(good, more=1),
        "a number for a text": as_json(good, join_id=1),
        "an id in lower case": as_json(good, join_id=good["join_id"].lower()),
        "a path for an id": as_json(good, join_id="../../../etc/passwd/aaaaaa"),
        "a short nonce": as_json(good, nonce="n"),
        "a long csr": as_json(good, csr="x" * 6001),
        "no proof": json.dumps(unproven(good)).encode(),
    }
    headers = {"content-type": "application/json"}
    answers = {
        name: (await stage.http.post("/enroll", content=body, headers=headers)).status_code
        for name, body in malformed.items()
    }
    assert answers == dict.fromkeys(malformed, 400)
    assert stage.refusals() == [("malformed", len(malformed))]
    assert stage.ca.in_force() == {}


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_what_a_page_in_a_browser_can_send_is_no_request(stage: Stage, media_type: str) -> None:
    body = as_json(request_of(stage.token()))
    response = await stage.http.post("/enroll", content=body, headers={"content-type": media_type})
    assert response.status_code == 400
    assert stage.ca.in_force() == {}


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH"])
async def test_there_is_nothing_else_to_do_here(stage: Stage, method: str) -> None:
    assert (await stage.http.request(method, "/enroll")).status_code == 405


# --- unauthenticated clients with large or slow requests


async def answer_to(address: HostPort, pieces: Iterable[bytes]) -> bytes:
    """Send ``pieces`` and return all that comes until the relay closes the connection."""
    async with asyncio.timeout(BOUND_S):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            for piece in pieces:
                writer.write(piece)
            return await reader.read()
        finally:
            writer.close()


def head(*headers: str) -> bytes:
    lines = ["POST /enroll HTTP/1.1", "Host: relay", "Content-Type: application/json", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.mark.parametrize("length", ["Content-Length: 17000", "Transfer-Encoding: chunked"])
async def test_more_than_a_request_can_be_is_not_read_to_its_end(
    stage: Stage, server: Server, length: str
) -> None:
    server.app = stage.routes
    body = b"x" * 17_000
    if "chunked" in length:
        body = b"%x\r\n%b\r\n" % (len(body), body)  # without the chunk that ends it
    answer = await answer_to(server.address, [head(length), body])
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert stage.refusals() == [("too_large", 1)]


async def test_a_request_that_does_not_end_is_ended(stage: Stage, server: Server) -> None:
    server.app = stage.make(body_timeout_s=0.05)
    answer = await answer_to(server.address, [head("Content-Length: 100"), b'{"join_id":'])
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert stage.refusals() == [("slow", 1)]


async def test_who_leaves_before_the_end_is_counted(stage: Stage) -> None:
    sent: list[Any] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: Message = {
        "type": "http",
        "method": "POST",
        "path": "/enroll",
        "headers": [],
        "query_string": b"",
        "client": None,
    }
    await stage.routes(scope, receive, send)
    assert stage.refusals() == [("gone", 1)]
