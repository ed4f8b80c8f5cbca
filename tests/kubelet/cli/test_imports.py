"""What the command line loads before a command runs: `kubelet run` only becomes another process."""

import subprocess
import sys

HEAVY = {"asyncio", "cryptography", "jsonschema_rs", "mcp", "paho", "psutil", "structlog", "websockets"}


def test_the_command_line_loads_nothing_that_only_some_commands_need() -> None:
    listing = "import sys, kubelet.cli.commands; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-P", "-c", listing], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split())
    assert {"typer", "kubelet.cli.run"} <= loaded
    assert loaded.isdisjoint(HEAVY)
