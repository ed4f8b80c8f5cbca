"""Leaves that an authority signed, or seems to have signed, although they are not as they ought to be."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from nacl.signing import SigningKey

from schemas.identity import san_uri
from tests.fakes.signer import NODE_ID, NOW_MS, TENANT, SimulatedCa, key_named

_SERIAL = 99


def san(node_id: str = NODE_ID, tenant: str = TENANT) -> x509.GeneralName:
    """Return the one name that a leaf of ``node_id`` has."""
    return x509.UniformResourceIdentifier(san_uri(tenant, node_id))


def invalid_leaf(  # noqa: PLR0913 - each is one fact to get wrong
    ca: SimulatedCa,
    *,
    common_names: Sequence[str] = (NODE_ID,),
    names: Sequence[x509.GeneralName] = (san(),),
    public_key: bytes | None = None,
    issuer: str | None = None,
    signer: SigningKey | None = None,
    more: Sequence[x509.ExtensionType] = (),
) -> str:
    """Return the leaf of ``NODE_ID`` in PEM with anything overridden, signed by ``ca`` or ``signer``."""
    key = public_key or bytes(key_named(f"node {NODE_ID}").verify_key)
    start = datetime.fromtimestamp(NOW_MS / 1000, UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(*common_names))
        .issuer_name(_name(issuer or ca.name))
        .public_key(Ed25519PublicKey.from_public_bytes(key))
        .serial_number(_SERIAL)
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    for extension in more:
        builder = builder.add_extension(extension, critical=False)
    private = Ed25519PrivateKey.from_private_bytes(bytes(signer or ca.key))
    return builder.sign(private, None).public_bytes(Encoding.PEM).decode("ascii")


def _name(*common_names: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in common_names])
