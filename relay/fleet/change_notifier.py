"""Notifies agents when the set of tools that they see has changed: at most once a second, and only them.

What counts is the set of names, titles, schemas and safety classes, for each audience that has listeners; a
slow audience does not delay another. While nothing changes, nothing is computed. Must not know how a listener
reaches its agent.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress

from attrs import Factory, define, field
from structlog.typing import FilteringBoundLogger

from relay.auth.permissions import Rights
from relay.fleet.fleet import Fleet
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.fleet.tool_index import Version
from schemas.health import Loop

INTERVAL_S = 1.0
_ROUND_S = 60.0
"""How long one check may take, while calls are made as well."""
_LISTENER_TIMEOUT_S = 5.0
# Of one tenant: its clients choose what they select, and must not delay those of others by it.
_AUDIENCES_AT_ONCE = 16

Listener = Callable[[], Awaitable[None]]
_Seen = tuple[Rights, Selection]
"""What decides what listeners see: those with equal rights and an equal selection are one audience."""


@define(eq=False, repr=False)
class _Audience:
    """The listeners that see the same. ``notified`` is the version that they were last notified of."""

    notified: Version
    listeners: dict[object, Listener] = field(factory=dict)
    quiet_until_s: float = 0.0
    is_busy: bool = False


@define(eq=False, repr=False)
class _Tenant:
    """The audiences of one tenant, and what limits how many are notified at the same time."""

    audiences: dict[_Seen, _Audience] = field(factory=dict)
    at_once: asyncio.Semaphore = field(factory=lambda: asyncio.Semaphore(_AUDIENCES_AT_ONCE))


@define(eq=False, repr=False)
class ChangeNotifier:
    """Notifies the audiences that have listeners.

    It checks every ``interval_s`` whether something has changed, and notifies an audience once in
    ``quiet_s``, by default once in ``interval_s``.

    Attributes:
        loop: the progress of ``run``.
    """

    _fleet: Fleet
    _log: FilteringBoundLogger
    _interval_s: float = INTERVAL_S
    _timeout_s: float = _LISTENER_TIMEOUT_S
    _quiet_s: float = field(default=Factory(lambda self: self._interval_s, takes_self=True))
    loop: Loop = field(init=False, factory=Loop)
    _woken: asyncio.Event = field(init=False, factory=asyncio.Event)
    _tenants: defaultdict[str, _Tenant] = field(init=False, factory=lambda: defaultdict(_Tenant))
    _changed: set[_Seen] = field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        self._fleet.follow(self._tenant_changed)

    def listen(
        self, rights: Rights, listener: Listener, selection: Selection = WHOLE_FLEET
    ) -> Callable[[], None]:
        """Call ``listener`` after every change that callers with ``rights`` see; return what ends that."""
        seen = rights, selection
        audiences = self._tenants[rights.tenant].audiences
        audience = audiences.get(seen)
        if audience is None:
            version = self._fleet.selected.version(rights, selection)
            audience = audiences[seen] = _Audience(version)
        key = object()
        audience.listeners[key] = listener

        def stop() -> None:
            if audience.listeners.pop(key, None) is not None and not audience.listeners:
                self._forget(seen)

        return stop

    def wake(self) -> None:
        """Check at once: tools are gone that agents must not rely on for another second."""
        self._woken.set()

    async def run(self) -> None:
        """Check once a second until cancelled, and when woken."""
        pause_s = self._interval_s
        async with asyncio.TaskGroup() as tasks:
            while True:
                self.loop.busy(pause_s + _ROUND_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._woken.wait()
                self._woken.clear()
                self._fleet.sweep()
                pause_s = self._interval_s
                for seen in list(self._changed):
                    if seen in self._changed:
                        pause_s = min(pause_s, self._check(seen, tasks))
                    # The version of what a long URL selects of 10 000 nodes takes many milliseconds.
                    await asyncio.sleep(0)

    def _tenant_changed(self, tenant: str) -> None:
        if tenant in self._tenants:
            self._changed.update(self._tenants[tenant].audiences)

    def _forget(self, seen: _Seen) -> None:
        tenant = seen[0].tenant
        audiences = self._tenants[tenant].audiences
        del audiences[seen]
        if not audiences:
            del self._tenants[tenant]
        self._changed.discard(seen)

    def _check(self, seen: _Seen, tasks: asyncio.TaskGroup) -> float:
        """Notify an audience if its list has changed and it may be now; return when to check again."""
        tenant, now_s = self._tenants[seen[0].tenant], asyncio.get_running_loop().time()
        audience = tenant.audiences[seen]
        version = self._fleet.selected.version(*seen)
        if audience.is_busy:
            return self._interval_s
        if version == audience.notified:
            self._changed.discard(seen)
            return self._interval_s
        if (quiet_s := audience.quiet_until_s - now_s) > 0:
            return quiet_s
        self._changed.discard(seen)
        audience.notified = version
        audience.quiet_until_s = now_s + self._quiet_s
        audience.is_busy = True
        tasks.create_task(self._notify_all(seen, audience, tenant.at_once))
        return self._interval_s

    async def _notify_all(self, seen: _Seen, audience: _Audience, at_once: asyncio.Semaphore) -> None:
        """Notify an audience. Never twice at a time: what changes meanwhile is notified after this."""
        try:
            async with at_once:
                await asyncio.gather(*map(self._notify, audience.listeners.values()))
        finally:
            audience.is_busy = False
        if seen in self._changed:
            self._woken.set()

    async def _notify(self, listener: Listener) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await listener()
        except TimeoutError:
            pass  # its client does not read, or its connection is lost: the stream ends by itself
        except Exception as error:  # noqa: BLE001 - a failure to notify one agent must not affect the others
            self._log.error("an agent was not notified of a change", exc_info=error)
