import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relay.cli.demo.local_system import LocalSystem
from relay.cli.demo.processes import Processes
from relay.cli.demo.proofs import NotHereError, Proof, ProofError, show_proofs
from relay.cli.demo.run import DemoError, lines_of, run_demo
from relay.streams.telemetry.hub import PER_AGENT
from schemas.process.command_errors import EXIT_NO
from tests.fakes.demo import plan_below
from tests.fakes.relay_command import Outcome, run_here
from tests.fakes.signer import NODE_ID


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
    assert "Calling tools of 32 nodes:" in done.stdout


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_demo_has_every_kind_that_ships_on_this_machine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "relay", "demo", "--once", "--nodes", "0", "--kinds", "all"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-2000:]
    here = {"health", "network", "packages", "procs", "sensors"}  # whatever this machine is
    assert not [short for short in here if f"\n  {short}-snapshot {{" not in done.stdout]


def entries(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def comes_out(_system: LocalSystem, directory: Path) -> str:
    return f"{entries(directory)}"


async def does_not(_system: LocalSystem, _directory: Path) -> str:
    raise ProofError("a node says \x1b[2J" + "x" * 5000)


async def lasts(_system: LocalSystem, _directory: Path) -> str:
    await asyncio.Event().wait()
    return ""


async def is_not_here(_system: LocalSystem, _directory: Path) -> str:
    raise NotHereError("no such kind")


@pytest.mark.parametrize(
    ("proof", "said"),
    [
        (comes_out, "[]"),
        (is_not_here, "not tried: no such kind"),
        (does_not, r"FAILED: a node says \x1b[2Jxxx"),
        (lasts, "FAILED: not done within 0 s"),
    ],
    ids=["came out", "not here", "did not", "lasted"],
)
async def test_what_the_demo_tries_is_said_as_it_came_out_and_fails_it_if_it_did_not(
    tmp_path: Path, proof: Proof, said: str
) -> None:
    lines = list[str]()
    async with Processes.running(tmp_path) as processes:
        system = LocalSystem(plan_below(tmp_path), processes, "", NODE_ID, [])
        proofs = {"first": comes_out, "second": proof, "third": comes_out}
        worked = await show_proofs(system, lines.append, proofs, bound_s=0.01)
    assert worked is not said.startswith("FAILED")
    assert [line.split()[0] for line in lines[1:]] == ["first", "second", "third"]
    assert lines[2].startswith(f"  {'second':<25}{said}")
    assert len(lines[2]) < 300
    assert lines[2].isprintable()
    assert entries(tmp_path) == []


def test_roots_that_cannot_be_read_are_one_line_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = tmp_path / "nothing"
    monkeypatch.setenv("SSL_CERT_FILE", str(nothing))
    error = f"relay: SSL_CERT_FILE names {nothing}: No such file or directory\n"
    assert run_here(monkeypatch, capsys, "demo", "--once") == Outcome(EXIT_NO, "", error)


STOPPED = """
import asyncio, os, signal
import relay.cli.demo.run
async def stopped(**_options):
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()
relay.cli.demo.run.run_demo = stopped
from relay.cli.entry import main
main()
"""


@pytest.mark.integration
@pytest.mark.parametrize(("options", "code"), [((), 0), (("--once",), 130)])
def test_a_demo_that_is_to_answer_has_not_ended_well_when_a_signal_ends_it(
    options: tuple[str, ...], code: int
) -> None:
    command = [sys.executable, "-P", "-c", STOPPED, "demo", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


GIB = 1024**3
SAMPLE: dict[str, Any] = {
    "ts_ms": 1_760_000_000_000,
    "node_id": NODE_ID,
    "uptime_s": 90_061,
    "cpu": {"cores": 4, "usage_pct": 12.345},
    "mem": {"total_bytes": 4 * GIB, "available_bytes": GIB * 3 // 2},
    "load": {"one": 0.5, "five": 1, "fifteen": 2.25},
    "disk": [{"mount": "/", "fs_type": "ext4", "total_bytes": 10 * GIB, "available_bytes": GIB}],
}


def test_an_echo_is_shown_as_its_message_and_when_it_was_received() -> None:
    result = {"message": "ping", "received_at_ms": 1_760_000_000_012, "node_id": NODE_ID}
    assert list(lines_of(result)) == [("message", "ping"), ("received", "2025-10-09 08:53:20.012+00:00")]


def test_a_sample_is_shown_in_units_for_people() -> None:
    assert list(lines_of(SAMPLE)) == [
        ("uptime", "1 day, 1:01:01"),
        ("cpu", "12.3 % of 4 cores"),
        ("memory", "1.5 GiB available of 4.0 GiB"),
        ("load", "0.50  1.00  2.25"),
        ("disk", "/ (ext4)  1.0 GiB available of 10.0 GiB"),
    ]


@pytest.mark.parametrize(
    ("part", "label"),
    [("uptime_s", "uptime"), ("cpu", "cpu"), ("mem", "memory"), ("load", "load"), ("disk", "disk")],
)
def test_a_part_that_is_not_there_has_no_line(part: str, label: str) -> None:
    result = {name: value for name, value in SAMPLE.items() if name != part}
    labels = [line[0] for line in lines_of(result)]
    assert label not in labels
    assert len(labels) == 4


def test_each_disk_has_a_line_of_its_own() -> None:
    (disk,) = SAMPLE["disk"]
    lines = list(lines_of({"disk": [{**disk, "mount": "/a"}, {**disk, "mount": "/b"}]}))
    assert [text.partition(" ")[0] for _, text in lines] == ["/a", "/b"]


@pytest.mark.parametrize("text", ["\x1b[2J", "\u202e", "a\nb", "\r"])
def test_no_text_of_a_node_reaches_the_terminal_raw(text: str) -> None:
    (disk,) = SAMPLE["disk"]
    result = {"message": text, "disk": [{**disk, "mount": text, "fs_type": text}]}
    for _, line in lines_of(result):
        assert line.isascii()
        assert line.isprintable()


def test_a_long_mount_is_cut() -> None:
    (disk,) = SAMPLE["disk"]
    ((_, line),) = lines_of({"disk": [{**disk, "mount": "/" + "x" * 5000, "fs_type": "y" * 5000}]})
    assert len(line) < 120


def test_of_what_a_node_did_not_say_nothing_is_shown() -> None:
    assert list(lines_of({})) == []


def test_of_the_findings_of_a_board_the_worst_is_worded() -> None:
    found = {"severity": "error", "code": "unit_failed", "subject": "a\x1b.service", "evidence": {"value": 7}}
    lines = list(lines_of({"findings": [found, {**found, "code": "hot"}], "total": 2}))
    assert lines == [("worst", 'error unit_failed a\\x1b.service {"value":7}'), ("total", "2")]
    assert list(lines_of({"findings": []})) == [("worst", "no finding")]


def test_members_of_another_kind_are_shown_as_they_are() -> None:
    result = {"node_id": "n", "text": "Linux \x1b", "lux": None, "at": [1, 2]}
    assert list(lines_of(result)) == [("text", "Linux \\x1b"), ("lux", "null"), ("at", "[1,2]")]
