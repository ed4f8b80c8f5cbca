"""Accepts the keys of agents' tokens that the CA endorses. Must not judge a key."""

from collections.abc import Callable, Mapping, Sequence

from relay.auth.accepted_keys import AcceptedKeys
from relay.auth.shared_token_keys import SharedTokenKeys
from relay.auth.token_keys import AcceptedKey, TokenKeys
from relay.watched_ledger import Record


class WatchedKeys:
    """The list of token keys as a ``relay.watched_ledger.WatchedLedger``.

    ``roots`` returns the roots that are trusted now: another one may endorse other keys.
    """

    name = "token keys"
    kinds = (SharedTokenKeys.kind,)

    def __init__(
        self, keys: TokenKeys, accepted: AcceptedKeys, roots: Callable[[], Sequence[str]], record: Record
    ) -> None:
        self._keys = keys
        self._accepted = accepted
        self._roots = roots
        self._record = record

    def stamp(self) -> object:
        """Return what differs after every entry, and when the roots do."""
        return (self._keys.stamp, *self._roots())

    def read(self) -> Mapping[str, AcceptedKey]:
        """Return the keys that are endorsed, by kid."""
        return self._keys.accepted()

    def begin(self, keys: Mapping[str, AcceptedKey]) -> None:
        """Accept the keys of before the relay was started."""
        self._accepted.accept(keys)

    def apply(self, keys: Mapping[str, AcceptedKey]) -> None:
        """Accept these keys and no other, and record those that are new."""
        for kid in sorted(self._accepted.accept(keys)):
            self._record("token_key_accepted", kid=kid)
