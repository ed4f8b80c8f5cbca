"""The broker loses all that it retains, and starts empty.

Within a heartbeat it retains again what each node publishes, and no tool was gone meanwhile.
"""

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path

from schemas import topics
from schemas.addresses import BrokerAddress
from tests.fakes.mqtt_listener import MqttListener
from tests.faults.site import BROKER, NODE, RELAY, Site

PAUSE_S = 0.1


async def test_all_is_published_again_and_no_tool_is_gone_meanwhile(tmp_path: Path) -> None:
    async with Site.running(tmp_path) as site, site.agent() as agent:
        tools, over = [await agent.tools()], asyncio.Event()

        async def watch() -> None:
            while not over.is_set():
                tools.append(await agent.tools())
                with suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), PAUSE_S)

        watching = asyncio.create_task(watch())
        await site.processes.kill(BROKER)
        shutil.rmtree(site.plan.directory / "broker")
        await site.start_broker()
        await site.until_logged(NODE, "broker connected", times=2)
        await site.until_logged(RELAY, "broker connected", times=2)
        address = BrokerAddress("127.0.0.1", site.plan.broker_port)
        for topic in (topics.identity(site.node_id), topics.announce(site.node_id)):
            async with MqttListener(address, topic).listening() as of:
                assert (await of.next()).payload
        over.set()
        await watching
        assert len(tools) > 2
        assert all(each == tools[0] for each in tools)
        assert len(site.log(RELAY, "node connected")) == 1
