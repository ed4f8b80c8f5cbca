"""The configuration of a nats-server that is started by these programs, as text.

Either for this machine alone, without encryption, or for other machines, with client certificates: there is
nothing in between. The same as what ``docs/brokers`` ships, and with limits. Must not read or write files.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from relay.broker.store import STORE_BYTES
from schemas.addresses import HostPort, is_loopback
from schemas.error_roots import OperatorError

_MAX_MEMORY_BYTES = 64 * 1024 * 1024
_MAX_PAYLOAD_BYTES = 132 * 1024
"""The largest manifest, 128 KiB, and its topic: a node retains at most four messages of this size."""
_MAX_PENDING_BYTES = 256 * 1024 * 1024
"""What may wait for one client to read it; one for which more waits is disconnected.

A relay that starts is sent all that is retained, 3.4 KiB a node, faster than it verifies it: by the server's
own default of 64 MiB it would be disconnected where there are 19 000 nodes.
"""

_COMMON = """\
server_name: edge-broker
listen: "127.0.0.1:-1"
logtime: false
max_payload: {payload}
max_pending: {pending}
jetstream {{
  store_dir: {store}
  max_memory_store: {memory}
  max_file_store: {file}
}}
"""
# Of QoS 2, a server stores what its sender never confirms.
_MQTT = """\
mqtt {{
  listen: {listen}
  reject_qos2_publish: true
}}
"""
_MQTT_TLS = """\
mqtt {{
  listen: {listen}
  reject_qos2_publish: true
  tls {{
    cert_file: {certificate}
    key_file: {key}
    ca_file: {roots}
    verify_and_map: true
  }}
}}
include {users}
"""


@dataclass(frozen=True, slots=True)
class AccessFiles:
    """What a broker for other machines admits clients by.

    Attributes:
        certificate, key: what the broker shows, PEM.
        roots: the roots of the clients' certificates, PEM.
        users: the users and their permissions, by the names in their certificates; a path relative to the
            configuration's directory.
    """

    certificate: Path
    key: Path
    roots: Path
    users: str


def nats_config(listen: HostPort, store: Path, access: AccessFiles | None) -> str:
    """Return the configuration of a nats-server with MQTT at ``listen`` and its messages in ``store``.

    With ``access`` it has TLS and demands a client certificate; without, it must be on loopback.

    Raises:
        OperatorError: other machines could reach it without a certificate.
    """
    common = _COMMON.format(
        store=_quoted(store),
        payload=_MAX_PAYLOAD_BYTES,
        pending=_MAX_PENDING_BYTES,
        memory=_MAX_MEMORY_BYTES,
        file=STORE_BYTES,
    )
    if access is None:
        if not is_loopback(listen.host):
            raise OperatorError(f"a broker at {listen} must have TLS and client certificates")
        return common + _MQTT.format(listen=_quoted(listen))
    return common + _MQTT_TLS.format(
        listen=_quoted(listen),
        certificate=_quoted(access.certificate),
        key=_quoted(access.key),
        roots=_quoted(access.roots),
        users=_quoted(access.users),
    )


def _quoted(value: object) -> str:
    # It knows no \u escapes.
    return json.dumps(str(value), ensure_ascii=False)
