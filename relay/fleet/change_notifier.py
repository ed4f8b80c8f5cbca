"""Notifies agents when the set of tools that they see has changed: at most once a second, and only them.

What counts is the set of names, titles, schemas and safety classes, for each audience that has listeners; a
slow audience does not delay another. While nothing changes, nothing is computed. Must not know how a listener
reaches its agent.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from structlog.typing import FilteringBoundLogger

from relay.auth.permissions import Rights
from relay.fleet.fleet import Fleet
from relay.fleet.tool_index import Version

INTERVAL_S = 1.0
_LISTENER_TIMEOUT_S = 5.0
# A tenant has at most one audience for each set of safety classes: none can use up all of these.
_AUDIENCES_AT_ONCE = 256

Listener = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class _Audience:
    """The listeners of equal rights. ``notified`` is the version that they were last notified of."""

    notified: Version
    listeners: dict[object, Listener] = field(default_factory=dict)
    quiet_until_s: float = 0.0
    is_busy: bool = False


class ChangeNotifier:
    """Notifies the audiences that have listeners.

    It checks every ``interval_s`` whether something has changed, and notifies an audience once in
    ``quiet_s``, by default once in ``interval_s``.
    """

    def __init__(
        self,
        fleet: Fleet,
        log: FilteringBoundLogger,
        interval_s: float = INTERVAL_S,
        timeout_s: float = _LISTENER_TIMEOUT_S,
        quiet_s: float | None = None,
    ) -> None:
        self._fleet = fleet
        self._log = log
        self._interval_s = interval_s
        self._quiet_s = interval_s if quiet_s is None else quiet_s
        self._timeout_s = timeout_s
        self._woken = asyncio.Event()
        self._audiences: defaultdict[str, dict[Rights, _Audience]] = defaultdict(dict)
        self._changed: set[Rights] = set()
        self._at_once = asyncio.Semaphore(_AUDIENCES_AT_ONCE)
        fleet.follow(self._tenant_changed)

    def listen(self, rights: Rights, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` after every change that callers with ``rights`` see; return what ends that."""
        audience = self._audiences[rights.tenant].get(rights)
        if audience is None:
            audience = self._audiences[rights.tenant][rights] = _Audience(self._fleet.version(rights))
        key = object()
        audience.listeners[key] = listener

        def stop() -> None:
            if audience.listeners.pop(key, None) is not None and not audience.listeners:
                self._forget(rights)

        return stop

    def wake(self) -> None:
        """Check at once: tools are gone that agents must not rely on for another second."""
        self._woken.set()

    async def run(self) -> None:
        """Check once a second until cancelled, and when woken."""
        pause_s = self._interval_s
        async with asyncio.TaskGroup() as tasks:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._woken.wait()
                self._woken.clear()
                self._fleet.sweep()
                pauses = [self._check(rights, tasks) for rights in list(self._changed)]
                pause_s = min([self._interval_s, *pauses])

    def _tenant_changed(self, tenant: str) -> None:
        if tenant in self._audiences:
            self._changed.update(self._audiences[tenant])

    def _forget(self, rights: Rights) -> None:
        of_tenant = self._audiences[rights.tenant]
        del of_tenant[rights]
        if not of_tenant:
            del self._audiences[rights.tenant]
        self._changed.discard(rights)

    def _check(self, rights: Rights, tasks: asyncio.TaskGroup) -> float:
        """Notify an audience if its list has changed and it may be now; return when to check again."""
        audience, now_s = self._audiences[rights.tenant][rights], asyncio.get_running_loop().time()
        version = self._fleet.version(rights)
        if audience.is_busy:
            return self._interval_s
        if version == audience.notified:
            self._changed.discard(rights)
            return self._interval_s
        if (quiet_s := audience.quiet_until_s - now_s) > 0:
            return quiet_s
        self._changed.discard(rights)
        audience.notified = version
        audience.quiet_until_s = now_s + self._quiet_s
        audience.is_busy = True
        tasks.create_task(self._notify_all(rights, audience))
        return self._interval_s

    async def _notify_all(self, rights: Rights, audience: _Audience) -> None:
        """Notify an audience. Never twice at a time: what changes meanwhile is notified after this."""
        try:
            async with self._at_once:
                await asyncio.gather(*map(self._notify, audience.listeners.values()))
        finally:
            audience.is_busy = False
        if rights in self._changed:
            self._woken.set()

    async def _notify(self, listener: Listener) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await listener()
        except TimeoutError:
            pass  # its client does not read, or its connection is lost: the stream ends by itself
        except Exception as error:  # noqa: BLE001 - a failure to notify one agent must not affect the others
            self._log.error("an agent was not notified of a change", exc_info=error)
