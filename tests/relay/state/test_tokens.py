"""Revoked tokens stay revoked, and a key verifies tokens only while a trusted root endorses it."""

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from relay.pki.authority import CertificateAuthority
from relay.state.ledger import LedgerError
from relay.state.merging import MAX_REFUSED
from relay.state.tokens import AcceptedKey, RevokedTokens, TokenKey, TokenKeys, is_jti, key_id, key_of
from schemas.keys import base64url
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.real_ca import created
from tests.fakes.shared import shared
from tests.fakes.signer import DAY_MS, LOW_ORDER_KEYS, NOW_MS, key_named


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "revoked_tokens.jsonl"


def test_what_was_revoked_stays_revoked(path: Path) -> None:
    RevokedTokens(path).revoke("a", now_ms=1)
    RevokedTokens(path).revoke("b/c=", now_ms=2)
    assert RevokedTokens(path).jtis() == {"a", "b/c="}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_who_watches_sees_a_revocation_and_no_change_when_it_is_repeated(path: Path) -> None:
    tokens = RevokedTokens(path)
    before = tokens.ledger.stamp
    RevokedTokens(path).revoke("a", now_ms=1)
    after = tokens.ledger.stamp
    assert after != before
    RevokedTokens(path).revoke("a", now_ms=2)
    assert tokens.ledger.stamp == after


@pytest.mark.parametrize("content", ['{"jti":1}\n', '{"jti":null}\n'])
def test_a_damaged_list_is_an_error_and_never_an_empty_one(path: Path, content: str) -> None:
    path.write_text(content)
    tokens = RevokedTokens(path)
    with pytest.raises(LedgerError, match=path.name):
        tokens.jtis()
    with pytest.raises(LedgerError, match=path.name):
        tokens.revoke("a", now_ms=1)
    assert path.read_text() == content


@pytest.mark.parametrize("text", ["01m7xw30dc", "a b/+=:", "x" * 128])
def test_a_jti_is_printable_ascii(text: str) -> None:
    assert is_jti(text)


@pytest.mark.parametrize("text", ["", "x" * 129, "a\n", "\x1b[31m", "caf\xe9", "\udce9"])
def test_other_text_is_no_jti(text: str) -> None:
    assert not is_jti(text)


FIRST, SECOND, THIRD = (bytes(key_named(f"token key {number}").verify_key) for number in (1, 2, 3))


@pytest.fixture
def keys(tmp_path: Path, ca: CertificateAuthority, clock: FakeClock) -> TokenKeys:
    return TokenKeys(tmp_path / "token_keys.jsonl", ca, clock)


def ends(keys: TokenKeys) -> Mapping[bytes, int | None]:
    """Return until when each key is accepted."""
    accepted = keys.accepted()
    assert all(kid == key_id(key.public_key) for kid, key in accepted.items())
    return {key.public_key: key.until_ms for key in accepted.values()}


def test_the_first_key_has_no_end_and_adding_it_again_changes_nothing(keys: TokenKeys) -> None:
    for _ in range(2):
        keys.add(FIRST, NOW_MS)
        assert ends(keys) == {FIRST: None}
        assert len(keys.entries()) == 1
    assert not keys.is_replaced(FIRST)
    assert not keys.is_replaced(SECOND)


def test_keys_before_another_one_end_when_that_says_so(keys: TokenKeys, clock: FakeClock) -> None:
    keys.add(FIRST, NOW_MS)
    keys.add(SECOND, NOW_MS + DAY_MS)
    assert ends(keys) == {FIRST: NOW_MS + DAY_MS, SECOND: None}
    # In the same millisecond: the order is that in which they were made.
    keys.add(THIRD, NOW_MS + 2 * DAY_MS)
    assert ends(keys) == {FIRST: NOW_MS + DAY_MS, SECOND: NOW_MS + 2 * DAY_MS, THIRD: None}
    assert [keys.is_replaced(key) for key in (FIRST, SECOND, THIRD)] == [True, True, False]
    clock.step(-DAY_MS)
    fourth = bytes(key_named("token key 4").verify_key)
    keys.add(fourth, NOW_MS)
    assert ends(keys) == {FIRST: NOW_MS, SECOND: NOW_MS, THIRD: NOW_MS, fourth: None}


def test_the_entries_say_the_same_in_any_order(
    tmp_path: Path, ca: CertificateAuthority, keys: TokenKeys, clock: FakeClock
) -> None:
    for number, key in enumerate((FIRST, SECOND, THIRD)):
        clock.advance(1)
        keys.add(key, NOW_MS + number)
    other = TokenKeys(tmp_path / "other.jsonl", ca, clock)
    takes = shared("token_key", other.ledger, is_endorsed=other.is_endorsed)
    for name, entry in reversed([*keys.entries().items()]):
        takes.settle({name: entry}, {name})
    assert other.accepted() == keys.accepted()


def test_a_relay_without_the_cas_key_accepts_what_its_root_endorses(
    tmp_path: Path, ca: CertificateAuthority, keys: TokenKeys, clock: FakeClock
) -> None:
    keys.add(FIRST, NOW_MS)
    for file in (tmp_path / "ca").glob("*.key"):
        file.unlink()
    assert not ca.can_issue()
    assert ends(TokenKeys(tmp_path / "token_keys.jsonl", ca, clock)) == {FIRST: None}


