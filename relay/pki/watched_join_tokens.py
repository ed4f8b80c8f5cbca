"""Has the relays of a fleet told what changes in this one's join tokens. Must not read a token."""

from relay.pki.join_tokens import JoinTokens
from relay.pki.shared_join_token_revocations import SharedJoinTokenRevocations
from relay.pki.shared_join_token_uses import SharedJoinTokenUses


class WatchedJoinTokens:
    """The join tokens as a ``relay.watched_ledger.WatchedLedger``.

    There is nothing to apply: the relay that enrols reads them for each node.
    """

    name = "join tokens"
    kinds = (SharedJoinTokenRevocations.kind, SharedJoinTokenUses.kind)

    def __init__(self, tokens: JoinTokens) -> None:
        self._tokens = tokens

    def stamp(self) -> object:
        """Return what differs after every entry."""
        return self._tokens.stamp

    def read(self) -> None:
        """Read nothing."""

    def begin(self, _content: None) -> None:
        """Apply nothing."""

    def apply(self, _content: None) -> None:
        """Apply nothing."""
