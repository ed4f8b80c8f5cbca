"""The disk is full: no file of a process can be written any further, and its log goes elsewhere.

A call that cannot be recorded is refused. Nothing else stops, and room makes everything as it was.
"""

import resource
from pathlib import Path

import pytest

from tests.faults.site import LOG_THROUGH_PIPE, NO_LIMIT, NODE, RELAY, Site

pytestmark = pytest.mark.long


async def test_calls_are_refused_while_they_cannot_be_recorded_and_nothing_else_stops(tmp_path: Path) -> None:
    async with Site.running(tmp_path, node=LOG_THROUGH_PIPE, relay=LOG_THROUGH_PIPE) as site:
        for program in (NODE, RELAY):
            site.limit(program, resource.RLIMIT_FSIZE, 0)
        refused = await site.call()
        assert refused.code == "E_INTERNAL"
        assert refused.envelope["message"] == "The call could not be recorded, so it was not made."
        await site.until_page(RELAY, lambda page: not page["audit"]["ready"])
        # What is kept for a restart, on either side, is not: the log says so, once.
        await site.until_logged(RELAY, "the newest manifests are not kept: a restart forgets them")
        await site.until_logged(NODE, "the time of the newest manifest is not kept", "File too large")

        for program in (NODE, RELAY):
            site.limit(program, resource.RLIMIT_FSIZE, NO_LIMIT)
        assert (await site.call()).code == "ok"
        await site.until_page(RELAY, lambda page: all(part["ready"] for part in page.values()))
        await site.until_logged(RELAY, "the newest manifests are kept again")
        assert len(site.log(RELAY, "node connected")) == 1
