"""Samples capabilities for as long as the relay's leases last, and hands every sample over.

One loop for each capability, at the interval of its lease, however many agents follow it: the relay merges
what they ask for. A lease ends by a frame or by time, so that a node whose relay is gone stops by itself.
Must not know the connection: leases come in, and samples go to a callback.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from structlog.typing import FilteringBoundLogger

from kubelet.handlers.base import Handler, ToolFault
from kubelet.handlers.verbs import verbs_of
from schemas.errors import ToolError
from schemas.kinds import KindRegistry
from schemas.payloads import TelemetryLease
from schemas.registry import SchemaRegistry
from schemas.text import printable

TakeSample = Callable[[str, Mapping[str, Any]], None]
"""Takes a sample of the capability of that id. Must not block."""


@dataclass(frozen=True, slots=True)
class _Lease:
    """How often the relay wants a sample, until when, and of what."""

    interval_s: float
    until_s: float
    arguments: Mapping[str, Any]


class TelemetrySampler:
    """The leases of one node. ``monotonic`` is in seconds."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        handlers: Sequence[Handler],
        kinds: KindRegistry,
        registry: SchemaRegistry,
        take: TakeSample,
        log: FilteringBoundLogger,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._sources = {
            handler.capability["cap_id"]: each
            for handler in handlers
            for each in verbs_of(handler, kinds, registry, log)
            if each.verb.streams
        }
        self._take = take
        self._log = log
        self._monotonic = monotonic
        self._sleep = sleep
        self._leases: dict[str, _Lease] = {}
        self._loops: dict[str, asyncio.Task[None]] = {}

    def lease(self, lease: TelemetryLease) -> None:
        """Sample by ``lease`` from now on, in place of the one before; ``ttl_ms`` 0 ends it."""
        cap_id = lease["cap_id"]
        source = self._sources.get(cap_id)
        arguments = {name: value for name, value in lease.items() if name in {"interval_ms", "include"}}
        if source is None or not source.accepts(arguments):
            self._log.warning("a lease that does not fit what this node offers", cap_id=cap_id)
            return
        before, following = self._leases.pop(cap_id, None), None
        if lease["ttl_ms"] > 0:
            until_s = self._monotonic() + lease["ttl_ms"] / 1000
            following = self._leases[cap_id] = _Lease(lease["interval_ms"] / 1000, until_s, arguments)
        if before is not None and following is not None and following.interval_s >= before.interval_s:
            return  # the loop reads it after the sample that is due
        if (loop := self._loops.pop(cap_id, None)) is not None:
            loop.cancel()
        if following is not None:
            loop = asyncio.create_task(self._run(cap_id))
            self._loops[cap_id] = loop
            loop.add_done_callback(lambda ended: self._ended(cap_id, ended))

    async def close(self) -> None:
        self._leases.clear()
        if loops := list(self._loops.values()):
            for loop in loops:
                loop.cancel()
            await asyncio.wait(loops)

    def _ended(self, cap_id: str, loop: asyncio.Task[None]) -> None:
        if self._loops.get(cap_id) is loop:
            del self._loops[cap_id]

    async def _run(self, cap_id: str) -> None:
        due_s = self._monotonic()
        while (lease := self._leases.get(cap_id)) is not None:
            if lease.until_s <= self._monotonic():
                del self._leases[cap_id]
                return
            await self._sample(cap_id, lease)
            # By a grid, so that intervals do not grow by what a sample takes; one that is missed is left out.
            now_s = self._monotonic()
            due_s += lease.interval_s
            if due_s <= now_s:
                due_s = now_s + lease.interval_s
            await self._sleep(due_s - now_s)

    async def _sample(self, cap_id: str, lease: _Lease) -> None:
        try:
            async with asyncio.timeout(lease.interval_s):
                sample = await self._sources[cap_id].invoke(lease.arguments, cap_id=cap_id)
            self._take(cap_id, sample)
        except ToolFault as fault:  # its kind states it: a sensor that hangs is no fault of the handler
            self._log.info("no sample", cap_id=cap_id, reason=printable(fault.code))
        except (ToolError, TimeoutError) as error:
            self._log.info("no sample", cap_id=cap_id, reason=type(error).__name__)
        except Exception as error:  # noqa: BLE001 - one broken handler must not end the daemon
            self._log.error("sample failed", cap_id=cap_id, exc_info=error)
