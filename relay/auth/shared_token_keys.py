"""The keys that verify agents' tokens, as the relays of a fleet have them in common.

Write access to what the relays share would otherwise be enough to sign tokens, so an entry counts only if a
root that this relay trusts has signed it. Any other is refused, and admits nothing. Must not share a private
key.
"""

from collections.abc import Callable, Container, Mapping
from itertools import islice

from structlog.typing import FilteringBoundLogger

from relay.auth.token_keys import TokenKeys, key_of
from relay.ledger import Entry
from relay.shared_ledger import AT_ONCE

MAX_REFUSED = 64
"""How many refused entries are kept, to be judged again by another root."""


class SharedTokenKeys:
    """A ``relay.shared_ledger.SharedLedger`` of ``keys``. ``refused`` is called for every entry refused."""

    kind = "token_key"
    ordered = False

    def __init__(self, keys: TokenKeys, refused: Callable[[], None], log: FilteringBoundLogger) -> None:
        self._keys = keys
        self._refused = refused
        self._log = log
        self._waiting: dict[str, Entry] = {}

    def key_of(self, entry: Entry) -> str:
        """Return the key's kid and its root's.

        Raises:
            ValueError: it is no point by which signatures can be verified.
        """
        return key_of(entry)

    def end_ms_of(self, _entry: Entry) -> None:
        """It never ends: it says until when tokens by earlier keys are accepted."""

    def settle(self, arrived: Mapping[str, Entry], known: Container[str]) -> Mapping[str, Entry]:
        """Take the keys that the CA endorses; return those that are not known elsewhere."""
        judged = {key: (entry, self._keys.is_endorsed(entry)) for key, entry in self._to_judge(arrived)}
        if good := {key: entry for key, (entry, is_good) in judged.items() if is_good}:
            self._keys.take(good)
        for key, (entry, is_good) in judged.items():
            if is_good:
                self._waiting.pop(key, None)
            elif key in arrived:
                self._refuse(key, entry)
        entries = self._keys.entries()
        missing = islice((key for key in entries if key not in known), AT_ONCE)
        return {key: entries[key] for key in missing}

    def _to_judge(self, arrived: Mapping[str, Entry]) -> list[tuple[str, Entry]]:
        """Return what is not in the file: what has arrived, and what a root may endorse that is new."""
        entries = self._keys.entries()
        return [(key, entry) for key, entry in (self._waiting | dict(arrived)).items() if key not in entries]

    def _refuse(self, key: str, entry: Entry) -> None:
        self._refused()
        if key in self._waiting or len(self._waiting) < MAX_REFUSED:
            if key not in self._waiting:
                self._log.error("token key refused: no root endorses it", token_key=key)
            self._waiting[key] = entry
