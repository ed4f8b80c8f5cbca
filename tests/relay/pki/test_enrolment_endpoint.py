import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from nacl.signing import SigningKey

import relay.pki.enrolments
from relay import ledger
from relay.audit.log import AuditUnavailableError
from relay.fleet.name_ledger import NameLedger, NodeName
from relay.http.routes import make_routes
from relay.ledger import Entry
from relay.pki.authority import CertificateAuthority
from relay.pki.enrolments import EnrolmentInfo
from relay.pki.join_tokens import JoinTokens
from relay.pki.records import IssuedLeaf
from schemas.addresses import BrokerAddress, HostPort
from schemas.certificates import make_csr, verify_leaf
from schemas.endorsement import are_endorsed
from schemas.enrolment import NODE, RELAY, RESPONSE_REF, JoinToken, is_proven, proven, shown_endorsements
from schemas.identity import certificates_in
from schemas.keys import base64url
from schemas.node_ids import new_node_id
from tests.fakes.enrolling import endpoint_of
from tests.fakes.hub import PUBLIC_URL, Hub
from tests.fakes.serving import Server
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, key_named

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 20
HOUR_S = 3600
KEY, OTHER_KEY = key_named("a node"), key_named("another node")
BROKER = BrokerAddress("mqtt.example", 8883, tls=True)

Message = dict[str, Any]


def request_of(
    token: JoinToken, node_id: str = NODE_ID, key: SigningKey = KEY, *, csr: str | None = None
) -> Message:
    """Return the request that a node makes with ``token``."""
    nonce = base64url(os.urandom(32))
    message = {"join_id": token.id, "csr": csr or make_csr(key, node_id), "nonce": nonce}
    return proven(message, token.key, NODE)


class Office:
    """The enrolment endpoint, with a real CA and real join tokens, on a clock that does not advance."""

    def __init__(self, hub: Hub, directory: Path) -> None:
        self.hub = hub
        self.directory = directory
        self.ca = CertificateAuthority(directory / "ca", hub.clock, os.urandom)
        self.ca.create()
        self.join_tokens = JoinTokens(directory / "join_tokens.jsonl", hub.clock, os.urandom)
        self.names = NameLedger(directory / "node_names.jsonl", hub.clock)
        self.routes = self.make()
        self.http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(self.routes), base_url=PUBLIC_URL, trust_env=False
        )

    def make(self, **options: Any) -> Any:
        """Return the application."""
        info = EnrolmentInfo(PUBLIC_URL, BROKER, own_root=True)
        enrolment = endpoint_of(self.hub, self.ca, self.join_tokens, self.names.name_new, info, **options)
        return make_routes(
            public_url=PUBLIC_URL,
            registry=self.hub.registry,
            metrics=self.hub.metrics,
            issuers=[],
            health=dict,
            running=nullcontext,
            more=enrolment.routes(),
        )

    def token(self, *, tenant: str = TENANT, ttl_s: int = HOUR_S, uses: int = 1, **names: Any) -> JoinToken:
        return self.join_tokens.create(tenant, ttl_s, uses, self.ca.root_pem(), **names)

    async def post(self, message: object) -> httpx2.Response:
        return await self.http.post("/enroll", json=message)

    async def enrolled(self, token: JoinToken, node_id: str = NODE_ID, key: SigningKey = KEY) -> Message:
        """Enrol, and return what the relay says."""
        response = await self.post(request_of(token, node_id, key))
        assert response.status_code == 200, response.text
        answer: Message = response.json()
        return answer

    def refusals(self) -> list[tuple[str, int]]:
        """Return the reasons that the audit gives, and how often."""
        self.hub.refusals.write()
        lines = [line for line in self.hub.audited() if line["event"] == "enrolment_refused"]
        return [(line["reason"], line["count"]) for line in lines]

    def enrolments(self) -> list[Message]:
        """Return the audit's lines on nodes that were enrolled."""
        return [line for line in self.hub.audited() if line["event"] == "enrolled"]


@pytest_asyncio.fixture(loop_scope="module")
async def office(hub: Hub, tmp_path: Path) -> AsyncIterator[Office]:
    office = Office(hub, tmp_path)
    async with office.http:
        yield office


def new_node_ids(count: int) -> list[str]:
    return [new_node_id(NOW_MS, os.urandom) for _ in range(count)]


# --- as it should be


