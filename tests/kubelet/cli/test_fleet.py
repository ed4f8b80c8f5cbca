import asyncio
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kubelet.cli.fleet import Counts, FleetProcessError, Parts, Progress, processes_for
from schemas.error_roots import OperatorError
from tests.fakes.node import write_identity
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, SimulatedCa

BOUND_S = 20


@pytest.mark.parametrize(
    ("nodes", "descriptors", "processes"),
    [(1, 65, 1), (2, 65, 2), (960, 1024, 1), (961, 1024, 2), (10_000, 1024, 11), (10_000, 20_000, 1)],
)
def test_there_are_as_many_processes_as_the_limit_of_open_files_requires(
    nodes: int, descriptors: int, processes: int
) -> None:
    assert processes_for(nodes, descriptors) == processes


def test_a_limit_that_permits_no_connection_is_an_error_with_advice() -> None:
    with pytest.raises(OperatorError, match="ulimit -n"):
        processes_for(1, 64)


def test_progress_is_a_table_whose_columns_are_aligned_and_whose_rows_differ() -> None:
    lines, times = io.StringIO(), iter([100.0, 100.0, 112.34, 160.0])
    progress = Progress(lines, lambda: next(times))
    progress.begin(10_000, 2)
    for counts in (Counts(0, 0, 0), Counts(0, 0, 0), Counts(2_000, 1_998, 0), Counts(10_000, 9_999, 1)):
        progress.show(counts)
    assert lines.getvalue().splitlines() == [
        "10,000 mock nodes in 2 processes; Ctrl-C stops them",
        "  seconds  connected  announced   rejected",
        "      0.0          0          0          0",
        "     12.3      2,000      1,998          0",
        "     60.0     10,000      9,999          1",
    ]


@pytest.mark.integration
async def test_the_counts_of_all_processes_are_added_up() -> None:
    seen: asyncio.Queue[Counts] = asyncio.Queue()
    says = "import time; print({!r}, flush=True); time.sleep(60)"
    commands = [[sys.executable, "-P", "-c", says.format(counts)] for counts in ("3 2 1", "30 20 10")]
    parts = asyncio.create_task(Parts(commands, seen.put_nowait).run())
    async with asyncio.timeout(BOUND_S):
        while await seen.get() != Counts(33, 22, 11):
            pass
    parts.cancel()
    with pytest.raises(asyncio.CancelledError):
        await parts


@pytest.mark.integration
async def test_a_process_that_ends_by_itself_ends_the_fleet(tmp_path: Path) -> None:
    left = tmp_path / "left"
    lasting = f"import os, signal, time; open({str(left)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    ending = f"import os, sys, time\nwhile not os.path.exists({str(left)!r}): time.sleep(0.01)\nsys.exit(3)"
    commands = [[sys.executable, "-P", "-c", code] for code in (lasting, ending)]
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(BOUND_S):
            await Parts(commands, lambda _: None).run()
    assert ended.group_contains(FleetProcessError, match="ended with exit code 3")
    with pytest.raises(ProcessLookupError):
        os.kill(int(left.read_text()), 0)


@pytest.mark.integration
def test_one_interrupt_ends_all_processes_of_a_fleet(tmp_path: Path, ca: SimulatedCa) -> None:
    for node_id in (NODE_ID, OTHER_NODE_ID):
        write_identity(tmp_path / "mocks" / node_id, ca.issue(node_id))
    fleet = f"{sys.executable} -P -m kubelet fleet --broker 127.0.0.1:9 --relay http://127.0.0.1:9"
    with subprocess.Popen(
        # 65 open files: one connection in each process.
        ["/bin/sh", "-c", f"ulimit -n 65; exec {fleet} --identities {tmp_path / 'mocks'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        shown = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=BOUND_S)
    assert shown[0] == "2 mock nodes in 2 processes; Ctrl-C stops them\n"
    assert shown[2].split()[1:] == ["0", "0", "0"]
    assert (process.returncode, errors) == (0, "")
