"""Targets: tokens, keys, certificates, and what proves that one may enrol. No secret gets into an error."""

from functools import cache
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from relay.auth.agent_tokens import Authenticator
from relay.auth.issuer_keys import MAX_KEYS, JwksError, JwksReader
from relay.pki.roots import read_server_key
from relay.state.key_files import KeyFileError
from relay.state.tokens import key_id
from schemas.certificates import (
    IdentityError,
    are_endorsed,
    is_endorsed,
    is_server_root,
    read_csr,
    verify_leaf,
)
from schemas.enrolment import MAX_REQUEST_BYTES, NODE, REQUEST_REF, JoinToken, JoinTokenError, is_proven
from schemas.identity import (
    CertificateFormatError,
    certificates_in,
    has_positive_serial,
    serial_of,
    to_pem,
    validity_of,
)
from schemas.keys import KeyFormatError, base64url, from_base64url, is_sound_public_key, private_key_from_pem
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads
from schemas.tokens import AGENT_REF, DEVICE_REF, TokenError, TokenVerifier
from tests.fakes.hostile_texts import is_clean
from tests.fakes.signer import LOW_ORDER_KEYS, NODE_ID, NOW_MS
from tests.fuzz import samples
from tests.fuzz.scratch import scratch
from tests.fuzz.target import REFUSED, Target, text_of, tried

_REGISTRY = SchemaRegistry()
_TOKENS = TokenVerifier(_REGISTRY, DEVICE_REF)
_ENROL = _REGISTRY.load(REQUEST_REF)
_OURS: Final = {"ours": samples.NODE.public_key}
_JWKS = JwksReader(_REGISTRY, _OURS)


def token(data: bytes) -> None:
    """A token is the one that was signed, or none."""
    text = text_of(data)
    if tried(lambda: _verify(text), TokenError, secret=text) is not REFUSED:
        assert data in samples.TOKENS


def token_claims(data: bytes) -> None:
    """The same where the signature fits: what the claims say is all that can be wrong."""
    signed = _signed(data, samples.NODE.kid)
    claims = tried(lambda: _verify(signed), TokenError, secret=signed)
    if claims is not REFUSED:
        assert claims["aud"] == samples.AUDIENCE
        assert claims["token_class"] == "device_runtime"


