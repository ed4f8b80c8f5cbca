"""Of two that append at one expected number, one does."""

from typing import TYPE_CHECKING, cast

import pytest
from nats.aio.client import Client
from nats.js.api import Header, StreamConfig
from nats.js.errors import APIError

from relay.cluster.expected_sequence import append
from tests.fakes.cluster_server import NatsServer

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
