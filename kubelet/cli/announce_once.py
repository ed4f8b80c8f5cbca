"""One manifest, signed and published by hand: what ``kubelet announce`` does.

Must not leave anything running.
"""

import random
import ssl
from functools import partial
from pathlib import Path
from typing import TextIO

from kubelet.announce.hardware import read_hardware_ids
from kubelet.announce.mqtt import MqttPublisher, publish_all
from kubelet.announce.signer import ManifestSigner, SignedManifest
from kubelet.config import kinds_directory, last_issued_file
from kubelet.handlers.factory import make_handlers
from kubelet.process import now_ms
from schemas import topics
from schemas.addresses import BrokerAddress
from schemas.identity_files import NodeIdentity
from schemas.manifest import fingerprint
from schemas.pacing import Backoff
from schemas.process.logs import make_logger
from schemas.registry import read_contract

_CONNECT_TIMEOUT_S = 10.0
_FIRST_WAIT_S = 1.0


def sign_once(
    identity: NodeIdentity,
    state_dir: Path,
    ttl_ms: int,
    stream: TextIO,
    kinds: tuple[str, ...] = (),
    *,
    remember: bool,
) -> SignedManifest:
    """Return a manifest of this machine, signed now, with the ``kinds`` that the operator named.

    Raises:
        ConfigError: one of them cannot be used.
    """
    log, contract = make_logger("kubelet", stream), read_contract(kinds, kinds_directory(state_dir))
    signer = ManifestSigner(
        identity=identity,
        hw_fingerprint=fingerprint(read_hardware_ids(Path("/"))),
        capabilities=[handler.capability for handler in make_handlers(identity.node_id, log, contract)],
        ttl_ms=ttl_ms,
        now_ms=now_ms,
        registry=contract.registry,
        last_issued=last_issued_file(state_dir) if remember else None,
        log=log,
    )
    return signer.sign()


async def publish_once(
    identity: NodeIdentity,
    manifest: SignedManifest,
    broker: BrokerAddress,
    stream: TextIO,
    tls: ssl.SSLContext | None = None,
) -> bool:
    """Publish identity and ``manifest``, retained; return whether the broker confirmed both."""
    backoff = Backoff(_FIRST_WAIT_S, _CONNECT_TIMEOUT_S, partial(random.uniform, 0.0))
    publisher = MqttPublisher(
        broker, f"edge-announce-{identity.node_id}", make_logger("kubelet", stream), backoff, tls
    )
    return await publish_all(
        publisher,
        [
            (topics.identity(identity.node_id), identity.chain_pem.encode("ascii")),
            (topics.announce(identity.node_id), manifest.wire),
        ],
        _CONNECT_TIMEOUT_S,
    )
