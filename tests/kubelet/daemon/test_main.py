"""The daemon's own process."""

import asyncio
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kubelet.config import DaemonPlan, NodeConfig
from schemas.addresses import BrokerAddress
from tests.fakes.demo import STOP_TIMEOUT_S
from tests.fakes.node import write_identity
from tests.fakes.signer import SimulatedNode

pytestmark = pytest.mark.integration

CONFIG = NodeConfig(BrokerAddress("mqtt.example", 8883, tls=True), "https://relay.example")

NOWHERE = NodeConfig(BrokerAddress("127.0.0.1", 9), "http://127.0.0.1:9")
LINE_BYTES = 1 << 20

HEAVY = {
    # What trimming the heap can do without: half a mebibyte.
    "ctypes",
    # What only the command line needs.
    "typer",
    "rich",
    "pygments",
    "cryptography",
    # What http.server brings along: half a mebibyte.
    "html",
    # What urllib.request brings along.
    "http.client",
    "email.message",
    # What python-ulid brings along.
    "typing_extensions",
    "ulid",
    # What is needed only for a call that does not fit its schema.
    "difflib",
    # What the command line has looked up; from Python 3.13 on pathlib itself loads it.
    *({"grp"} if sys.version_info < (3, 13) else ()),
    # What importlib.metadata brings along.
    "csv",
    "zipfile",
    # What is made to look absent.
    "bz2",
    "lzma",
    "_bz2",
    "_lzma",
    # Of kinds of an operator's own, which this one does not name.
    "kubelet.handlers.named",
    # What no dependency may load by accident.
    "mcp",
    "multiprocessing",
    "pydantic",
}

POSTPONED = {
    # Up to Python 3.12 the email package imports them at once, since then in the functions that need them.
    # The last one is then used by pathlib.
    *(
        {"calendar", "email.base64mime", "email.errors", "email.quoprimime", "glob"}
        if sys.version_info < (3, 13)
        else ()
    ),
    "importlib.metadata",
    # Since Python 3.12 each dataclass needs it.
    *({"inspect"} if sys.version_info < (3, 12) else ()),
    "jsonschema_rs.canonical",
    "locale",
    "pickle",
    # Debian's Python up to 3.13 uses it while it loads tempfile.
    *(set() if hasattr(tempfile, "_rmtree") else {"shutil"}),
    "stringprep",
    "structlog.stdlib",
    "structlog.threadlocal",
    "structlog.twisted",
    "textwrap",
    "tokenize",
    "urllib.request",
    "uuid",
}

# Prints at a signal which modules it has loaded, and which it has only postponed.
DAEMON = """
import signal, sys
def tell(*_):
    lazy = {{name for name, module in sys.modules.items() if type(module).__name__ == "_PostponedModule"}}
    print(*(name for name, module in sys.modules.items() if module and name not in lazy))
    print(*lazy, flush=True)
signal.signal(signal.SIGUSR1, tell)
sys.argv = ["kubelet.daemon", {plan!r}]
from kubelet.daemon.__main__ import main
main()
"""


async def test_a_running_daemon_has_loaded_no_module_that_it_can_do_without(
    tmp_path: Path, node_of_today: SimulatedNode
) -> None:
    state_dir = write_identity(tmp_path / "state", node_of_today).root
    plan = DaemonPlan(NOWHERE, state_dir, 0, tmp_path / "relay.sock").to_json()
    daemon = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", DAEMON.format(plan=plan)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
    )
    assert daemon.stdout is not None
    assert daemon.stderr is not None
    async with asyncio.timeout(STOP_TIMEOUT_S):
        # It has signed, listens, and has tried to connect: what it does from now on, it does again.
        while b"relay not reached" not in await daemon.stderr.readline():
            assert daemon.returncode is None
        daemon.send_signal(signal.SIGUSR1)
        loaded = set((await daemon.stdout.readline()).decode().split())
        postponed = set((await daemon.stdout.readline()).decode().split())
        daemon.terminate()
        await daemon.communicate()
    assert {"structlog", "websockets", "paho", "psutil", "blake3"} <= loaded
    assert loaded.isdisjoint(HEAVY)
    assert postponed == POSTPONED


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
    assert done.stderr == f"kubelet: {tmp_path / 'node_id'} is missing: run `edge-kubelet init`\n"
