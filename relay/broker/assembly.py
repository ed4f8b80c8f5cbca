"""Assembles the relay's own broker, if it has one.

Must not decide anything: it constructs the parts and connects them.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nacl.signing import SigningKey

from relay.broker.nats_server import AccessFiles, find_nats_server
from relay.broker.store import BrokerStore
from relay.broker.supervisor import BrokerSupervisor
from relay.part import Part
from relay.settings.environment import RelayEnvironment
from schemas.health import Health, endless

_SEED_BYTES = 32


@dataclass(frozen=True, slots=True)
class BrokerPart(Part):
    """The broker that one relay runs, and its store; both are None where it runs none.

    Attributes:
        reads_access_files: whether it admits clients by the files that ``relay.pki.broker_access`` writes.
        probe_node: a node id that no node has, on whose topic `relay doctor` tries to publish.
    """

    supervisor: BrokerSupervisor | None
    store: BrokerStore | None = None
    reads_access_files: bool = False
    probe_node: str | None = None

    async def start(self, write_access_files: Callable[[], object]) -> None:
        """Start it, after ``write_access_files`` if it reads such; return when it listens.

        Raises:
            BrokerStartError: it cannot be started.
            StateError, OSError: a file cannot be used.
        """
        if self.supervisor is not None:
            if self.reads_access_files:
                await asyncio.to_thread(write_access_files)
            await self.supervisor.start()

    async def run(self) -> None:
        """Start it again whenever it ends, and bound what it stores, until cancelled."""
        if self.supervisor is None or self.store is None:
            await super(BrokerPart, self).run()
        else:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(endless("broker", self.supervisor.run()))
                tasks.create_task(endless("broker store", self.store.run()))

    async def close(self) -> None:
        if self.supervisor is not None:
            await self.supervisor.close()

    def health(self) -> Mapping[str, Health]:
        """A broker that has ended is told from one that is not reached."""
        return {} if self.supervisor is None else {"broker_process": self.supervisor.health}

    @property
    def users(self) -> tuple[str, ...]:
        """Whom it admits besides nodes and the relay, as its list of users has them."""
        return () if self.store is None else (self.store.user,)

    def reload(self) -> bool:
        """Have it, if there is one, read its access lists again; return whether that is done."""
        return self.supervisor is None or self.supervisor.reload()


def assemble(environment: RelayEnvironment) -> BrokerPart:
    """Return the part of the configured broker, which is not started yet."""
    config = environment.config
    if config.own_broker is None:
        return BrokerPart(None)
    directory = config.state.broker
    access = None
    if config.own_broker.tls:
        tls = config.state.broker_tls
        access = AccessFiles(tls.certificate, tls.key, directory / "roots.pem", "nats-users.conf")
    probe_node = environment.ulids.new().lower()
    supervisor = BrokerSupervisor(
        config.own_broker,
        directory,
        access,
        find_program=find_nats_server,
        on_end=environment.metrics.broker_ends.inc,
        probe_node=probe_node,
        log=environment.log,
        monotonic=environment.monotonic,
    )
    store = BrokerStore(
        lambda: supervisor.own_port,
        SigningKey(environment.random_bytes(_SEED_BYTES)),
        environment.metrics.broker_store_filled.set,
        environment.log,
    )
    return BrokerPart(supervisor, store, reads_access_files=access is not None, probe_node=probe_node)
