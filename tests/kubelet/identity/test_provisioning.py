import os
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from kubelet.identity.provisioning import Issued, create_identity, install_certificate, install_renewed
from relay.pki.authority import CertificateAuthority
from schemas.certificates import (
    IdentityError,
    client_builder,
    endorse,
    endorse_servers,
    pem_of,
    read_csr,
    verify_leaf,
)
from schemas.identity import san_uri
from schemas.identity_files import IdentityFiles, IdentityFilesError
from schemas.projection import is_node_id
from tests.fakes.clock import FakeClock
from tests.fakes.server_ca import SimulatedServerCa
from tests.fakes.signer import (
    DAY_MS,
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    TENANT,
    SimulatedCa,
    SimulatedNode,
    key_named,
)

NEXT_ROOT = SimulatedCa("the next root").root_pem


@pytest.fixture
def files(tmp_path: Path) -> IdentityFiles:
    return IdentityFiles(tmp_path / "state")


@pytest.fixture
def made(files: IdentityFiles) -> IdentityFiles:
    create_identity(files, NOW_MS, os.urandom)
    return files


def issued(ca: SimulatedCa, files: IdentityFiles, node_id: str | None = None) -> SimulatedNode:
    """Return a leaf of ``ca`` for the node and the key in ``files``."""
    own = files.read()
    return ca.issue(node_id or own.node_id, key=own.key)


def everything_in(files: IdentityFiles) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in files.root.iterdir()}


def test_an_identity_is_made_of_what_comes_in(files: IdentityFiles) -> None:
    node_id = create_identity(files, NOW_MS, bytes)
    identity = files.read()
    assert is_node_id(node_id)
    assert (identity.node_id, identity.root_pem) == (node_id, None)
    assert bytes(identity.key) == bytes(32)


def test_the_request_proves_the_key_to_a_ca(made: IdentityFiles) -> None:
    own = made.read()
    assert read_csr(made.csr.read_text()) == (own.node_id, bytes(own.key.verify_key))


def test_the_first_leaf_is_believed_by_the_node_alone(made: IdentityFiles, ca: SimulatedCa) -> None:
    own = made.read()
    leaf = verify_leaf(own.leaf_pem, [own.leaf_pem], NOW_MS)
    assert (leaf.node_id, leaf.public_key) == (own.node_id, bytes(own.key.verify_key))
    with pytest.raises(IdentityError, match="chain"):
        verify_leaf(own.leaf_pem, [ca.root_pem], NOW_MS)


def test_only_the_owner_can_read_the_key(made: IdentityFiles) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made.root.iterdir()}
    assert modes == {"node_id": 0o644, "node.key": 0o600, "node.csr": 0o644, "leaf.pem": 0o644}
    assert stat.S_IMODE(made.root.stat().st_mode) == 0o700


def test_an_identity_is_never_overwritten(made: IdentityFiles) -> None:
    before = everything_in(made)
    with pytest.raises(IdentityFilesError, match="holds an identity already"):
        create_identity(made, NOW_MS, os.urandom)
    assert everything_in(made) == before


def test_a_certificate_of_a_ca_takes_the_place_of_the_first(made: IdentityFiles, ca: SimulatedCa) -> None:
    node = issued(ca, made)
    identity = install_certificate(made, Issued(node.leaf_pem, ca.root_pem), NOW_MS)
    own = made.read()
    assert (own.kid, own.root_pem) == (node.kid, ca.root_pem)
    assert own.chain_pem == node.leaf_pem + ca.root_pem
    assert (identity.node_id, identity.kid, identity.tenant) == (own.node_id, own.kid, node.tenant)


def test_text_around_a_leaf_is_left_behind(made: IdentityFiles, ca: SimulatedCa) -> None:
    node = issued(ca, made)
    install_certificate(
        made, Issued(f"Certificate:\n  Data\n{node.leaf_pem}{ca.root_pem}", ca.root_pem), NOW_MS
    )
    assert made.leaf.read_text() == node.leaf_pem


