"""Redeems a code or a refresh token once in a fleet: by the stream that its relays share.

Must not know what is redeemed, nor answer a request.
"""

import asyncio
from collections.abc import Awaitable, Callable

from attrs import define, field

from relay.sign_in.incoming import SignInRefusedError
from relay.state.redemptions import Redemptions
from relay.state.sharer import Sharing

TIMEOUT_S = 5.0
AWAY_RETRY_MS = 15_000
MAX_WAITING = 64
_POLL_S = 0.25

Redeem = Callable[[str, int], Awaitable[bool]]
"""Returns whether what a digest names is redeemed by this call, and was not before; until when it counts."""


async def alone(_what: str, _expires_at_ms: int) -> bool:
    """Redeem at the only relay: its own files and memory decide."""
    return True


def away(text: str) -> SignInRefusedError:
    """Return the refusal of what can be tried again once the other relays are reached."""
    return SignInRefusedError(503, text, "away", AWAY_RETRY_MS)


@define(eq=False, repr=False, kw_only=True)
class SharedRedemptions:
    """Redeems by ``redemptions``, which ``sharing`` shares; ``is_joined``: with whom, is known at present."""

    _redemptions: Redemptions
    _sharing: Sharing
    _is_joined: Callable[[], bool]
    _new_id: Callable[[], str]
    _waiting: int = field(init=False, default=0)

    async def redeem(self, what: str, expires_at_ms: int) -> bool:
        """Redeem, as ``Redeem`` describes. A call that was refused can be repeated.

        Raises:
            SignInRefusedError: the other relays are not reached: nothing is redeemed.
            StateError, OSError: a file cannot be used.
        """
        if self._is_joined() and self._waiting < MAX_WAITING:
            self._waiting += 1
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    return await self._counted(what, expires_at_ms)
            except TimeoutError:
                pass
            finally:
                self._waiting -= 1
        raise away("The relay does not reach the others of its fleet: try again later.")

    async def _counted(self, what: str, expires_at_ms: int) -> bool:
        by = self._new_id()
        while (is_ours := await asyncio.to_thread(self._redemptions.claim, what, by, expires_at_ms)) is None:
            self._sharing.changed("redemption")
            await self._sharing.written(_POLL_S)
        return is_ours
