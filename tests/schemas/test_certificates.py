import base64
from collections.abc import Sequence
from functools import partial

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from relay.pki.issuing import issue_leaf, make_root
from schemas.certificates import (
    UNENROLLED_TENANT,
    IdentityError,
    endorse,
    is_endorsed,
    make_csr,
    moment,
    read_csr,
    self_signed_leaf,
    verify_leaf,
)
from schemas.identity import MAX_PEM_BYTES, certificates_in, first_certificate_in, kid_of, san_uri
from tests.fakes.forged import invalid_leaf, name_of
from tests.fakes.signer import (
    DAY_MS,
    LOW_ORDER_KEYS,
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    TENANT,
    SimulatedCa,
    key_named,
)

CA = SimulatedCa()
NODE = CA.issue()
KEY = NODE.key
SKEW_MS = 5 * 60_000
DER = first_certificate_in(NODE.leaf_pem)

ED25519_OID = bytes.fromhex("06032b6570")
UNKNOWN_OID = bytes.fromhex("06032b6577")


def pem(der: bytes, label: str = "CERTIFICATE") -> str:
    return f"-----BEGIN {label}-----\n{base64.b64encode(der).decode()}\n-----END {label}-----\n"


leaf_with = partial(invalid_leaf, CA)


def ec_key() -> ec.EllipticCurvePublicKey:
    return ec.derive_private_key(7, ec.SECP256R1()).public_key()


