"""A fuzz target for every parser of bytes from outside: it takes any bytes, and ignores documented errors.

Whatever else is raised, and every assertion that fails, is a finding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from schemas import projection, topics
from schemas.addresses import AddressError, BrokerAddress, normal_url, parse_broker, parse_host_port
from schemas.canonical import is_canonical, jcs
from schemas.certificates import IdentityError, read_csr, verify_leaf
from schemas.enrolment import MAX_REQUEST_BYTES, NODE, REQUEST_REF, JoinToken, JoinTokenError, is_proven
from schemas.errors import CODES, ToolError
from schemas.frame_types import Role
from schemas.frames import MAX_FRAME_BYTES, FrameError, FrameReader
from schemas.identity import certificates_in, to_pem
from schemas.keys import KeyFormatError, base64url, private_key_from_pem
from schemas.kinds import KindRegistry
from schemas.manifest import MAX_MANIFEST_BYTES
from schemas.registry import SchemaRegistry
from schemas.session import ProtocolError, SessionMachine, State
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable_values
from schemas.tokens import DEVICE_REF, TokenError, TokenVerifier
from schemas.trust import TrustRules
from schemas.verdicts import Known, Outcome
from tests.fakes.hostile_texts import is_clean, strings_in
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID, NOW_MS
from tests.fuzz import samples

_REGISTRY = SchemaRegistry()
_READER = FrameReader(_REGISTRY)
_RULES = TrustRules(_REGISTRY, KindRegistry())
_KNOWN = Known({samples.NODE.kid: samples.NODE.identity()})
_TOKENS = TokenVerifier(_REGISTRY, DEVICE_REF)
_ERROR = _REGISTRY.load("error@1.0.0")
_ENROL = _REGISTRY.load(REQUEST_REF)
_HEARTBEAT = _REGISTRY.load("heartbeat@1.0.0")
_SAMPLE = _REGISTRY.load("system.metrics.sample@1.0.0")
_LIMIT = 1 << 16

Parse = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Target:
    """What is called with every input, and the good ones to begin from."""

    parse: Parse
    samples: Sequence[bytes]


def _text(data: bytes) -> str:
    # What is no UTF-8 becomes lone surrogates: a text can hold worse than a wire.
    return data.decode("utf-8", "surrogateescape")


def strict_json(data: bytes) -> None:
    """Bytes and text have the same reading, and what is read has a canonical form that is unique."""
    try:
        value = loads(data, max_bytes=_LIMIT)
    except StrictJsonError as error:
        assert is_clean(error.reason)  # noqa: PT017 - there is no pytest around a fuzzer
        return
    assert loads(data.decode("utf-8"), max_bytes=_LIMIT) == value
    assert is_canonical(data, value) is (jcs(value) == data)
    assert all(map(is_clean, strings_in(printable_values(value))))


def manifest(data: bytes) -> None:
    """Whatever is not the manifest that the node signed is not accepted, and nothing is raised."""
    verdict = _RULES.accept(data, NODE_ID, NOW_MS, _KNOWN)
    assert (verdict.outcome is Outcome.ACCEPTED) is (data == samples.MANIFEST)


def signed_manifest(data: bytes) -> None:
    """The same where hash and signature fit whatever the node has been made to sign."""
    try:
        members = loads(data, max_bytes=MAX_MANIFEST_BYTES)
    except StrictJsonError:
        return
    if not isinstance(members, dict):
        return
    wire = samples.NODE.manifest(
        **{str(name): value for name, value in members.items() if name not in _FIXED}
    )
    verdict = _RULES.accept(wire, NODE_ID, NOW_MS, _KNOWN)
    if verdict.manifest is not None:
        assert verdict.manifest.issued_at_ms <= NOW_MS + 300_000
        assert verdict.manifest.expires_at_ms > NOW_MS
        assert all(map(is_clean, strings_in(verdict.capabilities)))


_FIXED: Final = {"node_attestation", "attestation", "signer"}


def frame(data: bytes) -> None:
    """What is read fits a frame again, and what is announced has a canonical form."""
    try:
        read = _READER.read(_text(data) if data.isascii() else data, MAX_FRAME_BYTES)
    except FrameError as error:
        assert is_clean(error.reason)  # noqa: PT017 - as above
        return
    assert _READER.read(read.encode(), MAX_FRAME_BYTES * 6) == read
    jcs(read.payload)


def session(data: bytes) -> None:
    """Either end, in any state, ends the session or goes on."""
    for role in Role:
        for state in State:
            end = SessionMachine(role, _READER, Seconds())
            end.state = state
            try:
                end.receive(data)
            except ProtocolError as error:
                assert is_clean(error.reason)  # noqa: PT017 - as above


def token(data: bytes) -> None:
    """A token is the one that was signed, or none."""
    try:
        _verify(_text(data))
    except TokenError as error:
        assert is_clean(error.reason)  # noqa: PT017 - as above
        return
    assert data in samples.TOKENS


def token_claims(data: bytes) -> None:
    """The same where the signature fits: what the claims say is all that can be wrong."""
    header = base64url(samples.compact({"alg": "EdDSA", "kid": samples.NODE.kid}))
    signing_input = f"{header}.{base64url(data)}"
    signature = base64url(samples.NODE.sign(signing_input.encode()))
    try:
        claims = _verify(f"{signing_input}.{signature}")
    except TokenError as error:
        assert is_clean(error.reason)  # noqa: PT017 - as above
        return
    assert claims["aud"] == samples.AUDIENCE
    assert claims["token_class"] == "device_runtime"


def _verify(text: str) -> dict[str, object]:
    keys = {samples.NODE.kid: samples.NODE.public_key}
    return _TOKENS.verify(text, keys.get, audience=samples.AUDIENCE, now_s=NOW_MS // 1000)


def heartbeat(data: bytes) -> None:
    """A document judges whatever JSON there is, without an error."""
    try:
        beat = loads(data, max_bytes=1024)
    except StrictJsonError:
        return
    if _HEARTBEAT.is_valid(beat):
        assert is_clean(beat["node_id"])
        assert is_clean(beat["manifest_etag"])


def error_envelope(data: bytes) -> None:
    """What a node says of a failure becomes our own words."""
    try:
        envelope = loads(data, max_bytes=_LIMIT)
    except StrictJsonError:
        return
    if _ERROR.is_valid(envelope):
        ours = ToolError.from_node(envelope).envelope("0" * 26)
        assert _ERROR.is_valid(ours)
        assert ours["code"] in CODES
        assert ours["message"] != envelope["message"] or envelope["message"] == ""
        assert ours.get("retry_after_ms", 0) <= 60_000


def result(data: bytes) -> None:
    """A result that fits its document is harmless once its texts are escaped."""
    try:
        value = loads(data, max_bytes=_LIMIT)
    except StrictJsonError:
        return
    if _SAMPLE.is_valid(value):
        assert all(map(is_clean, strings_in(printable_values(value))))


def leaf(data: bytes) -> None:
    """Only a leaf of the root is accepted."""
    try:
        identity = verify_leaf(_text(data), [samples.CA.root_pem], NOW_MS)
    except IdentityError as error:
        assert is_clean(error.reason)  # noqa: PT017 - as above
        return
    assert identity == samples.NODE.identity()


def certificate_request(data: bytes) -> None:
    """A request whose signature holds asks for what was signed."""
    try:
        node_id, public_key = read_csr(_text(data))
    except IdentityError as error:
        assert is_clean(error.reason)  # noqa: PT017 - as above
        return
    assert (node_id, public_key) == (NODE_ID, samples.NODE.public_key)


def leaf_der(data: bytes) -> None:
    """The same for what is certainly base64, so that the damage is in the certificate."""
    leaf(to_pem([data]).encode())


def certificate_request_der(data: bytes) -> None:
    """As above."""
    certificate_request(to_pem([data]).replace("CERTIFICATE", "CERTIFICATE REQUEST").encode())


def private_key(data: bytes) -> None:
    """No byte of what was nearly a key gets into the error."""
    try:
        private_key_from_pem(_text(data))
    except KeyFormatError as error:
        assert str(error) == "not an Ed25519 private key in PKCS #8 PEM"  # noqa: PT017 - as above


def pem(data: bytes) -> None:
    """Text around certificates is ignored, and what is no base64 is an error."""
    try:
        certificates_in(_text(data))
    except ValueError:
        return


def join_token(data: bytes) -> None:
    """A join token has one spelling, and the error repeats none of it."""
    text = _text(data)
    try:
        read = JoinToken.parse(text)
    except JoinTokenError as error:
        assert is_clean(str(error))  # noqa: PT017 - as above
        return
    assert read.text() == text.strip()
    assert repr(read.key) not in repr(read)


def enrol_request(data: bytes) -> None:
    """Without the key there is no proof, whatever the request is."""
    try:
        request = loads(data, max_bytes=MAX_REQUEST_BYTES)
    except StrictJsonError:
        return
    if _ENROL.is_valid(request) and is_proven(request, samples.JOIN_KEY, NODE):
        assert request == loads(samples.ENROL_REQUEST, max_bytes=MAX_REQUEST_BYTES)


def tool_name(data: bytes) -> None:
    """A name is a tool's under its canonical form or its alias, and under nothing else."""
    text = _text(data)
    name = projection.parse(text)
    assert name is None or text in {name.canonical, name.alias}


