import json
import socket
import sys
from pathlib import Path

import pytest

from kubelet.cli.commands import main
from kubelet.cli.options import agent_socket
from kubelet.config import SERVICE_SOCKET
from schemas.caller_tools import SESSION_ID_PATTERN
from schemas.registry import SchemaRegistry


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


@pytest.mark.parametrize(
    "session", ["x y", "", "gogol_20261122_093000_1A2B3C4D", "gogol_20261122_093000_1a2b3c4d\n"]
)
def test_what_is_no_id_of_a_session_is_a_wrong_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], session: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["kubelet", "mcp", "--session", session])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "is not the id of a session, for example gogol_" in capsys.readouterr().err


def test_the_id_of_a_session_is_of_the_form_of_its_document(registry: SchemaRegistry) -> None:
    opened = registry.document("session.session_open@1.0.0")
    assert f'"{SESSION_ID_PATTERN}"' in json.dumps(opened)


def test_its_help_says_what_is_listed_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kubelet", "mcp", "--help"])
    with pytest.raises(SystemExit):
        main()
    shown = " ".join(capsys.readouterr().out.split())
    assert "while there are two, none is listed" in shown
    assert "edge-kubelet[agent]" in shown
