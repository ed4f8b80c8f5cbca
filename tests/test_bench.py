"""What the benchmarks do where one of them fails. That they measure is seen by running them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bench.__main__ as benches
from bench import flooded
from bench.load import Target
from bench.results import Figure
from relay.cli.demo.processes import Processes
from tests.fakes.ports import unused_port
from tests.fakes.raw_http_server import RawServer

MEASURED = Figure("first", 1.0, "ms", "another", 2.0, "ratio <= 3")


def failing() -> list[Figure]:
    raise RuntimeError("a call failed")


@pytest.mark.parametrize("names", [[], ["first", "second"]])
def test_a_part_that_fails_is_named_and_keeps_the_figures_of_those_before(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"first": ("a part", lambda: [MEASURED]), "second": ("one that fails", failing)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benches, "OUT", tmp_path / "latest.json")
    monkeypatch.setattr(benches, "PARTS", parts)
    with pytest.raises(RuntimeError, match="a call failed") as failed:
        benches.main(names)
    assert "The part second failed" in failed.value.__notes__[0]
    assert "ratio <= 3" in capsys.readouterr().out
    if names:
        assert not (tmp_path / "latest.json").exists()
    else:
        assert [row["name"] for row in json.loads((tmp_path / "latest.json").read_text())] == ["first"]


class Answered:
    """An agent whose calls are answered at once."""

    async def ask(self, _request: bytes) -> bytes:
        return b'"isError":false'


@pytest.mark.integration
async def test_calls_beside_a_flood_that_does_not_arrive_are_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flooded, "_HTTP_CALLS", 50)
    monkeypatch.setattr(flooded, "_SETTLE_S", 0.1)
    agent: Any = Answered()
    async with Processes.running(tmp_path) as processes, RawServer.running(b"") as server:
        system: Any = SimpleNamespace(processes=processes, plan=SimpleNamespace(directory=tmp_path))
        port = int(server.url.rpartition(":")[2])
        assert await flooded.p99_beside(system, agent, Target(0, [b""]), (port, 10, b"x")) >= 0
        with pytest.raises(RuntimeError, match="the flood was none"):
            await flooded.p99_beside(system, agent, Target(0, [b""]), (unused_port(), 10, b"x"))
