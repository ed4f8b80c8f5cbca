"""Has the roots that are trusted now endorse the keys of agents' tokens, after each change of them.

Must not make a key, nor judge an entry.
"""

import asyncio

from structlog.typing import FilteringBoundLogger

from relay.state.tokens import TokenKeys
from schemas.error_roots import StateError
from schemas.text import printable


class KeyEndorsement:
    """Writes to ``keys`` what a new root says of them, where its key is here."""

    def __init__(self, keys: TokenKeys, log: FilteringBoundLogger) -> None:
        self._keys = keys
        self._log = log

    async def follow(self) -> bool:
        """Follow the change; return whether that is done. It is repeated until it is."""
        try:
            await asyncio.to_thread(self._keys.endorse_again)
        except (StateError, OSError) as error:
            self._log.error("no root endorses the keys of tokens", reason=printable(str(error)))
            return False
        return True