async def test_the_roots_are_served_without_a_token(office: Office) -> None:
    response = await office.http.get("/enroll")
    servers = "".join(office.ca.servers.roots())
    assert response.status_code == 200
    assert response.text.startswith(office.ca.root_pem())
    assert response.text.endswith(servers)
    assert response.headers["content-type"].startswith("text/plain")
    office.ca.rotate_root(overlap_days=30)
    text = (await office.http.get("/enroll")).text
    assert text.startswith("".join(office.ca.roots()))
    # Each root that a join token may name vouches for the roots of servers.
    for root in office.ca.roots():
        assert are_endorsed(certificates_in(servers), certificates_in(root), shown_endorsements(text))


async def test_the_roots_of_servers_are_signed_once_for_all_who_ask(office: Office) -> None:
    first = (await office.http.get("/enroll")).text
    office.ca.servers.root_file.with_name("root.key").rename(office.ca.root_file.with_name("elsewhere.key"))
    assert (await office.http.get("/enroll")).text == first
    office.ca.root_file.with_name("elsewhere.key").rename(office.ca.root_file.with_name("root.key"))
    office.ca.servers.rotate()
    changed = (await office.http.get("/enroll")).text
    assert changed.endswith("".join(office.ca.servers.roots()))
    assert changed != first


async def test_who_has_a_join_token_gets_a_leaf_and_all_that_goes_with_it(office: Office) -> None:
    token = office.token()
    request = request_of(token)
    response = await office.post(request)
    answer = response.json()
    assert (response.status_code, response.headers["cache-control"]) == (200, "no-store")
    office.hub.registry.load(RESPONSE_REF).check(answer)
    assert is_proven(answer, token.key, RELAY)
    identity = verify_leaf(answer["certificate"], [office.ca.root_pem()], NOW_MS)
    assert (identity.node_id, identity.tenant) == (NODE_ID, TENANT)
    assert identity.public_key == bytes(KEY.verify_key)
    del answer["certificate"], answer["proof"]
    assert answer == {
        "roots": office.ca.root_pem(),
        "relay_url": PUBLIC_URL,
        "broker": "mqtts://mqtt.example:8883",
        "own_root": True,
        "nonce": request["nonce"],
        "server_time_ms": NOW_MS,
    }


async def test_a_node_that_takes_them_gets_the_roots_of_servers(office: Office) -> None:
    token = office.token()
    request = request_of(token)
    del request["proof"]
    answer = (await office.post(proven({**request, "server_roots": True}, token.key, NODE))).json()
    office.hub.registry.load(RESPONSE_REF).check(answer)
    assert is_proven(answer, token.key, RELAY)
    assert answer["server_roots"] == "".join(office.ca.servers.roots())


async def test_the_audit_says_who_was_enrolled_and_with_which_token(office: Office) -> None:
    token = office.token(tenant="globex")
    answer = await office.enrolled(token)
    kid = verify_leaf(answer["certificate"], office.ca.roots(), NOW_MS).kid
    [line] = office.enrolments()
    facts = {name: line[name] for name in ("node_id", "tenant", "kid", "join_id")}
    assert facts == {"node_id": NODE_ID, "tenant": "globex", "kid": kid, "join_id": token.id}


async def test_what_is_recorded_holds_no_secret(office: Office) -> None:
    token = office.token()
    await office.enrolled(token)
    await office.post({**request_of(token), "proof": "p" * 43})
    office.hub.refusals.write()
    recorded = office.hub.audit_file.read_text() + office.hub.lines.getvalue()
    for secret in (base64url(token.key), token.key.hex(), repr(token.key)):
        assert secret not in recorded


async def test_after_a_rotation_a_node_gets_both_roots_and_a_leaf_of_the_new(office: Office) -> None:
    token = office.token()
    office.ca.rotate_root(overlap_days=30)
    answer = await office.enrolled(token)
    assert answer["roots"] == "".join(office.ca.roots())
    assert verify_leaf(answer["certificate"], [office.ca.root_pem()], NOW_MS).node_id == NODE_ID


# --- how often


async def test_after_a_lost_answer_the_same_node_gets_another_leaf_for_the_same_use(office: Office) -> None:
    token = office.token(uses=1)
    await office.enrolled(token)
    again = await office.enrolled(token)
    assert verify_leaf(again["certificate"], office.ca.roots(), NOW_MS).node_id == NODE_ID
    assert (await office.post(request_of(token, OTHER_NODE_ID, OTHER_KEY))).status_code == 403
    assert office.refusals() == [("used_up", 1)]


