"""Of two servers nothing is kept, and the log says why."""

from pathlib import Path

import pytest

from relay.cluster.copies import TooFewServersError
from schemas.registry import SchemaRegistry
from tests.fakes.cluster_machine import Machine
from tests.fakes.nats_cluster import NatsCluster
from tests.fakes.polling import BOUND_S, until

pytestmark = [pytest.mark.integration, pytest.mark.long]


async def test_two_servers_as_a_cluster_are_refused_and_the_log_says_what_to_do(
    tmp_path: Path, registry: SchemaRegistry
) -> None:
    cluster = NatsCluster(tmp_path)
    machine = Machine.made(tmp_path / "machine", issues=True)
    cluster.start(2)
    try:
        async with machine.joined(cluster.config, registry) as member:
            reason = str(TooFewServersError())
            assert reason == "fewer than 3 servers of the cluster run: start 3, or one that is no cluster"
            await until(lambda: member.part.ledgers.problem == reason, 3 * BOUND_S)
            assert reason in member.part.health()["cluster"].state
            assert not member.part.health()["cluster"].ready
            await member.fake.lines.until("presence not available")
            cluster.servers[2].start()
            await until(lambda: member.part.ledgers.is_current, 3 * BOUND_S)
    finally:
        cluster.stop()
