"""The relay is started again, and knows nothing yet of what its nodes announce.

A call that comes before a node's session, or before its manifest, is to be made again: the node exists, and
nothing was sent to it.
"""

import shutil
from pathlib import Path

import pytest

from tests.faults.site import BROKER, RELAY, Answer, Site

pytestmark = pytest.mark.long


async def answers_until_ok(site: Site) -> list[Answer]:
    """Call until a call succeeds, and return what the calls before it have ended with."""
    answers: list[Answer] = []
    while (answer := await site.call()).code != "ok":
        answers.append(answer)
    return answers


async def test_until_its_manifest_is_there_a_call_of_an_enrolled_node_is_to_be_made_again(
    tmp_path: Path,
) -> None:
    async with Site.running(tmp_path) as site:
        # What the broker retains does not come: the node's session does.
        await site.processes.kill(BROKER)
        for marks_are_kept in (True, False):
            await site.processes.kill(RELAY)
            if not marks_are_kept:
                shutil.rmtree(site.relay_state / "marks")
            await site.start_relay()
            answers = await answers_until_ok(site)
            assert answers, marks_are_kept
            assert {answer.code for answer in answers} <= {"E_NODE_OFFLINE", "E_RATE_LIMITED"}
            assert all("retry_after_ms" in answer.envelope for answer in answers)
