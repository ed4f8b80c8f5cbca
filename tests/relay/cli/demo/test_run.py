import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relay.cli.demo.run import DemoError, lines_of, run_demo
from relay.cli.entry import main
from relay.streams.telemetry.hub import PER_AGENT
from schemas.process.command_errors import EXIT_NO
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


def test_members_of_another_kind_are_shown_as_they_are() -> None:
    result = {"node_id": "n", "text": "Linux \x1b", "lux": None, "at": [1, 2]}
    assert list(lines_of(result)) == [("text", "Linux \\x1b"), ("lux", "null"), ("at", "[1,2]")]
