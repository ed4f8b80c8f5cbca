import socket
import sys
from pathlib import Path

import pytest

from kubelet.cli.commands import main
from kubelet.cli.options import agent_socket
from kubelet.config import SERVICE_SOCKET


def test_an_agent_finds_the_socket_beside_the_state_or_else_that_of_the_service(tmp_path: Path) -> None:
    assert agent_socket(None, tmp_path) == SERVICE_SOCKET
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "relay.sock"))
    assert agent_socket(None, tmp_path) == tmp_path / "relay.sock"
    assert agent_socket(tmp_path / "named", tmp_path) == tmp_path / "named"


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mcp", "mcp_types"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("assembly", "mcp_server"):
        monkeypatch.delitem(sys.modules, f"kubelet.local_agent.{name}", raising=False)
    monkeypatch.setattr(sys, "argv", ["kubelet", "mcp"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    assert "pip install 'edge-kubelet[agent]'" in capsys.readouterr().err


def test_its_help_says_what_is_listed_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kubelet", "mcp", "--help"])
    with pytest.raises(SystemExit):
        main()
    shown = " ".join(capsys.readouterr().out.split())
    assert "while there are two, none is listed" in shown
    assert "edge-kubelet[agent]" in shown
