import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kubelet.config import read_stored
from kubelet.identity.enrolment import ClockError, Enroller, EnrolmentError, enrol_again
from kubelet.identity.http_exchange import NoAnswerError
from kubelet.identity.provisioning import Enrolled, create_identity
from kubelet.process import hold_alone
from relay.pki.roots import server_key_to_pem
from relay.settings.environment import now_ms
from schemas.addresses import AddressError
from schemas.certificates import endorse_servers, verify_leaf
from schemas.enrolment import JoinToken, shown_roots
from schemas.files import PRIVATE, write_atomic
from schemas.identity import first_certificate_in
from schemas.identity_files import IdentityFiles, IdentityFilesError
from schemas.keys import base64url
from schemas.strict_json import loads
from tests.fakes.clock import FakeClock
from tests.fakes.enrolment_server import EnrolmentServer
from tests.fakes.raw_http_server import server_context
from tests.fakes.server_ca import SimulatedServerCa, server_key_named
from tests.fakes.signer import DAY_MS, OTHER_NODE_ID, TENANT, SimulatedCa, key_named

pytestmark = pytest.mark.integration

NOW = now_ms()
MINUTE_MS = 60_000
CA = SimulatedCa("root of today", NOW)
OTHER_CA = SimulatedCa("another root of today", NOW)
SERVERS, OTHER_SERVERS = SimulatedServerCa("servers", NOW), SimulatedServerCa("other servers", NOW)

Message = dict[str, Any]


class Bench:
    """An enrolment server, and a node that is not enrolled yet."""

    def __init__(self, directory: Path) -> None:
        self.relay_clock, self.clock = FakeClock(NOW), FakeClock(NOW)
        self.server = EnrolmentServer(CA, self.relay_clock)
        self.files = IdentityFiles(directory / "state")
        self.directory = directory

    def open(
        self, ca: SimulatedCa | None = None, *, host: str = "127.0.0.1", since_ms: int = NOW
    ) -> AbstractAsyncContextManager[EnrolmentServer]:
        """Serve, over TLS if there is a ``ca`` for its certificate."""
        context = server_context(ca, self.directory, since_ms, host=host) if ca else None
        return self.server.open(context)

    async def enrol(
        self, token: JoinToken | None = None, url: str | None = None, *, plain_allowed: bool = False
    ) -> Enrolled:
        return await self.enroller(token, url, plain_allowed=plain_allowed).run()

    def enroller(
        self, token: JoinToken | None = None, url: str | None = None, *, plain_allowed: bool = False
    ) -> Enroller:
        return Enroller(
            self.files,
            token or self.server.token,
            url or self.server.url,
            plain_allowed,
            self.clock,
            os.urandom,
        )

    @property
    def untouched(self) -> bool:
        """Whether nothing was installed or stored."""
        unenrolled = not self.files.exists() or self.files.read().root_pem is None
        return unenrolled and (not self.files.root.exists() or read_stored(self.files.root) is None)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
async def plain_bench(bench: Bench) -> AsyncIterator[Bench]:
    """A bench whose server is open, over plain HTTP on this machine."""
    async with bench.open():
        yield bench


# --- as it should be


async def test_a_node_comes_away_with_all_that_it_needs(plain_bench: Bench) -> None:
    enrolled = await plain_bench.enrol()
    own = plain_bench.files.read()
    assert verify_leaf(own.leaf_pem, [CA.root_pem], NOW).tenant == TENANT
    assert own.root_pem == CA.root_pem
    assert enrolled.identity.node_id == own.node_id
    assert enrolled.identity.public_key == bytes(own.key.verify_key)
    assert read_stored(plain_bench.files.root) == enrolled.config
    assert enrolled.config.relay_url == plain_bench.server.url
    assert str(enrolled.config.broker) == "mqtt://127.0.0.1:1883"
    assert not enrolled.config.own_root


async def test_neither_the_token_s_key_nor_the_node_s_travels(plain_bench: Bench) -> None:
    await plain_bench.enrol()
    sent = "".join(asked.head + asked.body.decode() for asked in plain_bench.server.server.asked)
    own_key = bytes(plain_bench.files.read().key)
    for secret in (plain_bench.server.token.key, own_key):
        assert base64url(secret) not in sent
        assert secret.hex() not in sent
    assert len(plain_bench.server.genuine) == 1