def topic(data: bytes) -> None:
    """A topic says whose it is in one way."""
    text = _text(data)
    parsed = topics.parse(text)
    assert parsed is None or text == "$devices/{}/{}".format(*parsed)


def address(data: bytes) -> None:
    """What an address is read as is read as the same again."""
    for parse in (parse_broker, parse_host_port, normal_url):
        try:
            parsed = parse(_text(data))
        except AddressError:
            continue
        assert is_clean(str(parsed))
        if isinstance(parsed, BrokerAddress | str):
            assert parse(str(parsed)) == parsed


TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {
        "strict_json": Target(strict_json, (*samples.JSON, *samples.HOSTILE_DOCUMENTS)),
        "manifest": Target(manifest, (samples.MANIFEST,)),
        "signed_manifest": Target(signed_manifest, (samples.MANIFEST,)),
        "frame": Target(frame, samples.FRAMES),
        "session": Target(session, samples.FRAMES),
        "token": Target(token, samples.TOKENS),
        "token_claims": Target(token_claims, (samples.compact(samples.CLAIMS),)),
        "heartbeat": Target(heartbeat, (samples.compact(samples.HEARTBEAT),)),
        "error_envelope": Target(error_envelope, samples.ERRORS),
        "result": Target(result, samples.RESULTS),
        "leaf": Target(leaf, samples.LEAVES),
        "leaf_der": Target(leaf_der, samples.LEAVES_DER),
        "certificate_request": Target(certificate_request, samples.REQUESTS),
        "certificate_request_der": Target(certificate_request_der, samples.REQUESTS_DER),
        "private_key": Target(private_key, samples.KEYS),
        "pem": Target(pem, samples.LEAVES),
        "join_token": Target(join_token, samples.JOIN_TOKENS),
        "enrol_request": Target(enrol_request, (samples.ENROL_REQUEST,)),
        "tool_name": Target(tool_name, samples.NAMES),
        "topic": Target(topic, samples.TOPICS),
        "address": Target(address, samples.ADDRESSES),
    }
)
"""By name, as ``python -P -m tests.fuzz`` takes it."""
