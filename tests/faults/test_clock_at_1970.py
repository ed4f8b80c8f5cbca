"""A machine without a battery starts at 1970, and learns the time later.

Nothing is signed or accepted by such a clock; both programs run, say what they wait for, and go on when it is
set.
"""

from pathlib import Path

import pytest

from tests.faults.faked_time import FakedTime
from tests.faults.site import NODE, RELAY, Site

pytestmark = pytest.mark.long

AT_1970 = "@1970-01-01 00:01:00"


async def test_a_node_announces_nothing_until_its_clock_is_set(tmp_path: Path) -> None:
    time = FakedTime(tmp_path / "time")
    time.set(AT_1970)
    async with Site.stopped(tmp_path) as site:
        site.node = time.prefix
        await site.start_broker()
        await site.start_relay()
        await site.start_node()
        page = await site.until_page(NODE, lambda page: page["relay"]["state"] == "open")
        assert (page["manifest"]["ready"], page["calls"]["ready"]) == (False, False)
        assert page["manifest"]["state"].startswith("the clock is not set")
        assert site.log(RELAY, "node announced") == []
        assert (await site.call()).code == "E_NODE_OFFLINE"
        time.set("+0")
        await site.until_called()


async def test_a_relay_is_not_ready_until_its_clock_is_set(tmp_path: Path) -> None:
    time = FakedTime(tmp_path / "time")
    time.set(AT_1970)
    async with Site.stopped(tmp_path) as site:
        site.relay = time.prefix
        await site.start_broker()
        await site.start_relay()
        await site.start_node()
        await site.until_page(RELAY, lambda page: not page["clock"]["ready"])
        await site.until_logged(RELAY, "node refused")
        assert site.log(RELAY, "node connected") == []
        time.set("+0")
        await site.until_called()
        await site.until_page(RELAY, lambda page: page["clock"]["ready"])
