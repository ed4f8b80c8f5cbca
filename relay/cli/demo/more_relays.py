"""The further relays of a demo's fleet, joined by a nats-server of its own, with one mock node behind each.

Must not do what a user could not do: a further relay starts from what `relay ca backup --without-ca-key`
saves. The nats-server listens on loopback, without encryption, for one key that is made for each start, with
the permissions that ``docs/cluster/nats-server.conf`` ships.
"""

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import nkeys  # type: ignore[import-untyped]  # the library brings no types

from relay.broker.nats_server import find_nats_server
from relay.cli.backup.state import restore, save_for_another_relay
from relay.cli.demo.local_system import (
    TENANT,
    LocalSystem,
    OnStep,
    Plan,
    fleet_command,
    issue_token,
    relay_command,
)
from relay.cli.demo.processes import Processes
from relay.pki.authority import CertificateAuthority
from relay.settings.config import StateFiles
from relay.settings.environment import now_ms
from relay.settings.kept import read_kept
from schemas.addresses import HostPort
from schemas.files import PRIVATE, make_private_directory, write_atomic

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


FLEET = "main"
SERVER = "cluster"
_FEW_WAKE_UPS = MappingProxyType({"GOMAXPROCS": "1", "GODEBUG": "schedtrace=2147483647"})
"""For a server of few messages, beside the relays: it spends more on waking its threads than on messages.

One of them runs at a time. The thread that watches the others is not woken at each message, but by a timer a
hundred times a second: that is what a trace of the scheduler changes, here one line in 24 days.
"""


@dataclass(frozen=True, slots=True)
class FurtherRelay:
    """A relay besides the first, with its processes ``name`` and ``nodes``.

    Attributes:
        mock_node: the node behind it.
    """

    name: str
    nodes: str
    plan: Plan
    token: str
    mock_node: str

    def system(self, processes: Processes) -> LocalSystem:
        """Return what an agent of this relay connects to."""
        return LocalSystem(self.plan, processes, self.token, self.mock_node, [])


async def start_cluster_server(plan: Plan, processes: Processes) -> Plan:
    """Start the server that joins the relays; return the plan whose relay connects to it.

    Raises:
        ProgramError: there is no nats-server.
        StartError: it has ended.
    """
    listen = HostPort("127.0.0.1", processes.ports.take())
    seed, public_key = new_credentials(os.urandom)
    credentials, config = plan.directory / "cluster.seed", plan.directory / "cluster.conf"
    write_atomic(credentials, seed + "\n", PRIVATE)
    text = cluster_server_config(listen, plan.directory / "cluster", public_key, FLEET)
    write_atomic(config, text, PRIVATE)
    program = await asyncio.to_thread(find_nats_server)
    await processes.start(SERVER, [str(program), "-c", str(config)], _FEW_WAKE_UPS)
    await processes.until_listening(listen.port)
    options = ("--cluster", f"nats://{listen}", "--cluster-credentials", str(credentials))
    fleet_url = f"http://127.0.0.1:{processes.ports.take()}"
    return replace(plan, relay_options=(*plan.relay_options, *options), fleet_url=fleet_url)


async def start_more_relays(
    first: Plan, count: int, processes: Processes, step: OnStep
) -> Sequence[FurtherRelay]:
    """Start ``count`` relays besides the one of ``first``, and the node of each.

    Raises:
        StartError: a process could not be started.
    """
    ca = CertificateAuthority(first.state.ca, now_ms, os.urandom)
    started = []
    for number in range(2, 2 + count):
        plan = _plan_of(first, first.directory / f"relay-{number}", processes)
        (mock_node,) = ca.issue_mock(1, plan.mocks, TENANT)
        kept = read_kept(first.state.settings)
        restore(save_for_another_relay(first.state, ca, kept, now_ms(), os.urandom), plan.state)
        relay = FurtherRelay(
            f"relay-{number}", f"fleet-{number}", plan, issue_token(first, "demo-agent"), mock_node
        )
        await processes.start(relay.name, relay_command(plan))
        await processes.until_listening(plan.relay_port)
        await processes.start(relay.nodes, fleet_command(plan))
        step(f"relay {number}     {plan.url}, with node {mock_node}")
        started.append(relay)
    return started


def _plan_of(first: Plan, directory: Path, processes: Processes) -> Plan:
    make_private_directory(directory)
    state = StateFiles(directory / "relay")
    return replace(first, directory=directory, state=state, relay_port=processes.ports.take())
