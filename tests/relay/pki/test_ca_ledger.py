from pathlib import Path

import pytest

from relay.pki.ca_ledger import CaLedger
from relay.pki.errors import AuthorityStateError

REVOCATION = {"action": "revoke", "ts_ms": 1, "kid": "ab" * 32, "reason": "stolen"}


def no_root() -> None:
    raise AuthorityStateError("there is no CA")


@pytest.fixture
def ledger(tmp_path: Path) -> CaLedger:
    """One that was made with its CA."""
    made = CaLedger(tmp_path, lambda: None)
    with made.made():
        made.append(REVOCATION)
    return made


def test_what_is_appended_is_read_by_every_other(ledger: CaLedger) -> None:
    before = ledger.stamp
    with ledger.locked() as records:
        assert records.revoked == {"ab" * 32: 1}
        ledger.append(REVOCATION | {"kid": "cd" * 32})
    assert ledger.stamp != before
    assert CaLedger(ledger.path.parent, lambda: None).read().revoked.keys() == {"ab" * 32, "cd" * 32}


def test_a_ledger_that_is_gone_is_not_made_anew(ledger: CaLedger) -> None:
    ledger.path.unlink()
    with pytest.raises(AuthorityStateError, match="restore it from a backup"):
        ledger.read()
    with pytest.raises(AuthorityStateError, match="restore it from a backup"), ledger.locked():
        pass
    assert not ledger.path.exists()


def test_without_a_root_there_is_no_ledger(ledger: CaLedger) -> None:
    with pytest.raises(AuthorityStateError, match="there is no CA"):
        CaLedger(ledger.path.parent, no_root).read()


def test_a_damaged_ledger_is_a_fault_of_the_cas_state(ledger: CaLedger) -> None:
    ledger.path.write_bytes(b"{}\n")
    with pytest.raises(AuthorityStateError, match="line 1 is no entry"):
        ledger.read()
    with pytest.raises(AuthorityStateError, match="line 1 is no entry"), ledger.locked():
        pass
