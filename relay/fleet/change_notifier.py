"""Tells agents when what they see has changed: at most once a second, and only those for whom it did.

What counts is the visible set of names, schemas and safety classes, for each audience that listens; none
waits for another. Must not know how a listener is told.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import sha256

from structlog.typing import FilteringBoundLogger

from relay.auth.permissions import Rights
from relay.fleet.fleet import Fleet

INTERVAL_S = 1.0
_PATIENCE_S = 5.0
# A tenant has a handful of audiences: none can take all of these.
_AUDIENCES_AT_ONCE = 256

Listener = Callable[[], Awaitable[None]]


class ChangeNotifier:
    """Watches the fleet for the audiences that have listeners.

    It looks every ``interval_s``, and tells an audience once in ``quiet_s``, by default as often as it looks.
    """

    def __init__(
        self,
        fleet: Fleet,
        log: FilteringBoundLogger,
        interval_s: float = INTERVAL_S,
        patience_s: float = _PATIENCE_S,
        quiet_s: float | None = None,
    ) -> None:
        self._fleet = fleet
        self._log = log
        self._interval_s = interval_s
        self._quiet_s = interval_s if quiet_s is None else quiet_s
        self._patience_s = patience_s
        self._woken = asyncio.Event()
        self._listeners: dict[Rights, dict[object, Listener]] = {}
        self._seen: dict[Rights, bytes] = {}
        self._quiet_until: dict[Rights, float] = {}
        self._telling: set[Rights] = set()
        self._turns = asyncio.Semaphore(_AUDIENCES_AT_ONCE)

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
        pause_s = self._interval_s
        async with asyncio.TaskGroup() as tasks:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._woken.wait()
                self._woken.clear()
                self._fleet.sweep()
                pauses = [self._look(audience, tasks) for audience in list(self._listeners)]
                pause_s = min([self._interval_s, *pauses])

    def _look(self, audience: Rights, tasks: asyncio.TaskGroup) -> float:
        """Have ``audience`` told if it is time to; return in how many seconds to look again."""
        digest, now = self._digest(audience), asyncio.get_running_loop().time()
        if digest == self._seen.get(audience) or audience in self._telling:
            return self._interval_s
        if (quiet_s := self._quiet_until.get(audience, 0.0) - now) > 0:
            return quiet_s
        self._seen[audience] = digest
        self._quiet_until[audience] = now + self._quiet_s
        self._telling.add(audience)
        tasks.create_task(self._tell_all(audience))
        return self._interval_s

    async def _tell_all(self, audience: Rights) -> None:
        """Tell an audience. Never twice at a time: what changes meanwhile is told when this is done."""
        try:
            async with self._turns:
                await asyncio.gather(*map(self._tell, self._listeners.get(audience, {}).values()))
        finally:
            self._telling.discard(audience)
        if self._digest(audience) != self._seen.get(audience):
            self._woken.set()

    async def _tell(self, listener: Listener) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await listener()
        except TimeoutError:
            pass  # it has stopped reading, or is half gone: its stream ends by itself
        except Exception as error:  # noqa: BLE001 - a fault in telling one agent must cost the others nothing
            self._log.error("an agent was not told of a change", exc_info=error)

    def _digest(self, audience: Rights) -> bytes:
        tools = self._fleet.listed(audience)
        return sha256("\n".join(tool.fingerprint for tool in tools).encode("ascii")).digest()
