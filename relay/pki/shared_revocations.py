"""The revocations of certificates, as the relays of a fleet have them in common.

A revocation is final, so the revocations of all relays together count, in any order. It is complete in
itself: it names the serial number too, which a relay that does not know the certificate cannot look up. Must
not share what was issued, nor why it was revoked: a reason is a person's free text.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from itertools import islice

from relay.ledger import Entry
from relay.pki.ca_ledger import CaLedger
from relay.pki.records import Records
from relay.shared_ledger import AT_ONCE

_REASON = "revoked at another relay"


class SharedRevocations:
    """A ``relay.shared_ledger.SharedLedger`` in the CA's ledger."""

    kind = "revocation"
    ordered = False

    def __init__(self, ledger: CaLedger) -> None:
        self._ledger = ledger

    def key_of(self, entry: Entry) -> str:
        """Return the kid of the certificate."""
        return str(entry["kid"])

    def settle(self, arrived: Mapping[str, Entry], known: AbstractSet[str]) -> Mapping[str, Entry]:
        """Revoke what was revoked elsewhere; return what was revoked and is not known there."""
        records = self._ledger.read()
        if arrived.keys() - records.revoked.keys():
            with self._ledger.locked() as records:
                new = arrived.keys() - records.revoked.keys()
                self._ledger.append(*(_kept(arrived[kid]) for kid in sorted(new)))
            records = self._ledger.read()
        missing = islice((kid for kid in records.revoked if kid not in known), AT_ONCE)
        return {kid: _shared(records, kid) for kid in missing}


def _shared(records: Records, kid: str) -> Entry:
    entry: Entry = {"kid": kid, "revoked_ms": records.revoked[kid]}
    serial = records.serial_of(kid)
    return entry | ({"serial": f"{serial:x}"} if serial else {})


def _kept(entry: Entry) -> Entry:
    kept = {"action": "revoke", "ts_ms": entry["revoked_ms"], "kid": entry["kid"], "reason": _REASON}
    return kept | ({"serial": entry["serial"]} if "serial" in entry else {})
