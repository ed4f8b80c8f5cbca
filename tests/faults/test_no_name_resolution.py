"""The names of relay and broker cannot be resolved: at the start, and later when a connection is lost.

Both programs run and try again; they are connected soon after names are resolved again.
"""

from pathlib import Path

import pytest

from relay.cli.demo.local_system import Plan
from tests.faults.namespaces import mounted
from tests.faults.site import NODE, RELAY, Site

pytestmark = pytest.mark.long

NAME = "hub.example"
UNRESOLVED = "name resolution"


def set_name(hosts: Path, *, is_known: bool) -> None:
    """Make the name known or unknown. The file stays the same: it is mounted."""
    hosts.write_text(f"127.0.0.1 localhost {NAME if is_known else ''}\n", "ascii")


def by_name(plan: Plan) -> tuple[str, ...]:
    """Return the options of a relay that others know by the name, as it does its broker."""
    url, broker = f"http://{NAME}:{plan.relay_port}", f"{NAME}:{plan.broker_port}"
    return ("--public-url", url, "--broker", broker, "--insecure-plain-transports")


async def test_both_programs_wait_for_names_at_the_start_and_later(tmp_path: Path) -> None:
    hosts, servers = tmp_path / "hosts", tmp_path / "resolv.conf"
    # A server that is not there answers at once: the connection is refused.
    servers.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n", "ascii")
    set_name(hosts, is_known=False)
    async with Site.stopped(tmp_path) as site:
        site.set_relay_options(*by_name(site.plan))
        site.relay_url, site.broker = (
            f"http://{NAME}:{site.plan.relay_port}",
            f"{NAME}:{site.plan.broker_port}",
        )
        site.node_options = ("--insecure-plain-transports",)
        site.node = site.relay = mounted({Path("/etc/hosts"): hosts, Path("/etc/resolv.conf"): servers})
        await site.start_broker()
        await site.start_relay()
        await site.start_node()
        await site.until_logged(NODE, "relay not reached", UNRESOLVED)
        await site.until_logged(NODE, "broker not reached", UNRESOLVED)
        await site.until_logged(RELAY, "broker not reached", UNRESOLVED)
        set_name(hosts, is_known=True)
        await site.until_page(NODE, lambda page: page["calls"]["ready"])

        set_name(hosts, is_known=False)
        before = len(site.log(NODE, "relay not reached"))
        await site.processes.kill(RELAY)
        await site.start_relay()
        await site.until_logged(NODE, "relay not reached", UNRESOLVED, times=before + 1)
        set_name(hosts, is_known=True)
        await site.until_page(NODE, lambda page: page["calls"]["ready"])