async def test_a_request_that_another_client_sends_again_is_of_no_use_to_it(office: Office) -> None:
    token = office.token()
    request = request_of(token)
    await office.post(request)
    replayed = (await office.post(request)).json()
    # A leaf for the node's own key and a proof under a token: the attacker has neither the key nor the token.
    assert verify_leaf(replayed["certificate"], office.ca.roots(), NOW_MS).public_key == bytes(KEY.verify_key)


async def test_a_token_enrols_as_many_as_it_says_however_many_ask_at_once(office: Office) -> None:
    token = office.token(uses=5)
    requests = [request_of(token, node_id, key_named(node_id)) for node_id in new_node_ids(16)]
    async with asyncio.timeout(BOUND_S):
        answers = await asyncio.gather(*map(office.post, requests))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [403] * 11
    assert len(office.ca.in_force()) == 5
    assert office.refusals() == [("used_up", 11)]


async def test_an_enrolment_parses_what_is_new_in_the_ledgers_however_long_they_are(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf = IssuedLeaf(NODE_ID, TENANT, "", bytes(32), 1, NOW_MS + 1, NOW_MS)
    old = [
        replace(leaf, node_id=node_id, kid=f"{number:064x}").entry()
        for number, node_id in enumerate(new_node_ids(5000))
    ]
    with (office.directory / "ca" / "ledger.jsonl").open("a", encoding="ascii") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in old)
    parsed: list[str] = []
    parse = ledger.parse_entry

    def counting(line: bytes) -> Entry:
        entry = parse(line)
        parsed.append(entry["action"])
        return entry

    monkeypatch.setattr(ledger, "parse_entry", counting)
    token = office.token(uses=3)
    await office.enrolled(token)
    assert len(parsed) == len(old) + 1  # and the join token
    for node_id in new_node_ids(2):
        parsed.clear()
        await office.enrolled(token, node_id, key_named(node_id))
        # What the enrolment before it has written, in each ledger once.
        assert sorted(parsed) == ["issue", "spend"]
    parsed.clear()
    office.ca.revoke(NODE_ID)
    assert len(office.ca.revoked_kids()) == 1
    assert office.ca.records() is office.ca.records()
    assert parsed == ["issue", "revoke"]


async def test_of_two_that_want_the_same_id_at_once_one_gets_it(office: Office) -> None:
    token = office.token(uses=8)
    requests = [request_of(token, NODE_ID, key_named(f"claimant {number}")) for number in range(8)]
    async with asyncio.timeout(BOUND_S):
        answers = await asyncio.gather(*map(office.post, requests))
    assert sorted(answer.status_code for answer in answers) == [200] + [403] * 7
    assert office.refusals() == [("id_taken", 7)]


class StumblingCa(CertificateAuthority):
    """Ends before it issues, as in a power cut, as often as it is told to."""

    stumbles = 0

    def enrol(self, csr_pem: str, tenant: str, join_id: str) -> str:
        if self.stumbles > 0:
            self.stumbles -= 1
            raise OSError("no space left")
        return super().enrol(csr_pem, tenant, join_id)


async def test_a_use_that_was_spent_before_a_crash_is_the_same_nodes_and_no_others(
    office: Office,
) -> None:
    stumbling = StumblingCa(office.directory / "ca", office.hub.clock, os.urandom)
    stumbling.stumbles = 1
    office.ca = stumbling
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(office.make()), base_url=PUBLIC_URL, trust_env=False
    ) as office.http:
        token = office.token(uses=1)
        assert (await office.post(request_of(token))).status_code == 500
        assert (await office.post(request_of(token, OTHER_NODE_ID, OTHER_KEY))).status_code == 403
        await office.enrolled(token)
    assert office.refusals() == [("failing", 1), ("used_up", 1)]


# --- refused


def without_possession() -> str:
    """Return a request whose signature is not by the key in it."""
    pem = make_csr(KEY, NODE_ID)
    lines = pem.splitlines()
    last = lines[-2]
    lines[-2] = ("A" if last[0] != "A" else "B") + last[1:]
    return "\n".join(lines) + "\n"


async def refused(office: Office, message: Message, reason: str) -> bytes:
    """Return the answer to ``message``, which is refused for ``reason``."""
    before = len(office.ca.in_force())
    response = await office.post(message)
    assert response.status_code == 403
    assert office.refusals()[-1] == (reason, 1)
    assert len(office.ca.in_force()) == before
    return response.content


