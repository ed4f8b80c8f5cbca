"""The relay's own keys of tokens that are accepted now, as they change. Must not read a file."""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet

from relay.state.tokens import AcceptedKey


class AcceptedKeys(Mapping[str, bytes]):
    """Public keys of 32 bytes by kid, without those that have ended at ``now_ms``."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._keys: Mapping[str, AcceptedKey] = {}

    def accept(self, keys: Mapping[str, AcceptedKey]) -> AbstractSet[str]:
        """Accept ``keys`` from now on, and no others; return the kids of those that are new.

        An end that was known stays while this process runs: the list may have been restored from a backup.
        """
        new = keys.keys() - self._keys.keys()
        self._keys = {kid: _ended(key, self._keys.get(kid)) for kid, key in keys.items()}
        return new

    def __getitem__(self, kid: str) -> bytes:
        key = self._keys[kid]
        if key.until_ms is not None and key.until_ms <= self._now_ms():
            raise KeyError(kid)
        return key.public_key

    def __iter__(self) -> Iterator[str]:
        return (kid for kid in self._keys if kid in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _ended(key: AcceptedKey, before: AcceptedKey | None) -> AcceptedKey:
    """Return ``key`` with the earlier end of both."""
    known = [each.until_ms for each in (key, before) if each is not None and each.until_ms is not None]
    return key._replace(until_ms=min(known, default=None))
