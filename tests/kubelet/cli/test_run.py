"""`kubelet run`, typed once with options and once without."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.node import write_identity
from tests.fakes.ports import unused_port
from tests.fakes.signer import SimulatedNode

BOUND_S = 60
KUBELET = (sys.executable, "-P", "-m", "kubelet")

pytestmark = pytest.mark.integration


@contextmanager
def running(state: Path, *options: str) -> Iterator[list[str]]:
    """Run the node until it has started; give the lines that it printed before."""
    command = [*KUBELET, "run", "--state-dir", str(state), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        before = []
        for line in process.stderr:
            if '"kubelet started"' in line:
                break
            before.append(line)
        try:
            yield before
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=BOUND_S)
            assert process.returncode == 0


@pytest.mark.long
def test_a_bare_second_run_does_what_the_first_was_told(tmp_path: Path, node_of_today: SimulatedNode) -> None:
    write_identity(tmp_path / "state", node_of_today)
    port = unused_port()
    told = ("--relay", "http://127.0.0.1:9", "--no-broker", "--loopback-port", str(port), "--ttl", "20m")
    with running(tmp_path / "state", *told):
        pass
    with running(tmp_path / "state"):
        command = [*KUBELET, "config", "show", "--json", "--state-dir", str(tmp_path / "state")]
        # Nor does a second one, which cannot run, change what is kept.
        again = subprocess.run(
            [*KUBELET, "run", "--state-dir", str(tmp_path / "state"), "--ttl", "10m"],
            check=False,
            capture_output=True,
        )
        assert (again.returncode, b"another kubelet runs" in again.stderr) == (3, True)
        shown = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert {name: shown[name]["value"] for name in ("loopback_port", "no_broker", "ttl")} == {
        "loopback_port": port,
        "no_broker": True,
        "ttl": "20m",
    }
    with running(tmp_path / "state", "--ttl", "30m") as before:
        assert before[0] == "kubelet: not as it was told before: --ttl was 20m\n"
