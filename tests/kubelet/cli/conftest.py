"""The command line of the node, and the identity that it works with."""

import io
import sys
from pathlib import Path

import pytest

from kubelet.cli.commands import main
from schemas.identity_files import IdentityFiles
from tests.fakes.built_commands import build_commands_once
from tests.fakes.node import write_identity
from tests.fakes.node_command import Ran, Run, run_as_process
from tests.fakes.signer import SimulatedNode


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Return what runs a command line in this process, from its entry point to its exit code."""
    build_commands_once(monkeypatch)

    def run(*arguments: str | Path, stdin: bytes = b"") -> Ran:
        if arguments[:1] == ("run",):
            return run_as_process(*arguments)  # it becomes the daemon, in whatever process it is
        monkeypatch.setattr(sys, "argv", ["kubelet", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code: object = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code
        out, err = capfdbinary.readouterr()
        assert b"Traceback" not in err
        assert isinstance(code, int)
        return Ran(code, out, err.decode())

    return run


@pytest.fixture
def state(tmp_path: Path) -> IdentityFiles:
    """An empty place for an identity."""
    return IdentityFiles(tmp_path / "state")


@pytest.fixture
def enrolled(state: IdentityFiles, node_of_today: SimulatedNode) -> IdentityFiles:
    """The files of a node that has a leaf of a CA."""
    return write_identity(state.root, node_of_today)
