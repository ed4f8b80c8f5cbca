"""Enrolment, by the endpoint and behind it."""

import asyncio
import json
import os
from collections.abc import Awaitable, Iterable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import pytest
from nacl.signing import SigningKey

import relay.pki.enrolments
from relay.audit.log import AuditUnavailableError
from relay.pki.authority import CertificateAuthority
from relay.pki.enrolments import (
    EnrolmentInfo,
    EnrolmentRefusal,
    EnrolmentRefusedError,
    EnrolmentService,
    NameNode,
)
from relay.state import ledger
from relay.state.certificates import IssuedLeaf
from relay.state.join_tokens import JoinTokens
from relay.state.ledger import Entry
from schemas.addresses import HostPort
from schemas.certificates import IdentityReason, are_endorsed, make_csr, verify_leaf
from schemas.enrolment import NODE, RELAY, RESPONSE_REF, JoinToken, is_proven, proven, shown_endorsements
from schemas.identity import certificates_in
from schemas.keys import base64url
from schemas.labels import NodeName
from tests.fakes.disk import full_disk
from tests.fakes.enrolling import (
    HOUR_S,
    KEY,
    OTHER_KEY,
    Message,
    Stage,
    enrolments_of,
    new_node_ids,
    request_of,
    unproven,
)
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.polling import until
from tests.fakes.serving import Server
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, key_named

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 30


# --- as it should be


async def test_who_has_a_join_token_gets_a_leaf_and_all_that_goes_with_it(stage: Stage) -> None:
    token = stage.token()
    request = request_of(token)
    response = await stage.post(request)
    answer = response.json()
    assert (response.status_code, response.headers["cache-control"]) == (200, "no-store")
    stage.hub.registry.load(RESPONSE_REF).check(answer)
    assert is_proven(answer, token.key, RELAY)
    identity = verify_leaf(answer["certificate"], [stage.ca.root_pem()], NOW_MS)
    assert (identity.node_id, identity.tenant) == (NODE_ID, TENANT)
    assert identity.public_key == bytes(KEY.verify_key)
    del answer["certificate"], answer["proof"]
    assert answer == {
        "roots": stage.ca.root_pem(),
        "relay_url": PUBLIC_URL,
        "broker": "mqtts://mqtt.example:8883",
        "own_root": True,
        "nonce": request["nonce"],
        "server_time_ms": NOW_MS,
    }


async def test_a_node_that_takes_them_gets_the_roots_of_servers(stage: Stage) -> None:
    token = stage.token()
    request = request_of(token)
    del request["proof"]
    answer = (await stage.post(proven({**request, "server_roots": True}, token.key, NODE))).json()
    stage.hub.registry.load(RESPONSE_REF).check(answer)
    assert is_proven(answer, token.key, RELAY)
    assert answer["server_roots"] == "".join(stage.ca.servers.roots())


async def test_the_audit_says_who_was_enrolled_and_with_which_token(stage: Stage) -> None:
    token = stage.token(tenant="globex")
    answer = await stage.enrolled(token)
    kid = verify_leaf(answer["certificate"], stage.ca.roots(), NOW_MS).kid
    [line] = stage.enrolments()
    facts = {name: line[name] for name in ("node_id", "tenant", "kid", "join_id")}
    assert facts == {"node_id": NODE_ID, "tenant": "globex", "kid": kid, "join_id": token.id}


async def test_what_is_recorded_holds_no_secret(stage: Stage) -> None:
    token = stage.token()
    await stage.enrolled(token)
    await stage.post({**request_of(token), "proof": "p" * 43})
    stage.hub.refusals.write()
    recorded = stage.hub.audit_file.read_text() + stage.hub.lines.getvalue()
    for secret in (base64url(token.key), token.key.hex(), repr(token.key)):
        assert secret not in recorded


async def test_after_a_rotation_a_node_gets_both_roots_and_a_leaf_of_the_new(stage: Stage) -> None:
    token = stage.token()
    stage.ca.rotate_root(overlap_days=30)
    answer = await stage.enrolled(token)
    assert answer["roots"] == "".join(stage.ca.roots())
    assert verify_leaf(answer["certificate"], [stage.ca.root_pem()], NOW_MS).node_id == NODE_ID


