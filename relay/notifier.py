"""Tells agents when what they see has changed: at most once a second, and only those for whom it did.

What counts is the visible set of names, schemas and safety classes, for each audience that listens. Must
not know how a listener is told.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import sha256

from relay.fleet import Fleet
from relay.permissions import Rights

INTERVAL_S = 1.0
_PATIENCE_S = 5.0


Listener = Callable[[], Awaitable[None]]


class Notifier:
    """Watches the fleet for the audiences that have listeners."""

    def __init__(self, fleet: Fleet, interval_s: float = INTERVAL_S, patience_s: float = _PATIENCE_S) -> None:
        self._fleet = fleet
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._woken = asyncio.Event()
        self._listeners: dict[Rights, dict[object, Listener]] = {}
        self._seen: dict[Rights, bytes] = {}
        self._quiet_until: dict[Rights, float] = {}

    def listen(self, audience: Rights, listener: Listener) -> Callable[[], None]:
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
                self._quiet_until.pop(audience, None)

        return stop

    def wake(self) -> None:
        """Look at once: tools have gone that must not be believed in for another second."""
        self._woken.set()

    async def run(self) -> None:
        """Look once a second until cancelled, and when woken: expiries and graces end by themselves."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._woken.wait()
            self._woken.clear()
            self._fleet.sweep()
            for audience in list(self._listeners):
                await self._look(audience)

    async def _look(self, audience: Rights) -> None:
        digest, now = self._digest(audience), asyncio.get_running_loop().time()
        if digest == self._seen.get(audience) or now < self._quiet_until.get(audience, 0.0):
            return
        self._seen[audience] = digest
        self._quiet_until[audience] = now + self._interval_s
        await asyncio.gather(*map(self._tell, self._listeners.get(audience, {}).values()))

    async def _tell(self, listener: Listener) -> None:
        # One agent that has stopped reading, or is half gone, must cost the others nothing.
        with suppress(Exception):
            async with asyncio.timeout(self._patience_s):
                await listener()

    def _digest(self, audience: Rights) -> bytes:
        tools = self._fleet.listed(audience)
        return sha256("\n".join(tool.fingerprint for tool in tools).encode("ascii")).digest()
