import asyncio
import gzip
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relay.auth.fetching import MAX_BYTES
from relay.auth.issuer_keys import MAX_KEYS, IssuerKeys, JwksError, JwksReader, JwksSource
from relay.pki.roots import server_key_to_pem
from schemas.keys import base64url
from schemas.registry import SchemaRegistry
from tests.fakes.background import in_background
from tests.fakes.hub import counted
from tests.fakes.issuer import (
    BOUND_S,
    KEY,
    KID,
    OUR_KEY,
    OUR_KID,
    IssuerServer,
    TwoIssuers,
    jwk,
)
from tests.fakes.server_ca import SimulatedServerCa, server_key_named
from tests.fakes.signer import ABSENT, LOW_ORDER_KEYS, key_named

OTHER_KEY = key_named("the outside issuer's next key")
PUBLIC = bytes(KEY.verify_key)
DAY_MS = 86_400_000


# --- what is taken from a set -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def key_reader(registry: SchemaRegistry) -> JwksReader:
    return JwksReader(registry, {OUR_KID: bytes(OUR_KEY.verify_key)})


def key_set(*keys: object) -> bytes:
    return json.dumps({"keys": keys}).encode()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="all that is usual"),
        pytest.param({"use": ABSENT, "alg": ABSENT}, id="the least"),
        pytest.param({"alg": "Ed25519"}, id="the algorithm's other name"),
        pytest.param({"key_ops": ["verify"]}, id="to verify with"),
        pytest.param({"x5t": "abc", "nbf": 1}, id="with members of its own"),
        pytest.param({"kid": "x" * 128}, id="a long name"),
    ],
)
def test_an_ed25519_signing_key_is_taken(key_reader: JwksReader, changes: dict[str, Any]) -> None:
    kid = changes.get("kid", KID)
    assert key_reader.keys(key_set(jwk(**changes))) == {kid: PUBLIC}


# The last of the 43 letters has two bits that stand for nothing.
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
SECOND_SPELLING = base64url(PUBLIC)[:-1] + ALPHABET[ALPHABET.index(base64url(PUBLIC)[-1]) ^ 1]
USELESS: dict[str, object] = {
    "an RSA key": {"kty": "RSA", "kid": "r", "use": "sig", "alg": "RS256", "n": "AQAB", "e": "AQAB"},
    "a P-256 key": jwk(kty="EC", crv="P-256", y="AA"),
    "a shared secret": {"kty": "oct", "kid": KID, "k": base64url(PUBLIC)},
    "another curve": jwk(crv="Ed448"),
    "a key to agree with": jwk(crv="X25519"),
    "a key to encrypt with": jwk(use="enc"),
    "a key to sign with": jwk(key_ops=["sign"]),
    "operations that are no list": jwk(key_ops=5),
    "another algorithm": jwk(alg="ES256"),
    "an algorithm that is a list": jwk(alg=["EdDSA"]),
    "a key that shows its private half": jwk(d=base64url(bytes(KEY))),
    "no name": jwk(kid=ABSENT),
    "an empty name": jwk(kid=""),
    "a name that is too long": jwk(kid="x" * 129),
    "a name with a line feed": jwk(kid="a\n"),
    "a name with a space": jwk(kid="a b"),
    "a number for a name": jwk(kid=1),
    "a short key": jwk(x=base64url(PUBLIC[:31])),
    "a long key": jwk(x=base64url(PUBLIC + b"x")),
    "a padded key": jwk(x=base64url(PUBLIC) + "="),
    "a key in a second spelling": jwk(x=SECOND_SPELLING),
    "no key": jwk(x=ABSENT),
    "a null key": jwk(x=None),
    **{f"a point of {name}": jwk(x=base64url(low)) for name, low in LOW_ORDER_KEYS.items()},
    "our own key's name": jwk(kid=OUR_KID),
    "our own key": jwk(OUR_KEY),
    "a text": "key",
    "a list": [],
    "null": None,
}


@pytest.mark.parametrize("useless", USELESS.values(), ids=USELESS)
def test_what_is_no_such_key_is_passed_over_and_the_others_are_taken(
    key_reader: JwksReader, useless: object
) -> None:
    good = jwk(OTHER_KEY, "good")
    assert key_reader.keys(key_set(useless, good)) == {"good": bytes(OTHER_KEY.verify_key)}


