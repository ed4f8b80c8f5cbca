"""A certificate authority and nodes with real keys, which sign whatever a test gives them.

A good manifest takes no argument and a bad one takes one: ``node.manifest(expires_at_ms=…)``. Hash and
signature are made here from the bare libraries, so that the product's own signing is checked against a second
implementation. Seeds are derived from names: every run signs the same bytes.
"""

import base64
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final

import blake3
import rfc8785
from nacl.signing import SigningKey

from relay.pki.issuing import issue_leaf, make_root
from schemas.certificates import verify_leaf
from schemas.identity import Identity

NOW_MS: Final[Any] = 1_760_000_000_000
NODE_ID: Final = "01hzx9k3m4p7q8r9s0t1v2w3xy"
OTHER_NODE_ID: Final = "01hzx9k3m4p7q8r9s0t1v2w3xz"
TENANT: Final = "acme"
TTL_MS: Final = 15 * 60_000
DAY_MS: Final = 86_400_000

ABSENT: Final = object()
"""As a member's value: the member is left out."""

ECHO: Final[Mapping[str, Any]] = {
    "cap_id": "echo",
    "kind": "system.echo",
    "schema_ref": "mcp://schemas/system.echo.invoke.input@1.0.0",
    "verbs": ["invoke"],
    "safety_class": "read_only",
    "constraints": {"rate_limit_rps": 10, "max_concurrency": 4, "deadline_ms_default": 2000},
}
METRICS: Final[Mapping[str, Any]] = {
    "cap_id": "sysmetrics",
    "kind": "system.metrics",
    "schema_ref": "mcp://schemas/system.metrics@1.0.0",
    "verbs": ["snapshot"],
    "safety_class": "read_only",
    "constraints": {"rate_limit_rps": 0.5, "max_concurrency": 1, "deadline_ms_default": 1500},
}

# Encodings of points of small order, with which a signature can be made that fits many messages.
LOW_ORDER_KEYS: Final[Mapping[str, bytes]] = {
    "order-1": bytes.fromhex("01" + "00" * 31),
    "order-2": bytes.fromhex("ec" + "ff" * 30 + "7f"),
    "order-4": bytes(32),
    "order-8": bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
}


@lru_cache(maxsize=1024)
def key_named(name: str) -> SigningKey:
    """Return the key that is always the one called ``name``."""
    return SigningKey(sha256(name.encode()).digest())


# Made once for all tests: the same arguments make the same bytes.
_make_root = lru_cache(maxsize=256)(make_root)
_issue_leaf = lru_cache(maxsize=1024)(issue_leaf)


class SimulatedNode:
    """A node with a leaf: it signs what a test gives it, true or not."""

    def __init__(self, node_id: str, tenant: str, key: SigningKey, leaf_pem: str, root_pem: str) -> None:
        self.node_id = node_id
        self.tenant = tenant
        self.key = key
        self.leaf_pem = leaf_pem
        self.root_pem = root_pem

    @property
    def public_key(self) -> bytes:
        """The 32 bytes of the node's public key."""
        return bytes(self.key.verify_key)

    @property
    def kid(self) -> str:
        """The thumbprint of the leaf."""
        body = "".join(self.leaf_pem.splitlines()[1:-1])
        return sha256(base64.b64decode(body)).hexdigest()

    def identity(self, now_ms: int = NOW_MS) -> Identity:
        """Return the leaf as a verifier with the right root sees it at ``now_ms``."""
        return verify_leaf(self.leaf_pem, [self.root_pem], now_ms)

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of ``message``."""
        return self.key.sign(message).signature

    def document(self, **members: object) -> dict[str, Any]:
        """Return a good manifest with ``members`` in place of its own; neither hashed nor signed yet."""
        issued_at_ms = members.get("issued_at_ms", NOW_MS)
        document: dict[str, Any] = {
            "manifest_version": "1.1.0",
            "node_id": self.node_id,
            "hw_fingerprint": {"algo": "blake3-256", "value": "ab" * 32, "sources": ["machine_id"]},
            "node_attestation": {"alg": "Ed25519", "kid": self.kid, "sig": "", "payload_hash": ""},
            "issued_at_ms": issued_at_ms,
            "expires_at_ms": issued_at_ms + TTL_MS if isinstance(issued_at_ms, int) else issued_at_ms,
            "capabilities": [METRICS, ECHO],
        }
        document.update(members)
        return {name: value for name, value in document.items() if value is not ABSENT}

    def manifest(
        self,
        *,
        attestation: Mapping[str, object] | None = None,
        signer: SigningKey | None = None,
        **members: object,
    ) -> bytes:
        """Return the wire bytes of a signed manifest with anything in it overridden.

        Everything is overridden before it is hashed and signed, so that the one fact is all that is wrong;
        only ``attestation["sig"]`` replaces what ``signer`` (default: the node itself) has signed.
        """
        overrides = dict(attestation or {})
        document = self.document(**members)
        stated = document["node_attestation"] = {**document["node_attestation"], **overrides}
        stated.update(sig="", payload_hash="")
        unsigned = rfc8785.dumps(document)
        payload_hash = overrides.get("payload_hash", blake3.blake3(unsigned).hexdigest())
        hashed = _filled_in(unsigned, "payload_hash", payload_hash)
        signature = (signer or self.key).sign(hashed).signature
        text = base64.urlsafe_b64encode(signature).rstrip(b"=").decode()
        return _filled_in(hashed, "sig", overrides.get("sig", text))


def _filled_in(document: bytes, member: str, value: Any) -> bytes:
    """Return the canonical ``document`` with ``value`` as its last ``member``, which is empty."""
    before, _, after = document.rpartition(f'"{member}":""'.encode())
    return before + f'"{member}":'.encode() + rfc8785.dumps(value) + after


class SimulatedCa:
    """A root and the leaves that it issues."""

    def __init__(self, name: str = "root", now_ms: int = NOW_MS) -> None:
        self.name = name
        self.key = key_named(f"ca {name}")
        self.root_pem = _make_root(self.key, name, now_ms - DAY_MS, valid_days=3650, serial=1)
        self._serial = 1

    def issue(
        self,
        node_id: str = NODE_ID,
        tenant: str = TENANT,
        *,
        key: SigningKey | None = None,
        now_ms: int = NOW_MS,
        valid_days: int = 90,
    ) -> SimulatedNode:
        """Return a node with a leaf of this authority, valid from ``now_ms`` (less five minutes) on."""
        self._serial += 1
        key = key or key_named(f"node {node_id}")
        leaf_pem = _issue_leaf(
            self.root_pem,
            self.key,
            node_id=node_id,
            tenant=tenant,
            public_key=bytes(key.verify_key),
            now_ms=now_ms,
            valid_days=valid_days,
            serial=self._serial,
        )
        return SimulatedNode(node_id, tenant, key, leaf_pem, self.root_pem)