def _verify(text: str) -> dict[str, object]:
    keys = {samples.NODE.kid: samples.NODE.public_key}
    return _TOKENS.verify(text, keys.get, audiences=frozenset({samples.AUDIENCE}), now_s=NOW_MS // 1000)


def _signed(claims: bytes, kid: str) -> str:
    header = base64url(samples.compact({"alg": "EdDSA", "kid": kid}))
    signing_input = f"{header}.{base64url(claims)}"
    return f"{signing_input}.{base64url(samples.NODE.sign(signing_input.encode()))}"


def agent_token(data: bytes) -> None:
    """A token is the agent's that was signed, or it is refused."""
    text = text_of(data)
    if tried(lambda: _authenticator().identify(text), TokenError, secret=text) is not REFUSED:
        assert data in samples.AGENT_TOKENS


def agent_claims(data: bytes) -> None:
    """The same where the signature fits."""
    signed = _signed(data, key_id(samples.NODE.public_key))
    holder = tried(lambda: _authenticator().identify(signed), TokenError, secret=signed)
    if holder is not REFUSED:
        assert holder.issuer == samples.AUDIENCE
        assert holder.expires_s > NOW_MS // 1000
        assert all(map(is_clean, (holder.tenant, holder.sub, holder.jti, holder.members, *holder.scopes)))


@cache
def _authenticator() -> Authenticator:
    public_key = samples.NODE.public_key
    return Authenticator(
        TokenVerifier(_REGISTRY, AGENT_REF),
        {key_id(public_key): public_key},
        issuer=samples.AUDIENCE,
        audiences=frozenset({samples.AUDIENCE}),
        now_ms=lambda: NOW_MS,
    )


def jwks(data: bytes) -> None:
    """Of another issuer's set only sound keys are used, at most so many, and none that is the relay's own."""
    keys = tried(lambda: _JWKS.keys(data), JwksError)
    if keys is not REFUSED:
        assert len(keys) <= MAX_KEYS
        assert not keys.keys() & _OURS.keys()
        assert all(is_sound_public_key(key) for key in keys.values())
        assert not {*keys.values()} & {*_OURS.values(), *LOW_ORDER_KEYS.values()}


def base64url_text(data: bytes) -> None:
    """Bytes have one spelling: what is read is written the same."""
    text = text_of(data)
    read = tried(lambda: from_base64url(text), ValueError)
    if read is not REFUSED:
        assert base64url(read) == text
    assert from_base64url(base64url(data)) == data


def leaf(data: bytes) -> None:
    """Only a leaf of the root is accepted."""
    text = text_of(data)
    identity = tried(lambda: verify_leaf(text, [samples.CA.root_pem], NOW_MS), IdentityError)
    if identity is not REFUSED:
        assert identity == samples.NODE.identity()


def certificate_request(data: bytes) -> None:
    """A request whose signature holds asks for what was signed."""
    text = text_of(data)
    asked = tried(lambda: read_csr(text), IdentityError)
    if asked is not REFUSED:
        assert asked == (NODE_ID, samples.NODE.public_key)


def leaf_der(data: bytes) -> None:
    """The same for what is certainly base64, so that the damage is in the certificate."""
    leaf(to_pem([data]).encode())


def certificate_request_der(data: bytes) -> None:
    """As above."""
    certificate_request(to_pem([data]).replace("CERTIFICATE", "CERTIFICATE REQUEST").encode())


def der(data: bytes) -> None:
    """What is read of a certificate without the X.509 library is what the library reads."""
    validity, serial = (
        tried(lambda: validity_of(data), CertificateFormatError),
        tried(lambda: serial_of(data), CertificateFormatError),
    )
    if not has_positive_serial(data):
        return  # the library warns of it, and is not given it
    try:
        certificate = x509.load_der_x509_certificate(data)
        times = (certificate.not_valid_before_utc, certificate.not_valid_after_utc)
        number = certificate.serial_number
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        return
    assert validity == tuple(int(time.timestamp()) * 1000 for time in times)
    assert serial == number


def private_key(data: bytes) -> None:
    """No byte of what was nearly a key gets into the error."""
    text = text_of(data)
    read = tried(lambda: private_key_from_pem(text), KeyFormatError, secret=text)
    assert read is REFUSED or len(bytes(read)) == 32


def server_key(data: bytes) -> None:
    """The same of the key of a server, which another library reads."""
    tried(lambda: read_server_key(scratch("server.key", data)), KeyFileError, secret=text_of(data))


def pem(data: bytes) -> None:
    """Text around certificates is ignored; what is left is written and read the same."""
    text = text_of(data)
    found = tried(lambda: certificates_in(text), CertificateFormatError)
    if found is not REFUSED and all(found):
        assert tried(lambda: certificates_in(to_pem(found)), CertificateFormatError) in (found, REFUSED)


def endorsement(data: bytes) -> None:
    """Nothing but the root's own signature of them endorses roots, and a root of nodes is none of servers."""
    text = text_of(data)
    root, *_ = certificates_in(samples.CA.root_pem)
    assert not is_endorsed(data, [root], samples.ENDORSEMENT) or data == samples.NEW_ROOT
    assert not is_endorsed(samples.NEW_ROOT, [root], text) or text == samples.ENDORSEMENT
    assert not are_endorsed([data], [root], [samples.ENDORSEMENT, text])
    assert not is_server_root(data) or data[:1] == b"\x30"


def join_token(data: bytes) -> None:
    """A join token has one spelling, and the error repeats none of it."""
    text = text_of(data)
    read = tried(lambda: JoinToken.parse(text), JoinTokenError, secret=text)
    if read is not REFUSED:
        assert read.text() == text.strip()
        assert repr(read.key) not in repr(read)


def enrol_request(data: bytes) -> None:
    """Without the key there is no proof, whatever the request is."""
    request = tried(lambda: loads(data, max_bytes=MAX_REQUEST_BYTES), StrictJsonError)
    if request is not REFUSED and _ENROL.is_valid(request) and is_proven(request, samples.JOIN_KEY, NODE):
        assert request == loads(samples.ENROL_REQUEST, max_bytes=MAX_REQUEST_BYTES)


TARGETS: Final = {
    "token": Target(token, samples.TOKENS),
    "token_claims": Target(token_claims, (samples.compact(samples.CLAIMS),)),
    "agent_token": Target(agent_token, samples.AGENT_TOKENS),
    "agent_claims": Target(agent_claims, (samples.compact(samples.AGENT_CLAIMS),)),
    "jwks": Target(jwks, samples.JWKS),
    "base64url": Target(base64url_text, samples.AGENT_TOKENS, max_bytes=256),
    "leaf": Target(leaf, samples.LEAVES),
    "leaf_der": Target(leaf_der, samples.LEAVES_DER),
    "certificate_request": Target(certificate_request, samples.REQUESTS),
    "certificate_request_der": Target(certificate_request_der, samples.REQUESTS_DER),
    "der": Target(der, samples.LEAVES_DER),
    "private_key": Target(private_key, samples.KEYS),
    "server_key": Target(server_key, samples.SERVER_KEYS),
    "pem": Target(pem, samples.LEAVES),
    "endorsement": Target(endorsement, (samples.NEW_ROOT, samples.ENDORSEMENT.encode())),
    "join_token": Target(join_token, samples.JOIN_TOKENS),
    "enrol_request": Target(enrol_request, (samples.ENROL_REQUEST,)),
}
