"""Admits connecting nodes: so many a second, and so many steps of their handshakes in a turn of the loop.

Must not identify nodes: that is done behind it, and costs the most. Must not wait for a peer: one that does
not answer would hold up the others.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from attrs import define, field

from relay.limits.rate_limits import evict_idle
from schemas.addresses import address_group
from schemas.pacing import TokenBucket

RATE_PER_S = 300.0
BURST = 75.0
LONGEST_WAIT_S = 60.0
STEPS_PER_TURN = 8
"""About 10 ms."""
MOST_WAITING = int(RATE_PER_S)
"""The handshakes of a second: nodes give up after ten, and what was done for them is lost."""
_SHARE = 0.5
_MAX_ADDRESSES = 4096


class ConnectLimiter:
    """Token buckets that give retry times, for when thousands of nodes reconnect at once. In seconds.

    Each node over the rate gets another retry time, so that they do not all reconnect at the same moment. One
    address gets half of the rate at most, so that it cannot starve the others.
    """

    def __init__(
        self, rate: float = RATE_PER_S, burst: float = BURST, max_addresses: int = _MAX_ADDRESSES
    ) -> None:
        self._all = _RetryBucket(rate, burst, now=0.0)
        self._rate, self._burst = rate * _SHARE, max(1.0, burst * _SHARE)
        self._max_addresses = max_addresses
        self._by_address: OrderedDict[str, _RetryBucket] = OrderedDict()

    def enter(self, now: float, address: str, *, is_full: bool = False) -> float:
        """Admit a connection and return 0, or return in how many seconds, at most a minute, it is to retry.

        While the relay ``is_full``, none is admitted.

        A connection that the common bucket rejects has used the share of its address all the same: so one
        address can push back the retry times of all only so far.
        """
        bucket = self._bucket_of(address, now)
        return (bucket.enter(now) if bucket is not None else 0.0) or self._all.enter(now, is_full=is_full)

    def _bucket_of(self, address: str, now: float) -> "_RetryBucket | None":
        """Return the bucket of an address; None for those that only the common one limits."""
        key = address_group(address)
        if key is None:
            return None
        bucket = self._by_address.get(key)
        if bucket is not None:
            self._by_address.move_to_end(key)
        elif evict_idle(self._by_address, self._max_addresses, now):
            bucket = self._by_address[key] = _RetryBucket(self._rate, self._burst, now)
        return bucket


class _RetryBucket:
    """One token bucket, and the retry times that it has given."""

    __slots__ = ("_bucket", "_next_free", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._bucket = TokenBucket(rate, burst, now)
        self._next_free = 0.0

    def enter(self, now: float, *, is_full: bool = False) -> float:
        if not is_full and self._bucket.take(now) == 0:
            return 0.0
        wait_s = max(0.0, self._next_free - now) + 1 / self._rate
        # At most that, however many connect: once they are gone, their retry times delay no other node.
        wait_s = min(wait_s, LONGEST_WAIT_S)
        self._next_free = now + wait_s
        return wait_s

    def is_idle(self, now: float) -> bool:
        return self._next_free <= now and self._bucket.is_full(now)


@define(eq=False, repr=False)
class ConnectQueue:
    """The handshakes that ``limiter`` admits, first come, first served. ``monotonic`` is in seconds.

    A turn of the event loop handles all that is ready. When thousands of nodes reconnect, one long turn makes
    hundreds ready at once and the next turn longer still, while calls wait and revocations are not read: so
    only ``steps_per_turn`` of their steps run in one. With ``most_waiting`` the relay is slower than the
    rate, and more are throttled as though over it.
    """

    _limiter: ConnectLimiter
    _monotonic: Callable[[], float]
    _steps_per_turn: int = STEPS_PER_TURN
    _most_waiting: int = MOST_WAITING
    _begun: deque[asyncio.Future[None]] = field(init=False, factory=deque)
    _new: deque[asyncio.Future[None]] = field(init=False, factory=deque)

    async def enter(self, address: str) -> float:
        """Return 0 when a handshake may begin; or, at once, in how many seconds the node is to retry."""
        is_full = len(self._new) >= self._most_waiting
        wait_s = self._limiter.enter(self._monotonic(), address, is_full=is_full)
        if wait_s == 0:
            await self._turn(self._new)
        return wait_s

    async def go_on(self) -> None:
        """Return when a handshake that has begun may go on: these come before new ones."""
        await self._turn(self._begun)

    async def _turn(self, queue: deque[asyncio.Future[None]]) -> None:
        loop = asyncio.get_running_loop()
        if not self._begun and not self._new:
            loop.call_soon(self._next_steps)
        turn: asyncio.Future[None] = loop.create_future()
        queue.append(turn)
        await turn

    def _next_steps(self) -> None:
        steps = 0
        while steps < self._steps_per_turn and (queue := self._begun or self._new):
            turn = queue.popleft()
            if not turn.done():  # else its connection was ended meanwhile
                turn.set_result(None)
                steps += 1
        if self._begun or self._new:
            asyncio.get_running_loop().call_soon(self._next_steps)
