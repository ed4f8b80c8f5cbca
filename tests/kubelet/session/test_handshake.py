import pytest

from kubelet.session.link import AudienceError, answer_to
from schemas.identity import certificates_in
from schemas.identity_files import NodeIdentity
from schemas.registry import SchemaRegistry
from schemas.tokens import DEVICE_REF, TokenVerifier
from tests.fakes.frames import PAYLOADS
from tests.fakes.node import identity_of
from tests.fakes.signer import NODE_ID, NOW_MS, SimulatedCa, SimulatedNode

RELAY = "https://relay.example"
JTI, BOOT_ID = "01HZX9K3M4P7Q8R9S0T1V2W3XJ", "01HZX9K3M4P7Q8R9S0T1V2W3XB"
CHALLENGE = {"nonce": "n" * 43, "audience": RELAY, "server_time_ms": NOW_MS}


@pytest.fixture
def identity(node: SimulatedNode) -> NodeIdentity:
    return identity_of(node)


def test_the_answer_names_the_node_and_shows_its_chain(identity: NodeIdentity, node: SimulatedNode) -> None:
    answer = answer_to(CHALLENGE, identity, RELAY, JTI, BOOT_ID)
    assert answer.keys() == PAYLOADS["auth"].keys()
    assert answer["node_id"] == NODE_ID
    assert answer["certificate"] == node.leaf_pem + node.root_pem
    assert answer["boot_id"] == BOOT_ID


@pytest.mark.parametrize("off_s", [0, -3600, 86_400], ids=["now", "an hour behind", "a day ahead"])
def test_the_token_is_for_this_challenge_and_lives_a_minute_by_the_relays_clock(
    identity: NodeIdentity, node: SimulatedNode, registry: SchemaRegistry, off_s: int
) -> None:
    now_s = NOW_MS // 1000 + off_s
    challenge = {**CHALLENGE, "server_time_ms": now_s * 1000 + 999}
    token = answer_to(challenge, identity, RELAY, JTI, BOOT_ID)["token"]
    claims = TokenVerifier(registry, DEVICE_REF).verify(
        token, {node.kid: node.public_key}.get, audiences=frozenset({RELAY}), now_s=now_s
    )
    assert claims == {
        "iss": NODE_ID,
        "sub": NODE_ID,
        "aud": RELAY,
        "nonce": "n" * 43,
        "iat": now_s,
        "exp": now_s + 60,
        "jti": JTI,
        "scope": "device:connect",
        "token_class": "device_runtime",
    }


@pytest.mark.parametrize(
    "named",
    ["https://other.example", f"{RELAY}/", f"{RELAY}:443", RELAY.upper(), RELAY.replace("https", "http"), ""],
)
def test_a_challenge_of_another_audience_is_not_answered(identity: NodeIdentity, named: str) -> None:
    with pytest.raises(AudienceError):
        answer_to({**CHALLENGE, "audience": named}, identity, RELAY, JTI, BOOT_ID)


def test_after_a_renewal_the_new_leaf_is_shown_first_and_names_the_key(
    identity: NodeIdentity, node: SimulatedNode, ca: SimulatedCa, registry: SchemaRegistry
) -> None:
    fresh = ca.issue(key=node.key)
    identity.renew(fresh.leaf_pem, node.root_pem)
    answer = answer_to(CHALLENGE, identity, RELAY, JTI, BOOT_ID)
    shown = certificates_in(answer["certificate"])
    assert shown == certificates_in(fresh.leaf_pem + node.leaf_pem + node.root_pem)
    verifier = TokenVerifier(registry, DEVICE_REF)
    keys = {fresh.kid: node.public_key}
    verifier.verify(answer["token"], keys.get, audiences=frozenset({RELAY}), now_s=NOW_MS // 1000)
