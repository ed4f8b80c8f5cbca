"""A process may open nothing any more: no file, no connection, and none is accepted.

What is open goes on. What cannot be opened is tried again, and the log says why it was not.
"""

import asyncio
import resource
from pathlib import Path

import pytest

from tests.faults.site import BROKER, NODE, RELAY, Site

pytestmark = pytest.mark.long


async def test_what_is_open_goes_on_and_what_is_lost_comes_back(tmp_path: Path) -> None:
    async with Site.running(tmp_path) as site:
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        site.limit(NODE, resource.RLIMIT_NOFILE, 0)
        assert (await site.call()).code == "ok"
        await site.processes.kill(RELAY)
        await site.processes.kill(BROKER)
        await site.start_broker()
        await site.start_relay()
        await site.until_logged(NODE, "relay not reached", "Too many open files")
        await site.until_logged(NODE, "broker not reached", "Too many open files")
        site.limit(NODE, resource.RLIMIT_NOFILE, usual)
        await site.until_called()

        async with site.agent() as agent:
            assert (await agent.call()).code == "ok"
            site.limit(RELAY, resource.RLIMIT_NOFILE, 0)
            waits = asyncio.create_task(site.call())
            await site.until_logged(RELAY, "connections refused", "descriptors")
            assert (await agent.call()).code == "ok"
            site.limit(RELAY, resource.RLIMIT_NOFILE, usual)
            assert (await waits).code == "ok"