async def test_a_token_that_replaces_a_node_revokes_its_leaves_and_is_for_it_alone(stage: Stage) -> None:
    first = verify_leaf((await stage.enrolled(stage.token()))["certificate"], stage.ca.roots(), NOW_MS)
    token = stage.token(replaces=NODE_ID)
    other_id, *_ = new_node_ids(1)
    assert (await stage.post(request_of(token, other_id, OTHER_KEY))).status_code == 403
    second = await stage.enrolled(token, NODE_ID, OTHER_KEY)
    identity = verify_leaf(second["certificate"], stage.ca.roots(), NOW_MS)
    assert (identity.node_id, identity.public_key) == (NODE_ID, bytes(OTHER_KEY.verify_key))
    assert [leaf.kid for leaf in stage.ca.records().unrevoked(NODE_ID)] == [identity.kid]
    assert first.kid in stage.ca.records().revoked


async def test_a_node_that_is_revoked_does_not_come_back_by_the_token_that_replaced_it(stage: Stage) -> None:
    await stage.enrolled(stage.token())
    token = stage.token(replaces=NODE_ID)
    await stage.enrolled(token, NODE_ID, OTHER_KEY)
    stage.ca.revoke(NODE_ID)
    for key in (OTHER_KEY, KEY):
        assert (await stage.post(request_of(token, NODE_ID, key))).status_code == 403
    assert stage.ca.records().unrevoked(NODE_ID) == []


# --- how often


async def test_after_a_lost_answer_the_same_node_gets_another_leaf_for_the_same_use(
    stage: Stage,
) -> None:
    token = stage.token(uses=1)
    await stage.enrolled(token)
    again = await stage.enrolled(token)
    assert verify_leaf(again["certificate"], stage.ca.roots(), NOW_MS).node_id == NODE_ID
    assert (await stage.post(request_of(token, OTHER_NODE_ID, OTHER_KEY))).status_code == 403
    assert stage.refusals() == [("used_up", 1)]


async def test_a_request_that_another_client_sends_again_is_of_no_use_to_it(stage: Stage) -> None:
    token = stage.token()
    request = request_of(token)
    await stage.post(request)
    replayed = (await stage.post(request)).json()
    # A leaf for the node's own key and a proof under a token: the attacker has neither the key nor the token.
    assert verify_leaf(replayed["certificate"], stage.ca.roots(), NOW_MS).public_key == bytes(KEY.verify_key)


async def test_a_token_enrols_as_many_as_it_says_however_many_ask_at_once(stage: Stage) -> None:
    token = stage.token(uses=5)
    requests = [request_of(token, node_id, key_named(node_id)) for node_id in new_node_ids(16)]
    async with asyncio.timeout(BOUND_S):
        answers = await asyncio.gather(*map(stage.post, requests))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [403] * 11
    assert len(stage.ca.in_force()) == 5
    assert stage.refusals() == [("used_up", 11)]


async def test_an_enrolment_parses_what_is_new_in_the_ledgers_however_long_they_are(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf = IssuedLeaf(NODE_ID, TENANT, "", bytes(32), 1, NOW_MS + 1, NOW_MS)
    old = [
        replace(leaf, node_id=node_id, kid=f"{number:064x}").entry()
        for number, node_id in enumerate(new_node_ids(5000))
    ]
    with (stage.directory / "ca" / "ledger.jsonl").open("a", encoding="ascii") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in old)
    parsed: list[str] = []
    parse = ledger.parse_entry

    def counting(line: bytes) -> Entry:
        entry = parse(line)
        parsed.append(entry["action"])
        return entry

    monkeypatch.setattr(ledger, "parse_entry", counting)
    token = stage.token(uses=3)
    await stage.enrolled(token)
    assert len(parsed) == len(old) + 1  # and the join token
    for node_id in new_node_ids(2):
        parsed.clear()
        await stage.enrolled(token, node_id, key_named(node_id))
        # What the enrolment before it has written, in each ledger once.
        assert sorted(parsed) == ["issue", "spend"]
    parsed.clear()
    stage.ca.revoke(NODE_ID)
    assert len(stage.ca.revoked_kids()) == 1
    assert stage.ca.records() is stage.ca.records()
    assert parsed == ["issue", "revoke"]


