"""Keeps the node's manifest fresh, and hands every new one to its senders.

A heartbeat signs a manifest with a new expiry, republishes it, then sends a heartbeat (RFC-0001
decision 6). What is to be announced at once still waits until the signer may sign again: a request costs a
relay less than a signature costs a board. Must not know what a sender does with a manifest.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

from structlog.typing import FilteringBoundLogger

from kubelet.announce.signer import ClockNotSetError, ManifestSigner, SignedManifest
from kubelet.config import DEFAULT_HEARTBEAT_S
from schemas.health import Loop
from schemas.manifest import MAX_TTL_MS

LONGEST_INTERVAL_S = 300.0
"""As a relay of the largest fleet asks for it. No relay makes a node heartbeat less often."""
_JITTER = 0.1
_CLOCK_RETRY_S = 5.0
_ROUND_S = 120.0
"""How long one announcement may take: a sender waits until its connection takes it, or is lost."""

Sender = Callable[[SignedManifest], Awaitable[bool]]
"""Sends a manifest to the relay or the broker; returns whether it could."""


class Announcer:
    """Signs now, and then once an interval.

    Attributes:
        current: the newest manifest, or None before the first.
        published: the newest that a sender took.
        blocked_reason: why nothing can be signed now; empty if it can.
        loop: the progress of ``run``.
    """

    def __init__(
        self,
        signer: ManifestSigner,
        interval_s: float,
        rng: random.Random,
        log: FilteringBoundLogger,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._signer = signer
        self._own_interval_s = interval_s
        self._own_ttl_ms = signer.ttl_ms
        self._asked_interval_s: float | None = None
        self._rng = rng
        self._log = log
        self._sleep = sleep
        self._senders: list[Sender] = []
        self._due = asyncio.Event()
        self.current: SignedManifest | None = None
        self.published: SignedManifest | None = None
        self.blocked_reason = ""
        self.loop = Loop()

    def add_sender(self, sender: Sender) -> None:
        self._senders.append(sender)

    async def send_current(self, sender: Sender) -> None:
        """Give ``sender`` the current manifest again: its connection is new."""
        if self.current is not None and await sender(self.current):
            self.published = self.current

    def advance_past(self, mark_ms: int) -> None:
        """Make what is announced next newer than ``mark_ms``, the newest that the relay has accepted.

        At once, if that is what was wrong with the current one, or that an earlier clock was ahead.
        """
        if not self._signer.advance_past(mark_ms) or self.current is None:
            return
        if mark_ms >= self.current.issued_at_ms or self._signer.is_of_the_future(self.current):
            self._due.set()

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats, without the jitter.

        What the relay asks for, of at most 300 s; or what the operator has named, if that is shorter.
        """
        asked = self._asked_interval_s
        if asked is None:
            return self._own_interval_s
        if self._own_interval_s == DEFAULT_HEARTBEAT_S:
            return min(asked, max(LONGEST_INTERVAL_S, self._own_interval_s))
        return min(asked, self._own_interval_s)

    def announce_now(self) -> None:
        """Announce at once: the leaf has changed."""
        self._due.set()

    def follow_interval(self, interval_s: float) -> None:
        """Heartbeat as often as the relay asks for, from now on: see ``interval_s``.

        A longer interval begins after the next heartbeat, whose manifest is valid for as much longer.
        """
        before = self.interval_s
        self._asked_interval_s = interval_s
        self._fit_ttl()
        if self.interval_s < before:
            self._due.set()

    def change(self, interval_s: float, ttl_ms: int) -> None:
        """Heartbeat once an interval, by manifests that are valid for ``ttl_ms``, from now on."""
        self._own_interval_s, self._own_ttl_ms = interval_s, ttl_ms
        self._fit_ttl()
        self._due.set()

    def _fit_ttl(self) -> None:
        """Let manifests be valid for as many heartbeats as by the node's own settings, and 24 h at most."""
        longer = max(1.0, self.interval_s / self._own_interval_s)
        self._signer.ttl_ms = min(round(self._own_ttl_ms * longer), MAX_TTL_MS)

    async def run(self) -> None:
        while True:
            while (wait_s := self._signer.wait_s()) > 0:
                self.loop.busy(wait_s + _ROUND_S)
                await self._sleep(wait_s)
            # Before announcing: a relay may request a newer manifest while this one is still being sent.
            self._due.clear()
            self.loop.busy(_ROUND_S)
            pause_s = await self._announce()
            self.loop.busy(pause_s + _ROUND_S)
            await self._pause(pause_s)

    async def _pause(self, seconds: float) -> None:
        """Wait for ``seconds``, or until there is something to announce at once."""
        over = asyncio.ensure_future(self._sleep(seconds))
        due = asyncio.ensure_future(self._due.wait())
        try:
            await asyncio.wait((over, due), return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            due.cancel()

    async def _announce(self) -> float:
        try:
            manifest = self._signer.sign()
        except ClockNotSetError as error:
            self._log.warning("nothing announced", reason=str(error))
            self.blocked_reason = str(error)
            return _CLOCK_RETRY_S
        self.blocked_reason = ""
        self.current = manifest
        for sender in self._senders:
            try:
                await self.send_current(sender)
            except Exception as error:  # noqa: BLE001 - a fault of one sender must not stop the others
                self._log.error("manifest not sent", exc_info=error)
        return self.interval_s * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
