"""Sends sealed questions to other relays of the fleet, and hands over theirs: the channels, made and kept.

Each process is asked on a subject of its own, ``edge.<fleet>.sealed.<relay>``, where a channel begins, too. A
relay has one channel to each that it asks, made with the first question, and again after an hour. What
another relay answers is proven, and so is that it has not done what it was asked: it says "not mine". What
comes from anything else is dropped and counted, and what was waited for is waited for on: so neither a forged
answer nor the servers' word that no relay listens ends a question that may have been read. Must not know what
is asked, and must not repeat a question.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from attrs import define, field
from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.typing import FilteringBoundLogger

from relay.cluster.channel import (
    Asking,
    ChannelError,
    Offered,
    RandomBytes,
    RelayKey,
    SealedChannel,
    is_finish,
    session_of,
)
from relay.cluster.client import Accept, subscribe
from relay.cluster.connection import ClusterConnection, Replies
from relay.cluster.messages import ClusterMessageError, CountMessage
from relay.limits.rate_limits import Allowance, KeyedLimiters
from relay.routing.port import NoResponderError
from schemas.certificates import RelayCertificate
from schemas.error_roots import PeerError
from schemas.errors import ToolError

SEALED = "sealed"
"""What a message is counted as that is none of another relay's."""
LIFE_S = 3600.0
"""How long a relay asks by one channel. The other one keeps it somewhat longer."""
_KEPT_S = LIFE_S + 300.0
HANDSHAKE_S = 2.0
_AGAIN_S = 5.0
"""How soon a relay is tried again that listens, and makes no channel: each try takes the time of a call."""
_SUSPECT_S = 10.0
"""How old a channel is at least that a question without an answer ends."""
MAX_OFFERED, MAX_CHANNELS = 64, 256
HELLOS = Allowance(rate=50, burst=100, concurrency=1)
"""How many handshakes are answered: each costs a millisecond, and certificates are no secret."""

_DONE, _NOT_MINE, _LATE = b"\x00", b"\x01", b"\x02"
_MAX_BESIDE = 1 << 16


class NotMineError(PeerError):
    """Another relay has proven that it has not done what it was asked, and will not."""


class RelayTrust(NamedTuple):
    """Which certificates of relays are accepted.

    Attributes:
        relay: returns what one says, DER, that is accepted now. Raises IdentityError.
        signer: returns the same also of one that has ended since: what it has signed stays.
        accepts: whether one that was is accepted still: not revoked, and its root trusted.
    """

    relay: Callable[[bytes], RelayCertificate]
    signer: Callable[[bytes], RelayCertificate]
    accepts: Callable[[RelayCertificate], bool]


class SealedAsk(NamedTuple):
    """A question of another relay, which is proven.

    Attributes:
        relay: the process that asks.
        name: of the relay, by its certificate.
        beside: what goes along with ``body``, and is no part of its document.
        ahead_ms: how far the clock of this process is ahead of the other's: not less, and not more by
            longer than the other waits for the end of a handshake.
        reply: answers it, once.
        not_mine: answers, instead, that nothing was done.
        late: answers that nothing was done because, by ``ahead_ms``, it is too old. The other relay makes
            another channel: its clock may have stood still.
    """

    relay: str
    name: str
    kind: str
    beside: str
    body: bytes
    ahead_ms: int
    reply: Callable[[bytes], None]
    not_mine: Callable[[], None]
    late: Callable[[], None]

    def check(self, relay: str) -> None:
        """Return if ``relay`` is the process that asks, as the body says.

        Raises:
            ClusterMessageError: it is not.
        """
        if relay != self.relay:
            raise ClusterMessageError("it is of another relay than its channel")


SealedHandler = Callable[[SealedAsk], None]
"""Handles a question, or has it handled. Must not block."""


class _Kept(NamedTuple):
    channel: SealedChannel
    since_s: float
    ahead_ms: int = 0