async def test_all_refusals_look_the_same_and_the_audit_knows_why(office: Office, tmp_path: Path) -> None:
    elsewhere = JoinTokens(tmp_path / "elsewhere.jsonl", office.hub.clock, os.urandom)
    foreign = elsewhere.create(TENANT, HOUR_S, 1, office.ca.root_pem())
    token = office.token(uses=10)
    void, used_up, expired = office.token(), office.token(), office.token(ttl_s=60)
    office.join_tokens.revoke(void.id)
    await office.enrolled(used_up, *_a_node("the first"))
    await office.enrolled(token, OTHER_NODE_ID, OTHER_KEY)
    office.hub.clock.advance(61_000)
    other_key = JoinToken(token.id, os.urandom(32), token.fingerprint)
    good = request_of(token)
    answers = [
        await refused(office, request_of(foreign), "unknown_token"),
        await refused(office, request_of(void), "unknown_token"),
        await refused(office, request_of(expired), "unknown_token"),
        await refused(office, request_of(other_key), "proof"),
        await refused(office, {**good, "nonce": "n" * 43}, "proof"),
        await refused(office, {**good, "csr": make_csr(OTHER_KEY, NODE_ID)}, "proof"),
        await refused(office, proven(_unproven(good), token.key, RELAY), "proof"),
        await refused(office, request_of(used_up), "used_up"),
        await refused(office, request_of(token, OTHER_NODE_ID, KEY), "id_taken"),
        await refused(office, request_of(token, csr=without_possession()), "no_proof_of_possession"),
        await refused(office, request_of(token, csr=make_csr(KEY, "relay")), "not_a_node_id"),
        await refused(office, request_of(token, csr=make_csr(KEY, NODE_ID.upper())), "not_a_node_id"),
        await refused(office, request_of(token, csr=office.ca.root_pem()), "not_a_request"),
        await refused(office, request_of(token, csr="\u00e9"), "not_a_request"),
    ]
    assert set(answers) == {b'{"error":"enrolment","message":"This node is not enrolled."}'}


def _a_node(name: str) -> tuple[str, SigningKey]:
    return new_node_ids(1)[0], key_named(name)


def _unproven(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "proof"}


async def test_no_token_enrols_a_node_id_that_exists(office: Office) -> None:
    await office.enrolled(office.token())
    for tenant in (TENANT, "globex"):
        for key in (KEY, OTHER_KEY):
            await refused(office, request_of(office.token(tenant=tenant), NODE_ID, key), "id_taken")


async def test_a_node_that_was_revoked_does_not_come_back_with_its_token(office: Office) -> None:
    token = office.token()
    await office.enrolled(token)
    office.ca.revoke(NODE_ID)
    await refused(office, request_of(token), "id_taken")


async def test_a_refusal_does_not_use_a_token_up(office: Office) -> None:
    await office.enrolled(office.token())
    token = office.token(uses=1)
    for message in (
        request_of(token, NODE_ID, OTHER_KEY),
        request_of(token, NODE_ID, KEY),
        request_of(token, csr=without_possession()),
        {**request_of(token, OTHER_NODE_ID), "proof": "p" * 43},
    ):
        assert (await office.post(message)).status_code == 403
    await office.enrolled(token, OTHER_NODE_ID, OTHER_KEY)


def as_json(message: Message, **changes: object) -> bytes:
    return json.dumps({**message, **changes}).encode()


async def test_what_is_no_request_is_not_looked_at(office: Office) -> None:
    good = request_of(office.token())
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
        "no proof": json.dumps(_unproven(good)).encode(),
    }
    headers = {"content-type": "application/json"}
    answers = {
        name: (await office.http.post("/enroll", content=body, headers=headers)).status_code
        for name, body in malformed.items()
    }
    assert answers == dict.fromkeys(malformed, 400)
    assert office.refusals() == [("malformed", len(malformed))]
    assert office.ca.in_force() == {}


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_what_a_page_in_a_browser_can_send_is_no_request(office: Office, media_type: str) -> None:
    body = as_json(request_of(office.token()))
    response = await office.http.post("/enroll", content=body, headers={"content-type": media_type})
    assert response.status_code == 400
    assert office.ca.in_force() == {}


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH"])
async def test_there_is_nothing_else_to_do_here(office: Office, method: str) -> None:
    assert (await office.http.request(method, "/enroll")).status_code == 405


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
    office: Office, server: Server, length: str
) -> None:
    server.app = office.routes
    body = b"x" * 17_000
    if "chunked" in length:
        body = b"%x\r\n%b\r\n" % (len(body), body)  # without the chunk that ends it
    answer = await answer_to(server.address, [head(length), body])
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert office.refusals() == [("too_large", 1)]


