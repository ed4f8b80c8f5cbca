"""The disk of the audit answers no write and no sync for ten seconds, and then goes on.

Calls that cannot be recorded in time are refused and were never sent. The relay answers all else
meanwhile, and no session is lost.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relay.audit.verify import verify
from schemas.process.status_socket import read_status
from tests.fakes.fuse_disk import fuse_disk
from tests.faults.site import BOUND_S, HEARTBEAT_S, NODE, RELAY, Site, until

pytestmark = [pytest.mark.long, pytest.mark.integration]

STALL_S = 10


async def test_a_relay_goes_on_and_refuses_what_it_cannot_record(tmp_path: Path) -> None:
    async with Site.stopped(tmp_path / "site") as site:
        with fuse_disk(tmp_path / "disk") as disk, mounted(disk.path / "audit.jsonl", site) as audit:
            await site.start_all()
            disk.stall()
            beats = acknowledged(site)
            refused: list[str] = []

            async def stalled_for_ten_heartbeats() -> bool:
                # Each is answered while the disk stalls: it does until ten heartbeats were acknowledged.
                answer = await site.call()
                assert answer.code == "E_INTERNAL", answer
                assert answer.envelope["message"] == "The call could not be recorded, so it was not made."
                refused.append(answer.envelope["correlation_id"])
                return acknowledged(site) >= beats + STALL_S / HEARTBEAT_S

            await until(stalled_for_ten_heartbeats)
            await site.until_page(RELAY, lambda page: not page["audit"]["ready"])
            async with site.agent() as agent:
                assert await agent.tools()
            disk.resume()
            await site.until_called()
            await site.until_page(RELAY, lambda page: all(part["ready"] for part in page.values()))
            # One session all the time; and of what was refused, none has reached the node.
            assert len(site.log(RELAY, "node connected")) == 1
            assert not site.log(RELAY, "node disconnected")
            ran = {entry["correlation_id"] for entry in site.log(NODE, "command done")}
            assert refused
            assert not ran & set(refused)
            await site.processes.stop(RELAY)
            assert verify(audit).intact


def acknowledged(site: Site) -> int:
    """Return how many heartbeats of its session the node has had acknowledged."""
    count: int = read_status(site.node_state)["relay"]["acknowledgements"]
    return count


@contextmanager
def mounted(file: Path, site: Site) -> Iterator[Path]:
    """Hold ``file`` in the place of the relay's audit; yield that."""
    audit = site.plan.state.audit
    for place in (file, audit):
        place.touch(mode=0o600)
    mount, umount = ["mount", "--bind", str(file), str(audit)], ["umount", "--lazy", str(audit)]
    ran = subprocess.run(mount, capture_output=True, text=True, timeout=BOUND_S, check=False)
    if ran.returncode:
        pytest.skip(f"no file can be mounted over another here: {ran.stderr}")
    try:
        yield audit
    finally:
        subprocess.run(umount, timeout=BOUND_S, check=True)
