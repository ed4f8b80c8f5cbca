"""Which relay of the fleet a node tries next, and when.

A relay is configured by a URL. Its name may have several addresses, each of which may be another relay. Every
address has waits of its own, so a relay that is away, or asks for time, does not keep a node from the others.
Must not connect, and must not decide what a failure means.
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from ipaddress import ip_address
from socket import SOCK_STREAM

from schemas.addresses import host_of, is_loopback, is_secure, port_of
from schemas.pacing import Backoff

FIRST_S = 1.0
LONGEST_S = 30.0
"""The relay limits the rate of reconnects by itself: no node need wait longer than that."""
LONGEST_REQUESTED_S = 600.0
"""What a relay may request: a dishonest one must not suspend a node for a day."""
MOST_ADDRESSES = 16
"""Of one name: whatever answers for it must not make a node try addresses for hours."""
RESOLVE_TIMEOUT_S = 5.0

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host name, for a port; raises OSError if there are none."""


@dataclass(frozen=True, slots=True)
class RelayAddress:
    """Where one relay listens.

    Attributes:
        url: as configured, in its normal form.
        host: an IP address of the URL's name; None where the name is not resolved here.
    """

    url: str
    host: str | None = None

    def __str__(self) -> str:
        return self.url if self.host in {None, host_of(self.url)} else f"{self.url} at {self.host}"


@dataclass(slots=True)
class _Attempts:
    """The waits of one address. ``not_before_ms`` is in ticks."""

    backoff: Backoff
    not_before_ms: float = 0.0


class RelayAddresses:
    """The relays at ``urls``, in the order in which the node ``node_id`` tries them.

    The order follows from a hash of node and address: nodes spread over the relays, each has its own order
    after every restart, and a relay that is added or removed moves no more than its share of them.
    ``ticks_ms`` are milliseconds that only go forward.
    """

    def __init__(
        self,
        urls: Sequence[str],
        node_id: str,
        rng: random.Random,
        ticks_ms: Callable[[], float],
        resolve: Resolve | None = None,
    ) -> None:
        self._urls = tuple(dict.fromkeys(urls))
        self._node_id = node_id
        self._rng = rng
        self._ticks_ms = ticks_ms
        self._resolve = resolve or system_resolve
        self._known: dict[str, list[RelayAddress]] = {}
        self._attempts: dict[RelayAddress, _Attempts] = {}
        self._last: RelayAddress | None = None

    async def next(self) -> tuple[RelayAddress, float]:
        """Return the address to try next, and in how many seconds."""
        found = await asyncio.gather(*map(self._addresses_of, self._urls))
        addresses = [address for of_url in found for address in of_url]
        drawn = partial(self._rng.uniform, 0.0)
        self._attempts = {
            each: self._attempts.get(each) or _Attempts(Backoff(FIRST_S, LONGEST_S, drawn))
            for each in addresses
        }
        now_ms = self._ticks_ms()

        def urgency(address: RelayAddress) -> tuple[float, bool, bytes]:
            due_ms = max(self._attempts[address].not_before_ms, now_ms)
            # The last one first: it may hold the session, and answers to commands can still be sent there.
            rank = sha256(f"{self._node_id} {address.url} {address.host}".encode()).digest()
            return due_ms, address != self._last, rank

        chosen = min(addresses, key=urgency)
        self._last = chosen
        return chosen, (urgency(chosen)[0] - now_ms) / 1000

    def failed(self, address: RelayAddress, requested_s: float, *, was_open: bool) -> float:
        """Return in how many seconds ``address`` is tried again: of a bound that grows, or as requested.

        ``was_open``: a session ended. Thousands of nodes may have lost theirs in this moment, so the other
        relays are not tried at once either. Without a request, the same relay comes first: it may resume
        the session.
        """
        if requested_s > 0:
            # Thousands that got the same wait must still not reconnect in the same moment.
            wait_s = min(requested_s, LONGEST_REQUESTED_S - FIRST_S) + self._rng.uniform(0, FIRST_S)
        else:
            wait_s = self._attempts[address].backoff.next_s()
        self._attempts[address].not_before_ms = self._ticks_ms() + wait_s * 1000
        if was_open:
            self.postpone_all(wait_s if requested_s == 0 else self._rng.uniform(0, FIRST_S))
        return wait_s

    def postpone_all(self, wait_s: float) -> None:
        """Try no relay for ``wait_s``."""
        not_before_ms = self._ticks_ms() + wait_s * 1000
        for attempts in self._attempts.values():
            attempts.not_before_ms = max(attempts.not_before_ms, not_before_ms)

    def succeeded(self, address: RelayAddress) -> None:
        self._attempts[address].backoff.reset()

    async def _addresses_of(self, url: str) -> list[RelayAddress]:
        """Return the addresses of ``url`` as they are now, or as they were known last."""
        if not _is_resolved_here(url):
            return [RelayAddress(url)]
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                hosts = await self._resolve(host_of(url), port_of(url))
            self._known[url] = [RelayAddress(url, host) for host in hosts[:MOST_ADDRESSES]]
        except OSError:  # a timeout is one too
            pass
        # Without any, connecting resolves the name again, and its error says what is wrong.
        return self._known.get(url) or [RelayAddress(url)]


async def system_resolve(host: str, port: int) -> Sequence[str]:
    """Return the IP addresses of ``host``, of both families.

    Raises:
        OSError: there are none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _is_resolved_here(url: str) -> bool:
    """Return whether the URL has a name, and no proxy that resolves it."""
    host = host_of(url)
    try:
        ip_address(host)
    except ValueError:
        return is_loopback(host) or not _is_by_proxy(url)
    return False


def names_proxies(environment: Mapping[str, str]) -> bool:
    """Return whether ``environment`` says anything of proxies.

    What reads it in full takes most of a mebibyte, and few nodes are behind a proxy.
    """
    return any(name.lower().endswith("_proxy") for name in environment)


def _is_by_proxy(url: str) -> bool:
    if not names_proxies(os.environ):
        return False
    from urllib.request import getproxies, proxy_bypass  # noqa: PLC0415 - as above

    # The names that the library for WebSockets looks for.
    names = ("wss", "socks", "https") if is_secure(url) else ("ws", "socks", "https", "http")
    proxies = getproxies()
    return any(name in proxies for name in names) and not proxy_bypass(f"{host_of(url)}:{port_of(url)}")