async def test_of_two_that_want_the_same_id_at_once_one_gets_it(stage: Stage) -> None:
    token = stage.token(uses=8)
    requests = [request_of(token, NODE_ID, key_named(f"claimant {number}")) for number in range(8)]
    async with asyncio.timeout(BOUND_S):
        answers = await asyncio.gather(*map(stage.post, requests))
    assert sorted(answer.status_code for answer in answers) == [200] + [403] * 7
    assert stage.refusals() == [("id_taken", 7)]


class StumblingCa(CertificateAuthority):
    """Ends before it issues, as in a power cut, as often as it is told to."""

    stumbles = 0

    def enrol(self, csr_pem: str, tenant: str, join_id: str, replaces: str = "") -> str:
        if self.stumbles > 0:
            self.stumbles -= 1
            raise OSError("no space left")
        return super().enrol(csr_pem, tenant, join_id, replaces)


async def test_a_use_that_was_spent_before_a_crash_is_the_same_nodes_and_no_others(
    stage: Stage,
) -> None:
    stumbling = StumblingCa(stage.directory / "ca", stage.hub.clock, os.urandom)
    stumbling.stumbles = 1
    stage.ca = stumbling
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(stage.make()), base_url=PUBLIC_URL, trust_env=False
    ) as stage.http:
        token = stage.token(uses=1)
        assert (await stage.post(request_of(token))).status_code == 500
        assert (await stage.post(request_of(token, OTHER_NODE_ID, OTHER_KEY))).status_code == 403
        await stage.enrolled(token)
    assert stage.refusals() == [("failing", 1), ("used_up", 1)]


# --- refused


def without_possession() -> str:
    """Return a request whose signature is not by the key in it."""
    pem = make_csr(KEY, NODE_ID)
    lines = pem.splitlines()
    last = lines[-2]
    lines[-2] = ("A" if last[0] != "A" else "B") + last[1:]
    return "\n".join(lines) + "\n"


async def refused(stage: Stage, message: Message, reason: str) -> bytes:
    """Return the answer to ``message``, which is refused for ``reason``."""
    before = len(stage.ca.in_force())
    response = await stage.post(message)
    assert response.status_code == 403
    assert stage.refusals()[-1] == (reason, 1)
    assert len(stage.ca.in_force()) == before
    return response.content


async def test_all_refusals_look_the_same_and_the_audit_knows_why(stage: Stage, tmp_path: Path) -> None:
    elsewhere = JoinTokens(tmp_path / "elsewhere.jsonl", stage.hub.clock, os.urandom)
    foreign = elsewhere.create(TENANT, HOUR_S, 1, stage.ca.root_pem())
    token = stage.token(uses=10)
    void, used_up, expired = stage.token(), stage.token(), stage.token(ttl_s=60)
    stage.join_tokens.revoke(void.id)
    await stage.enrolled(used_up, *_a_node("the first"))
    await stage.enrolled(token, OTHER_NODE_ID, OTHER_KEY)
    stage.hub.clock.advance(61_000)
    other_key = JoinToken(token.id, os.urandom(32), token.fingerprint)
    good = request_of(token)
    answers = [
        await refused(stage, request_of(foreign), "unknown_token"),
        await refused(stage, request_of(void), "unknown_token"),
        await refused(stage, request_of(expired), "unknown_token"),
        await refused(stage, request_of(other_key), "proof"),
        await refused(stage, {**good, "nonce": "n" * 43}, "proof"),
        await refused(stage, {**good, "csr": make_csr(OTHER_KEY, NODE_ID)}, "proof"),
        await refused(stage, proven(unproven(good), token.key, RELAY), "proof"),
        await refused(stage, request_of(used_up), "used_up"),
        await refused(stage, request_of(token, OTHER_NODE_ID, KEY), "id_taken"),
        await refused(stage, request_of(token, csr=without_possession()), "no_proof_of_possession"),
        await refused(stage, request_of(token, csr=make_csr(KEY, "relay")), "not_a_node_id"),
        await refused(stage, request_of(token, csr=make_csr(KEY, NODE_ID.upper())), "not_a_node_id"),
        await refused(stage, request_of(token, csr=stage.ca.root_pem()), "not_a_request"),
        await refused(stage, request_of(token, csr="\u00e9"), "not_a_request"),
    ]
    assert set(answers) == {b'{"error":"enrolment","message":"This node is not enrolled."}'}


