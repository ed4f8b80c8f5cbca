"""The state directory cannot be written: its file system was mounted read-only, or became so.

A program that cannot write at its start ends, and names the file. One that runs goes on, and says what it
does not keep.
"""

import os
from pathlib import Path

import pytest

from tests.faults.namespaces import read_only
from tests.faults.site import NODE, RELAY, Site

pytestmark = pytest.mark.long

# Root may write where the mode forbids it; without these capabilities it is as any user.
_AS_ANY_USER = (
    ()
    if os.geteuid()
    else (
        "setpriv",
        "--bounding-set=-dac_override,-dac_read_search",
        "--inh-caps=-dac_override,-dac_read_search",
    )
)


async def test_a_program_that_cannot_write_at_its_start_names_the_file(tmp_path: Path) -> None:
    async with Site.stopped(tmp_path) as site:
        site.node, site.relay = read_only(site.node_state), read_only(site.relay_state)
        for program, file in ((NODE, site.node_state / "lock"), (RELAY, site.relay_state / "audit.lock")):
            ended = await site.refused(program)
            assert ended.startswith(f"{program} ended with status 3: ")
            assert ended.endswith(f"{program}: {file}: Read-only file system")


def set_mode(directory: Path, mode: int) -> None:
    """Set the mode of ``directory`` and of those below it."""
    for each in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        each.chmod(mode)


async def test_a_program_that_cannot_write_later_goes_on_and_says_so(tmp_path: Path) -> None:
    async with Site.running(tmp_path, node=_AS_ANY_USER, relay=_AS_ANY_USER) as site:
        directories = (site.node_state, site.relay_state)
        try:
            for directory in directories:
                set_mode(directory, 0o500)
            await site.until_logged(RELAY, "the newest manifests are not kept: a restart forgets them")
            await site.until_logged(NODE, "the time of the newest manifest is not kept", "Permission denied")
            assert (await site.call()).code == "ok"
        finally:
            for directory in directories:
                set_mode(directory, 0o700)
        await site.until_logged(RELAY, "the newest manifests are kept again")
        assert len(site.log(RELAY, "node connected")) == 1
