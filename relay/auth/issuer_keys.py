"""The keys of the external issuer of agents' tokens: a JWK set, fetched and cached.

A key is accepted while the set that the operator named contains it. Tokens with unknown keys make the relay
fetch the set at most once in ten seconds. Must not read tokens, and must not follow the issuer's server to
another URL.
"""

import asyncio
import math
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from itertools import islice
from typing import Any

import httpx2
from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.auth.fetching import MAX_BYTES, OK, answer_to
from relay.observability.metrics import Metrics
from schemas.error_roots import PeerError
from schemas.keys import from_base64url, is_sound_public_key
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads
from schemas.tls import client_context
from schemas.tokens import EXTERNAL_KEY_REF

MAX_KEYS = 64
TIMEOUT_S = 5.0
MIN_INTERVAL_S = 10.0
"""The least time between two fetches, whatever causes them."""
REFRESH_S = 600.0
RETRY_S = 30.0
MAX_AGE_S = 86_400.0
"""How long keys are accepted while their issuer cannot be reached, to within one retry."""


class JwksFault(StrEnum):
    """What is wrong with the issuer's server or with its set; fit for a log and a counter's label."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    STATUS = "status"
    TOO_LARGE = "too_large"
    NOT_JSON = "not_json"
    NOT_A_KEY_SET = "not_a_key_set"


class JwksError(PeerError):
    """The set could not be fetched, or is malformed."""

    def __init__(self, reason: JwksFault) -> None:
        super().__init__(reason)
        self.reason = reason


@define(eq=False, repr=False)
class JwksSource:
    """The server that publishes the set. A response is bounded in time and in bytes, and not yet trusted."""

    _url: str
    _timeout_s: float = TIMEOUT_S
    # The system's authorities, or those that SSL_CERT_FILE names.
    _tls: ssl.SSLContext = field(init=False, factory=client_context)

    async def fetch(self) -> bytes:
        """Return the document at the URL.

        Raises:
            JwksError: with reason ``unreachable``, ``timeout``, ``status`` or ``too_large``.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._get()
        except TimeoutError:
            raise JwksError(JwksFault.TIMEOUT) from None
        except (httpx2.TransportError, OSError):
            raise JwksError(JwksFault.UNREACHABLE) from None

    async def _get(self) -> bytes:
        headers = {"accept": "application/jwk-set+json, application/json"}
        status, body = await answer_to(httpx2.Request("GET", self._url, headers=headers), self._tls)
        if status != OK:
            raise JwksError(JwksFault.STATUS)
        if body is None:
            raise JwksError(JwksFault.TOO_LARGE)
        return body


class JwksReader:
    """Takes the usable keys from a set; ``ours`` are the relay's own, never accepted from it."""

    def __init__(self, registry: SchemaRegistry, ours: Mapping[str, bytes]) -> None:
        self._wanted = registry.load(EXTERNAL_KEY_REF)
        self._ours = ours

    def keys(self, document: bytes) -> dict[str, bytes]:
        """Return the set's Ed25519 signing keys, at most ``MAX_KEYS``; everything else is ignored.

        A ``kid`` that two of them share is ignored too.

        Raises:
            JwksError: with reason ``not_json`` or ``not_a_key_set``.
        """
        try:
            value = loads(document, max_bytes=MAX_BYTES)
        except StrictJsonError:
            raise JwksError(JwksFault.NOT_JSON) from None
        members = value.get("keys") if isinstance(value, dict) else None
        if not isinstance(members, list):
            raise JwksError(JwksFault.NOT_A_KEY_SET)
        usable = list(islice(filter(None, map(self._usable, members)), MAX_KEYS))
        occurrences = Counter(kid for kid, _ in usable)
        return {kid: key for kid, key in usable if occurrences[kid] == 1}

    def _usable(self, member: Any) -> tuple[str, bytes] | None:
        if not self._wanted.is_valid(member):
            return None
        try:
            key = from_base64url(member["x"])
        except ValueError:
            return None
        kid = member["kid"]
        if not is_sound_public_key(key) or kid in self._ours or key in self._ours.values():
            return None
        return kid, key


@define(eq=False, repr=False, kw_only=True)
class IssuerKeys:
    """The keys that are accepted now. ``fetch`` returns the set and ``read`` takes the keys from it."""

    _fetch: Callable[[], Awaitable[bytes]]
    _read: Callable[[bytes], Mapping[str, bytes]]
    _monotonic: Callable[[], float]
    _metrics: Metrics
    _log: FilteringBoundLogger
    _sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _keys: Mapping[str, bytes] = field(init=False, factory=dict)
    _fetch_began_s: float = field(init=False, default=-math.inf)
    _read_s: float = field(init=False, default=-math.inf)
    _fetching: asyncio.Task[None] | None = field(init=False, default=None)
    _outcome: str = field(init=False, default="")
    _follow_ups: list[Callable[[], None]] = field(init=False, factory=list)

    def get(self, kid: str) -> bytes | None:
        """Return the 32-byte public key of ``kid``, or None."""
        return self._keys.get(kid)

    def follow(self, changed: Callable[[], None]) -> None:
        self._follow_ups.append(changed)

    async def refresh(self) -> None:
        """Fetch the set unless the last fetch is too recent; wait for a fetch in flight."""
        now_s = self._monotonic()
        if self._fetching is None and now_s - self._fetch_began_s >= MIN_INTERVAL_S:
            self._fetch_began_s = now_s
            self._fetching = asyncio.create_task(self._fetch_set())
            self._fetching.add_done_callback(self._forget_task)
        if self._fetching is not None:
            # Shield: a cancelled waiter must not cancel the shared fetch.
            await asyncio.shield(self._fetching)

    async def run(self) -> None:
        """Fetch the set at once and then regularly, so that a withdrawn key is dropped, until cancelled."""
        try:
            while True:
                await self.refresh()
                await self._sleep(REFRESH_S if self._outcome == "ok" else RETRY_S)
        finally:
            if self._fetching is not None:
                self._fetching.cancel()

    async def _fetch_set(self) -> None:
        try:
            keys = self._read(await self._fetch())
            outcome = "ok"
            self._read_s = self._monotonic()
        except JwksError as error:
            outcome = error.reason
            stale = self._monotonic() - self._read_s >= MAX_AGE_S
            keys = {} if stale else self._keys
        self._note(outcome, keys)
        if keys != self._keys:
            self._keys = keys
            for changed in self._follow_ups:
                changed()

    def _note(self, outcome: str, keys: Mapping[str, bytes]) -> None:
        self._metrics.issuer_fetches.labels(outcome).inc()
        if outcome == self._outcome and len(keys) == len(self._keys):
            return  # one line per outage, not one every half minute
        self._outcome = outcome
        if outcome == "ok" and keys:
            self._log.info("outside issuer's keys fetched", keys=len(keys))
        elif outcome == "ok":
            self._log.warning("the outside issuer publishes no Ed25519 signing key")
        else:
            self._log.warning("outside issuer's keys not fetched", reason=outcome, keys_kept=len(keys))

    def _forget_task(self, _done: asyncio.Task[None]) -> None:
        self._fetching = None
