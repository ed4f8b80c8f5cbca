"""A node behind a link that holds back what it carries: the caller and the handler have a budget each."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import structlog

from kubelet.handlers.system_echo import EchoHandler
from kubelet.session.link import LinkState
from schemas.addresses import BrokerAddress
from schemas.errors import Failure
from schemas.registry import SchemaRegistry
from tests.fakes.fault_proxy import FaultProxy, LinkFault
from tests.fakes.hub import Hub
from tests.fakes.linked_node import LinkedNode
from tests.fakes.served_relay import ServedRelay
from tests.fakes.serving import Server
from tests.fakes.session_stage import command, failure
from tests.fakes.signer import ECHO, NODE_ID, NOW_MS

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

HANDLER_MS = 100
HASTY = {**ECHO, "constraints": {**ECHO["constraints"], "deadline_ms_default": HANDLER_MS}}
ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"


class HastyEcho(EchoHandler):
    """Announces that it ends within ``HANDLER_MS``; ``messages`` is what it was called with."""

    def __init__(self) -> None:
        super().__init__(HASTY, NODE_ID, lambda: NOW_MS, structlog.get_logger())
        self.messages: list[str] = []

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self.messages.append(arguments["message"])
        return await super().invoke(verb, arguments)


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A relay and a node, connected through ``link``."""

    relay: ServedRelay
    link: FaultProxy
    echo: HastyEcho


@pytest_asyncio.fixture(loop_scope="module")
async def site(tmp_path: Path, registry: SchemaRegistry, server: Server) -> AsyncIterator[SlowLink]:
    echo = HastyEcho()
    async with FaultProxy(BrokerAddress(server.address.host, server.address.port)).running() as link:
        url = f"http://{link.address.host}:{link.address.port}"
        hub = Hub(tmp_path, registry, public_url=url)
        async with (
            ServedRelay.open(hub, server) as relay,
            LinkedNode.running(hub.ca.issue(), url, registry, [echo]) as node,
        ):
            await node.until(LinkState.ANNOUNCED)
            yield SlowLink(relay, link, echo)
        hub.close()


@pytest.mark.holds("RFC-0005/7/deadline")
async def test_an_answer_counts_that_took_longer_than_the_handler_may(site: SlowLink) -> None:
    held = site.link.begin(LinkFault.DELAY)
    call = asyncio.create_task(site.relay.call(ECHO_NAME, message="late"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(call), 3 * HANDLER_MS / 1000)
    site.link.end(held)
    assert (await call).json()["result"]["structuredContent"]["message"] == "late"


async def test_a_command_whose_time_was_spent_on_the_link_never_runs(site: SlowLink) -> None:
    held = site.link.begin(LinkFault.DELAY)
    spent = command(2 * HANDLER_MS, message="spent")
    assert await failure(asyncio.create_task(site.relay.sessions.run(spent))) is Failure.DEADLINE_EXCEEDED
    site.link.end(held)
    following = await site.relay.call(ECHO_NAME, message="in time")
    assert following.json()["result"]["structuredContent"]["message"] == "in time"
    assert site.echo.messages == ["in time"]
