from pathlib import Path

import pytest

from tests.fakes.relay_command import RelayCommand, relay_command


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def bare(state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RelayCommand:
    """Run the command line in this process; its state lies in a directory of the test's own."""
    return relay_command(state, monkeypatch, capsys)


@pytest.fixture
def relay(bare: RelayCommand) -> RelayCommand:
    """Run the command line; a file whose tests all need a CA gives them one with it."""
    return bare
