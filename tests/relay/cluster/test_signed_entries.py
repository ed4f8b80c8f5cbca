"""What relays of a sealed fleet store for each other: signed, and nothing else is taken."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.cluster.signed_entries import NoCertificateError, NotSignedError, SignedDocuments
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import Machine, Member, current
from tests.fakes.cluster_server import NatsServer
from tests.fakes.polling import until
from tests.fakes.relay_keys import RelayCa, unsigned
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID

CA = RelayCa()
KEY = CA.key("one")
SUBJECT = "edge.main.ledger.revocation.abc"


def signed_by(ca: RelayCa = CA, *, sealed: bool = True) -> SignedDocuments:
    return SignedDocuments(lambda: KEY, ca.trust.signer, ca.trust.accepts, lambda: sealed)


def test_what_a_relay_has_signed_is_read_by_all_and_what_it_has_not_is_read_until_the_fleet_is_sealed() -> (
    None
):
    written = signed_by().written(SUBJECT, b'{"a":1}')
    for reader in (signed_by(), signed_by(sealed=False)):
        read = reader.read(SUBJECT, written)
        assert (read.document, read.by) == (b'{"a":1}', CA.relay(KEY.certificate))
    assert signed_by(sealed=False).written(SUBJECT, b"{}") == b"{}"
    assert signed_by(sealed=False).read(SUBJECT, b"{}").by is None
    with pytest.raises(NotSignedError, match="is not signed"):
        signed_by().read(SUBJECT, b"{}")


@given(st.integers(0, 4096), st.integers(0, 7))
def test_no_bit_of_it_can_be_changed(at: int, bit: int) -> None:
    written = bytearray(signed_by().written(SUBJECT, b'{"a":1}'))
    written[at % len(written)] ^= 1 << bit
    with pytest.raises(NotSignedError):
        signed_by().read(SUBJECT, bytes(written))


@given(st.binary(max_size=600))
def test_what_is_no_signed_document_is_none(noise: bytes) -> None:
    with pytest.raises(NotSignedError):
        signed_by().read(SUBJECT, noise)


def test_it_is_good_under_its_own_subject_and_by_a_relay_of_this_fleet_that_is_not_revoked() -> None:
    written = signed_by().written(SUBJECT, b"{}")
    with pytest.raises(NotSignedError):
        signed_by().read(f"{SUBJECT}d", written)
    with pytest.raises(NotSignedError, match="chain"):
        signed_by(RelayCa("of others", CA.now_ms)).read(SUBJECT, written)
    ca = RelayCa(CA.name, CA.now_ms)
    reader = signed_by(ca)
    assert reader.read(SUBJECT, written).by is not None
    ca.revoked.add(CA.relay(KEY.certificate).name)
    with pytest.raises(NotSignedError, match="revoked"):
        reader.read(SUBJECT, written)


def test_what_was_signed_lasts_longer_than_the_certificate() -> None:
    later = RelayCa(CA.name, CA.now_ms + 91 * 86_400_000)
    later.ca = CA.ca
    assert signed_by(later).read(SUBJECT, signed_by().written(SUBJECT, b"{}")).by is not None


def test_a_relay_without_a_certificate_writes_nothing_in_a_sealed_fleet() -> None:
    trust = CA.trust
    with pytest.raises(NoCertificateError, match="without-ca-key"):
        SignedDocuments(lambda: None, trust.signer, trust.accepts, lambda: True).written(SUBJECT, b"{}")
    assert unsigned().written(SUBJECT, b"{}") == b"{}"


# --- in the stream, on a real server


@pytest.fixture
def other(tmp_path: Path, one: Machine) -> Machine:
    return Machine.like(one, tmp_path / "other")


async def forge(nats: NatsServer, *said: tuple[str, bytes]) -> None:
    """Write with what one relay has at NATS, and without a certificate of the fleet."""
    async with nats.connected() as client:
        for subject, data in said:
            await client.jetstream().publish(subject, data)


@pytest.mark.integration
async def test_a_revocation_that_no_relay_has_signed_is_not_taken_and_stops_nothing(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    kid = one.issued(NODE_ID)
    joined = one.joined(nats.config, registry, CA, sealed=True)
    async with joined as first, other.joined(nats.config, registry, CA, sealed=True) as second:
        await current(first, second)
        revocation = b'{"kid":"%b","revoked_ms":1}' % kid.encode("ascii")
        await forge(
            nats,
            (f"edge.main.ledger.revocation.{kid}", revocation),
            ("edge.main.ledger.unheard_of.key", b"{}"),
        )
        await until(lambda: first.counted_entries("not_signed", "revocation") == 1)
        await until(lambda: second.counted_entries("not_signed", "unknown") == 1)
        # All that relays say is still understood, and reaches the others.
        one.tokens.revoke("a token", now_ms=1)
        first.part.ledgers.changed("token_revocation")
        await until(lambda: other.tokens.jtis() == {"a token"})
        assert first.part.ledgers.understands
        assert second.part.ledgers.understands
    assert not one.revoked
    assert not other.revoked


@pytest.mark.integration
async def test_what_a_stranger_writes_over_a_revocation_is_replaced_by_it(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    kid = one.issued(NODE_ID)
    async with one.joined(nats.config, registry, CA, sealed=True) as first:
        one.revoke(NODE_ID, first)
        await until(lambda: first.counted_entries("appended", "revocation") == 1)
        await current(first)
        await forge(nats, (f"edge.main.ledger.revocation.{kid}", b"nothing"))
        await until(lambda: first.counted_entries("appended", "revocation") == 2)
        async with other.joined(nats.config, registry, CA, sealed=True):
            await until(lambda: other.revoked == {kid})


@pytest.mark.integration
async def test_what_was_in_the_stream_before_is_signed_by_those_that_have_it(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    kid = one.issued(OTHER_NODE_ID)
    async with one.joined(nats.config, registry) as before:
        one.revoke(OTHER_NODE_ID, before)
        await until(lambda: before.counted_entries("appended", "revocation") == 1)
    async with one.joined(nats.config, registry, CA, sealed=True) as first:
        await until(lambda: first.counted_entries("appended", "revocation") == 1)
        async with other.joined(nats.config, registry, CA, sealed=True):
            await until(lambda: other.revoked == {kid})


@pytest.mark.integration
async def test_the_decision_to_seal_reaches_the_others_and_only_a_root_makes_it(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    async with (
        one.joined(nats.config, registry, CA) as first,
        other.joined(nats.config, registry, CA) as second,
    ):
        await current(first, second)
        assert not other.seal.seal(1)  # it has no key
        forged = b'{"sealed_ms":1,"root":"%b","signature":"%b"}' % (b"ab" * 32, b"A" * 86)
        await forge(nats, (f"edge.main.ledger.seal.{'ab' * 32}", forged))
        await until(lambda: second.part.ledgers.is_current and other.refused == 1)
        assert not other.seal.is_sealed()
        assert one.seal.seal(1)
        assert one.seal.seal(2)
        first.part.ledgers.changed("seal")
        await until(other.seal.is_sealed)
    assert len(one.seal.ledger.read().by_key) == 1


@pytest.mark.integration
async def test_presence_that_no_relay_has_signed_is_none(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    forged_relay = "01HZX9K3M4P7Q8R9S0T1V2W3XE"
    entry = b'{"relay":"%b","session_id":"%b","connected":true}' % (2 * (forged_relay.encode(),))
    async with Member.joined(nats.config, tmp_path / "relay", registry, ca=CA, sealed=True) as member:
        await until(lambda: member.part.presence.is_current)
        await forge(
            nats,
            (f"$KV.edge_main_presence.relay.{forged_relay}", b'{"url":"https://x.example"}'),
            (f"$KV.edge_main_presence.node.{NODE_ID}", entry),
        )
        await until(lambda: member.counted_entries("not_understood", "presence") == 2)
        assert not member.part.presence.others()
        assert member.part.presence.relay_of(NODE_ID) is None


@pytest.mark.integration
async def test_a_relay_that_becomes_sealed_signs_all_that_it_has_in_the_stream(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    kids = [one.issued(node_id) for node_id in (NODE_ID, OTHER_NODE_ID)]
    one.names.label(NODE_ID, "acme", "pump")
    async with (
        one.joined(nats.config, registry, CA) as first,
        other.joined(nats.config, registry, CA) as second,
    ):
        await current(first, second)
        await until(lambda: first.counted_entries("appended", "leaf") == len(kids))
        for member in (first, second):
            member.part.seal()
        await until(lambda: first.counted_entries("appended", "leaf") == 2 * len(kids))
        for member in (first, second):
            await member.fake.lines.until("this relay seals what it says to others from now on")
        await current(first, second)
        one.revoke(NODE_ID, first)
        await until(lambda: other.revoked == {kids[0]})
