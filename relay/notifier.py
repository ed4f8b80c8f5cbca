"""Tells agents when what they see has changed: at most once a second, and only those for whom it did.

What counts is the visible set of names, schemas and safety classes, for each audience that listens. Must
not know how a listener is told.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256

from relay.fleet import Fleet

INTERVAL_S = 1.0
_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Audience:
    """All callers that see the same tools."""

    tenant: str
    safety_classes: frozenset[str]


Listener = Callable[[], Awaitable[None]]


class Notifier:
    """Watches the fleet for the audiences that have listeners."""

    def __init__(self, fleet: Fleet, interval_s: float = INTERVAL_S, patience_s: float = _PATIENCE_S) -> None:
        self._fleet = fleet
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._listeners: dict[Audience, dict[object, Listener]] = {}
        self._seen: dict[Audience, bytes] = {}

    def listen(self, audience: Audience, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` after every change that ``audience`` can see; return what stops it."""
        token = object()
        if audience not in self._listeners:
            self._seen[audience] = self._digest(audience)
        self._listeners.setdefault(audience, {})[token] = listener

        def stop() -> None:
            listeners = self._listeners.get(audience, {})
            listeners.pop(token, None)
            if not listeners:
                self._listeners.pop(audience, None)
                self._seen.pop(audience, None)

        return stop

    async def run(self) -> None:
        """Look once a second until cancelled: expiries and graces end by themselves."""
        while True:
            await asyncio.sleep(self._interval_s)
            self._fleet.sweep()
            for audience in list(self._listeners):
                await self._look(audience)

    async def _look(self, audience: Audience) -> None:
        digest = self._digest(audience)
        if digest == self._seen.get(audience):
            return
        self._seen[audience] = digest
        await asyncio.gather(*map(self._tell, self._listeners.get(audience, {}).values()))

    async def _tell(self, listener: Listener) -> None:
        # One agent that has stopped reading, or is half gone, must cost the others nothing.
        with suppress(Exception):
            async with asyncio.timeout(self._patience_s):
                await listener()

    def _digest(self, audience: Audience) -> bytes:
        tools = self._fleet.listed(audience.tenant, audience.safety_classes)
        return sha256("\n".join(tool.fingerprint for tool in tools).encode("ascii")).digest()
