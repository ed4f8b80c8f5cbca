"""What the command line loads before a command runs: `kubelet run` only becomes another process."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

HEAVY = {"asyncio", "cryptography", "jsonschema_rs", "mcp", "paho", "psutil", "structlog", "websockets"}


def test_the_command_line_loads_nothing_that_only_some_commands_need() -> None:
    listing = "import sys, kubelet.cli.commands; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-P", "-c", listing], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split())
    assert {"typer", "kubelet.cli.commands"} <= loaded
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize(
    "command", ["kubelet config show --state-dir {0}", "relay config show --state-dir={0} --log-level info"]
)
def test_a_command_that_takes_texts_and_paths_loads_no_converter(command: str, tmp_path: Path) -> None:
    program, *arguments = command.format(tmp_path).split()
    main = {"kubelet": "kubelet.cli.commands", "relay": "relay.cli.entry"}[program]
    running = f"""
import sys
from {main} import main
sys.argv = {[program, *arguments]}
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print("loaded", *sys.modules)
"""
    ran = subprocess.run([sys.executable, "-P", "-c", running], capture_output=True, text=True, check=True)
    *_, last = ran.stdout.splitlines()
    assert {"loaded", "typer"} <= set(last.split())
    assert "pydantic" not in last.split()
