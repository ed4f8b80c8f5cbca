"""How two relays agree on keys, and seal what they say: the handshake and the channel, without I/O.

The relay that asks sends a hello, the other one answers with a welcome, and the first one finishes: each has
signed, with the key of its certificate, both ephemeral keys (X25519), both certificates and both processes.
That is the exchange of ISO/IEC 9798-3, from which SIGMA has come; see docs/decisions/0100. From then on each
request has a number of its own, is opened once, and is answered once, under a key for each direction.

    asking = Asking.begun(own, to="01H…", relay="01J…", fleet="main", random_bytes=os.urandom)
    offered = Offered.by(asking.hello, own, relay="01H…", fleet="main", random_bytes=os.urandom, verify=…)
    finish, asker = asking.finish(offered.welcome, verify, ticks_ms)
    confirm, answerer = offered.finish(finish)        # the one SealedChannel, and once it is confirmed
    asker.confirm(confirm)                            # the other

What is forged, repeated, or meant for another raises ChannelError, and changes nothing. Must not know what is
said, must not read a clock, and must not decide which certificates are trusted.
"""

import struct
from collections.abc import Callable
from typing import NamedTuple, Self

from attrs import define, field
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from nacl.signing import SigningKey

from schemas.certificates import IdentityError, RelayCertificate
from schemas.error_roots import PeerError
from schemas.keys import verifies

MAX_CERTIFICATE_BYTES = 2048
MOST_MESSAGES = 1 << 32
"""How many requests one channel carries. After that, as after a restart, there is a new one."""
WINDOW = 4096
"""How far a request may be behind the newest one: as many as a relay answers at once."""

_LABEL = b"edge-kubelet relay channel 1"
_HELLO, _WELCOME, _FINISH, _CONFIRM, _REQUEST, _REPLY = range(1, 7)
_KEY_BYTES, _SIGNATURE_BYTES = 32, 64
_SESSION = struct.Struct("!B16s")
_FINISH_HEAD = struct.Struct("!B16sQ")
_HELLO_HEAD = struct.Struct("!B16s32s26s26s")
_WELCOME_HEAD = struct.Struct("!B16s32s")
_HEAD = struct.Struct("!B16sQ")

Verify = Callable[[bytes], RelayCertificate]
"""Returns what the certificate, DER, of a relay of this fleet says, valid now. Raises IdentityError."""
RandomBytes = Callable[[int], bytes]


class ChannelError(PeerError):
    """A message belongs to no handshake or channel of this relay; the text says why, in fixed words."""


class RelayKey(NamedTuple):
    """What a relay proves with which one it is: its certificate, DER, and the key of that."""

    certificate: bytes
    key: SigningKey


def session_of(message: bytes) -> bytes:
    """Return which handshake or channel ``message`` says to be of: not proven.

    Raises:
        ChannelError: it has no head.
    """
    if len(message) < _SESSION.size:
        raise ChannelError("is too short")
    session: bytes = message[1 : _SESSION.size]
    return session


def is_finish(message: bytes) -> bool:
    """Return whether ``message`` says that it ends a handshake: not proven."""
    return message[:1] == bytes([_FINISH])


@define(eq=False, repr=False)
class ReplayWindow:
    """Which of the numbers since the newest less ``WINDOW`` were taken."""

    _newest: int = 0
    _taken: int = 0  # bit n: the number ``_newest - n``

    def take(self, number: int) -> bool:
        """Return whether ``number`` was not taken yet, as far as is known, and is from now on."""
        ahead = number - self._newest
        if ahead > 0:
            self._taken = ((self._taken << ahead) | 1) & ((1 << WINDOW) - 1) if ahead < WINDOW else 1
            self._newest = number
            return True
        if -ahead >= WINDOW or self._taken >> -ahead & 1:
            return False
        self._taken |= 1 << -ahead
        return True


