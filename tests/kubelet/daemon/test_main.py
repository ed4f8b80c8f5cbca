"""The daemon's own process."""

import subprocess
import sys
from pathlib import Path

from kubelet.config import DaemonPlan, NodeConfig
from schemas.addresses import BrokerAddress
from tests.fakes.demo import STOP_TIMEOUT_S

CONFIG = NodeConfig(BrokerAddress("mqtt.example", 8883, tls=True), "https://relay.example")

HEAVY = {
    # What only the command line needs.
    "typer",
    "rich",
    "pygments",
    "cryptography",
    # What http.server brings along: half a mebibyte.
    "html",
    # What is made to look absent.
    "bz2",
    "lzma",
    "_bz2",
    "_lzma",
    # What no dependency may load by accident.
    "mcp",
    "multiprocessing",
    "pydantic",
}

LOADED = """
import sys
sys.argv = ["kubelet.daemon", {plan!r}]
from kubelet.daemon.__main__ import main
try:
    main()
except SystemExit:
    pass
print(*sorted(name for name, module in sys.modules.items() if module and "." not in name))
"""


def test_the_daemon_loads_no_heavy_module_that_it_can_do_without(tmp_path: Path) -> None:
    # Without an identity it ends at once, with everything loaded that it would run with.
    plan = DaemonPlan(CONFIG, tmp_path, 0).to_json()
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADED.format(plan=plan)],
        check=True,
        capture_output=True,
        text=True,
        timeout=STOP_TIMEOUT_S,
    )
    loaded = set(done.stdout.split())
    assert {"structlog", "websockets", "paho", "psutil"} <= loaded
    assert loaded.isdisjoint(HEAVY)


def test_what_the_daemon_cannot_do_is_said_in_one_line(tmp_path: Path) -> None:
    plan = DaemonPlan(CONFIG, tmp_path, 0).to_json()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kubelet.daemon", plan],
        check=False,
        capture_output=True,
        text=True,
        timeout=STOP_TIMEOUT_S,
    )
    assert done.returncode == 3
    assert done.stderr == f"kubelet: {tmp_path / 'node_id'} is missing: run `kubelet init`\n"
