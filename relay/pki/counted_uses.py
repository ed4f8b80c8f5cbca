"""Waits, before a leaf is issued, until all relays of the fleet count the use of its join token.

A relay that was restored from an older backup does not know by its own file what was used since; the stream
that the relays share does, and each use in it is one node's. So a use that is not in the stream is none.
Must not judge a proof.
"""

import asyncio

from relay.pki.enrolments import NotCountedError
from relay.state.join_tokens import JoinRefusedError, JoinTokens
from relay.state.sharer import NotShared, Sharing

TIMEOUT_S = 4.0
"""How long an enrolment waits for it; one that another relay has forwarded ends there after 6 s."""
_POLL_S = 0.25


class CountedUses:
    """A ``relay.pki.enrolments.CountUse`` by the stream. ``connect`` it before it is used."""

    def __init__(self, tokens: JoinTokens, timeout_s: float = TIMEOUT_S) -> None:
        self._tokens = tokens
        self._timeout_s = timeout_s
        self._sharing: Sharing = NotShared()

    def connect(self, sharing: Sharing) -> None:
        """Have uses counted by ``sharing`` from now on."""
        self._sharing = sharing

    async def counted(self, join_id: str, node_id: str) -> None:
        """Wait, as ``CountUse`` describes."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while not await asyncio.to_thread(self._is_counted, join_id, node_id):
                    self._sharing.changed("join_token_use")
                    await self._sharing.written(_POLL_S)
        except TimeoutError:
            raise NotCountedError("the use of the join token is not counted: NATS does not answer") from None

    def _is_counted(self, join_id: str, node_id: str) -> bool:
        grant = self._tokens.find(join_id)
        if grant is None:
            raise JoinRefusedError("the join token has ended meanwhile")
        uses = dict(grant.counted)
        if node_id in uses.values():
            return True
        if len(uses) >= grant.uses:
            raise JoinRefusedError("others have used the join token up")
        return False