async def test_an_identity_that_is_there_is_enrolled_as_it_is(plain_bench: Bench) -> None:
    node_id = create_identity(plain_bench.files, NOW, os.urandom)
    key = plain_bench.files.read().key
    assert (await plain_bench.enrol()).identity.node_id == node_id
    assert plain_bench.files.read().key == key


async def test_after_a_lost_answer_the_same_node_asks_again(plain_bench: Bench) -> None:
    plain_bench.server.lost = 1
    with pytest.raises(NoAnswerError):
        await plain_bench.enrol()
    assert plain_bench.untouched
    await plain_bench.enrol()
    first, second = plain_bench.server.genuine
    assert first["csr"] == second["csr"]
    assert first["nonce"] != second["nonce"]


async def test_the_key_of_a_new_identity_is_used_again_after_a_lost_answer(plain_bench: Bench) -> None:
    await plain_bench.enrol()
    before, plain_bench.server.lost = plain_bench.files.read(), 1
    for is_lost in (True, False):
        with pytest.raises(NoAnswerError) if is_lost else nullcontext():
            await enrol_again(plain_bench.enroller())
    _, first, second = plain_bench.server.genuine
    assert first["csr"] == second["csr"]
    after = plain_bench.files.read()
    assert (after.node_id, after.key == before.key) == (before.node_id, False)


@pytest.mark.parametrize("last", [None, "leaf.pem", "node.key"])
async def test_a_new_identity_is_put_in_its_place_after_a_crash_with_the_token_that_was_spent(
    plain_bench: Bench, monkeypatch: pytest.MonkeyPatch, last: str | None
) -> None:
    await plain_bench.enrol()
    before, replace = plain_bench.files.read(), Path.replace

    def crash(path: Path, target: Path) -> Path:
        if target.parent == plain_bench.files.root and last in {target.name, None}:
            raise SystemExit
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        with pytest.raises(SystemExit):
            await enrol_again(plain_bench.enroller())
    await enrol_again(plain_bench.enroller())
    _, first, second = plain_bench.server.genuine
    assert first["csr"] == second["csr"]
    after = plain_bench.files.read()
    assert (after.node_id, after.key == before.key) == (before.node_id, False)
    assert after.root_pem == CA.root_pem
    assert plain_bench.files.key.stat().st_mode & 0o777 == PRIVATE
    assert not (plain_bench.files.root / "again").exists()


async def test_after_a_crash_half_way_through_installing_it_can_be_run_again(plain_bench: Bench) -> None:
    create_identity(plain_bench.files, NOW, os.urandom)
    plain_bench.files.root_certificate.write_text(CA.root_pem)  # the root was written, and the leaf was not
    await plain_bench.enrol()
    assert plain_bench.files.read().root_pem == CA.root_pem


async def test_the_url_that_the_relay_states_is_pinned(plain_bench: Bench) -> None:
    plain_bench.server.overrides = {
        "relay_url": "https://relay.example",
        "broker": "mqtts://mqtt.example:8883",
    }
    config = (await plain_bench.enrol()).config
    assert (config.relay_url, str(config.broker)) == ("https://relay.example", "mqtts://mqtt.example:8883")


async def test_every_root_that_is_trusted_is_installed(plain_bench: Bench) -> None:
    both = OTHER_CA.root_pem + CA.root_pem
    plain_bench.server.overrides = {"roots": both}
    plain_bench.server.shown_roots = both
    await plain_bench.enrol()
    assert plain_bench.files.read().root_pem == both


# --- once is enough


async def test_a_node_that_is_enrolled_is_not_enrolled_again(plain_bench: Bench) -> None:
    await plain_bench.enrol()
    leaf, asked = plain_bench.files.read().leaf_pem, len(plain_bench.server.server.asked)
    with pytest.raises(IdentityFilesError, match="is enrolled already, as node"):
        await plain_bench.enrol()
    plain_bench.clock.advance(91 * DAY_MS)
    with pytest.raises(IdentityFilesError, match="is enrolled already, as node"):
        await plain_bench.enrol()
    assert plain_bench.files.read().leaf_pem == leaf
    assert len(plain_bench.server.server.asked) == asked


async def test_a_directory_that_another_kubelet_holds_is_left_alone(plain_bench: Bench) -> None:
    create_identity(plain_bench.files, NOW, os.urandom)
    with hold_alone(plain_bench.files.root), pytest.raises(IdentityFilesError, match="another kubelet"):
        await plain_bench.enrol()
    assert plain_bench.server.methods == []


# --- whom it talks to


