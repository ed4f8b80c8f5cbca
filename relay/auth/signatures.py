"""JWTs that others have signed by RS256, ES256 or EdDSA, and whether a JWK of theirs verifies one.

The algorithms are a list of our own, and each takes its own type of key: a header cannot choose another. Must
not read a claim, nor take a key that the JWT itself names.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from schemas.keys import from_base64url

ALGORITHMS = ("RS256", "ES256", "EdDSA")
_RSA_BITS = range(2048, 8193)
_COORDINATE = 32


class Jwt(NamedTuple):
    """A JWT of which nothing is verified yet."""

    header: Mapping[str, Any]
    claims: Mapping[str, Any]
    signed: bytes
    signature: bytes

    @classmethod
    def of(cls, text: str, max_length: int) -> "Jwt":
        """Return the JWT that is ``text``.

        Raises:
            ValueError: it is none.
        """
        parts = text.split(".") if len(text) <= max_length and text.isascii() else []
        try:
            header, claims, signature = map(from_base64url, parts)
            members = [json.loads(header), json.loads(claims)]
        except RecursionError:
            raise ValueError("nested too deep") from None
        if not all(isinstance(each, dict) for each in members):
            raise ValueError("not of objects")
        return cls(members[0], members[1], text.rpartition(".")[0].encode("ascii"), signature)

    @property
    def has_known_algorithm(self) -> bool:
        return self.header.get("alg") in ALGORITHMS and "crit" not in self.header

    def may_be_of(self, key: Mapping[str, Any]) -> bool:
        """Return whether the header names ``key``, or none."""
        return "kid" not in self.header or key.get("kid") == self.header["kid"]

    def is_verified_by(self, key: Mapping[str, Any]) -> bool:
        """Return whether ``key``, a JWK, verifies the signature, by an algorithm of the list."""
        algorithm = self.header.get("alg")
        if not self.has_known_algorithm or not self.may_be_of(key):
            return False
        if key.get("use", "sig") != "sig" or key.get("alg", algorithm) != algorithm:
            return False
        try:
            return _verifies(str(algorithm), key, self.signed, self.signature)
        except (InvalidSignature, KeyError, ValueError, TypeError, AttributeError):
            return False  # of one key that is none: another may be the one


def _verifies(algorithm: str, key: Mapping[str, Any], signed: bytes, signature: bytes) -> bool:
    match algorithm, key.get("kty"), key.get("crv"):
        case "RS256", "RSA", _:
            modulus = _number(key["n"])
            if modulus.bit_length() not in _RSA_BITS:
                return False
            rsa.RSAPublicNumbers(_number(key["e"]), modulus).public_key().verify(
                signature, signed, padding.PKCS1v15(), SHA256()
            )
        case "ES256", "EC", "P-256":
            if len(signature) != 2 * _COORDINATE:
                return False
            halves = signature[:_COORDINATE], signature[_COORDINATE:]
            numbers = encode_dss_signature(*(int.from_bytes(half, "big") for half in halves))
            curve = ec.SECP256R1()
            ec.EllipticCurvePublicNumbers(_number(key["x"]), _number(key["y"]), curve).public_key().verify(
                numbers, signed, ec.ECDSA(SHA256())
            )
        case "EdDSA", "OKP", "Ed25519":
            ed25519.Ed25519PublicKey.from_public_bytes(from_base64url(key["x"])).verify(signature, signed)
        case _:
            return False
    return True


def _number(text: str) -> int:
    return int.from_bytes(from_base64url(text), "big")