def uri(text: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier(text)


# --- the leaf -----------------------------------------------------------------------------------------


def test_a_leaf_of_the_root_is_believed() -> None:
    identity = verify_leaf(NODE.leaf_pem, [CA.root_pem], NOW_MS)
    assert identity.node_id == NODE_ID
    assert identity.tenant == TENANT
    assert identity.public_key == NODE.public_key
    assert identity.kid == kid_of(DER)
    assert certificates_in(identity.pem) == [DER]
    assert identity.not_before_ms == NOW_MS - SKEW_MS
    assert identity.not_after_ms == NOW_MS + 90 * DAY_MS


def test_only_the_first_certificate_counts() -> None:
    other = CA.issue(OTHER_NODE_ID)
    identity = verify_leaf(NODE.leaf_pem + other.leaf_pem + CA.root_pem, [CA.root_pem], NOW_MS)
    assert identity == NODE.identity()


def test_one_of_several_roots_suffices() -> None:
    other = SimulatedCa("other")
    assert verify_leaf(NODE.leaf_pem, [other.root_pem, CA.root_pem], NOW_MS).node_id == NODE_ID
    assert verify_leaf(NODE.leaf_pem, [other.root_pem + CA.root_pem], NOW_MS).node_id == NODE_ID


def test_the_plain_leaf_of_the_helper_is_believed() -> None:
    # Else every refusal below could be for another reason than the one it names.
    assert verify_leaf(leaf_with(), [CA.root_pem], NOW_MS).node_id == NODE_ID


LOOKALIKE = SimulatedCa("root")
LOOKALIKE.key = key_named("an impostor")
LOOKALIKE.root_pem = make_root(LOOKALIKE.key, "root", NOW_MS - DAY_MS, 3650, 1)
RENAMED_ISSUER = leaf_with(issuer="another")


@pytest.mark.parametrize(
    "leaf",
    [
        pytest.param(SimulatedCa("other").issue().leaf_pem, id="a-foreign-root"),
        pytest.param(LOOKALIKE.issue().leaf_pem, id="a-root-of-the-same-name-and-another-key"),
        pytest.param(SimulatedCa("other").issue().leaf_pem + CA.root_pem, id="our-root-only-appended"),
        pytest.param(self_signed_leaf(KEY, NODE_ID, NOW_MS, 90, 5), id="self-signed"),
        pytest.param(RENAMED_ISSUER, id="our-key-under-another-issuer-name"),
        pytest.param(pem(DER[:-1] + bytes([DER[-1] ^ 1])), id="one-bit-of-the-signature-flipped"),
    ],
)
def test_a_leaf_that_no_root_has_issued_is_not_accepted(leaf: str) -> None:
    with pytest.raises(IdentityError) as caught:
        verify_leaf(leaf, [CA.root_pem], NOW_MS)
    assert caught.value.reason == "chain"


def test_without_roots_no_leaf_is_trusted() -> None:
    with pytest.raises(IdentityError, match="chain"):
        verify_leaf(NODE.leaf_pem, [], NOW_MS)


def test_a_leaf_cannot_issue_a_leaf() -> None:
    middle = SimulatedCa()
    middle.root_pem, middle.key = NODE.leaf_pem, NODE.key
    grandchild = middle.issue(OTHER_NODE_ID).leaf_pem
    for presented in (grandchild, grandchild + NODE.leaf_pem + CA.root_pem):
        with pytest.raises(IdentityError, match="chain"):
            verify_leaf(presented, [CA.root_pem], NOW_MS)
    with pytest.raises(IdentityError, match="chain"):
        verify_leaf(grandchild, [NODE.leaf_pem], NOW_MS)


def test_an_anchor_that_does_not_say_that_it_is_a_ca_verifies_no_leaf() -> None:
    anchor = SimulatedCa()
    anchor.root_pem, anchor.key = leaf_with(is_ca=None), NODE.key
    with pytest.raises(IdentityError, match="chain"):
        verify_leaf(anchor.issue(OTHER_NODE_ID).leaf_pem, [anchor.root_pem], NOW_MS)


def test_the_root_itself_is_no_leaf() -> None:
    with pytest.raises(IdentityError, match="wrong_form"):
        verify_leaf(CA.root_pem, [CA.root_pem], NOW_MS)


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        pytest.param(leaf_with(names=()), "wrong_form", id="no-alternative-name"),
        pytest.param(leaf_with(names=[x509.DNSName("node.example")]), "wrong_form", id="a-dns-name"),
        pytest.param(
            leaf_with(names=[uri(san_uri(TENANT, NODE_ID)), uri(san_uri("b", NODE_ID))]),
            "wrong_form",
            id="two-tenants",
        ),
        pytest.param(
            leaf_with(names=[uri(san_uri(TENANT, NODE_ID)), x509.DNSName("node.example")]),
            "wrong_form",
            id="a-dns-name-beside-the-uri",
        ),
        pytest.param(leaf_with(names=[uri("urn:other:node")]), "wrong_form", id="another-uri"),
        pytest.param(
            leaf_with(names=[uri(san_uri("Acme", NODE_ID))]), "wrong_form", id="a-tenant-in-upper-case"
        ),
        pytest.param(leaf_with(names=[uri(san_uri("", NODE_ID))]), "wrong_form", id="an-empty-tenant"),
        pytest.param(leaf_with(names=[uri(san_uri("a" * 64, NODE_ID))]), "wrong_form", id="a-tenant-of-64"),
        pytest.param(
            leaf_with(names=[uri(san_uri(TENANT, NODE_ID) + ":x")]), "wrong_form", id="a-uri-that-goes-on"
        ),
        pytest.param(leaf_with(is_ca=True), "wrong_form", id="a-ca"),
        pytest.param(leaf_with(is_ca=None), "wrong_form", id="no-basic-constraints"),
        pytest.param(leaf_with(common_names=()), "wrong_form", id="no-common-name"),
        pytest.param(leaf_with(common_names=(NODE_ID, NODE_ID)), "wrong_form", id="two-common-names"),
        pytest.param(leaf_with(common_names=(OTHER_NODE_ID,)), "id_mismatch", id="another-nodes-common-name"),
        pytest.param(
            leaf_with(common_names=(NODE_ID.upper(),)), "id_mismatch", id="a-common-name-in-upper-case"
        ),
        pytest.param(leaf_with(public_key=ec_key()), "not_ed25519", id="an-elliptic-curve-key"),
    ],
)
def test_a_leaf_of_our_root_that_is_not_of_the_form_is_not_believed(leaf: str, reason: str) -> None:
    with pytest.raises(IdentityError) as caught:
        verify_leaf(leaf, [CA.root_pem], NOW_MS)
    assert caught.value.reason == reason


@pytest.mark.parametrize("low", LOW_ORDER_KEYS.values(), ids=LOW_ORDER_KEYS)
def test_a_leaf_with_a_key_of_low_order_is_not_believed(low: bytes) -> None:
    leaf = leaf_with(public_key=low)
    with pytest.raises(IdentityError) as caught:
        verify_leaf(leaf, [CA.root_pem], NOW_MS)
    assert caught.value.reason == "low_order_key"


