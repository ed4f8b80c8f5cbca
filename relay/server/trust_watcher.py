"""Applies what the operator decides while the relay runs: revocations, another root, and nodes' names.

The commands write ledgers, which are polled four times a second: that costs less than a way into this
process. They are read on threads: with thousands of nodes that takes a while, and calls go on. ``Freshness``
counts every poll that succeeds: without them, calls are refused. Another thread counts ledgers that have not
changed, however busy the event loop is. Must not know what is in a ledger.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event
from typing import Any

from structlog.typing import FilteringBoundLogger

from relay.server.descriptor_reserve import DescriptorReserve
from relay.server.follow_ups import FollowUps
from relay.server.ledger_freshness import SHARED, Freshness
from relay.server.ledger_threads import LedgerThreads
from relay.shared_ledger import Sharing
from relay.watched_ledger import WatchedLedger
from schemas.error_roots import StateError
from schemas.health import Loop, endless
from schemas.text import printable

INTERVAL_S = 0.25
"""How often the ledgers are polled."""
_POLL_S = 120.0
"""How long one poll may take: the ledgers of thousands of nodes, on a slow disk."""


class TrustWatcher:
    """Watches ``ledgers`` for one relay.

    A ledger may depend on those before it. ``sharing`` is told of every change; ``after_poll`` are called
    after each poll.

    Attributes:
        loop: the progress of ``run``.
        follow_ups: the work after changes, which it runs.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        ledgers: Sequence[WatchedLedger[Any]],
        *,
        freshness: Freshness,
        sharing: Sharing,
        reserve: DescriptorReserve,
        follow_ups: FollowUps,
        after_poll: Sequence[Callable[[], None]],
        log: FilteringBoundLogger,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._ledgers = ledgers
        self._freshness = freshness
        self._sharing = sharing
        self._reserve = reserve
        self.follow_ups = follow_ups
        self._after_poll = after_poll
        self._log = log
        self._interval_s = interval_s
        self.loop = Loop()
        # One for each ledger, and the one that counts those that are unchanged.
        self._threads = LedgerThreads(reserve, len(ledgers) + 1, "watch")
        self._was_fresh = True
        # The stamps of what was applied, and of what the other relays were told of.
        self._seen: dict[str, object] = {}
        self._shared: dict[str, object] = {}
        self._read_errors: dict[str, str] = {}

    def begin(self) -> None:
        """Apply what was decided before the relay was started.

        Raises:
            StateError, OSError: it cannot be read. A relay that does not know the
                revocations must not run.
        """
        for ledger in self._ledgers:
            stamp = ledger.stamp()
            ledger.begin(ledger.read())
            self._seen[ledger.name] = stamp
            self._freshness.read(ledger.name)
        self._freshness.read(SHARED)

    async def run(self) -> None:
        """Poll, and run the follow-ups, until cancelled."""
        ended = Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(endless("follow-ups", self.follow_ups.run()))
            confirming = self._threads.run(lambda: self._confirm_until(ended))
            tasks.create_task(endless("ledgers", confirming))
            try:
                while True:
                    self.loop.busy(_POLL_S)
                    await self._sharing.written(self._interval_s)
                    await self.poll()
            finally:
                ended.set()

    def confirm_unchanged(self) -> None:
        """Count the ledgers that are as they were when they were last applied. Thread-safe.

        Of one that has changed, or cannot be looked at, only the poll that applies it counts.
        """
        if self._sharing.understands:
            self._freshness.read(SHARED)
        for ledger in self._ledgers:
            with suppress(StateError, OSError):
                applied = self._seen.get(ledger.name)
                if self._reserve.run(ledger.stamp) == applied:
                    self._freshness.read(ledger.name)

    def _confirm_until(self, ended: Event) -> None:
        while not ended.wait(self._interval_s):
            self.confirm_unchanged()

    async def poll(self) -> None:
        """Apply what has been decided since the last poll."""
        await asyncio.gather(*map(self._poll, self._ledgers))
        if self._sharing.understands:
            self._freshness.read(SHARED)
        self._log_freshness()
        for act in self._after_poll:
            act()

    async def _poll(self, ledger: WatchedLedger[Any]) -> None:
        try:
            # The stamp first: a change during the read is found by the next poll.
            stamp = await self._threads.run(ledger.stamp)
            if stamp != self._seen[ledger.name]:
                if stamp != self._shared.get(ledger.name):
                    # Before it is applied here: the other relays need not wait for that.
                    self._sharing.changed(*ledger.kinds)
                    self._shared[ledger.name] = stamp
                ledger.apply(await self._threads.run(ledger.read))
                self._seen[ledger.name] = stamp
            self._freshness.read(ledger.name)
            self._read_errors.pop(ledger.name, None)
        except (StateError, OSError) as error:
            # What is in effect stays, and the next poll tries again; one line for each reason is enough.
            reason = printable(str(error))
            if reason != self._read_errors.get(ledger.name):
                self._log.error("a change cannot be read", what=ledger.name, reason=reason)
            self._read_errors[ledger.name] = reason

    def _log_freshness(self) -> None:
        is_fresh = self._freshness.is_fresh()
        if is_fresh is not self._was_fresh:
            self._was_fresh = is_fresh
            if is_fresh:
                self._log.info("the ledgers can be read again; calls are made")
            else:
                unread = {*self._read_errors, *(() if self._sharing.understands else (SHARED,))}
                self._log.error("the ledgers cannot be read; calls are refused", unread=sorted(unread))