def _a_node(name: str) -> tuple[str, SigningKey]:
    return new_node_ids(1)[0], key_named(name)


async def test_a_refusal_does_not_use_a_token_up(stage: Stage) -> None:
    await stage.enrolled(stage.token())
    token = stage.token(uses=1)
    for message in (
        request_of(token, NODE_ID, OTHER_KEY),
        request_of(token, NODE_ID, KEY),
        request_of(token, csr=without_possession()),
        {**request_of(token, OTHER_NODE_ID), "proof": "p" * 43},
    ):
        assert (await stage.post(message)).status_code == 403
    await stage.enrolled(token, OTHER_NODE_ID, OTHER_KEY)


async def test_beyond_a_crowd_nodes_are_told_to_come_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = stage.token()
    with monkeypatch.context() as patched:
        patched.setattr(relay.pki.enrolments, "_MAX_WAITING", 0)
        assert (await stage.post(request_of(token))).status_code == 429
    assert stage.refusals() == [("busy", 1)]
    await stage.enrolled(token)


# --- when the relay cannot


async def test_a_relay_without_the_ca_s_key_says_so_and_still_shows_the_roots(stage: Stage) -> None:
    token = stage.token()
    (stage.directory / "ca" / "root.key").unlink()
    response = await stage.post(request_of(token))
    assert (response.status_code, response.json()["message"]) == (503, "This relay has no CA key.")
    assert stage.refusals() == [("no_ca", 1)]
    shown = (await stage.http.get("/enroll")).text
    assert shown == stage.ca.root_pem() + stage.ca.servers.roots()[0]


async def test_a_ledger_that_is_damaged_enrols_no_node(stage: Stage) -> None:
    token = stage.token()
    (stage.directory / "ca" / "ledger.jsonl").write_text("not a ledger\n")
    response = await stage.post(request_of(token))
    assert response.status_code == 500
    assert str(stage.directory) not in response.text
    assert stage.refusals() == [("failing", 1)]