@define(eq=False, repr=False)
class SealedChannel:
    """The keys of one session, at one of its ends: the asker's, which seals requests, or the answerer's.

    Attributes:
        session: names it to both.
        peer: the certificate of the other relay.
        relay: the process of the other relay.
        finished_ms: the asker's clock when it had the welcome and ended the handshake.
    """

    session: bytes
    peer: RelayCertificate
    relay: str
    finished_ms: int
    _requests: ChaCha20Poly1305
    _replies: ChaCha20Poly1305
    _sent: int = field(init=False, default=0)
    _window: ReplayWindow = field(init=False, factory=ReplayWindow)

    @property
    def is_spent(self) -> bool:
        """Whether it takes no more requests."""
        return self._sent >= MOST_MESSAGES

    def seal(self, plain: bytes) -> tuple[int, bytes]:
        """Return the number of the next request, and the request; at the asker.

        Raises:
            ChannelError: it is spent.
        """
        if self.is_spent:
            raise ChannelError("is of a channel that is spent")
        self._sent += 1
        return self._sent, _sealed(self._requests, _REQUEST, self.session, self._sent, plain)

    def open(self, message: bytes) -> tuple[int, bytes]:
        """Return the number of a request and what it says; at the answerer, once for each.

        Raises:
            ChannelError: it was not sealed in this channel, or was opened before, or is too late to tell.
        """
        number = _number_of(message)
        plain = _opened(self._requests, _REQUEST, self.session, number, message)
        if not self._window.take(number):  # only of what is proven: another must not use up numbers
            raise ChannelError("is repeated")
        return number, plain

    def seal_reply(self, number: int, plain: bytes) -> bytes:
        """Return the answer to a request that was opened. Call it once for each."""
        return _sealed(self._replies, _REPLY, self.session, number, plain)

    def open_reply(self, number: int, message: bytes) -> bytes:
        """Return the answer to the request of that number.

        Raises:
            ChannelError: it is another message.
        """
        return _opened(self._replies, _REPLY, self.session, number, message)

    def confirm(self, message: bytes) -> None:
        """Return if the answerer has proven to have the keys too, at the asker.

        Raises:
            ChannelError: it has not.
        """
        _opened(self._replies, _CONFIRM, self.session, 0, message)


@define(eq=False, repr=False, kw_only=True)
class Asking:
    """A handshake at the relay that begins it.

    Attributes:
        hello: what it sends first.
    """

    hello: bytes
    _own: RelayKey
    _to: str
    _fleet: str
    _secret: X25519PrivateKey
    _session: bytes

    @classmethod
    def begun(cls, own: RelayKey, *, to: str, relay: str, fleet: str, random_bytes: RandomBytes) -> Self:
        """Return one of the process ``relay`` with the process ``to``."""
        session, secret = random_bytes(16), X25519PrivateKey.from_private_bytes(random_bytes(_KEY_BYTES))
        ephemeral = secret.public_key().public_bytes_raw()
        head = _HELLO_HEAD.pack(_HELLO, session, ephemeral, relay.encode("ascii"), to.encode("ascii"))
        hello = head + own.certificate
        return cls(hello=hello, own=own, to=to, fleet=fleet, secret=secret, session=session)

    def finish(self, welcome: bytes, verify: Verify, ticks_ms: int) -> tuple[bytes, SealedChannel]:
        """Return what ends the handshake, and the channel, which is to be confirmed.

        ``ticks_ms`` is this relay's clock, which cannot be set: the other one learns it, and so can tell how
        old a request is.

        Raises:
            ChannelError: ``welcome`` is no answer to the hello by a relay of this fleet.
        """
        if len(welcome) < _WELCOME_HEAD.size + _SIGNATURE_BYTES:
            raise ChannelError("is too short")
        kind, session, ephemeral = _WELCOME_HEAD.unpack_from(welcome)
        said, signature = welcome[:-_SIGNATURE_BYTES], welcome[-_SIGNATURE_BYTES:]
        if (kind, session) != (_WELCOME, self._session):
            raise ChannelError("is of another handshake")
        peer = _certificate(said[_WELCOME_HEAD.size :], self._own, verify)
        transcript = _transcript(self._fleet, self.hello, said)
        if not verifies(peer.public_key, _signed(_WELCOME, transcript), signature):
            raise ChannelError("is not signed by the relay of its certificate")
        requests, replies = _keys(self._secret, ephemeral, transcript)
        head = _FINISH_HEAD.pack(_FINISH, session, ticks_ms)
        signed = self._own.key.sign(_signed(_FINISH, transcript) + head).signature
        return head + signed, SealedChannel(session, peer, self._to, ticks_ms, requests, replies)


