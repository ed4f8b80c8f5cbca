"""Passkeys and browser sessions: how a person proves who it is (WebAuthn), and for how long that holds.

A challenge is authenticated by a key of this process, so that strangers who ask for one leave nothing behind;
it is good once. A session is 32 random bytes in a cookie, of which the digest is kept, in memory. Must not
decide what a person may do.
"""

import hmac
from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import sha256
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from attrs import define, field, frozen
from cryptography.hazmat.primitives.asymmetric import ec
from fido2.cose import ES256
from fido2.server import Fido2Server
from fido2.utils import websafe_encode
from fido2.webauthn import (
    Aaguid,
    AttestedCredentialData,
    AuthenticationResponse,
    PublicKeyCredentialRpEntity,
    PublicKeyCredentialUserEntity,
    RegistrationResponse,
    ResidentKeyRequirement,
    UserVerificationRequirement,
)

from relay.state.people import PeopleLedger, Person, by_credential, digest_of
from schemas.error_roots import PeerError
from schemas.keys import base64url

CHALLENGE_MS = 300_000
SESSION_MS = 12 * 3_600_000
_MAX_SESSIONS = 4096
_MAX_USED = 4096
_NONCE_BYTES, _TIME_BYTES, _MAC_BYTES = 16, 8, 32
_REQUIRED = UserVerificationRequirement.REQUIRED
SIGN_IN, MAKE = b"sign in", b"make"


class PasskeyError(PeerError):
    """A passkey was not made, or did not prove who its owner is."""


@frozen
class BrowserSession:
    """One browser of a person. ``proof``: what it began with; ``form`` proves that a form was shown to it."""

    person: str
    proof: bytes
    until_ms: int
    form: str


