"""A CA in a directory, and what a test reads of its files and certificates."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from relay.pki.authority import CertificateAuthority
from schemas.certificates import make_csr
from tests.fakes.clock import FakeClock
from tests.fakes.signer import NODE_ID, NOW_MS, key_named

KEY = key_named("the node")
OTHER_KEY = key_named("another node")
CSR = make_csr(KEY, NODE_ID)
JOIN_ID, OTHER_JOIN_ID = "01HZX9K3M4P7Q8R9S0T1V2W3XY", "01HZX9K3M4P7Q8R9S0T1V2W3XZ"


def authority(directory: Path, clock: FakeClock | None = None) -> CertificateAuthority:
    return CertificateAuthority(directory, clock or FakeClock(NOW_MS), os.urandom)


def ledger(ca: CertificateAuthority) -> list[dict[str, Any]]:
    text = ca.root_file.with_name("ledger.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def files(ca: CertificateAuthority) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in ca.root_file.parent.iterdir()}


def kid_of(pem: str) -> str:
    return x509.load_pem_x509_certificate(pem.encode()).fingerprint(SHA256()).hex()


def serial_of(pem: str) -> int:
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def revoked_in(crls: str) -> list[set[int]]:
    lists = [f"-----BEGIN X509 CRL-----{part}" for part in crls.split("-----BEGIN X509 CRL-----")[1:]]
    return [{entry.serial_number for entry in x509.load_pem_x509_crl(text.encode())} for text in lists]
