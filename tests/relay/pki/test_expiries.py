from dataclasses import replace
from pathlib import Path

import pytest

from relay.pki.errors import AuthorityStateError
from relay.pki.expiries import Expiries
from relay.settings.config import TlsFiles
from schemas.addresses import BrokerAddress
from schemas.identity import first_certificate_in, validity_of
from tests.fakes.environment import config
from tests.fakes.hub import Hub


def test_each_certificate_that_the_relay_shows_has_an_end(hub: Hub, tmp_path: Path) -> None:
    plain = config(tmp_path)
    assert Expiries(plain, lambda: hub.ca.root_pem).names == ("root",)
    over_tls = replace(
        plain,
        tls=TlsFiles(tmp_path / "server.pem", tmp_path / "server.key"),
        broker=BrokerAddress("broker.example", 8883, tls=True),
    )
    expiries = Expiries(over_tls, lambda: hub.ca.root_pem)
    assert expiries.names == ("root", "server", "broker_client")
    leaf_pem = hub.ca.issue().leaf_pem
    (tmp_path / "server.pem").write_text(leaf_pem)
    assert expiries.end_ms("server") == validity_of(first_certificate_in(leaf_pem))[1]
    assert expiries.end_ms("root") == validity_of(first_certificate_in(hub.ca.root_pem))[1]


@pytest.mark.parametrize("damaged", [None, b"", b"\xff", b"no certificate"])
def test_one_that_cannot_be_read_ends_at_once(tmp_path: Path, damaged: bytes | None) -> None:
    def unreadable() -> str:
        raise AuthorityStateError("the root is damaged")

    files = TlsFiles(tmp_path / "server.pem", tmp_path / "server.key")
    if damaged is not None:
        files.certificate.write_bytes(damaged)
    over_tls = replace(config(tmp_path), tls=files)
    expiries = Expiries(over_tls, unreadable)
    assert (expiries.end_ms("server"), expiries.end_ms("root")) == (0, 0)