def test_a_key_that_another_ca_endorses_is_not_accepted_even_from_the_file(
    tmp_path: Path, keys: TokenKeys, clock: FakeClock
) -> None:
    foreign = TokenKeys(tmp_path / "foreign.jsonl", created(tmp_path / "other ca", clock), clock)
    foreign.add(FIRST, NOW_MS)
    (entry,) = foreign.entries().values()
    assert not keys.is_endorsed(entry)
    with keys.ledger.locked():
        keys.ledger.append(entry)
    assert keys.accepted() == {}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"public_key": THIRD.hex()}, id="another key"),
        pytest.param({"made_ms": NOW_MS + 1}, id="a later one"),
        pytest.param({"others_until_ms": 0}, id="which ends others"),
        pytest.param({"root": "ab" * 32}, id="an unknown root"),
        pytest.param({"signature": base64url(bytes(64))}, id="an empty signature"),
        pytest.param({"signature": "_" * 86}, id="no signature"),
    ],
)
def test_an_entry_that_was_changed_is_endorsed_by_nothing(
    keys: TokenKeys, changes: Mapping[str, Any]
) -> None:
    keys.add(FIRST, NOW_MS)
    keys.add(SECOND, NOW_MS + DAY_MS)
    entry = [*keys.entries().values()][1]
    assert keys.is_endorsed(entry)
    assert not keys.is_endorsed(entry | dict(changes))


@pytest.mark.parametrize("key", LOW_ORDER_KEYS.values(), ids=LOW_ORDER_KEYS.keys())
def test_a_key_by_which_one_signature_fits_all_is_no_key(key: bytes) -> None:
    entry = {"public_key": key.hex(), "made_ms": 0, "others_until_ms": 0, "root": "ab" * 32}
    with pytest.raises(ValueError, match="not a sound key"):
        TokenKey.of(entry)
    with pytest.raises(ValueError, match="not a sound key"):
        key_of(entry)


def test_a_new_root_endorses_the_keys_that_have_not_ended(
    ca: CertificateAuthority, keys: TokenKeys, clock: FakeClock
) -> None:
    keys.add(FIRST, NOW_MS)
    keys.add(SECOND, NOW_MS + 1)
    clock.advance(1)
    until_ms = ca.rotate_root(overlap_days=1)
    keys.endorse_again()
    keys.endorse_again()
    # The one that has ended is endorsed by the old root alone.
    assert len(keys.entries()) == 3
    assert ends(keys) == {FIRST: NOW_MS + 1, SECOND: None}
    # Made while both are trusted: some relays know the old one alone.
    keys.add(THIRD, NOW_MS + 2 * DAY_MS)
    assert len(keys.entries()) == 5
    clock.advance(until_ms - clock())
    assert ends(keys) == {SECOND: NOW_MS + 2 * DAY_MS, THIRD: None}


def test_what_a_root_has_endorsed_ends_with_it(
    ca: CertificateAuthority, keys: TokenKeys, clock: FakeClock
) -> None:
    keys.add(FIRST, NOW_MS)
    clock.advance(ca.rotate_root(overlap_days=1) - clock())
    assert keys.accepted() == {}


def test_without_the_cas_key_the_own_key_of_a_relay_alone_is_the_only_one(
    tmp_path: Path, ca: CertificateAuthority, keys: TokenKeys, clock: FakeClock
) -> None:
    keys.add(FIRST, NOW_MS)
    replaced = TokenKeys(tmp_path / "token_keys.jsonl", ca, clock, own=SECOND)
    assert replaced.accepted() == {key_id(SECOND): AcceptedKey(SECOND, None)}
    assert ends(TokenKeys(tmp_path / "token_keys.jsonl", ca, clock, own=FIRST)) == {FIRST: None}


def test_any_jti_has_a_key_of_letters_and_digits_and_other_text_has_none(path: Path) -> None:
    key_of = shared("token_revocation", RevokedTokens(path).ledger).form.key_of
    assert key_of({"jti": "any text: of another issuer. *>", "revoked_ms": NOW_MS}).isalnum()
    with pytest.raises(ValueError, match="not a jti"):
        key_of({"jti": "line\n", "revoked_ms": NOW_MS})


# --- as the relays of a fleet have them in common ------------------------------------------------------


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
def one(tmp_path: Path, ca: CertificateAuthority) -> Side:
    return side(tmp_path / "one", ca)


@pytest.fixture
def other(tmp_path: Path, ca: CertificateAuthority) -> Side:
    return side(tmp_path / "other", ca)


def side(directory: Path, ca: CertificateAuthority) -> Side:
    directory.mkdir(mode=0o700)
    return Side(directory, ca)


def test_what_no_trusted_root_endorses_is_refused_counted_and_said_once(tmp_path: Path, other: Side) -> None:
    foreign = side(tmp_path / "foreign", created(tmp_path / "foreign ca"))
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
    ours = created(tmp_path / "theirs")
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
