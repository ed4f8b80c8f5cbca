"""What the benchmarks do where one of them fails. That they measure is seen by running them."""

import json
from pathlib import Path

import pytest

import bench.__main__ as benches
from bench.results import Figure

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
