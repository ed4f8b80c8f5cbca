"""What is appended at an expected number, and in how many copies it is kept."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from nats.aio.client import Client
from nats.js.api import Header, StreamConfig
from nats.js.errors import APIError

from relay.cluster.jetstream import TooFewServersError, append
from schemas.registry import SchemaRegistry
from tests.fakes.cluster_machine import Machine
from tests.fakes.cluster_server import NatsServer
from tests.fakes.nats_cluster import NatsCluster
from tests.fakes.polling import BOUND_S, until

if TYPE_CHECKING:
    from nats.js import JetStreamContext

SUBJECT = "edge.main.ledger.name.x"
EMPTY = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: "0"}


@pytest.mark.integration
async def test_of_two_that_expect_the_same_the_first_appends(nats: NatsServer) -> None:
    client = Client()
    await client.connect(
        nats.url, nkeys_seed_str=nats.credentials.read_text(), inbox_prefix="edge.main.inbox"
    )
    context = client.jetstream()
    await context.add_stream(
        StreamConfig("edge_main_ledger", subjects=["edge.main.ledger.>"], allow_msg_ttl=True)
    )
    appended = [await append(context, SUBJECT, b"{}", expected=EMPTY, kept_s=kept_s) for kept_s in (60, None)]
    assert appended == [1, None]
    await client.close()


class Refusing:
    """Stands for servers in a state that a test cannot bring about: another entry is on its way."""

    def __init__(self, err_code: int) -> None:
        self._err_code = err_code

    async def publish(self, *_arguments: object, **_options: object) -> None:
        raise APIError(code=400, err_code=self._err_code)


@pytest.mark.parametrize("err_code", [10071, 10164])
async def test_a_number_that_is_not_known_yet_is_another_than_expected(err_code: int) -> None:
    context = cast("JetStreamContext", Refusing(err_code))
    assert await append(context, SUBJECT, b"{}", expected=EMPTY, kept_s=None) is None


async def test_any_other_error_is_raised() -> None:
    context = cast("JetStreamContext", Refusing(10077))
    with pytest.raises(APIError):
        await append(context, SUBJECT, b"{}", expected=EMPTY, kept_s=None)


@pytest.mark.integration
@pytest.mark.long
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