async def test_a_request_that_does_not_end_is_ended(office: Office, server: Server) -> None:
    server.app = office.make(body_timeout_s=0.05)
    answer = await answer_to(server.address, [head("Content-Length: 100"), b'{"join_id":'])
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert office.refusals() == [("slow", 1)]


async def test_who_leaves_before_the_end_is_counted(office: Office) -> None:
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
    await office.routes(scope, receive, send)
    assert office.refusals() == [("gone", 1)]


async def test_beyond_a_crowd_nodes_are_told_to_come_again(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = office.token()
    with monkeypatch.context() as patched:
        patched.setattr(relay.pki.enrolments, "_MAX_WAITING", 0)
        assert (await office.post(request_of(token))).status_code == 429
    assert office.refusals() == [("busy", 1)]
    await office.enrolled(token)


# --- when the relay cannot


async def test_a_relay_without_the_ca_s_key_says_so_and_still_shows_the_roots(office: Office) -> None:
    token = office.token()
    (office.directory / "ca" / "root.key").unlink()
    response = await office.post(request_of(token))
    assert (response.status_code, response.json()["message"]) == (503, "This relay has no CA key.")
    assert office.refusals() == [("no_ca", 1)]
    shown = (await office.http.get("/enroll")).text
    assert shown == office.ca.root_pem() + office.ca.servers.roots()[0]


async def test_without_a_root_there_is_nothing_to_show(office: Office) -> None:
    (office.directory / "ca" / "root.pem").unlink()
    response = await office.http.get("/enroll")
    assert response.status_code == 503
    assert str(office.directory) not in response.text


async def test_a_ledger_that_is_damaged_enrols_no_node(office: Office) -> None:
    token = office.token()
    (office.directory / "ca" / "ledger.jsonl").write_text("not a ledger\n")
    response = await office.post(request_of(token))
    assert response.status_code == 500
    assert str(office.directory) not in response.text
    assert office.refusals() == [("failing", 1)]


async def test_what_cannot_be_recorded_is_not_handed_out_and_is_there_for_the_next_try(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = office.token()

    def fail(**_facts: object) -> None:
        raise AuditUnavailableError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(office.hub.audit, "write", fail)
        response = await office.post(request_of(token))
    assert response.status_code == 500
    assert "certificate" not in response.text
    assert office.refusals() == [("audit", 1)]
    await office.enrolled(token)
    assert len(office.enrolments()) == 1


# --- names --------------------------------------------------------------------------------------------


async def test_a_node_has_the_names_of_its_join_token_as_soon_as_it_is_enrolled(office: Office) -> None:
    await office.enrolled(office.token(label="greenhouse pi", tags=["site=north"]))
    assert office.names.read().by_node == {NODE_ID: NodeName(TENANT, "greenhouse pi", ("site=north",))}


async def test_every_node_of_a_join_token_has_its_tags(office: Office) -> None:
    token = office.token(uses=2, tags=["gateway"])
    await office.enrolled(token)
    await office.enrolled(token, OTHER_NODE_ID, key_named("another node"))
    assert {name.tags for name in office.names.read().by_node.values()} == {("gateway",)}
    assert len(office.names.read().by_node) == 2


async def test_a_node_whose_label_was_given_away_meanwhile_enrols_without_it_and_the_log_shows_that(
    office: Office,
) -> None:
    token = office.token(label="pi", tags=["gateway"])
    office.names.label(OTHER_NODE_ID, TENANT, "PI")
    await office.enrolled(token)
    assert office.names.read().by_node[NODE_ID] == NodeName(TENANT, "", ("gateway",))
    [line] = office.hub.lines.entries("node enrolled without the label of its join token")
    assert (line["node_id"], line["join_id"]) == (NODE_ID, token.id)


async def test_a_node_that_enrols_without_names_writes_none(office: Office) -> None:
    await office.enrolled(office.token())
    assert not (office.directory / "node_names.jsonl").exists()


async def test_a_node_cannot_name_itself(office: Office) -> None:
    token = office.token()
    message = proven({**request_of(token), "label": "pi"}, token.key, NODE)
    assert (await office.post(message)).status_code == 400


async def test_while_names_cannot_be_written_no_node_is_enrolled_with_one(office: Office) -> None:
    token = office.token(label="pi")
    (office.directory / "node_names.jsonl").write_text("no entry\n")
    assert (await office.post(request_of(token))).status_code == 500
    (office.directory / "node_names.jsonl").unlink()
    await office.enrolled(token)
    assert office.names.read().by_node == {NODE_ID: NodeName(TENANT, "pi")}
