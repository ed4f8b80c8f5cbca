"""The revocations of certificates, as the relays of a fleet have them in common.

A revocation is final, so the revocations of all relays together count, in any order. It is complete in
itself: it names the serial number and the end of the certificate too, which a relay that does not know the
certificate cannot look up. Once that has expired it is not shared any more, and stays in the file. Must not
share what was issued, nor why it was revoked: a reason is a person's free text.
"""

from collections.abc import Callable, Container, Mapping, Sequence

from relay.ledger import Entry
from relay.pki.ca_ledger import CaLedger
from relay.pki.records import CaRecords
from relay.shared_ledger import FinalEntries, settle_final

_REASON = "revoked at another relay"


class SharedRevocations:
    """A ``relay.shared_ledger.SharedLedger`` in the CA's ledger."""

    kind = "revocation"
    ordered = False

    def __init__(self, ledger: CaLedger, now_ms: Callable[[], int]) -> None:
        self._ledger = ledger
        self._now_ms = now_ms

    def key_of(self, entry: Entry) -> str:
        """Return the kid of the certificate."""
        return str(entry["kid"])

    def end_ms_of(self, entry: Entry) -> int | None:
        """Return when the certificate expires; None if that is not on record."""
        end_ms = entry.get("not_after_ms")
        return None if end_ms is None else int(end_ms)

    def settle(self, arrived: Mapping[str, Entry], known: Container[str]) -> Mapping[str, Entry]:
        """Revoke what was revoked elsewhere; return what was revoked and is not known there."""
        return settle_final(arrived, known, read=self._revoked, add=self._revoke, lasts=self._lasts)

    def _revoked(self) -> FinalEntries:
        records = self._ledger.read()
        return FinalEntries(records.revoked.keys(), lambda kid: _shared(records, kid))

    def _lasts(self, entry: Entry) -> bool:
        end_ms = self.end_ms_of(entry)
        return end_ms is None or end_ms > self._now_ms()

    def _revoke(self, entries: Sequence[Entry]) -> None:
        with self._ledger.locked() as records:
            # Another process may have revoked some of them meanwhile.
            self._ledger.append(*(_kept(entry) for entry in entries if entry["kid"] not in records.revoked))


def _shared(records: CaRecords, kid: str) -> Entry:
    entry: Entry = {"kid": kid, "revoked_ms": records.revoked[kid]}
    serial = records.serial_of(kid)
    entry |= {"serial": f"{serial:x}"} if serial else {}
    end_ms = records.end_ms_of(kid)
    return entry | ({"not_after_ms": end_ms} if end_ms is not None else {})


def _kept(entry: Entry) -> Entry:
    kept = {"action": "revoke", "ts_ms": entry["revoked_ms"], "kid": entry["kid"], "reason": _REASON}
    return kept | {name: entry[name] for name in ("serial", "not_after_ms") if name in entry}
