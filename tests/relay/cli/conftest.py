from pathlib import Path

import pytest

from tests.fakes.relay_command import RelayCommand, relay_command


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def relay(state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RelayCommand:
    """Run the command line in this process; its state lies in a directory of the test's own."""
    return relay_command(state, monkeypatch, capsys)
