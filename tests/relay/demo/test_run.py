import subprocess
import sys
from pathlib import Path

import pytest

from relay.demo.run import DemoError, run_demo
from schemas.error_roots import OperatorError
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


async def test_roots_that_cannot_be_read_are_named_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "nothing"))
    with pytest.raises(OperatorError, match=f"SSL_CERT_FILE names {tmp_path / 'nothing'}: No such file"):
        await run_demo(nodes=0, once=True, ready_file=None)
