"""Attacker: node A, or one who makes certificates. Tried: a leaf that names B but is not B's.

Among them leaves that the CA itself signed by mistake: nothing but the one form of a leaf is believed. What
must happen: the identity is refused with its reason and nothing that its key signed is ever in force.
"""

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from schemas.certificates import self_signed_leaf
from schemas.identity import certificates_in, to_pem
from tests.fakes.forged import invalid_leaf, san
from tests.fakes.hub import Hub
from tests.fakes.refusals import audited_refusals, manifest_in_force, refusal
from tests.fakes.served_relay import ServedRelay
from tests.fakes.server_ca import issue_old_server
from tests.fakes.signer import (
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    SimulatedCa,
    SimulatedNode,
    key_named,
)

CA = SimulatedCa()
THIEF = key_named("a thief")
THIEFS_KEY = bytes(THIEF.verify_key)
LOOKALIKE = SimulatedCa("lookalike")
LOOKALIKE.name = CA.name

# id-ce-issuerAltName (2.5.29.18) and id-ce-subjectAltName (2.5.29.17) as DER has them.
ISSUER_NAME, SUBJECT_NAME = bytes.fromhex("0603551d12"), bytes.fromhex("0603551d11")


def two_name_extensions() -> str:
    """Return a leaf with the extension of the alternative name twice, which no library would build."""
    leaf = invalid_leaf(
        CA, names=[san(OTHER_NODE_ID)], public_key=THIEFS_KEY, more=[x509.IssuerAlternativeName([san()])]
    )
    certificate = x509.load_pem_x509_certificate(leaf.encode("ascii"))
    signed = certificate.tbs_certificate_bytes
    renamed = signed.replace(ISSUER_NAME, SUBJECT_NAME)
    assert renamed != signed
    der = certificate.public_bytes(Encoding.DER).replace(signed, renamed)
    return to_pem([der.replace(certificate.signature, CA.key.sign(renamed).signature)])


GAMES = [
    pytest.param(
        invalid_leaf(CA, common_names=[NODE_ID], names=[san(OTHER_NODE_ID)], public_key=THIEFS_KEY),
        "id_mismatch",
        id="B in the common name and A in the alternative name",
    ),
    pytest.param(
        invalid_leaf(CA, common_names=[OTHER_NODE_ID], names=[san(NODE_ID)], public_key=THIEFS_KEY),
        "id_mismatch",
        id="A in the common name and B in the alternative name",
    ),
    pytest.param(
        invalid_leaf(CA, common_names=[OTHER_NODE_ID], names=[san(OTHER_NODE_ID)], public_key=THIEFS_KEY),
        "id_mismatch",
        id="A's own leaf on B's topic",
    ),
    pytest.param(
        invalid_leaf(CA, common_names=[OTHER_NODE_ID, NODE_ID], public_key=THIEFS_KEY),
        "wrong_form",
        id="two common names",
    ),
    pytest.param(
        invalid_leaf(CA, names=[san(OTHER_NODE_ID), san(NODE_ID)], public_key=THIEFS_KEY),
        "wrong_form",
        id="A's name and B's in one extension",
    ),
    pytest.param(
        invalid_leaf(CA, names=[san(), san()], public_key=THIEFS_KEY),
        "wrong_form",
        id="B's name twice in one extension",
    ),
    pytest.param(two_name_extensions(), "bad_certificate", id="two extensions of names, A's and B's"),
    pytest.param(
        invalid_leaf(CA, names=[san(), x509.DNSName(NODE_ID)], public_key=THIEFS_KEY),
        "wrong_form",
        id="a DNS name besides",
    ),
    pytest.param(
        invalid_leaf(CA, names=[x509.DNSName(NODE_ID)], public_key=THIEFS_KEY),
        "wrong_form",
        id="a DNS name alone",
    ),
    pytest.param(
        issue_old_server(
            CA.root_pem,
            CA.key,
            name=NODE_ID,
            hosts=[NODE_ID],
            public_key=THIEFS_KEY,
            now_ms=NOW_MS,
            valid_days=1,
            serial=7,
        ),
        "wrong_form",
        id="a server's certificate with B's id as its name",
    ),
    pytest.param(self_signed_leaf(THIEF, NODE_ID, NOW_MS, 90, 5), "chain", id="self-signed"),
    pytest.param(
        invalid_leaf(CA, public_key=THIEFS_KEY, signer=THIEF), "chain", id="in the root's name, self-made"
    ),
    pytest.param(LOOKALIKE.issue(key=THIEF).leaf_pem, "chain", id="a root of the same name"),
    pytest.param(
        LOOKALIKE.issue(key=THIEF).leaf_pem + LOOKALIKE.root_pem, "chain", id="a root that it brings itself"
    ),
    pytest.param(
        LOOKALIKE.issue(key=THIEF).leaf_pem + CA.issue().leaf_pem + CA.root_pem,
        "chain",
        id="B's leaf and our root after its own",
    ),
    pytest.param(
        CA.issue(OTHER_NODE_ID, key=THIEF).leaf_pem + CA.issue().leaf_pem,
        "id_mismatch",
        id="A's leaf before B's",
    ),
]


@pytest.mark.parametrize(("leaf", "reason"), GAMES)
def test_a_leaf_that_is_not_quite_another_nodes_is_refused(
    hub: Hub, node: SimulatedNode, leaf: str, reason: str
) -> None:
    good = hub.connect(node)
    hub.fleet.offer_identity(NODE_ID, leaf)
    assert audited_refusals(hub) == [refusal("identity_refused", NODE_ID, reason)]
    impostor = SimulatedNode(NODE_ID, node.tenant, THIEF, leaf, hub.ca.root_pem)
    verdict = hub.fleet.offer_manifest(NODE_ID, impostor.manifest(issued_at_ms=NOW_MS + 1), "broker")
    assert verdict.manifest is None
    assert manifest_in_force(hub, node) == good


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("leaf", "reason"), GAMES)
async def test_nor_does_it_open_a_session(
    relay: ServedRelay, node: SimulatedNode, leaf: str, reason: str
) -> None:
    impostor = SimulatedNode(NODE_ID, node.tenant, THIEF, leaf, relay.hub.ca.root_pem)
    async with relay.end(impostor) as end:
        await end.answer_challenge()
        assert await end.until_closed() == (4001, [])
    assert audited_refusals(relay.hub) == [refusal("node_refused", "127.0.0.1", reason)]
    assert relay.hub.nodes_of(node.tenant) == []


def test_an_odd_serial_is_refused_without_a_word_of_the_librarys(hub: Hub, node: SimulatedNode) -> None:
    good = hub.connect(node)
    (der,) = certificates_in(invalid_leaf(CA, public_key=THIEFS_KEY))
    odd = der.replace(bytes.fromhex("020163"), bytes.fromhex("020100"), 1)
    assert odd != der
    hub.fleet.offer_identity(NODE_ID, to_pem([odd]))
    (line,) = audited_refusals(hub)
    assert line["event"] == "identity_refused"
    assert manifest_in_force(hub, node) == good