async def test_to_another_relay_than_the_token_s_nothing_is_said(plain_bench: Bench) -> None:
    fingerprint = sha256(first_certificate_in(OTHER_CA.root_pem)).digest()
    token = JoinToken(plain_bench.server.token.id, plain_bench.server.token.key, fingerprint)
    with pytest.raises(EnrolmentError, match="is another relay than the one that made this join token"):
        await plain_bench.enrol(token)
    assert plain_bench.server.methods == ["GET"]
    assert not plain_bench.files.exists()


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param("", id="nothing"),
        pytest.param("no roots at all", id="no certificate"),
        pytest.param(OTHER_CA.root_pem, id="another"),
        pytest.param(CA.root_pem.replace("BEGIN", "BEGUN"), id="damaged"),
        pytest.param("-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----\n", id="no base64"),
        pytest.param(CA.root_pem * 40, id="without end"),
    ],
)
async def test_a_relay_that_does_not_show_the_token_s_root_is_another(plain_bench: Bench, shown: str) -> None:
    plain_bench.server.shown_roots = shown
    with pytest.raises(EnrolmentError, match="is another relay"):
        await plain_bench.enrol()
    assert plain_bench.server.methods == ["GET"]


@pytest.mark.parametrize("own_root", [True, False])
async def test_over_tls_a_certificate_of_the_token_s_root_is_believed(bench: Bench, own_root: bool) -> None:  # noqa: FBT001 - a table
    bench.server.overrides = {"own_root": own_root}
    async with bench.open(CA):
        assert (await bench.enrol()).config.own_root is own_root


async def test_a_relay_in_the_middle_that_shows_the_right_roots_is_told_nothing(bench: Bench) -> None:
    async with bench.open(OTHER_CA):
        with pytest.raises(EnrolmentError, match="is not believed"):
            await bench.enrol()
    assert bench.server.methods == ["GET"]
    assert bench.untouched


def context_of_servers(servers: SimulatedServerCa, directory: Path) -> ssl.SSLContext:
    key = server_key_named("a server")
    certificate, key_file = directory / "server.pem", directory / "server.key"
    write_atomic(certificate, servers.issue("relay", ["127.0.0.1"], key.public_key()))
    write_atomic(key_file, server_key_to_pem(key), PRIVATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key_file)
    return context


async def test_the_roots_of_servers_that_the_token_s_root_endorses_are_believed(bench: Bench) -> None:
    bench.server.shown_roots = shown_roots(
        CA.root_pem, SERVERS.root_pem, [endorse_servers(CA.key, SERVERS.root_pem)]
    )
    async with bench.server.open(context_of_servers(SERVERS, bench.directory)):
        await bench.enrol()
    (request,) = bench.server.genuine
    assert request["server_roots"] is True


@pytest.mark.parametrize(
    "endorsements",
    [
        pytest.param([], id="none"),
        pytest.param(["AAAA"], id="no signature"),
        pytest.param([endorse_servers(OTHER_CA.key, OTHER_SERVERS.root_pem)], id="by another root"),
        pytest.param([endorse_servers(CA.key, SERVERS.root_pem)], id="of another root of servers"),
    ],
)
async def test_roots_of_servers_with_a_false_endorsement_are_not_believed(
    bench: Bench, endorsements: list[str]
) -> None:
    bench.server.shown_roots = shown_roots(CA.root_pem, OTHER_SERVERS.root_pem, endorsements)
    async with bench.server.open(context_of_servers(OTHER_SERVERS, bench.directory)):
        with pytest.raises(EnrolmentError, match="is not believed"):
            await bench.enrol()
    assert bench.server.methods == ["GET"]
    assert bench.untouched


async def test_a_certificate_for_another_name_is_not_believed(bench: Bench) -> None:
    async with bench.open(CA, host="other.example"):
        with pytest.raises(EnrolmentError, match="IP address mismatch"):
            await bench.enrol()
    assert bench.server.methods == ["GET"]


