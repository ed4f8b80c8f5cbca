"""One fleet has one public URL and one CA: a relay that has others is refused.

Nodes sign for the one, and are admitted by the other, which endorses the keys of agents' tokens too: a
relay that differs could serve neither, and would list what it cannot call. A relay that connects asks those
that run, and does not join if one of them differs. Of two that differ and have joined all the same, at one
moment or on two sides of a partition, the one stays that more of the relays heard lately agree with, so that
one relay that is wrong does not end the others. Must not know what is sent besides.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from attrs import define, field
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from structlog.typing import FilteringBoundLogger

from relay.cluster.client import ClusterConnectError
from relay.cluster.connection import respond
from relay.cluster.messages import ClusterMessageError, Document
from relay.cluster.signed_entries import NotSignedError, SignedDocuments
from relay.observability.ascii_json import encoded
from relay.state.merging import OLDEST
from schemas.certificates import is_relay_name
from schemas.registry import SchemaRegistry
from schemas.text import printable

_VERSION = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}(\.[0-9A-Za-z]{1,16}){0,4}")
_VERSION_HEADER, _NAME_HEADER = "Edge-Version", "Edge-Relay"
MAX_HEARD = 256
"""How many relays are counted; of more, those that were heard last."""


@dataclass(frozen=True, slots=True)
class RelayIdentity:
    """What a relay says of itself.

    Attributes:
        url: its public URL, in its normal form.
        roots: the kids of the roots of nodes that it trusts now.
        version: its own; beside the document, which relays of an older version read too.
        name: of its certificate; empty if it has none. Beside the document, too.
    """

    relay: str
    url: str
    roots: Sequence[str]
    version: str = OLDEST
    name: str = ""

    def document(self) -> bytes:
        return encoded({"relay": self.relay, "url": self.url, "roots": list(self.roots)}).encode("ascii")

    def headers(self) -> dict[str, str]:
        """Return what another relay can do without."""
        return {_VERSION_HEADER: self.version} | ({_NAME_HEADER: self.name} if self.name else {})

    def agrees(self, other: "RelayIdentity") -> bool:
        """Return whether both can be of one fleet."""
        return self.url == other.url and not set(self.roots).isdisjoint(other.roots)


@define(eq=False, repr=False)
class HeardRelays:
    """The relays that were heard in the last ``within_s`` seconds, by their ids."""

    _monotonic: Callable[[], float]
    _within_s: float
    _heard: dict[str, tuple[RelayIdentity, float]] = field(init=False, factory=dict)

    def add(self, other: RelayIdentity) -> None:
        self._heard.pop(other.relay, None)
        self._heard[other.relay] = (other, self._monotonic())
        if len(self._heard) > MAX_HEARD:
            del self._heard[next(iter(self._heard))]

    def __contains__(self, relay: str) -> bool:
        return any(each.relay == relay for each in self._lately())

    def version_of(self, relay: str) -> str:
        """Return the version of a relay; the oldest if it was not heard lately, or has not said."""
        return next((each.version for each in self._lately() if each.relay == relay), OLDEST)

    def name_of(self, relay: str) -> str:
        """Return the name of a relay by its certificate; empty if it was not heard lately, or has none."""
        return next((each.name for each in self._lately() if each.relay == relay), "")

    def stays(self, own: RelayIdentity, other: RelayIdentity) -> bool:
        """Return whether ``own`` stays, and not ``other``: more relays agree with it, or its id is lower."""
        lately = [each for each in self._lately() if each.relay not in {own.relay, other.relay}]
        ours, theirs = (sum(map(each.agrees, lately)) for each in (own, other))
        return own.relay < other.relay if ours == theirs else ours > theirs

    def _lately(self) -> list[RelayIdentity]:
        since = self._monotonic() - self._within_s
        return [each for each, at in self._heard.values() if at >= since]


REPEAT_S = 60.0
MAX_UNREAD = 256
"""How many messages of other relays wait to be read; of more than so many relays, some are heard later."""
_HEARD_S = 1.5 * REPEAT_S
_PAUSE_S = 1.0
"""Each relay that hears another may answer in turn: without a pause they would flood each other."""
_ANSWER_S = 2.0
_REF = "cluster.identity@1.0.0"
_MAX_BYTES = 1024


def identity_subject(fleet: str) -> str:
    """Return the subject on which relays say what they have in common."""
    return f"edge.{fleet}.identity"


@define(eq=False, repr=False)
class FleetIdentity:
    """Compares what ``own`` returns, whose roots may change, with what the other relays of ``fleet`` say.

    Attributes:
        others: those that have joined, and were heard lately.
    """

    _own: Callable[[], RelayIdentity]
    _subject: str = field(kw_only=True, alias="fleet", converter=identity_subject)
    _registry: SchemaRegistry = field(kw_only=True)
    _signed: SignedDocuments = field(kw_only=True)
    _monotonic: Callable[[], float] = field(kw_only=True)
    _log: FilteringBoundLogger = field(kw_only=True)
    _sleep: Callable[[float], Awaitable[None]] = field(kw_only=True, default=asyncio.sleep)
    _document: Document = field(init=False)
    _reported: str | None = field(init=False, default=None)
    # Why messages were dropped during this connection: each is logged once.
    _dropped: set[str] = field(init=False, factory=set)
    _asked: asyncio.Event = field(init=False, factory=asyncio.Event)
    _outranked: asyncio.Event = field(init=False, factory=asyncio.Event)
    others: HeardRelays = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._document = Document(self._registry, _REF, _MAX_BYTES)
        self.others = HeardRelays(self._monotonic, _HEARD_S)

    async def check(self, client: Client) -> None:
        """Ask the relays that run, before this one joins them.

        Without an answer it joins: a relay that hangs must not keep the others out.

        Raises:
            ClusterConnectError: one of them differs; the text says in what, and what to do.
        """
        try:
            answer = await client.request(self._subject, self._said(self._own()), _ANSWER_S)
        except (NoRespondersError, TimeoutError):
            return
        other = self._read(answer)
        if other is not None and (difference := self._difference(other)) is not None:
            raise ClusterConnectError(difference)

    async def serve(self, client: Client) -> None:
        """Answer those that connect, on ``client``; return when another relay stays, and not this one."""
        self._outranked.clear()
        self._dropped.clear()
        await client.subscribe(
            self._subject,
            cb=self._heard,
            pending_msgs_limit=MAX_UNREAD,
            pending_bytes_limit=MAX_UNREAD * 2 * _MAX_BYTES,
        )
        parts = (self._repeat(client), self._answer(client), self._outranked.wait())
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                await each  # it may have failed
        finally:
            for each in tasks:
                each.cancel()

    async def _repeat(self, client: Client) -> None:
        while True:
            await self._say(client)
            await self._sleep(REPEAT_S)

    async def _answer(self, client: Client) -> None:
        """Let a relay that was not heard before, or differs, hear what this one has."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self._say(client)
            await self._sleep(_PAUSE_S)

    async def _heard(self, message: Msg) -> None:
        own, other = self._own(), self._read(message)
        if other is None or other.relay == own.relay:
            return
        difference = self._difference(other)
        if difference is not None and difference != self._reported:
            self._reported = difference
            self._log.warning("another relay is not of this fleet", reason=difference)
        if message.reply:
            await respond(message, self._said(own))
            return
        is_new = other.relay not in self.others
        self.others.add(other)
        if difference is not None and not self.others.stays(own, other):
            self._outranked.set()
        elif difference is not None or is_new:
            self._asked.set()

    async def _say(self, client: Client) -> None:
        own = self._own()
        await client.publish(self._subject, self._said(own), headers=own.headers())

    def _said(self, own: RelayIdentity) -> bytes:
        return self._signed.written(self._subject, own.document())

    def _read(self, message: Msg) -> RelayIdentity | None:
        try:
            signed = self._signed.read(self._subject, message.data)
            said = self._document.read(signed.document)
        except (ClusterMessageError, NotSignedError) as error:
            if (reason := str(error)) not in self._dropped:
                self._dropped.add(reason)
                self._log.warning("identity of another relay dropped", reason=reason)
            return None
        headers = message.headers or {}
        version, name = headers.get(_VERSION_HEADER, ""), headers.get(_NAME_HEADER, "")
        known = version if _VERSION.fullmatch(version) else OLDEST
        if signed.by is not None:
            name = signed.by.name
        return RelayIdentity(
            said["relay"], said["url"], said["roots"], known, name if is_relay_name(name) else ""
        )

    def _difference(self, other: RelayIdentity) -> str | None:
        """Return in what ``other`` differs from this relay, and what to do about it; None if in nothing."""
        own = self._own()
        if other.url != own.url:
            return (
                f"relay {other.relay} of this fleet has the public URL {printable(other.url, 256)}, "
                f"and this one {own.url}: give both the same --public-url, or this one another "
                "--cluster-fleet"
            )
        if not set(other.roots) & set(own.roots):
            return (
                f"relay {other.relay} of this fleet trusts other roots of nodes: restore this one from its "
                "`relay ca backup --without-ca-key`, or copy its ca/previous.pem and ca/root.pem, or give "
                "this one another --cluster-fleet"
            )
        return None