def duplicated_extension() -> bytes:
    first, second = (x509.ObjectIdentifier(f"1.3.6.1.4.1.55555.{number}") for number in (1, 2))
    leaf = leaf_with(more=[x509.UnrecognizedExtension(first, b""), x509.UnrecognizedExtension(second, b"")])
    der = first_certificate_in(leaf)
    stem = bytes.fromhex("2b0601040183b203")
    assert der.count(stem) == 2
    return der.replace(stem + b"\x02", stem + b"\x01")


def other_general_name() -> bytes:
    at = DER.index(b"urn:edge-kubelet") - 2
    return DER[:at] + b"\xa3" + DER[at + 1 :]  # the tag of an x400Address


def with_one_oid_replaced(which: int) -> bytes:
    parts = DER.split(ED25519_OID)
    assert len(parts) == 4
    return (
        b"".join(
            part + (UNKNOWN_OID if index == which else ED25519_OID) for index, part in enumerate(parts[:-1])
        )
        + (parts[-1])
    )


@pytest.mark.parametrize(
    "leaf",
    [
        pytest.param("", id="nothing"),
        pytest.param("-----BEGIN CERTIFICATE-----\nAAAAA\n-----END CERTIFICATE-----", id="not-base64"),
        pytest.param(pem(b"no certificate"), id="not-der"),
        pytest.param(pem(DER[:-1]), id="cut-off"),
        pytest.param(pem(DER + b"\0"), id="a-byte-too-many"),
        pytest.param(NODE.leaf_pem + " " * MAX_PEM_BYTES, id="too-large"),
        pytest.param(make_csr(KEY, NODE_ID), id="a-request"),
        pytest.param(pem(with_one_oid_replaced(1)), id="a-key-of-an-unknown-algorithm"),
        pytest.param(
            pem(DER.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x05")), id="an-unknown-version"
        ),
        pytest.param(pem(duplicated_extension()), id="an-extension-twice"),
        pytest.param(pem(other_general_name()), id="a-name-of-an-unsupported-type"),
    ],
)
def test_what_cannot_be_read_as_a_certificate_is_refused_with_a_reason(leaf: str) -> None:
    with pytest.raises(IdentityError) as caught:
        verify_leaf(leaf, [CA.root_pem], NOW_MS)
    assert caught.value.reason == "bad_certificate"


@pytest.mark.parametrize("which", [0, 2], ids=["inside", "outside"])
def test_a_signature_of_an_unknown_algorithm_proves_nothing(which: int) -> None:
    with pytest.raises(IdentityError, match="chain"):
        verify_leaf(pem(with_one_oid_replaced(which)), [CA.root_pem], NOW_MS)


@pytest.mark.parametrize("mask", [0x01, 0x80], ids=hex)
def test_a_leaf_with_any_bit_flipped_is_refused_with_a_reason(mask: int) -> None:
    serial = DER.index(b"\xa0\x03\x02\x01\x02\x02\x01") + 7  # behind the version
    for index in range(len(DER)):
        if index == serial:
            continue  # a serial of zero or less: the library warns before anything here can refuse it
        flipped = bytearray(DER)
        flipped[index] ^= mask
        with pytest.raises(IdentityError):
            verify_leaf(pem(bytes(flipped)), [CA.root_pem], NOW_MS)


@pytest.mark.parametrize(
    ("now_ms", "believed"),
    [
        pytest.param(NOW_MS - SKEW_MS - 1, False, id="before-the-allowance-for-clocks"),
        pytest.param(NOW_MS - SKEW_MS, True, id="within-the-allowance-for-clocks"),
        pytest.param(NOW_MS + 90 * DAY_MS - 1, True, id="in-the-last-millisecond"),
        pytest.param(NOW_MS + 90 * DAY_MS, False, id="expired"),
    ],
)
def test_a_leaf_is_believed_within_its_validity_only(now_ms: int, believed: bool) -> None:  # noqa: FBT001 - the expected answer
    if believed:
        assert verify_leaf(NODE.leaf_pem, [CA.root_pem], now_ms) == NODE.identity()
    else:
        with pytest.raises(IdentityError, match="validity"):
            verify_leaf(NODE.leaf_pem, [CA.root_pem], now_ms)


NOON_MS = NOW_MS + DAY_MS // 2
"""Within the one day of ``leaf_with``."""
ENDING_AT_NOON = make_root(CA.key, "root", NOON_MS - 3 * DAY_MS, 3, 1)
BEGINNING_AT_NOON = make_root(CA.key, "root", NOON_MS + SKEW_MS, 3650, 1)


@pytest.mark.parametrize(
    ("root", "now_ms", "believed"),
    [
        pytest.param(ENDING_AT_NOON, NOON_MS - 1, True, id="in-the-last-millisecond-of-the-root"),
        pytest.param(ENDING_AT_NOON, NOON_MS, False, id="as-the-root-ends"),
        pytest.param(BEGINNING_AT_NOON, NOON_MS - 1, False, id="a-millisecond-before-the-root-begins"),
        pytest.param(BEGINNING_AT_NOON, NOON_MS, True, id="as-the-root-begins"),
    ],
)
def test_a_root_outside_its_own_validity_verifies_no_leaf(root: str, now_ms: int, believed: bool) -> None:  # noqa: FBT001 - the expected answer
    leaf = leaf_with()
    assert verify_leaf(leaf, [CA.root_pem], now_ms).node_id == NODE_ID
    if believed:
        assert verify_leaf(leaf, [root], now_ms).node_id == NODE_ID
    else:
        with pytest.raises(IdentityError) as caught:
            verify_leaf(leaf, [root], now_ms)
        assert caught.value.reason == "chain"


def test_a_root_that_has_ended_does_not_stand_in_the_way_of_one_that_has_not() -> None:
    leaf = leaf_with()
    for roots in ([ENDING_AT_NOON, CA.root_pem], [ENDING_AT_NOON + CA.root_pem]):
        assert verify_leaf(leaf, roots, NOON_MS).node_id == NODE_ID


def test_a_self_signed_leaf_that_has_expired_is_not_believed_even_by_itself() -> None:
    leaf = self_signed_leaf(KEY, NODE_ID, NOW_MS, 90, 5)
    with pytest.raises(IdentityError) as caught:
        verify_leaf(leaf, [leaf], NOW_MS + 90 * DAY_MS)
    assert caught.value.reason == "validity"


# --- issuing ------------------------------------------------------------------------------------------


def issue(
    public_key: bytes = NODE.public_key,
    node_id: str = NODE_ID,
    tenant: str = TENANT,
    root_pem: str = CA.root_pem,
) -> str:
    return issue_leaf(
        root_pem,
        CA.key,
        node_id=node_id,
        tenant=tenant,
        public_key=public_key,
        now_ms=NOW_MS,
        valid_days=90,
        serial=7,
    )


def test_a_leaf_says_what_it_is_for() -> None:
    leaf = x509.load_pem_x509_certificate(issue().encode())
    assert leaf.subject == name_of(NODE_ID)
    assert leaf.issuer == name_of("root")
    assert leaf.serial_number == 7
    assert leaf.extensions.get_extension_for_class(x509.BasicConstraints).critical
    usage = leaf.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.digital_signature
    assert not usage.key_cert_sign


def test_issuing_the_same_facts_gives_the_same_bytes() -> None:
    assert issue() == issue()


@pytest.mark.parametrize("low", LOW_ORDER_KEYS.values(), ids=LOW_ORDER_KEYS)
def test_no_leaf_is_issued_for_a_key_of_low_order(low: bytes) -> None:
    with pytest.raises(IdentityError, match="low_order_key"):
        issue(public_key=low)


@pytest.mark.parametrize(
    ("node_id", "tenant", "reason"),
    [
        pytest.param(NODE_ID.upper(), TENANT, "not_a_node_id", id="an-id-in-upper-case"),
        pytest.param(f"{NODE_ID}\n", TENANT, "not_a_node_id", id="an-id-and-a-line-feed"),
        pytest.param("", TENANT, "not_a_node_id", id="no-id"),
        pytest.param(NODE_ID, "", "not_a_tenant", id="no-tenant"),
        pytest.param(NODE_ID, "acme:node:x", "not_a_tenant", id="a-tenant-that-splits-the-uri"),
        pytest.param(NODE_ID, "acme\n", "not_a_tenant", id="a-tenant-and-a-line-feed"),
        pytest.param(NODE_ID, "-acme", "not_a_tenant", id="a-tenant-that-begins-with-a-dash"),
        pytest.param(NODE_ID, "Acme", "not_a_tenant", id="a-tenant-in-upper-case"),
        pytest.param(NODE_ID, "a" * 64, "not_a_tenant", id="a-tenant-of-64"),
        pytest.param(NODE_ID, UNENROLLED_TENANT, "not_a_tenant", id="the-tenant-of-who-has-none"),
    ],
)
def test_no_leaf_is_issued_for_names_of_another_form(node_id: str, tenant: str, reason: str) -> None:
    with pytest.raises(IdentityError) as caught:
        issue(node_id=node_id, tenant=tenant)
    assert caught.value.reason == reason


@pytest.mark.parametrize("tenant", ["a", "0", "a" * 63, "a-b_c", f"{UNENROLLED_TENANT}2"])
def test_a_leaf_is_issued_for_every_tenant_of_the_form(tenant: str) -> None:
    assert verify_leaf(issue(tenant=tenant), [CA.root_pem], NOW_MS).tenant == tenant


def root_ending_at(ms: int) -> str:
    return make_root(CA.key, "root", ms - 3650 * DAY_MS, 3650, 1)


@pytest.mark.parametrize(
    ("left_ms", "days"),
    [
        pytest.param(3650 * DAY_MS, 90, id="a-root-with-years-left"),
        pytest.param(90 * DAY_MS, 90, id="a-root-that-ends-with-the-leaf"),
        pytest.param(90 * DAY_MS - 1000, 89, id="a-root-that-ends-a-second-before-the-leaf"),
        pytest.param(30 * DAY_MS + DAY_MS // 2, 30, id="a-root-with-30-and-a-half-days-left"),
        pytest.param(DAY_MS, 1, id="a-root-with-a-day-left"),
    ],
)
def test_a_leaf_never_outlives_its_root(left_ms: int, days: int) -> None:
    root = root_ending_at(NOW_MS + left_ms)
    leaf = issue(root_pem=root)
    assert verify_leaf(leaf, [root], NOW_MS).not_after_ms == NOW_MS + days * DAY_MS <= NOW_MS + left_ms
    assert verify_leaf(leaf, [root], NOW_MS + days * DAY_MS - 1).node_id == NODE_ID


@pytest.mark.parametrize(
    "left_ms",
    [
        pytest.param(DAY_MS - 1000, id="within-a-day"),
        pytest.param(0, id="now"),
        pytest.param(-1000, id="a-second-ago"),
        pytest.param(-100 * DAY_MS, id="long-ago"),
    ],
)
def test_no_leaf_is_issued_by_a_root_that_ends_too_soon_to_be_of_use(left_ms: int) -> None:
    with pytest.raises(IdentityError) as caught:
        issue(root_pem=root_ending_at(NOW_MS + left_ms))
    assert caught.value.reason == "root_too_old"


def test_a_root_may_issue_leaves_and_nothing_below_them() -> None:
    root = x509.load_pem_x509_certificate(CA.root_pem.encode())
    basic = root.extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical
    assert basic.value == x509.BasicConstraints(ca=True, path_length=0)
    usage = root.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.key_cert_sign
    assert not usage.digital_signature
    root.verify_directly_issued_by(root)


def test_a_self_signed_leaf_is_believed_by_who_has_it_as_its_anchor() -> None:
    leaf = self_signed_leaf(KEY, NODE_ID, NOW_MS, 90, 5)
    identity = verify_leaf(leaf, [leaf], NOW_MS)
    assert (identity.node_id, identity.tenant) == (NODE_ID, UNENROLLED_TENANT)
    assert identity.public_key == NODE.public_key


# --- the request --------------------------------------------------------------------------------------


def csr_der(common_names: Sequence[str] = (NODE_ID,)) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(name_of(*common_names))
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(KEY))
    return builder.sign(key, None).public_bytes(Encoding.DER)


def csr_pem(der: bytes) -> str:
    return pem(der, "CERTIFICATE REQUEST")


def ec_csr() -> str:
    builder = x509.CertificateSigningRequestBuilder().subject_name(name_of(NODE_ID))
    return (
        builder.sign(ec.derive_private_key(7, ec.SECP256R1()), SHA256()).public_bytes(Encoding.PEM).decode()
    )


def test_a_request_is_read_back() -> None:
    assert read_csr(make_csr(KEY, NODE_ID)) == (NODE_ID, NODE.public_key)
    assert read_csr(csr_pem(csr_der())) == (NODE_ID, NODE.public_key)


@pytest.mark.parametrize(
    ("csr", "reason"),
    [
        pytest.param("", "not_a_request", id="nothing"),
        pytest.param("caf\xe9", "not_a_request", id="not-ascii"),
        pytest.param(NODE.leaf_pem, "not_a_request", id="a-certificate"),
        pytest.param(csr_pem(csr_der()[:-1]), "not_a_request", id="cut-off"),
        pytest.param(" " * MAX_PEM_BYTES + make_csr(KEY, NODE_ID), "not_a_request", id="too-large"),
        pytest.param(
            csr_pem(csr_der().replace(ED25519_OID, UNKNOWN_OID)),
            "not_a_request",
            id="a-key-of-an-unknown-algorithm",
        ),
        pytest.param(ec_csr(), "not_ed25519", id="an-elliptic-curve-key"),
        pytest.param(
            csr_pem(csr_der().replace(NODE.public_key, key_named("another").verify_key.encode())),
            "no_proof_of_possession",
            id="the-key-of-another",
        ),
        pytest.param(
            csr_pem(csr_der().replace(NODE_ID.encode(), OTHER_NODE_ID.encode())),
            "no_proof_of_possession",
            id="the-id-of-another",
        ),
        pytest.param(csr_pem(csr_der(())), "not_a_node_id", id="no-common-name"),
        pytest.param(csr_pem(csr_der((NODE_ID, OTHER_NODE_ID))), "not_a_node_id", id="two-common-names"),
        pytest.param(make_csr(KEY, "node"), "not_a_node_id", id="a-name-that-is-no-id"),
        *(
            pytest.param(csr_pem(csr_der().replace(NODE.public_key, low)), "low_order_key", id=f"low-{name}")
            for name, low in LOW_ORDER_KEYS.items()
        ),
    ],
)
def test_a_request_that_proves_nothing_is_refused(csr: str, reason: str) -> None:
    with pytest.raises(IdentityError) as caught:
        read_csr(csr)
    assert caught.value.reason == reason
    assert str(caught.value) == reason


OLD, NEW, OTHER = SimulatedCa("old"), SimulatedCa("new"), SimulatedCa("other")


def der(ca: SimulatedCa) -> bytes:
    return first_certificate_in(ca.root_pem)


def test_an_endorsement_is_a_signature_of_the_old_key_over_the_new_root() -> None:
    text = endorse(OLD.key, NEW.root_pem)
    signature = base64.urlsafe_b64decode(text + "==")
    assert OLD.key.verify_key.verify(b"edge-kubelet root\n" + der(NEW), signature)
    assert len(text) == 86


def test_one_of_those_that_are_trusted_is_enough() -> None:
    endorsement = endorse(OLD.key, NEW.root_pem)
    for trusted in ([OLD], [OTHER, OLD], [OLD, OTHER]):
        assert is_endorsed(der(NEW), map(der, trusted), endorsement)


@pytest.mark.parametrize("trusted", [[], [OTHER], [NEW]], ids=["none", "another", "itself"])
def test_a_root_that_is_not_trusted_endorses_nothing(trusted: list[SimulatedCa]) -> None:
    assert not is_endorsed(der(NEW), map(der, trusted), endorse(OLD.key, NEW.root_pem))


def test_an_endorsement_is_for_one_root() -> None:
    assert not is_endorsed(der(OTHER), [der(OLD)], endorse(OLD.key, NEW.root_pem))


def test_what_the_old_root_signed_otherwise_is_no_endorsement() -> None:
    plain = base64.urlsafe_b64encode(OLD.key.sign(der(NEW)).signature).rstrip(b"=").decode()
    assert not is_endorsed(der(NEW), [der(OLD)], plain)


@pytest.mark.parametrize("text", ["", "A", "A" * 86, "=" * 86, "\ud800" * 86, "\x1b[31m"])
def test_what_is_no_signature_endorses_nothing(text: str) -> None:
    assert not is_endorsed(der(NEW), [der(OLD)], text)


def test_a_root_of_another_kind_endorses_nothing_and_does_no_harm() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateBuilder(name_of("ec"), name_of("ec"), key.public_key(), 5)
    builder = builder.not_valid_before(moment(NOW_MS)).not_valid_after(moment(NOW_MS + DAY_MS))
    strange = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)
    endorsement = endorse(OLD.key, NEW.root_pem)
    assert not is_endorsed(der(NEW), [strange, b"no certificate"], endorsement)
    assert is_endorsed(der(NEW), [strange, b"", der(OLD)], endorsement)