def test_a_leaf_is_no_root_of_itself(made: IdentityFiles, ca: SimulatedCa) -> None:
    leaf_pem = issued(ca, made).leaf_pem
    check_refused(made, leaf_pem, leaf_pem, "name the root of the CA")
    check_refused(made, leaf_pem, ca.root_pem + leaf_pem, "name the root of the CA")


@pytest.mark.parametrize(
    ("changed", "now_ms", "reason"),
    [
        pytest.param({"node_id": OTHER_NODE_ID}, NOW_MS, "for another node", id="node"),
        pytest.param({"key": key_named("a stranger")}, NOW_MS, "for another key", id="key"),
        pytest.param({}, NOW_MS - DAY_MS, "not accepted: validity", id="not yet"),
        pytest.param({}, NOW_MS + 91 * DAY_MS, "not accepted: validity", id="no more"),
    ],
)
def test_a_certificate_that_is_not_this_nodes_now_is_refused(
    made: IdentityFiles, ca: SimulatedCa, changed: dict[str, Any], now_ms: int, reason: str
) -> None:
    own = made.read()
    leaf = ca.issue(**{"node_id": own.node_id, "key": own.key, **changed}).leaf_pem
    check_refused(made, leaf, ca.root_pem, reason, now_ms)


def test_what_is_no_certificate_of_the_root_is_refused(made: IdentityFiles, ca: SimulatedCa) -> None:
    check_refused(made, issued(SimulatedCa("other"), made).leaf_pem, ca.root_pem, "not accepted: chain")
    for leaf_pem in ("", "hello", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        check_refused(made, leaf_pem, ca.root_pem, "not accepted: bad_certificate")


def check_refused(
    files: IdentityFiles, leaf_pem: str, root_pem: str, reason: str, now_ms: int = NOW_MS
) -> None:
    before = everything_in(files)
    with pytest.raises(IdentityFilesError, match=reason):
        install_certificate(files, Issued(leaf_pem, root_pem), now_ms)
    assert everything_in(files) == before


# --- what comes over the session ----------------------------------------------------------------------


@pytest.fixture
def enrolled(made: IdentityFiles, ca: SimulatedCa) -> IdentityFiles:
    install_certificate(made, Issued(issued(ca, made).leaf_pem, ca.root_pem), NOW_MS)
    return made


def test_a_renewed_leaf_is_installed_with_the_roots_that_came_with_it(
    enrolled: IdentityFiles, ca: SimulatedCa
) -> None:
    # It is verified as what is installed by hand.
    stranger = ca.issue(enrolled.read().node_id, key=key_named("a stranger"))
    check_not_renewed(enrolled, stranger.leaf_pem, ca.root_pem, "for another key")
    check_not_renewed(enrolled, issued(ca, enrolled).leaf_pem, "", "not accepted: chain")
    fresh = issued(ca, enrolled)
    identity = install_renewed(enrolled, Issued(fresh.leaf_pem, ca.root_pem), NOW_MS)
    own = enrolled.read()
    assert (own.kid, own.root_pem, identity.kid) == (fresh.kid, ca.root_pem, fresh.kid)


def check_not_renewed(
    files: IdentityFiles, leaf_pem: str, roots_pem: str, reason: str, endorsement: str = ""
) -> None:
    before = everything_in(files)
    with pytest.raises(IdentityFilesError, match=reason):
        install_renewed(files, Issued(leaf_pem, roots_pem, endorsement=endorsement), NOW_MS)
    assert everything_in(files) == before


def test_at_a_rotation_the_new_root_comes_with_the_one_that_the_node_trusts_and_is_endorsed_by_it(
    enrolled: IdentityFiles, ca: SimulatedCa
) -> None:
    new = SimulatedCa("the next root")
    fresh = issued(new, enrolled)
    endorsement = endorse(ca.key, new.root_pem)
    install_renewed(
        enrolled, Issued(fresh.leaf_pem, new.root_pem + ca.root_pem, endorsement=endorsement), NOW_MS
    )
    assert enrolled.read().root_pem == new.root_pem + ca.root_pem
    # And later with the new one alone: the old one's time is up.
    install_renewed(enrolled, Issued(issued(new, enrolled).leaf_pem, new.root_pem), NOW_MS)
    assert enrolled.read().root_pem == new.root_pem


def test_a_node_that_was_away_takes_an_endorsed_root_though_the_old_one_is_gone(
    enrolled: IdentityFiles, ca: SimulatedCa
) -> None:
    new = SimulatedCa("the next root")
    endorsement = endorse(ca.key, new.root_pem)
    install_renewed(
        enrolled, Issued(issued(new, enrolled).leaf_pem, new.root_pem, endorsement=endorsement), NOW_MS
    )
    assert enrolled.read().root_pem == new.root_pem


def test_a_node_follows_its_ca_from_root_to_root(tmp_path: Path, made: IdentityFiles) -> None:
    clock = FakeClock(NOW_MS)
    authority = CertificateAuthority(tmp_path / "ca", clock, os.urandom)
    authority.create()
    csr, node_id = made.csr.read_text(), made.read().node_id
    install_certificate(made, Issued(authority.issue(csr, TENANT), authority.root_pem()), NOW_MS)
    for _ in range(3):
        authority.rotate_root(30)
        for days in (29, 1):
            clock.advance(days * DAY_MS)
            leaf, roots = authority.renew(csr, node_id), authority.roots()
            endorsement = authority.endorsement()
            install_renewed(made, Issued(leaf, "".join(roots), endorsement=endorsement or ""), clock())
            assert made.read().root_pem == "".join(roots)
    assert len(authority.roots()) == 1


@pytest.mark.parametrize("of", ["the rogue", "the next root"])
def test_a_rogue_root_beside_a_good_one_is_refused_whichever_root_issued_the_leaf(
    enrolled: IdentityFiles, ca: SimulatedCa, of: str
) -> None:
    # Roots and endorsements are public: an impostor of the relay can send both.
    rogue, new = SimulatedCa("the rogue"), SimulatedCa("the next root")
    endorsement = endorse(ca.key, new.root_pem)
    leaf = issued(SimulatedCa(of), enrolled).leaf_pem
    reason = "neither trusted by this node nor endorsed"
    for roots in (rogue.root_pem, new.root_pem + rogue.root_pem, ca.root_pem + rogue.root_pem):
        check_not_renewed(enrolled, leaf, roots, reason, endorsement)
    check_not_renewed(enrolled, leaf, rogue.root_pem + ca.root_pem, reason)


@pytest.mark.parametrize(
    "endorsement",
    [
        pytest.param("", id="none"),
        pytest.param("\ud800", id="no text"),
        pytest.param(endorse(key_named("ca the next root"), NEXT_ROOT), id="of its own"),
    ],
)
def test_a_new_root_without_a_good_endorsement_is_refused(
    enrolled: IdentityFiles, ca: SimulatedCa, endorsement: str
) -> None:
    leaf = issued(SimulatedCa("the next root"), enrolled).leaf_pem
    reason = "neither trusted by this node nor endorsed"
    check_not_renewed(enrolled, leaf, NEXT_ROOT + ca.root_pem, reason, endorsement)


def test_a_root_that_an_endorsed_one_endorses_is_refused(enrolled: IdentityFiles, ca: SimulatedCa) -> None:
    new, newest = SimulatedCa("the next root"), SimulatedCa("the one after it")
    roots = newest.root_pem + new.root_pem + ca.root_pem
    leaf = issued(newest, enrolled).leaf_pem
    for endorsement in (endorse(ca.key, new.root_pem), endorse(new.key, newest.root_pem)):
        check_not_renewed(enrolled, leaf, roots, "neither trusted by this node", endorsement)


def test_a_node_that_was_never_enrolled_is_not_enrolled_over_the_session(
    made: IdentityFiles, ca: SimulatedCa
) -> None:
    check_not_renewed(made, issued(ca, made).leaf_pem, ca.root_pem, "neither trusted by this node")


def test_a_key_that_stands_among_the_roots_is_not_kept(enrolled: IdentityFiles, ca: SimulatedCa) -> None:
    secret = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"
    install_renewed(enrolled, Issued(issued(ca, enrolled).leaf_pem, secret + ca.root_pem + "# text"), NOW_MS)
    assert enrolled.read().root_pem == ca.root_pem


# --- the roots of servers


SERVERS, NEXT_SERVERS = SimulatedServerCa(), SimulatedServerCa("the next root of servers")


def renewed(files: IdentityFiles, ca: SimulatedCa, server_roots: str, *endorsements: str) -> Issued:
    leaf = issued(ca, files).leaf_pem
    return Issued(leaf, ca.root_pem, server_roots, server_endorsements=endorsements)


def test_a_node_that_had_none_takes_the_roots_of_servers_that_its_root_endorses(
    enrolled: IdentityFiles, ca: SimulatedCa
) -> None:
    both = NEXT_SERVERS.root_pem + SERVERS.root_pem
    assert not enrolled.server_roots.exists()
    install_renewed(enrolled, renewed(enrolled, ca, both, "A" * 86, endorse_servers(ca.key, both)), NOW_MS)
    assert enrolled.server_roots.read_text() == both
    # An answer of a relay that does not tell of any leaves them as they are.
    install_renewed(enrolled, renewed(enrolled, ca, ""), NOW_MS)
    assert enrolled.server_roots.read_text() == both


@pytest.mark.parametrize(
    ("told", "endorsements"),
    [
        pytest.param(SERVERS.root_pem, (), id="without an endorsement"),
        pytest.param(
            SERVERS.root_pem + NEXT_SERVERS.root_pem,
            (endorse_servers(key_named("ca root"), SERVERS.root_pem),),
            id="of one of the two",
        ),
        pytest.param(NEXT_ROOT, (endorse_servers(key_named("ca root"), NEXT_ROOT),), id="of a root of nodes"),
        pytest.param(
            SERVERS.root_pem, (endorse(key_named("ca root"), SERVERS.root_pem),), id="as a root of nodes"
        ),
    ],
)
def test_roots_of_servers_without_a_good_endorsement_are_refused_with_the_whole_answer(
    enrolled: IdentityFiles, ca: SimulatedCa, told: str, endorsements: tuple[str, ...]
) -> None:
    before = enrolled.leaf.read_text()
    with pytest.raises(IdentityFilesError, match="not endorsed"):
        install_renewed(enrolled, renewed(enrolled, ca, told, *endorsements), NOW_MS)
    assert not enrolled.server_roots.exists()
    assert enrolled.leaf.read_text() == before


def test_a_root_of_servers_that_is_endorsed_as_one_of_nodes_is_still_none(
    enrolled: IdentityFiles, ca: SimulatedCa
) -> None:
    leaf = issued(ca, enrolled).leaf_pem
    roots = ca.root_pem + SERVERS.root_pem
    install_renewed(enrolled, Issued(leaf, roots, endorsement=endorse(ca.key, SERVERS.root_pem)), NOW_MS)
    forged = client_builder(
        bytes(key_named("thief").verify_key), NODE_ID, san_uri(TENANT, NODE_ID), NOW_MS, 9
    )
    issuer = x509.load_pem_x509_certificate(SERVERS.root_pem.encode())
    leaf = pem_of(forged.issuer_name(issuer.subject).serial_number(5).sign(SERVERS.key, SHA256()))
    with pytest.raises(IdentityError, match="chain"):
        verify_leaf(leaf, [enrolled.read().root_pem or ""], NOW_MS)
