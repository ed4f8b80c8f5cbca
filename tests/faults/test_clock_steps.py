"""The clock of a machine is set by a day, either way, while its program runs, and later back.

No command runs for it, none is refused for a delay that there was not, and nothing stays wrong.
"""

from pathlib import Path

import pytest

from tests.faults.faked_time import FakedTime
from tests.faults.site import NODE, RELAY, Site

pytestmark = pytest.mark.long


async def test_a_nodes_clock_is_set_by_a_day(tmp_path: Path) -> None:
    time = FakedTime(tmp_path / "time")
    async with Site.running(tmp_path, node=time.prefix) as site, site.agent() as agent:
        time.set("-1d")
        await site.until_page(NODE, lambda page: page["calls"]["ready"])
        assert (await agent.call()).code == "ok"
        time.set("+1d")
        # What was accepted stays in force until it expires; what this clock signs is of the future.
        await site.until_logged(NODE, "relay rejects the manifest")
        assert (await agent.call()).code == "ok"
        time.set("+0")
        await site.until_page(NODE, lambda page: all(part["ready"] for part in page.values()))
        assert (await agent.call()).code == "ok"
        assert len(site.log(RELAY, "node connected")) == 1


async def test_a_relays_clock_is_set_by_a_day(tmp_path: Path) -> None:
    time = FakedTime(tmp_path / "time")
    async with Site.running(tmp_path, relay=time.prefix) as site, site.agent() as agent:
        # By the first clock every manifest has expired, by the second a new one is of the future.
        for step, code in (("+1d", "E_MANIFEST_INVALID"), ("-1d", "ok")):
            time.set(step)
            await site.until_page(RELAY, lambda page: not page["clock"]["ready"])
            await site.until_logged(RELAY, "manifest rejected")
            assert (await agent.call()).code == code
            time.set("+0")
            await site.until_page(RELAY, lambda page: page["clock"]["ready"])
            assert (await agent.call()).code == "ok"
        await site.until_page(NODE, lambda page: all(part["ready"] for part in page.values()))
        assert len(site.log(RELAY, "node connected")) == 1


async def test_the_clock_of_a_machine_with_both_was_ahead_by_a_day(tmp_path: Path) -> None:
    time = FakedTime(tmp_path / "time")
    async with Site.running(tmp_path, relay=time.prefix, node=time.prefix) as site, site.agent() as agent:
        time.set("+1d")
        # By one clock they agree, so that both remember a manifest of tomorrow.
        await site.until_page(RELAY, lambda page: page["clock"]["ready"])
        await site.until_page(NODE, lambda page: all(part["ready"] for part in page.values()))
        assert (await agent.call()).code == "ok"
        time.set("+0")
        await site.until_logged(NODE, "relay rejects the manifest")
        await site.until_page(RELAY, lambda page: page["clock"]["ready"])
        await site.until_page(NODE, lambda page: all(part["ready"] for part in page.values()))
        assert (await agent.call()).code == "ok"
        assert len(site.log(RELAY, "node connected")) == 1
