"""A connection of a node is half open: nothing arrives any more, and neither end is told.

Both notice within half a minute, and the node connects again.
"""

import asyncio
from pathlib import Path

import pytest

from schemas.addresses import BrokerAddress
from tests.fakes.fault_proxy import FaultProxy, LinkFault
from tests.fakes.ports import unused_port
from tests.faults.site import NODE, RELAY, Site

pytestmark = pytest.mark.long

NOTICED_S = 30
LAG_S = 5


async def test_both_ends_notice_it_within_half_a_minute(tmp_path: Path) -> None:
    port = unused_port()
    async with Site.stopped(tmp_path) as site:
        site.set_relay_options("--listen", f"127.0.0.1:{port}")
        proxy = FaultProxy(BrokerAddress("127.0.0.1", port), site.plan.relay_port)
        async with proxy.running():
            await site.start_all()
            # The oldest connection is the node's.
            proxy.begin(LinkFault.BLACK_HOLE, 0)
            async with asyncio.timeout(NOTICED_S + LAG_S):
                await site.until_logged(RELAY, "node disconnected")
                await site.until_logged(NODE, "relay lost")
            await site.until_called()