async def test_what_cannot_be_recorded_is_not_handed_out_and_is_there_for_the_next_try(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = stage.token()

    def fail(**_facts: object) -> None:
        raise AuditUnavailableError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(stage.hub.audit, "write", fail)
        response = await stage.post(request_of(token))
    assert response.status_code == 500
    assert "certificate" not in response.text
    assert stage.refusals() == [("audit", 1)]
    await stage.enrolled(token)
    assert len(stage.enrolments()) == 1


# --- names


async def test_a_node_has_the_names_of_its_join_token_as_soon_as_it_is_enrolled(
    stage: Stage,
) -> None:
    await stage.enrolled(stage.token(label="greenhouse pi", tags=["site=north"]))
    assert stage.names.read().by_node == {NODE_ID: NodeName(TENANT, "greenhouse pi", ("site=north",))}


async def test_every_node_of_a_join_token_has_its_tags(stage: Stage) -> None:
    token = stage.token(uses=2, tags=["gateway"])
    await stage.enrolled(token)
    await stage.enrolled(token, OTHER_NODE_ID, key_named("another node"))
    assert {name.tags for name in stage.names.read().by_node.values()} == {("gateway",)}
    assert len(stage.names.read().by_node) == 2


async def test_a_node_whose_label_was_given_away_meanwhile_enrols_without_it_and_the_log_shows_that(
    stage: Stage,
) -> None:
    token = stage.token(label="pi", tags=["gateway"])
    stage.names.label(OTHER_NODE_ID, TENANT, "PI")
    await stage.enrolled(token)
    assert stage.names.read().by_node[NODE_ID] == NodeName(TENANT, "", ("gateway",))
    [line] = stage.hub.lines.entries("node enrolled without the label of its join token")
    assert (line["node_id"], line["join_id"]) == (NODE_ID, token.id)


async def test_a_node_that_enrols_without_names_writes_none(stage: Stage) -> None:
    await stage.enrolled(stage.token())
    assert not (stage.directory / "node_names.jsonl").exists()


async def test_a_node_cannot_name_itself(stage: Stage) -> None:
    token = stage.token()
    message = proven({**request_of(token), "label": "pi"}, token.key, NODE)
    assert (await stage.post(message)).status_code == 400


async def test_while_names_cannot_be_written_no_node_is_enrolled_with_one(stage: Stage) -> None:
    token = stage.token(label="pi")
    (stage.directory / "node_names.jsonl").write_text("no entry\n")
    assert (await stage.post(request_of(token))).status_code == 500
    (stage.directory / "node_names.jsonl").unlink()
    await stage.enrolled(token)
    assert stage.names.read().by_node == {NODE_ID: NodeName(TENANT, "pi")}


# --- without HTTP, as the service for other relays asks


def enrolments(stage: Stage, name_node: NameNode | None = None) -> EnrolmentService:
    info = EnrolmentInfo(PUBLIC_URL, None, own_root=False)
    return enrolments_of(stage.hub, stage.ca, stage.join_tokens, name_node or stage.names.name_new, info)


async def reason_of(enrolling: Awaitable[object]) -> EnrolmentRefusal | IdentityReason:
    """Return why the request is refused."""
    with pytest.raises(EnrolmentRefusedError) as caught:
        await enrolling
    return caught.value.reason


async def test_a_node_learns_of_a_relay_without_a_broker_that_there_is_none(stage: Stage) -> None:
    token = stage.token()
    answer = await enrolments(stage).enrol(request_of(token))
    assert is_proven(answer, token.key, RELAY)
    assert (answer["broker"], answer["own_root"], answer["relay_url"]) == (None, False, PUBLIC_URL)


async def test_join_tokens_that_cannot_be_read_enrol_no_node_and_the_log_says_so_once(
    stage: Stage,
) -> None:
    token = stage.token()
    file = stage.directory / "join_tokens.jsonl"
    whole = file.read_bytes()
    file.write_text("no entry\n")
    for _ in range(3):
        assert await reason_of(enrolments(stage).enrol(request_of(token))) is EnrolmentRefusal.FAILING
    assert len(stage.hub.lines.entries("a node cannot be enrolled")) == 1
    assert stage.ca.in_force() == {}
    file.write_bytes(whole)
    await enrolments(stage).enrol(request_of(token))


async def test_on_a_full_disk_no_node_is_enrolled_and_its_token_is_not_used_up(stage: Stage) -> None:
    token = stage.token(uses=1)
    with full_disk():
        assert await reason_of(enrolments(stage).enrol(request_of(token))) is EnrolmentRefusal.FAILING
    assert stage.ca.in_force() == {}
    await enrolments(stage).enrol(request_of(token, OTHER_NODE_ID, OTHER_KEY))


async def test_an_enrolment_that_is_cancelled_leaves_its_place_in_the_queue(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    deciding, decide = Event(), Event()

    def slow(*_name: object) -> bool:
        deciding.set()
        return decide.wait(BOUND_S)

    monkeypatch.setattr(relay.pki.enrolments, "_MAX_WAITING", 1)
    named, token = stage.token(label="pi"), stage.token()
    deciding_one = enrolments(stage, slow)
    first = asyncio.create_task(deciding_one.enrol(request_of(named)))
    try:
        await until(deciding.is_set)
        assert await reason_of(deciding_one.enrol(request_of(token))) is EnrolmentRefusal.BUSY
        first.cancel()
        await asyncio.wait([first])
        await deciding_one.enrol(request_of(token, OTHER_NODE_ID, OTHER_KEY))
    finally:
        decide.set()


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (EnrolmentRefusal.BUSY, 429),
        (EnrolmentRefusal.CA_AWAY, 503),
        (EnrolmentRefusal.AUDIT, 500),
        (EnrolmentRefusal.UNKNOWN_TOKEN, 403),
        (IdentityReason.NOT_A_NODE_ID, 403),
    ],
)
async def test_a_refusal_has_the_status_that_its_client_sees(
    reason: EnrolmentRefusal | IdentityReason, status: int
) -> None:
    assert EnrolmentRefusedError(reason).status == status


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
