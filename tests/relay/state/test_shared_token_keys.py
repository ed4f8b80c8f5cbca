import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from relay.pki.authority import CertificateAuthority
from relay.state.merging import MAX_REFUSED
from relay.state.tokens import TokenKeys
from schemas.keys import base64url
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.shared import shared
from tests.fakes.signer import NOW_MS, key_named

FIRST = bytes(key_named("token key").verify_key)
NONE: frozenset[str] = frozenset()


@dataclass
class Side:
    """A relay with its file of keys, as far as these are shared; ``refused`` counts what it has refused."""

    directory: Path
    ca: CertificateAuthority
    refused: list[str] = field(default_factory=list)
    lines: LogLines = field(default_factory=LogLines)

    def __post_init__(self) -> None:
        self.keys = TokenKeys(self.directory / "token_keys.jsonl", self.ca, FakeClock(NOW_MS))
        self.shared = shared(
            "token_key",
            self.keys.ledger,
            is_endorsed=self.keys.is_endorsed,
            refused=self.refused.append,
            lines=self.lines,
        )


@pytest.fixture
def ca(tmp_path: Path) -> CertificateAuthority:
    return made(tmp_path / "ca")


@pytest.fixture
def one(tmp_path: Path, ca: CertificateAuthority) -> Side:
    return side(tmp_path / "one", ca)


@pytest.fixture
def other(tmp_path: Path, ca: CertificateAuthority) -> Side:
    return side(tmp_path / "other", ca)


def made(directory: Path) -> CertificateAuthority:
    authority = CertificateAuthority(directory, FakeClock(NOW_MS), os.urandom)
    authority.create()
    return authority


def side(directory: Path, ca: CertificateAuthority) -> Side:
    directory.mkdir(mode=0o700)
    return Side(directory, ca)


def test_what_no_trusted_root_endorses_is_refused_counted_and_said_once(tmp_path: Path, other: Side) -> None:
    foreign = side(tmp_path / "foreign", made(tmp_path / "foreign ca"))
    foreign.keys.add(FIRST, NOW_MS)
    entries = foreign.shared.settle({}, NONE)
    for count in (1, 2):
        assert other.shared.settle(entries, frozenset(entries)) == {}
        assert len(other.refused) == count
    assert other.keys.accepted() == {}
    assert not (other.directory / "token_keys.jsonl").exists()
    (line,) = other.lines.entries("token key refused: no root endorses it")
    assert [line["token_key"]] == [*entries]


def test_what_was_refused_is_accepted_once_its_root_is_trusted(tmp_path: Path, one: Side) -> None:
    ours = made(tmp_path / "theirs")
    root = (tmp_path / "theirs" / "root.pem").read_bytes()
    other = side(tmp_path / "behind", ours)
    one.keys.add(FIRST, NOW_MS)
    entries = one.shared.settle({}, NONE)
    other.shared.settle(entries, frozenset(entries))
    # As the operator copies it after a rotation.
    (tmp_path / "theirs" / "root.pem").write_bytes((tmp_path / "ca" / "root.pem").read_bytes())
    other.shared.settle({}, frozenset(entries))
    assert other.keys.accepted() == one.keys.accepted()
    assert len(other.refused) == 1
    assert root != (tmp_path / "theirs" / "root.pem").read_bytes()


def test_of_many_that_are_refused_some_are_kept_and_said(one: Side) -> None:
    public_keys = [bytes(key_named(f"stranger {number}").verify_key) for number in range(MAX_REFUSED + 2)]
    forged: list[dict[str, Any]] = [
        {
            "public_key": public_key.hex(),
            "made_ms": NOW_MS,
            "others_until_ms": NOW_MS,
            "root": "ab" * 32,
            "signature": base64url(bytes(64)),
        }
        for public_key in public_keys
    ]
    one.shared.settle({one.shared.form.key_of(entry): entry for entry in forged}, NONE)
    assert len(one.refused) == len(forged)
    assert len(one.lines.entries("token key refused: no root endorses it")) == MAX_REFUSED
