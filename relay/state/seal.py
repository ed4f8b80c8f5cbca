"""Whether relays of the fleet seal what they say to each other: decided once, and for good.

The relay with the CA's key decides, and a root signs it, so that no other can. An entry in the file counts
whatever becomes of that root. Must not know what is sealed, nor how.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from relay.state.ledger import Entry, Keyed, Ledger
from relay.state.merging import SharedForm
from schemas.canonical import jcs
from schemas.certificates import is_seal_endorsed
from schemas.identity import first_certificate_in, kid_of


class SealEndorser(Protocol):
    """The CA of the fleet, as far as it decides this."""

    def roots(self) -> Sequence[str]:
        """Return the roots of nodes that are trusted now, in PEM."""
        ...

    def endorse_seal(self, statement: bytes) -> Mapping[str, str]:
        """Return the endorsement of ``statement`` by each trusted root, by its kid; none without the keys."""
        ...


def read_seal(entry: Entry) -> tuple[str, Entry]:
    """Return an entry by the root that endorses it."""
    return str(entry["root"]), {"sealed_ms": int(entry["sealed_ms"]), **entry}


def _statement(entry: Entry) -> bytes:
    return jcs({"sealed_ms": entry["sealed_ms"]})


class FleetSeal:
    """The decision in ``path``, which ``ca`` endorses.

    Everything raises LedgerError if the file is damaged, AuthorityStateError if there is no CA, and OSError
    if a file cannot be used.
    """

    def __init__(self, path: Path, ca: SealEndorser) -> None:
        self.ledger = Ledger(path, Keyed(read_seal))
        self._ca = ca

    def is_sealed(self) -> bool:
        return bool(self.ledger.read().by_key)

    def seal(self, now_ms: int) -> bool:
        """Have the roots whose keys are here endorse it; return whether there is one, and it is sealed."""
        with self.ledger.locked() as kept:
            if not kept.by_key:
                said = {"sealed_ms": now_ms}
                endorsed = self._ca.endorse_seal(_statement(said)).items()
                self.ledger.append(*(said | {"root": root, "signature": made} for root, made in endorsed))
        return self.is_sealed()

    def is_endorsed(self, entry: Entry) -> bool:
        """Return whether the root that ``entry`` names is trusted, and has signed it."""
        roots = [first_certificate_in(root) for root in self._ca.roots()]
        named = [root for root in roots if kid_of(root) == entry["root"]]
        return is_seal_endorsed(_statement(entry), named, entry["signature"])


SEALS = SharedForm(
    key_of=lambda entry: str(entry["root"]),
    entries=lambda kept: kept.by_key,
    has=lambda kept, entry: entry["root"] in kept.by_key,
    line=lambda _kept, entry, _now_ms: entry,
)