@pytest.fixture
def trusting_the_other_ca(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let this machine trust the other CA, as it trusts those on the web."""
    (tmp_path / "system.pem").write_text(OTHER_CA.root_pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "system.pem"))


@pytest.mark.usefixtures("trusting_the_other_ca")
async def test_a_certificate_that_the_machine_trusts_will_do(bench: Bench) -> None:
    async with bench.open(OTHER_CA):
        assert not (await bench.enrol()).config.own_root


@pytest.mark.usefixtures("trusting_the_other_ca")
async def test_but_not_where_the_relay_says_that_it_shows_its_own(bench: Bench) -> None:
    bench.server.overrides = {"own_root": True}
    async with bench.open(OTHER_CA):
        with pytest.raises(EnrolmentError, match="something in between answers for it"):
            await bench.enrol()
    assert bench.untouched


# --- what it is told


def changed(**members: object) -> Callable[[Message], Message]:
    return lambda message: {**message, **members}


OTHERS_LEAF = CA.issue(OTHER_NODE_ID, now_ms=NOW).leaf_pem


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(changed(certificate=OTHERS_LEAF), id="certificate"),
        pytest.param(changed(roots=OTHER_CA.root_pem), id="roots"),
        pytest.param(changed(relay_url="https://rogue.example"), id="relay"),
        pytest.param(changed(broker="mqtts://rogue.example:8883"), id="broker"),
        pytest.param(changed(own_root=True), id="own_root"),
        pytest.param(changed(nonce="n" * 43), id="nonce"),
        pytest.param(changed(server_time_ms=1), id="time"),
        pytest.param(changed(proof="p" * 43), id="proof"),
    ],
)
async def test_an_answer_that_was_changed_on_the_way_is_refused(
    plain_bench: Bench, tamper: Callable[[Message], Message]
) -> None:
    plain_bench.server.tamper = tamper
    with pytest.raises(EnrolmentError, match="was changed, or is not from the relay of this join token"):
        await plain_bench.enrol()
    assert plain_bench.untouched


async def test_an_answer_to_another_question_is_refused_though_it_is_genuine(plain_bench: Bench) -> None:
    said: list[Message] = []

    def replay(message: Message) -> Message:
        said.append(message)
        return said[0]

    plain_bench.server.tamper = replay
    plain_bench.server.lost = 1
    with pytest.raises(NoAnswerError):
        await plain_bench.enrol()
    with pytest.raises(EnrolmentError, match="was changed"):
        await plain_bench.enrol()
    assert plain_bench.untouched


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(changed(more=1), id="a member more"),
        pytest.param(lambda message: {k: v for k, v in message.items() if k != "proof"}, id="a member less"),
        pytest.param(changed(relay_url="ftp://relay.example"), id="no relay"),
        pytest.param(changed(own_root="yes"), id="another type"),
        pytest.param(lambda message: [message], id="a list"),
        pytest.param(lambda _message: "yes", id="a word"),
    ],
)
async def test_an_answer_of_another_form_is_none(
    plain_bench: Bench, tamper: Callable[[Message], Any]
) -> None:
    plain_bench.server.tamper = tamper
    with pytest.raises(EnrolmentError, match="answers with something else than a relay would"):
        await plain_bench.enrol()
    assert plain_bench.untouched


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        pytest.param(OTHERS_LEAF, "for another node", id="another node's"),
        pytest.param(CA.root_pem, "not accepted", id="the root itself"),
        pytest.param("no PEM", "not accepted: bad_certificate", id="none"),
        pytest.param(OTHER_CA.issue(now_ms=NOW).leaf_pem, "not accepted: chain", id="another root's"),
    ],
)
async def test_a_leaf_that_is_not_for_this_node_is_not_installed(
    plain_bench: Bench, leaf: str, text: str
) -> None:
    plain_bench.server.overrides = {"certificate": leaf}
    with pytest.raises(IdentityFilesError, match=text):
        await plain_bench.enrol()
    assert plain_bench.files.read().root_pem is None


async def test_a_leaf_of_the_same_id_for_another_key_is_not_installed(plain_bench: Bench) -> None:
    node_id = create_identity(plain_bench.files, NOW, os.urandom)
    plain_bench.server.overrides = {
        "certificate": CA.issue(node_id, key=key_named("another"), now_ms=NOW).leaf_pem
    }
    with pytest.raises(IdentityFilesError, match="for another key"):
        await plain_bench.enrol()


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (400, "did not understand"),
        (403, "the join token is used up, expired or withdrawn"),
        (404, "is no relay"),
        (413, "status 413"),
        (421, "use the relay's public URL"),
        (429, "is busy"),
        (503, "has no CA key"),
    ],
)
async def test_a_refusal_says_what_to_do_and_repeats_nothing(
    plain_bench: Bench, status: int, text: str
) -> None:
    plain_bench.server.status = status
    with pytest.raises(EnrolmentError, match=text) as caught:
        await plain_bench.enrol()
    assert "whatever" not in str(caught.value)
    assert plain_bench.untouched


@pytest.mark.parametrize("status", [429, 503])
async def test_a_relay_that_says_when_to_try_again_is_quoted(plain_bench: Bench, status: int) -> None:
    plain_bench.server.status, plain_bench.server.headers = status, {"Retry-After": "15"}
    with pytest.raises(EnrolmentError, match="run it again in 15 s"):
        await plain_bench.enrol()


# --- in the clear


async def test_a_relay_in_the_clear_on_another_machine_is_not_asked(bench: Bench) -> None:
    with pytest.raises(AddressError, match=r"http://relay\.example is not encrypted"):
        await bench.enrol(url="http://relay.example")
    assert not bench.files.root.exists()


@pytest.mark.parametrize("told", [{"broker": "mqtt://mqtt.example:1883"}, {"relay_url": "http://r.example"}])
async def test_nothing_in_the_clear_is_pinned_unless_the_operator_said_so(
    plain_bench: Bench, told: Message
) -> None:
    plain_bench.server.overrides = told
    with pytest.raises(AddressError, match="is not encrypted"):
        await plain_bench.enrol()
    assert plain_bench.untouched
    assert (await plain_bench.enrol(plain_allowed=True)).config.plain_allowed
    stored = read_stored(plain_bench.files.root)
    assert stored is not None
    assert stored.plain_allowed


@pytest.mark.parametrize(
    "told",
    [{"broker": "mqtt://127.0.0.1:99999"}, {"relay_url": "https://user@relay.example"}],
    ids=["broker", "relay"],
)
async def test_an_address_that_cannot_be_used_is_the_relays_mistake(
    plain_bench: Bench, told: Message
) -> None:
    plain_bench.server.overrides = told
    with pytest.raises(EnrolmentError, match="names an address that cannot be used"):
        await plain_bench.enrol()
    assert plain_bench.untouched


async def test_a_root_that_is_damaged_here_is_not_taken_for_an_enrolment(plain_bench: Bench) -> None:
    await plain_bench.enrol()
    damaged = "-----BEGIN CERTIFICATE-----\nAAAAA\n-----END CERTIFICATE-----\n"
    plain_bench.files.root_certificate.write_text(damaged)
    with pytest.raises(IdentityFilesError, match=r"root\.pem holds no certificate"):
        await plain_bench.enrol()


# --- the time


@pytest.mark.parametrize("off_ms", [-6 * MINUTE_MS, 6 * MINUTE_MS, -10 * 365 * DAY_MS])
async def test_a_clock_that_is_wrong_is_named_and_once_set_it_works(plain_bench: Bench, off_ms: int) -> None:
    plain_bench.clock.advance(off_ms)
    with pytest.raises(ClockError, match=r"clock reads .* UTC and the relay's .* UTC: set the clock"):
        await plain_bench.enrol()
    assert plain_bench.untouched
    plain_bench.clock.now_ms = NOW
    await plain_bench.enrol()


@pytest.mark.parametrize("off_ms", [-5 * MINUTE_MS + 1000, 5 * MINUTE_MS])
async def test_a_clock_that_is_nearly_right_will_do(plain_bench: Bench, off_ms: int) -> None:
    plain_bench.clock.advance(off_ms)
    await plain_bench.enrol()


@pytest.mark.parametrize(
    ("since_ms", "text"),
    [(NOW + 9 * DAY_MS, "not yet valid"), (NOW - 40 * DAY_MS, "expired")],
    ids=["not yet valid", "expired"],
)
async def test_a_certificate_of_another_time_speaks_of_the_clock(
    bench: Bench, since_ms: int, text: str
) -> None:
    # TLS looks at the machine's own clock, so that here it is the relay's that is wrong.
    async with bench.open(CA, since_ms=since_ms):
        with pytest.raises(ClockError, match=f"{text}.*set the clock"):
            await bench.enrol()


async def test_many_nodes_enrol_side_by_side(plain_bench: Bench, tmp_path: Path) -> None:
    server = plain_bench.server

    async def enrol(number: int) -> str:
        files = IdentityFiles(tmp_path / f"node {number}")
        enroller = Enroller(files, server.token, server.url, False, plain_bench.clock, os.urandom)  # noqa: FBT003
        return (await enroller.run()).identity.node_id

    async with asyncio.timeout(30):
        node_ids = await asyncio.gather(*map(enrol, range(8)))
    assert len(set(node_ids)) == 8
    asked = [loads(said.body, max_bytes=20_000) for said in server.server.asked if said.method == "POST"]
    assert len({request["nonce"] for request in asked}) == 8
