"""The configuration and the credentials of the nats-server that joins the relays of a demo.

On loopback, without encryption, for one key that is made for each start. The permissions are those that
``docs/cluster/nats-server.conf`` ships. Must not start anything.
"""

import json
from collections.abc import Callable
from pathlib import Path

import nkeys  # type: ignore[import-untyped]  # the library brings no types

from schemas.addresses import HostPort

_SEED_BYTES = 32

_CONFIG = """\
server_name: edge-cluster
listen: {listen}
logtime: false
max_payload: 1048576
jetstream {{
  store_dir: {store}
  max_memory_store: 67108864
  max_file_store: 1073741824
}}
authorization {{
  users: [
    {{ nkey: {key}, permissions: {permissions} }}
  ]
}}
"""


def new_credentials(random_bytes: Callable[[int], bytes]) -> tuple[str, str]:
    """Return the seed of a new nkey of a user, and its public key."""
    seed = nkeys.encode_seed(random_bytes(_SEED_BYTES), nkeys.PREFIX_BYTE_USER)
    pair = nkeys.from_seed(bytearray(seed))
    public = pair.public_key.decode("ascii")
    pair.wipe()
    return seed.decode("ascii"), public


def relay_permissions(fleet: str) -> dict[str, dict[str, list[str]]]:
    """Return what the relays of ``fleet`` may publish and subscribe to; nothing else may any of it."""
    bucket = f"edge_{fleet}_presence"
    streams = (f"KV_{bucket}", f"edge_{fleet}_ledger")
    return {
        "publish": {
            "allow": [
                f"edge.{fleet}.>",
                f"$KV.{bucket}.>",
                *(subject for stream in streams for subject in _read_and_made(stream)),
            ]
        },
        "subscribe": {"allow": [f"edge.{fleet}.>"]},
    }


def _read_and_made(stream: str) -> list[str]:
    return [
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.STREAM.CREATE.{stream}",
        f"$JS.API.STREAM.UPDATE.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}.>",
        f"$JS.API.CONSUMER.INFO.{stream}.>",
        f"$JS.API.CONSUMER.DELETE.{stream}.>",
        f"$JS.FC.{stream}.>",
    ]


def cluster_server_config(listen: HostPort, store: Path, public_key: str, fleet: str) -> str:
    """Return the configuration of a nats-server at ``listen``, for the relays that have ``public_key``."""
    return _CONFIG.format(
        listen=json.dumps(str(listen)),
        store=json.dumps(str(store), ensure_ascii=False),
        key=public_key,
        permissions=json.dumps(relay_permissions(fleet)),
    )