@define(eq=False, repr=False)
class Offered:
    """A handshake at the relay that is asked.

    Attributes:
        session: names it.
        welcome: what it answers.
    """

    session: bytes
    welcome: bytes
    _peer: RelayCertificate
    _relay: str
    _transcript: bytes
    _requests: ChaCha20Poly1305
    _replies: ChaCha20Poly1305

    @classmethod
    def by(  # noqa: PLR0913 - what comes in from outside
        cls,
        hello: bytes,
        own: RelayKey,
        *,
        relay: str,
        fleet: str,
        random_bytes: RandomBytes,
        verify: Verify,
    ) -> Self:
        """Return what the process ``relay`` offers to the one that has sent ``hello``.

        Raises:
            ChannelError: that is no hello to this process by another relay of this fleet.
        """
        if len(hello) <= _HELLO_HEAD.size:
            raise ChannelError("is too short")
        kind, session, ephemeral, asking, to = _HELLO_HEAD.unpack_from(hello)
        if kind != _HELLO or to != relay.encode("ascii") or not (asking.isalnum() and asking.isascii()):
            raise ChannelError("is for another relay")
        peer = _certificate(hello[_HELLO_HEAD.size :], own, verify)
        secret = X25519PrivateKey.from_private_bytes(random_bytes(_KEY_BYTES))
        head = _WELCOME_HEAD.pack(_WELCOME, session, secret.public_key().public_bytes_raw())
        said = head + own.certificate
        transcript = _transcript(fleet, hello, said)
        requests, replies = _keys(secret, ephemeral, transcript)
        signature = own.key.sign(_signed(_WELCOME, transcript)).signature
        return cls(session, said + signature, peer, asking.decode("ascii"), transcript, requests, replies)

    def finish(self, finish: bytes) -> tuple[bytes, SealedChannel]:
        """Return what confirms the channel to the other relay, and the channel.

        Raises:
            ChannelError: ``finish`` is not by the relay whose certificate the hello had.
        """
        head, signature = finish[: _FINISH_HEAD.size], finish[_FINISH_HEAD.size :]
        if not verifies(self._peer.public_key, _signed(_FINISH, self._transcript) + head, signature):
            raise ChannelError("is not signed by the relay of its certificate")
        _, _, ticks_ms = _FINISH_HEAD.unpack(head)
        channel = SealedChannel(
            self.session, self._peer, self._relay, ticks_ms, self._requests, self._replies
        )
        return _sealed(self._replies, _CONFIRM, self.session, 0, b""), channel


def _certificate(der: bytes, own: RelayKey, verify: Verify) -> RelayCertificate:
    if len(der) > MAX_CERTIFICATE_BYTES:
        raise ChannelError("has a certificate that is too large")
    if der == own.certificate:
        raise ChannelError("is this relay's own")
    try:
        return verify(der)
    except IdentityError as error:
        raise ChannelError(f"has a certificate that is not accepted: {error.reason}") from None


def _transcript(fleet: str, hello: bytes, welcome: bytes) -> bytes:
    """Return the digest of all that both have said. Each part is preceded by its length."""
    digest = Hash(SHA256())
    for part in (_LABEL, fleet.encode("utf-8"), hello, welcome):
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.finalize()


def _signed(who: int, transcript: bytes) -> bytes:
    """Return what a relay signs: as the one that answers, or as the one that finishes."""
    return _LABEL + bytes([0, who]) + transcript


def _keys(
    secret: X25519PrivateKey, other: bytes, transcript: bytes
) -> tuple[ChaCha20Poly1305, ChaCha20Poly1305]:
    """Return the keys of requests and of replies."""
    try:
        shared = secret.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:  # a point of low order: what follows would not depend on this relay's secret
        raise ChannelError("has no usable key") from None
    both = HKDF(SHA256(), 2 * _KEY_BYTES, salt=transcript, info=_LABEL).derive(shared)
    return ChaCha20Poly1305(both[:_KEY_BYTES]), ChaCha20Poly1305(both[_KEY_BYTES:])


def _sealed(key: ChaCha20Poly1305, kind: int, session: bytes, number: int, plain: bytes) -> bytes:
    head = _HEAD.pack(kind, session, number)
    return head + key.encrypt(_nonce(number), plain, head)


def _opened(key: ChaCha20Poly1305, kind: int, session: bytes, number: int, message: bytes) -> bytes:
    head = _HEAD.pack(kind, session, number)
    if message[: _HEAD.size] != head:
        raise ChannelError("is of another kind, channel or request")
    try:
        return key.decrypt(_nonce(number), message[_HEAD.size :], head)
    except (InvalidTag, ValueError):
        raise ChannelError("was not sealed in its channel") from None


def _nonce(number: int) -> bytes:
    """Return the nonce of a message: a key seals each number once, since a confirmation has 0."""
    return number.to_bytes(12, "big")


def _number_of(message: bytes) -> int:
    if len(message) < _HEAD.size:
        raise ChannelError("is too short")
    number: int = _HEAD.unpack_from(message)[2]
    return number
