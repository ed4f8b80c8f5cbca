"""The state of a node is copied to another machine, and both run.

The newer has the session, and the older does not take it back at once: commands go to one of them. Both ends
say so.
"""

import shutil
from pathlib import Path

import pytest

from tests.faults.site import NODE, RELAY, Site

pytestmark = pytest.mark.long

TWIN = "twin"


async def test_the_newer_one_is_called_and_the_older_one_waits(tmp_path: Path) -> None:
    async with Site.running(tmp_path) as site:
        copy = tmp_path / TWIN
        shutil.copytree(site.node_state, copy, ignore=shutil.ignore_patterns("*.sock", "lock"))
        await site.start_node(TWIN, copy)
        flagged = await site.until_logged(RELAY, "two machines use one identity; the newer stays")
        assert flagged["node_id"] == site.node_id
        closed = await site.until_logged(NODE, "relay closed the session")
        assert (closed["code"], closed["what"]) == (4008, "another machine uses this identity")
        await site.until_called()
        await site.until_page(NODE, lambda page: not page["relay"]["ready"])
        assert len(site.log(RELAY, "node connected")) == 2
