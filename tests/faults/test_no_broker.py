"""The broker is away, at the start and later: manifests come by the sessions, and calls are made."""

from pathlib import Path

import pytest

from tests.faults.site import BROKER, NODE, RELAY, Site

pytestmark = pytest.mark.long


async def test_calls_are_made_without_it_and_it_is_used_when_it_comes(tmp_path: Path) -> None:
    async with Site.stopped(tmp_path) as site:
        await site.start_relay()
        await site.start_node()
        await site.until_called()
        await site.start_broker()
        for program in (NODE, RELAY):
            await site.until_page(program, lambda page: page["broker"]["ready"])
        await site.processes.kill(BROKER)
        for program in (NODE, RELAY):
            await site.until_page(program, lambda page: not page["broker"]["ready"])
        assert (await site.call()).code == "ok"
        assert len(site.log(RELAY, "node connected")) == 1
