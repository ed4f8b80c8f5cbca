import os
import subprocess
import sys
from pathlib import Path

import pytest

from relay.cli.demo.run import DemoError, run_demo
from relay.cli.entry import main
from relay.streams.telemetry.hub import PER_AGENT
from schemas.process.exit_codes import EXIT_NO


async def test_a_ready_file_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready_file = tmp_path / "missing" / "ready"
    with pytest.raises(DemoError, match=f"--ready-file {ready_file}: there is no directory"):
        await run_demo(nodes=0, once=True, ready_file=ready_file)
    assert capsys.readouterr().out == ""


@pytest.mark.integration
def test_more_nodes_than_open_files_are_refused_in_one_line_before_anything_starts() -> None:
    demo = f"{sys.executable} -P -m relay demo --nodes 300"
    done = subprocess.run(
        ["/bin/sh", "-c", f"ulimit -n 256; exec {demo}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (EXIT_NO, "")
    assert done.stderr == (
        "relay: 300 mock nodes need 380 open files, and 256 are allowed:"
        " raise the limit with `ulimit -n 380`, or give fewer --nodes\n"
    )


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_demo_of_more_nodes_than_a_caller_may_subscribe_to_ends_well(tmp_path: Path) -> None:
    nodes = PER_AGENT + 4
    done = subprocess.run(
        [sys.executable, "-P", "-m", "relay", "demo", "--once", "--nodes", str(nodes)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-2000:]
    assert f"{nodes} mock nodes" in done.stdout
    assert "Calling each tool of 32 nodes:" in done.stdout


def test_roots_that_cannot_be_read_are_one_line_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = tmp_path / "nothing"
    monkeypatch.setenv("SSL_CERT_FILE", str(nothing))
    monkeypatch.setattr(sys, "argv", ["relay", "demo", "--once"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == EXIT_NO
    error = f"relay: SSL_CERT_FILE names {nothing}: No such file or directory\n"
    assert capsys.readouterr() == ("", error)