def test_a_name_that_stands_for_two_keys_stands_for_none(key_reader: JwksReader) -> None:
    assert key_reader.keys(key_set(jwk(), jwk(OTHER_KEY), jwk(OTHER_KEY, "other"))) == {
        "other": bytes(OTHER_KEY.verify_key)
    }


def test_a_set_without_a_key_for_us_is_an_empty_one(key_reader: JwksReader) -> None:
    assert key_reader.keys(key_set(USELESS["an RSA key"])) == key_reader.keys(key_set()) == {}


def test_no_more_than_sixty_four_keys_are_taken(key_reader: JwksReader) -> None:
    assert MAX_KEYS == 64
    many = [jwk(key_named(f"key {number}"), f"kid-{number}", use=ABSENT) for number in range(65)]
    assert list(key_reader.keys(key_set(*many))) == [f"kid-{number}" for number in range(64)]


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        pytest.param(b"", "not_json", id="nothing"),
        pytest.param(b"<html></html>", "not_json", id="a page"),
        pytest.param(b'{"keys":[],"keys":[]}', "not_json", id="a member twice"),
        pytest.param(b'{"keys":[NaN]}', "not_json", id="no number"),
        pytest.param(b'{"keys":' + b"[" * 10_000, "not_json", id="an abyss"),
        pytest.param(b"\xff", "not_json", id="no text"),
        pytest.param(b"[]", "not_a_key_set", id="a list"),
        pytest.param(b"{}", "not_a_key_set", id="no keys"),
        pytest.param(b'{"keys":{}}', "not_a_key_set", id="keys that are no list"),
    ],
)
def test_what_is_no_set_is_refused_with_a_fixed_word(
    key_reader: JwksReader, document: bytes, reason: str
) -> None:
    with pytest.raises(JwksError) as caught:
        key_reader.keys(document)
    assert caught.value.reason == reason


# --- what a server may send ---------------------------------------------------------------------------


@pytest_asyncio.fixture
async def server() -> AsyncIterator[IssuerServer]:
    async with IssuerServer.running() as server:
        yield server


async def refusal(source: JwksSource) -> str:
    with pytest.raises(JwksError) as caught:
        async with asyncio.timeout(BOUND_S):
            await source.fetch()
    return caught.value.reason


async def test_the_set_is_fetched_with_one_plain_request(server: IssuerServer) -> None:
    assert await JwksSource(server.url).fetch() == key_set(jwk())
    (request,) = server.requests
    assert request.startswith(b"GET /keys HTTP/1.1\r\n")
    assert b"accept-encoding: identity" in request.lower()
    assert b"authorization" not in request.lower()
    assert b"cookie" not in request.lower()


@pytest.mark.parametrize(
    "location",
    [
        pytest.param("/elsewhere", id="on the same server"),
        pytest.param("http://127.0.0.1:1/", id="on another"),
        pytest.param("file:///etc/passwd", id="a file"),
        pytest.param("http://[", id="to nowhere"),
    ],
)
async def test_a_redirect_is_not_followed(server: IssuerServer, location: str) -> None:
    server.say("302 Found", key_set(jwk()), f"Location: {location}")
    assert await refusal(JwksSource(server.url)) == "status"
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", ["404 Not Found", "500 Internal Server Error", "206 Partial Content"])
async def test_another_status_brings_no_keys(server: IssuerServer, status: str) -> None:
    server.say(status, key_set(jwk()))
    assert await refusal(JwksSource(server.url)) == "status"


async def test_sixty_four_kibibytes_are_read_and_no_more(server: IssuerServer) -> None:
    assert MAX_BYTES == 65_536
    server.say("200 OK", b"x" * MAX_BYTES)
    assert len(await JwksSource(server.url).fetch()) == MAX_BYTES
    server.say("200 OK", b"x" * (MAX_BYTES + 1))
    assert await refusal(JwksSource(server.url)) == "too_large"


async def test_an_answer_of_no_stated_length_is_bounded_too(server: IssuerServer) -> None:
    server.answer = b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 10_000_000
    assert await refusal(JwksSource(server.url)) == "too_large"


async def test_nothing_is_unpacked(server: IssuerServer) -> None:
    packed = gzip.compress(bytes(10_000_000))
    server.say("200 OK", packed, "Content-Encoding: gzip")
    assert await JwksSource(server.url).fetch() == packed


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"SSH-2.0-OpenSSH_9.9\r\n\r\n", id="another protocol"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", id="half"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", id="a length that is none"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_000_000, id="endless headers"),
    ],
)
async def test_what_is_no_whole_answer_is_none(server: IssuerServer, answer: bytes) -> None:
    server.answer = answer
    assert await refusal(JwksSource(server.url)) == "unreachable"


