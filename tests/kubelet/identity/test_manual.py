import os
from pathlib import Path

import pytest

from kubelet.config import read_stored
from kubelet.identity.provisioning import ManualEnrolment, ServerRootsMissingError, create_identity
from relay.pki.authority import CertificateAuthority
from schemas.addresses import AddressError
from schemas.identity_files import IdentityFiles
from tests.fakes.clock import FakeClock
from tests.fakes.signer import NOW_MS

RELAY, BROKER = "https://relay.example", "mqtts://mqtt.example"


@pytest.fixture
def ca(tmp_path: Path) -> CertificateAuthority:
    ca = CertificateAuthority(tmp_path / "ca", FakeClock(NOW_MS), os.urandom)
    ca.create()
    return ca


@pytest.fixture
def files(tmp_path: Path) -> IdentityFiles:
    files = IdentityFiles(tmp_path / "state")
    create_identity(files, NOW_MS, os.urandom)
    return files


def copied(ca: CertificateAuthority, files: IdentityFiles, *, servers: bool = True) -> ManualEnrolment:
    leaf = ca.issue(files.csr.read_text())
    roots = [*(ca.servers.roots() if servers else []), *ca.roots()]
    return ManualEnrolment(files, leaf, "".join(roots), NOW_MS)


def test_during_a_rotation_both_roots_of_both_kinds_are_installed(
    ca: CertificateAuthority, files: IdentityFiles
) -> None:
    ca.rotate_root()
    ca.servers.rotate()
    enrolled = copied(ca, files).install_with([RELAY], BROKER, system_roots=False, plain_allowed=False)
    assert files.root_pem() == "".join(ca.roots())
    assert files.server_roots.read_text() == "".join(ca.servers.roots())
    assert (enrolled.config, enrolled.config.own_root) == (read_stored(files.root), True)


def test_leaf_and_roots_alone_leave_the_configuration_as_it_is(
    ca: CertificateAuthority, files: IdentityFiles
) -> None:
    copied(ca, files).install()
    assert read_stored(files.root) is None
    assert files.server_roots.exists()


def test_a_relay_over_tls_needs_roots_of_servers_or_those_of_the_machine(
    ca: CertificateAuthority, files: IdentityFiles
) -> None:
    enrolment = copied(ca, files, servers=False)
    with pytest.raises(ServerRootsMissingError, match="relay ca roots --pem"):
        enrolment.install_with([RELAY], BROKER, system_roots=False, plain_allowed=False)
    assert files.root_pem() is None
    assert not enrolment.install_with([RELAY], BROKER, system_roots=True, plain_allowed=False).config.own_root


def test_addresses_are_checked_before_anything_is_written(
    ca: CertificateAuthority, files: IdentityFiles
) -> None:
    with pytest.raises(AddressError, match="insecure"):
        copied(ca, files).install_with(
            ["http://relay.example"], BROKER, system_roots=False, plain_allowed=False
        )
    assert files.root_pem() is None