@define(eq=False, repr=False, kw_only=True)
class Passkeys:
    """Makes and checks passkeys of the people in ``people``, for the relay at ``public_url``."""

    _public_url: str
    _people: PeopleLedger
    _now_ms: Callable[[], int]
    _random_bytes: Callable[[int], bytes]
    _key: bytes = field(init=False)
    _server: Fido2Server = field(init=False)
    _decoy: AttestedCredentialData = field(init=False)
    _used: dict[bytes, int] = field(init=False, factory=dict)
    _lock: Lock = field(init=False, factory=Lock)
    _sessions: OrderedDict[str, BrowserSession] = field(init=False, factory=OrderedDict)

    def __attrs_post_init__(self) -> None:
        self._key = self._random_bytes(32)
        host = urlsplit(self._public_url).hostname or ""
        entity = PublicKeyCredentialRpEntity(id=host, name="Edge relay")
        self._server = Fido2Server(entity, verify_origin=self._public_url.__eq__)
        decoy = ec.generate_private_key(ec.SECP256R1()).public_key()
        public = ES256.from_cryptography_key(decoy)  # type: ignore[no-untyped-call]
        self._decoy = AttestedCredentialData.create(Aaguid(bytes(16)), self._random_bytes(32), public)

    # --- challenges --------------------------------------------------------------------------------------

    def _challenge(self, purpose: bytes) -> bytes:
        plain = self._random_bytes(_NONCE_BYTES) + (self._now_ms() + CHALLENGE_MS).to_bytes(
            _TIME_BYTES, "big"
        )
        return plain + hmac.digest(self._key, purpose + b"\0" + plain, sha256)

    def _taken(self, challenge: bytes, purpose: bytes) -> None:
        """Use up ``challenge``.

        Raises:
            PasskeyError: it is none of ours for ``purpose``, has expired, or was used.
        """
        plain, mac = challenge[:-_MAC_BYTES], challenge[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, hmac.digest(self._key, purpose + b"\0" + plain, sha256)):
            raise PasskeyError("challenge")
        now, until = self._now_ms(), int.from_bytes(plain[_NONCE_BYTES:], "big")
        with self._lock:
            self._used = {known: end for known, end in self._used.items() if end > now}
            if until <= now or challenge in self._used or len(self._used) >= _MAX_USED:
                raise PasskeyError("challenge")
            self._used[challenge] = until

    # --- ceremonies --------------------------------------------------------------------------------------

    def creation(self, secret: str) -> dict[str, Any]:
        """Return the options by which a browser makes a passkey, for the holder of a one-time link.

        Raises:
            InvitationError: the link cannot be used.
        """
        person = self._people.read().invited_by(secret, self._now_ms())
        user = PublicKeyCredentialUserEntity(
            id=person.id.encode("ascii"), name=person.name, display_name=person.name
        )
        options, _ = self._server.register_begin(
            user,
            [AttestedCredentialData(known) for _, known in person.passkeys],
            resident_key_requirement=ResidentKeyRequirement.REQUIRED,
            user_verification=_REQUIRED,
            challenge=self._challenge(MAKE),
        )
        return dict(options)

    def made(self, secret: str, response: Mapping[str, Any]) -> tuple[Person, bytes]:
        """Record the passkey in ``response``; return whose it is, and its public part.

        Raises:
            InvitationError: the link cannot be used.
            PasskeyError: the response does not prove a passkey.
        """
        self._people.read().invited_by(secret, self._now_ms())  # before anything else is parsed
        try:
            read = RegistrationResponse.from_dict(response)
            challenge = bytes(read.response.client_data.challenge)
            state = {"challenge": websafe_encode(challenge), "user_verification": _REQUIRED}
            data = self._server.register_complete(state, read)
        except Exception as error:  # the library raises whatever its parsers do
            raise PasskeyError("malformed") from error
        self._taken(challenge, MAKE)
        if data.credential_data is None:
            raise PasskeyError("malformed")
        if data.credential_data.credential_id in self._known():
            raise PasskeyError("known")  # its maker chooses the id: another's would keep its owner out
        credential = bytes(data.credential_data)
        return self._people.add_passkey(secret, credential), credential

    def request(self) -> dict[str, Any]:
        """Return the options by which a browser proves a passkey, of whichever person."""
        options, _ = self._server.authenticate_begin(
            user_verification=_REQUIRED, challenge=self._challenge(SIGN_IN)
        )
        return dict(options)

    def proven(self, response: Mapping[str, Any]) -> tuple[Person, bytes]:
        """Return who has proven a passkey by ``response``, and the passkey's public part.

        Raises:
            PasskeyError: the response proves none. It takes as long whether or not the passkey is known.
        """
        try:
            read = AuthenticationResponse.from_dict(response)
            challenge = bytes(read.response.client_data.challenge)
        except Exception as error:
            raise PasskeyError("malformed") from error
        found = self._known().get(read.raw_id)
        key = self._decoy.public_key if found is None else AttestedCredentialData(found[1]).public_key
        asked = AttestedCredentialData.create(Aaguid(bytes(16)), read.raw_id, key)
        state = {"challenge": websafe_encode(challenge), "user_verification": _REQUIRED}
        try:
            self._server.authenticate_complete(state, [asked], read)
        except Exception as error:
            raise PasskeyError("not proven") from error
        self._taken(challenge, SIGN_IN)
        if found is None:
            raise PasskeyError("not proven")
        person, credential = found
        handle = read.response.user_handle
        if handle is not None and handle != person.id.encode("ascii"):
            raise PasskeyError("not proven")
        return person, credential

    def _known(self) -> Mapping[bytes, tuple[Person, bytes]]:
        """Return whose each passkey is, and its public part, by the id that the passkey has."""
        return {
            AttestedCredentialData(credential).credential_id: (person, credential)
            for credential, person in by_credential(self._people.read().by_id).items()
        }

    def are_offered(self) -> bool:
        """Return whether anybody was invited to make one."""
        return any(person.provider is None for person in self._people.read().by_id.values())

    # --- sessions ----------------------------------------------------------------------------------------

    def begin_session(self, person: Person, proof: bytes) -> str:
        """Return the value of the cookie of a new session."""
        value = base64url(self._random_bytes(32))
        until, form = self._now_ms() + SESSION_MS, base64url(self._random_bytes(16))
        self._sessions[digest_of(value)] = BrowserSession(person.id, proof, until, form)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return value

    def session_of(self, value: str | None) -> tuple[BrowserSession, Person] | None:
        """Return the session of a cookie, and whose it is; None if it has ended, by whatever."""
        session = self._sessions.get(digest_of(value)) if value else None
        if session is None:
            return None
        person = self._people.read().active(session.person)
        has_proof = person is not None and session.proof in person.proofs
        if person is None or not has_proof or session.until_ms <= self._now_ms():
            self.end_session(value)
            return None
        return session, person

    def end_session(self, value: str | None) -> None:
        if value:
            self._sessions.pop(digest_of(value), None)
