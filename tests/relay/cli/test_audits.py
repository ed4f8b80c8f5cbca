"""The audits of several relays: verified in one table, and searched in the order of time."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from relay.audit.log import AuditLog
from relay.cli.audit import app
from tests.fakes.clock import FakeClock
from tests.fakes.signer import NOW_MS

PARENT = "01HZX9K3M4P7Q8R9S0T1V2W3XA"


class Written:
    """The audit of one relay, whose clock is ``late_ms`` behind."""

    def __init__(self, directory: Path, late_ms: int) -> None:
        directory.mkdir()
        self.directory = directory
        self.path = directory / "audit.jsonl"
        self.clock = FakeClock(NOW_MS + late_ms)
        self.log = AuditLog(self.path, self.clock)

    def write(self, **facts: str) -> None:
        self.log.write(**facts)
        self.clock.advance(1000)


@pytest.fixture
def relays(tmp_path: Path) -> Iterator[list[Written]]:
    """Two relays, whose lines alternate in time."""
    written = [Written(tmp_path / "first", 0), Written(tmp_path / "second", 500)]
    for number in range(2):
        for relay in written:
            relay.write(event="tried", parent=PARENT, reason=str(number))
            relay.write(event="other", reason=str(number))
    yield written
    for relay in written:
        relay.log.close()


Run = Callable[..., Result]


@pytest.fixture
def run(relays: list[Written]) -> Run:
    def run(command: str, *arguments: str, option: str = "") -> Result:
        places = [str(relay.directory) for relay in relays]
        named = [word for place in places for word in ((option, place) if option else (place,))]
        return CliRunner().invoke(app, [command, *arguments, *named])

    return run


def spoil(relay: Written) -> None:
    lines = relay.path.read_bytes().splitlines(keepends=True)
    relay.path.write_bytes(b"".join([lines[0], *lines[2:]]))


def test_each_chain_is_a_row_of_one_table(run: Run, relays: list[Written]) -> None:
    done = run("verify")
    assert done.exit_code == 0, done.output
    header, *rows = done.output.splitlines()
    assert header.split() == ["AUDIT", "LINES", "FIRST", "LAST", "HEAD", "RESULT"]
    for row, relay in zip(rows, relays, strict=True):
        assert row.startswith(str(relay.directory))
        assert relay.log.head[:12] in row
        assert row.endswith("intact")


def test_one_that_is_broken_is_named_and_hides_no_other(run: Run, relays: list[Written]) -> None:
    spoil(relays[0])
    done = run("verify", "--json")
    assert done.exit_code == 1
    first, second = json.loads(done.output)
    assert (first["intact"], first["broken"]["line"], second["intact"]) == (False, 2, True)
    assert first["result"] == "BROKEN: audit.jsonl line 2"


def test_lines_that_were_cut_off_since_the_last_time_are_exit_code_4(run: Run, relays: list[Written]) -> None:
    assert run("verify").exit_code == 0
    relays[1].path.write_bytes(b"".join(relays[1].path.read_bytes().splitlines(keepends=True)[:-1]))
    done = run("verify")
    assert done.exit_code == 4
    assert "LINES LOST" in done.output
    spoil(relays[0])
    assert run("verify").exit_code == 1  # a broken chain is worse
    assert run("verify", "--accept-loss").exit_code == 1


def test_a_place_without_an_audit_is_a_row_too(run: Run, tmp_path: Path) -> None:
    done = run("verify", str(tmp_path / "nowhere"))
    assert done.exit_code == 1
    assert f"NOT READ: there is no audit in {tmp_path / 'nowhere'}" in done.output
    assert done.output.count("intact") == 2


def test_a_hash_is_expected_in_one_audit_alone(run: Run) -> None:
    assert run("verify", "--expect", "ab" * 32).exit_code == 2


def test_an_id_is_found_in_all_of_them_in_the_order_of_time(run: Run, relays: list[Written]) -> None:
    done = run("grep", f"parent={PARENT}", "--json", option="--in")
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in done.output.splitlines()]
    assert [Path(line["audit"]).name for line in found] == ["first", "second", "first", "second"]
    assert {line["event"] for line in found} == {"tried"}
    shown = run("grep", f"parent={PARENT}", option="--in").output.splitlines()
    assert [line.split()[0] for line in shown] == [str(relay.directory) for relay in relays] * 2


def test_what_is_in_none_of_them_is_exit_code_1(run: Run) -> None:
    assert run("grep", "event=nothing", option="--in").exit_code == 1