@define(eq=False, repr=False, kw_only=True)
class SealedLink:
    """The channels of the process ``relay`` with the others of ``fleet``.

    ``key`` returns what it proves with which relay it is; None if it has no certificate. ``ticks_ms`` is a
    clock that cannot be set.

    Attributes:
        requests: carries messages, also those that are not sealed.
        is_sealed: whether this relay says nothing that is not sealed, and hears nothing else.
    """

    requests: ClusterConnection
    fleet: str
    relay: str
    _key: Callable[[], RelayKey | None]
    _trust: RelayTrust
    _random_bytes: RandomBytes
    _monotonic: Callable[[], float]
    _ticks_ms: Callable[[], int]
    _count: CountMessage
    _log: FilteringBoundLogger
    _handlers: dict[str, SealedHandler] = field(init=False, factory=dict)
    _asking: dict[str, _Kept] = field(init=False, factory=dict)
    _making: dict[str, asyncio.Task[SealedChannel]] = field(init=False, factory=dict)
    _not_before_s: dict[str, float] = field(init=False, factory=dict)
    _offered: OrderedDict[bytes, Offered] = field(init=False, factory=OrderedDict)
    _answering: OrderedDict[bytes, _Kept] = field(init=False, factory=OrderedDict)
    _replies: Replies = field(init=False, factory=Replies)
    _limiters: KeyedLimiters[str] = field(init=False)
    _reported: set[str] = field(init=False, factory=set)
    is_sealed: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._limiters = KeyedLimiters(self._monotonic, 1)

    def answer(self, kind: str, handler: SealedHandler) -> None:
        """Have ``handler`` answer what others ask of that kind. Any other kind is "not mine"."""
        self._handlers[kind] = handler

    async def request(self, relay: str, kind: str, body: bytes, timeout_s: float, beside: str = "") -> bytes:
        """Return what ``relay`` answers.

        Raises:
            NotMineError: it has done nothing, and will not.
            NoResponderError: it was not sent: there is no channel.
            TimeoutError: no answer of that relay in time; it may have been read.
        """
        until_s = self._monotonic() + timeout_s
        channel = await self._channel(relay, min(timeout_s, HANDSHAKE_S))
        number, sealed = channel.seal(_said(kind, beside, body))

        def opened(data: bytes) -> bytes | None:
            if not self._trust.accepts(channel.peer):
                self._drop(ChannelError("is of a relay that was revoked"))
                return None
            try:
                return channel.open_reply(number, data)
            except ChannelError as error:
                self._drop(error)
                return None

        left_s = until_s - self._monotonic()
        try:
            answer = await self.requests.request(self._subject(relay), sealed, left_s, accept=opened)
        except TimeoutError:
            kept = self._asking.get(relay)
            if kept is not None and self._monotonic() - kept.since_s >= _SUSPECT_S:
                del self._asking[relay]  # the other relay may have lost it
            raise
        if answer[:1] == _LATE:
            self._asking.pop(relay, None)
        if answer[:1] in {_NOT_MINE, _LATE}:
            raise NotMineError("another relay has not done it")
        return answer[1:]

    async def send(self, relay: str, kind: str, body: bytes) -> bool:
        """Send what is not to be answered; return False if there is no channel yet.

        Then one is begun: what is sent again may find it.
        """
        if (channel := self._usable(relay)) is None:
            self._begin(relay)
            return False
        await self.requests.publish(self._subject(relay), channel.seal(_said(kind, "", body))[1])
        return True

    async def serve(self, client: Client) -> None:
        self._reported.clear()
        await subscribe(client, self._subject(self.relay), self._received, self._log)
        await asyncio.Event().wait()

    def relay_gone(self, relay: str) -> None:
        """Forget the channel to a process that has ended."""
        self._asking.pop(relay, None)
        self._not_before_s.pop(relay, None)

    async def close(self) -> None:
        if making := list(self._making.values()):
            for task in making:
                task.cancel()
            await asyncio.wait(making)
        await self._replies.close()

    def _subject(self, relay: str) -> str:
        return f"edge.{self.fleet}.sealed.{relay}"

    # --- asking

    def _usable(self, relay: str) -> SealedChannel | None:
        kept = self._asking.get(relay)
        if kept is None:
            return None
        is_old = self._monotonic() - kept.since_s >= LIFE_S
        if is_old or kept.channel.is_spent or not self._trust.accepts(kept.channel.peer):
            del self._asking[relay]
            return None
        return kept.channel

    async def _channel(self, relay: str, timeout_s: float) -> SealedChannel:
        """Return the channel to ``relay``, made if there is none.

        Raises:
            NoResponderError: there is none, and nothing was asked.
        """
        if (channel := self._usable(relay)) is not None:
            return channel
        try:
            async with asyncio.timeout(timeout_s):
                # One that gives up does not end it for the others that wait.
                await asyncio.wait({making := self._begin(relay)})
        except TimeoutError:
            raise NoResponderError("no channel with that relay") from None
        return making.result()

    def _begin(self, relay: str) -> "asyncio.Task[SealedChannel]":
        making = self._making.get(relay)
        if making is None:
            making = self._making[relay] = asyncio.create_task(self._made(relay))
            making.add_done_callback(lambda done: self._was_made(relay, done))
        return making

    def _was_made(self, relay: str, done: "asyncio.Task[SealedChannel]") -> None:
        del self._making[relay]
        if done.cancelled() or isinstance(error := done.exception(), NoResponderError | None):
            return
        self._log.error("channel not made", relay=relay, exc_info=error)

    async def _made(self, relay: str) -> SealedChannel:
        if self._monotonic() < self._not_before_s.get(relay, 0):
            raise NoResponderError("no channel with that relay")
        if (own := self._key()) is None:
            raise NoResponderError("this relay has no certificate of its fleet")
        asking = Asking.begun(
            own, to=relay, relay=self.relay, fleet=self.fleet, random_bytes=self._random_bytes
        )
        channels: list[SealedChannel] = []

        def welcomed(data: bytes) -> bytes | None:
            finish, channel = asking.finish(data, self._trust.relay, self._ticks_ms())
            channels.append(channel)
            return finish

        def confirmed(data: bytes) -> bytes | None:
            channels[0].confirm(data)
            return data

        finish = await self._shaken(relay, asking.hello, welcomed)
        await self._shaken(relay, finish, confirmed)
        self._not_before_s.pop(relay, None)
        self._asking[relay] = _Kept(channels[0], self._monotonic())
        self._log.info("channel with another relay", relay=relay, name=channels[0].peer.name)
        return channels[0]

    async def _shaken(self, relay: str, message: bytes, take: Accept) -> bytes:
        """Return what ``take`` makes of the answer to a message of a handshake: nothing is asked yet."""

        def accept(data: bytes) -> bytes | None:
            if not data:
                raise NoResponderError("no relay listens there")
            try:
                return take(data)
            except ChannelError as error:
                self._drop(error)
                return None

        try:
            return await self.requests.request(self._subject(relay), message, HANDSHAKE_S, accept=accept)
        except TimeoutError:
            self._not_before_s[relay] = self._monotonic() + _AGAIN_S
            raise NoResponderError("that relay makes no channel") from None

    # --- answering

    def _received(self, message: Msg) -> None:
        try:
            session = session_of(message.data)
            if (kept := self._answering.get(session)) is not None:
                self._asked(message, kept)
            elif is_finish(message.data):
                self._finished(message, session)
            else:
                self._offer(message)
        except ChannelError as error:
            self._drop(error)

    def _offer(self, message: Msg) -> None:
        if (own := self._key()) is None:
            return
        try:
            with self._limiters.held("hello", HELLOS):
                offered = Offered.by(
                    message.data,
                    own,
                    relay=self.relay,
                    fleet=self.fleet,
                    random_bytes=self._random_bytes,
                    verify=self._trust.relay,
                )
        except ToolError:
            raise ChannelError("is one of too many handshakes") from None
        if offered.session in self._offered:
            raise ChannelError("is repeated")
        self._offered[offered.session] = offered
        if len(self._offered) > MAX_OFFERED:
            self._offered.popitem(last=False)
        self._replies.send(message, offered.welcome)

    def _finished(self, message: Msg, session: bytes) -> None:
        offered = self._offered.get(session)
        if offered is None:
            raise ChannelError("is of no handshake")
        confirm, channel = offered.finish(message.data)
        del self._offered[session]
        # The servers can hold back the end of a handshake, but no longer than the other relay waits for it.
        ahead_ms = self._ticks_ms() - channel.finished_ms
        self._answering[session] = _Kept(channel, self._monotonic(), ahead_ms)
        if len(self._answering) > MAX_CHANNELS:
            self._answering.popitem(last=False)
        self._replies.send(message, confirm)

    def _asked(self, message: Msg, kept: _Kept) -> None:
        channel, session = kept.channel, kept.channel.session
        number, plain = channel.open(message.data)
        if self._monotonic() - kept.since_s >= _KEPT_S or not self._trust.accepts(channel.peer):
            del self._answering[session]
            raise ChannelError("is of a channel that has ended")
        self._answering.move_to_end(session)
        kind, beside, body = _heard(plain)

        def reply(answer: bytes, status: bytes = _DONE) -> None:
            self._replies.send(message, channel.seal_reply(number, status + answer))

        ask = SealedAsk(
            channel.relay,
            channel.peer.name,
            kind,
            beside,
            body,
            kept.ahead_ms,
            reply,
            not_mine=partial(reply, b"", _NOT_MINE),
            late=partial(reply, b"", _LATE),
        )
        handler = self._handlers.get(kind)
        if handler is None:
            ask.not_mine()
        else:
            handler(ask)

    def _drop(self, error: ChannelError) -> None:
        """Count a message that is dropped, and log it: once for each reason and connection."""
        self._count(SEALED, "answered", "refused")
        if (reason := str(error)) not in self._reported:
            self._reported.add(reason)
            self._log.warning("message of no other relay dropped", reason=f"it {reason}")


def _said(kind: str, beside: str, body: bytes) -> bytes:
    """Return what is sealed: its kind, what goes along, and the message, each with its length before it."""
    word, along = kind.encode("ascii"), beside.encode("utf-8")
    if len(along) >= _MAX_BESIDE:
        raise ValueError("too long to go along")
    return b"".join((bytes([len(word)]), word, len(along).to_bytes(2, "big"), along, body))


def _heard(plain: bytes) -> tuple[str, str, bytes]:
    """Return kind, what goes along, and message, from a relay that is proven, and may be of another version.

    Raises:
        ChannelError: it is not of that form.
    """
    try:
        end = 1 + plain[0]
        begin = end + 2 + int.from_bytes(plain[end : end + 2], "big")
        if begin > len(plain):
            raise ChannelError("is not of the form of a question")
        return plain[1:end].decode("ascii"), plain[end + 2 : begin].decode("utf-8"), plain[begin:]
    except (IndexError, UnicodeDecodeError):
        raise ChannelError("is not of the form of a question") from None
