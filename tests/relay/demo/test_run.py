from pathlib import Path

import pytest

from relay.demo.run import DemoError, run_demo


async def test_a_ready_file_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready_file = tmp_path / "missing" / "ready"
    with pytest.raises(DemoError, match=f"--ready-file {ready_file}: there is no directory"):
        await run_demo(nodes=0, once=True, ready_file=ready_file)
    assert capsys.readouterr().out == ""