@pytest.mark.integration
async def test_a_server_that_is_not_there_is_unreachable() -> None:
    async with IssuerServer.running() as gone:
        pass
    assert await refusal(JwksSource(gone.url)) == "unreachable"


@pytest.mark.parametrize("begun", [b"", b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"keys":'])
async def test_a_server_that_does_not_come_to_an_end_is_given_up(server: IssuerServer, begun: bytes) -> None:
    server.answer, server.finish = begun, False
    assert await refusal(JwksSource(server.url, timeout_s=0.2)) == "timeout"


async def test_a_proxy_of_the_environment_is_not_asked(
    server: IssuerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert await JwksSource(server.url).fetch() == key_set(jwk())


@pytest.mark.integration
async def test_over_tls_the_server_must_be_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = SimulatedServerCa("an authority", time.time_ns() // 1_000_000)
    key = server_key_named("a web server")
    (tmp_path / "root.pem").write_text(ca.root_pem)
    (tmp_path / "server.key").write_text(server_key_to_pem(key))

    async def outcome(host: str) -> bytes | str:
        (tmp_path / "server.pem").write_text(ca.issue("issuer", [host], key.public_key()))
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
        async with IssuerServer.running(tls) as server:
            try:
                return await JwksSource(server.url).fetch()
            except JwksError as error:
                return error.reason

    assert await outcome("127.0.0.1") == "unreachable"
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "root.pem"))
    assert await outcome("127.0.0.1") == key_set(jwk())
    assert await outcome("192.0.2.1") == "unreachable"


# --- when it is fetched, and how long it is believed --------------------------------------------------


@pytest_asyncio.fixture
async def world(registry: SchemaRegistry) -> AsyncIterator[TwoIssuers]:
    async with TwoIssuers.running(registry) as world:
        yield world


async def refresh(keys: IssuerKeys) -> None:
    async with asyncio.timeout(BOUND_S):
        await keys.refresh()


@pytest.mark.integration
async def test_a_key_is_known_once_it_was_fetched(world: TwoIssuers) -> None:
    assert world.keys.get(KID) is None
    await refresh(world.keys)
    assert world.keys.get(KID) == PUBLIC
    assert world.keys.get("another") is None


@pytest.mark.integration
async def test_no_caller_can_have_it_fetched_twice_within_ten_seconds(world: TwoIssuers) -> None:
    await refresh(world.keys)
    world.server.publish(jwk(OTHER_KEY, "next"))
    for _ in range(100):
        await refresh(world.keys)
    world.clock.advance(9_999)
    await refresh(world.keys)
    assert world.fetches == 1
    world.clock.advance(1)
    await refresh(world.keys)
    assert world.fetches == 2
    assert world.keys.get("next") == bytes(OTHER_KEY.verify_key)


@pytest.mark.integration
async def test_a_fetch_that_failed_counts_as_one(world: TwoIssuers) -> None:
    world.server.say("500 Internal Server Error", b"")
    for _ in range(10):
        await refresh(world.keys)
    assert world.fetches == 1


@pytest.mark.integration
async def test_all_who_come_while_it_is_fetched_wait_for_the_one_fetch(world: TwoIssuers) -> None:
    world.server.open.clear()
    waiting = [asyncio.create_task(refresh(world.keys)) for _ in range(50)]
    await world.server.asked(1)
    world.clock.advance(60_000)
    late = asyncio.create_task(refresh(world.keys))
    world.server.open.set()
    await asyncio.gather(*waiting, late)
    assert world.fetches == 1
    assert world.keys.get(KID) == PUBLIC


@pytest.mark.integration
async def test_a_waiter_that_is_cancelled_does_not_cancel_the_shared_fetch(world: TwoIssuers) -> None:
    world.server.open.clear()
    first = asyncio.create_task(refresh(world.keys))
    await world.server.asked(1)
    second = asyncio.create_task(refresh(world.keys))
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    world.server.open.set()
    await second
    assert world.fetches == 1
    assert world.keys.get(KID) == PUBLIC


@pytest.mark.integration
async def test_keys_are_fetched_at_the_start_and_every_ten_minutes_without_being_asked_for(
    world: TwoIssuers,
) -> None:
    async with in_background(world.keys.run()):
        for count in (1, 2, 3):
            pause = await world.pauses.next()
            assert pause.seconds == 600
            assert world.fetches == count
            world.clock.advance(600_000)
            pause.end()


@pytest.mark.integration
async def test_a_key_that_is_withdrawn_is_gone_with_the_next_fetch_and_the_followers_hear_of_it(
    world: TwoIssuers,
) -> None:
    heard: list[bytes | None] = []
    world.keys.follow(lambda: heard.append(world.keys.get(KID)))
    async with in_background(world.keys.run()):
        for keys in ([jwk()], [jwk(OTHER_KEY, "next")]):
            pause = await world.pauses.next()
            world.server.publish(*keys)
            world.clock.advance(600_000)
            pause.end()
        await world.pauses.next()
    # Heard when it came and when it went, and not when it stayed.
    assert heard == [PUBLIC, None]


@pytest.mark.integration
async def test_an_issuer_that_is_away_is_asked_again_sooner(world: TwoIssuers) -> None:
    world.server.say("503 Service Unavailable", b"")
    async with in_background(world.keys.run()):
        pause = await world.pauses.next()
        assert pause.seconds == 30
        world.server.publish(jwk())
        world.clock.advance(30_000)
        pause.end()
        assert (await world.pauses.next()).seconds == 600
        assert world.keys.get(KID) == PUBLIC


FAILURES = {
    "status": b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
    "unreachable": b"",
    "not_json": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n<",
    "not_a_key_set": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
    "too_large": b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 70_000,
}


@pytest.mark.integration
@pytest.mark.parametrize(("reason", "answer"), FAILURES.items(), ids=FAILURES)
async def test_keys_outlive_their_issuers_absence_for_a_day_and_no_longer(
    world: TwoIssuers, reason: str, answer: bytes
) -> None:
    await refresh(world.keys)
    world.server.answer = answer
    world.clock.advance(DAY_MS - 1)
    await refresh(world.keys)
    assert world.keys.get(KID) == PUBLIC
    assert counted(world.metrics, "issuer_fetches_total", outcome=reason) == 1
    world.clock.advance(10_000)
    await refresh(world.keys)
    assert world.keys.get(KID) is None
    assert world.lines.entries()[-1]["keys_kept"] == 0


@pytest.mark.integration
async def test_an_issuer_that_answers_again_is_believed_again_for_a_day(world: TwoIssuers) -> None:
    await refresh(world.keys)
    world.clock.advance(DAY_MS - 1)
    await refresh(world.keys)
    world.server.say("503 Service Unavailable", b"")
    world.clock.advance(DAY_MS - 1)
    await refresh(world.keys)
    assert world.keys.get(KID) == PUBLIC


@pytest.mark.integration
async def test_a_set_without_a_usable_key_withdraws_them_all_and_the_log_says_so(
    world: TwoIssuers,
) -> None:
    await refresh(world.keys)
    world.server.publish(USELESS["an RSA key"])
    world.clock.advance(10_000)
    await refresh(world.keys)
    assert world.keys.get(KID) is None
    assert world.lines.entries()[-1]["event"] == "the outside issuer publishes no Ed25519 signing key"


@pytest.mark.integration
async def test_an_issuer_that_stays_away_is_one_line_in_the_log(world: TwoIssuers) -> None:
    world.server.say("503 Service Unavailable", b"")
    for _ in range(5):
        await refresh(world.keys)
        world.clock.advance(30_000)
    assert world.fetches == 5
    (line,) = world.lines.entries()
    assert (line["event"], line["reason"]) == ("outside issuer's keys not fetched", "status")
    world.server.publish(jwk())
    await refresh(world.keys)
    assert (
        world.lines.entries()[-1] | {"event": "outside issuer's keys fetched", "keys": 1}
        == (world.lines.entries()[-1])
    )


@pytest.mark.integration
async def test_a_fetch_that_is_under_way_ends_with_the_relay(world: TwoIssuers) -> None:
    world.server.open.clear()
    running = asyncio.create_task(world.keys.run())
    await world.server.asked(1)
    waiting = asyncio.create_task(world.keys.refresh())
    await asyncio.sleep(0)  # it waits now
    running.cancel()
    await asyncio.wait([running, waiting], timeout=BOUND_S)
    assert running.cancelled()
    assert waiting.cancelled()
    assert world.keys.get(KID) is None
