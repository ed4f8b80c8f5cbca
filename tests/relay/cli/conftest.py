from pathlib import Path

import pytest

from tests.fakes.relay_command import RelayCommand, relay_command


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def bare(state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RelayCommand:
    """Run the command line in this process; its state directory is the test's own, and not there yet."""
    return relay_command(state, monkeypatch, capsys)


@pytest.fixture
def relay(bare: RelayCommand) -> RelayCommand:
    """Run the command line in a state directory with a CA."""
    assert bare("ca", "init").code == 0
    return bare
