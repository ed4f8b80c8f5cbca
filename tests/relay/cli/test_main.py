import subprocess
import sys
from pathlib import Path

import pytest

from relay.cli.entry import main
from relay.settings.config import View
from tests.fakes.command_files import RUN
from tests.fakes.homeless import without_home
from tests.fakes.relay_command import RelayCommand as Relay


@pytest.mark.parametrize("arguments", [["--help"], ["ca", "--help"], ["token", "issue", "--help"]])
def test_help_is_a_result(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["relay", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.integration
def test_the_help_is_shown_where_the_extra_client_alone_is_installed() -> None:
    without_the_others = """
import sys
OTHERS = {"httptools", "nats", "nkeys", "opentelemetry", "prometheus_client", "pyrage", "starlette"}
OTHERS |= {"uvicorn", "uvloop"}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OTHERS:
            raise ModuleNotFoundError(name + " is not here", name=name)
sys.meta_path.insert(0, Blocker())
from relay.cli.entry import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", without_the_others, "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "The certificate authority that nodes are enrolled with." in done.stdout


@pytest.mark.parametrize("arguments", [["config", "check"], ["token", "list"], ["run", "--no-broker"]])
def test_a_user_without_a_home_directory_has_to_name_the_state_directory(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_home(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["relay", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().err.removeprefix("relay: ")
    assert ended.value.code == 78
    assert printed == "name the state directory with --state-dir: this user has no home directory\n"


def test_a_user_without_a_home_directory_needs_none_where_the_state_directory_is_named(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_home(monkeypatch)
    assert relay("ca", "init").code == 0
    assert relay("config", "check", "--no-broker").code == 0


@pytest.mark.integration
def test_the_module_is_the_same_command(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "relay", "run", "--broker", "x", "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith("relay: ")
    assert done.stderr.count("\n") == 1


def test_a_fault_of_our_own_has_a_traceback_and_the_exit_code_of_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    def broken(_state_dir: Path | None) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr("relay.cli.ca.authority", broken)
    monkeypatch.setattr(sys, "argv", ["relay", "ca", "list", "--state-dir", str(state)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 70
    assert "KeyError: 'a fault'" in capsys.readouterr().err


def test_the_message_of_a_fault_is_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    def broken(_state_dir: Path | None) -> None:
        raise KeyError("\x1b[31m from outside")

    monkeypatch.setattr("relay.cli.ca.authority", broken)
    monkeypatch.setattr(sys, "argv", ["relay", "ca", "list", "--state-dir", str(state)])
    with pytest.raises(SystemExit):
        main()
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize("command", [["run", "--broker", "127.0.0.1:1"], ["audit", "tail"]])
def test_on_a_nodes_installation_the_command_says_in_one_line_what_to_install(
    tmp_path: Path, command: list[str]
) -> None:
    extra = ["pydantic_core", "starlette", "uvicorn", "uvloop", "httptools", "mcp", "pyrage", "httpx2"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({extra!r}))\n"
        f"sys.argv[1:] = {[*command, '--state-dir', str(tmp_path)]!r}\n"
        "from relay.cli.entry import main; main()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "pip install 'edge-kubelet[relay]'" in done.stderr


@pytest.mark.integration
def test_the_commands_load_neither_the_server_nor_its_libraries() -> None:
    code = "import sys, relay.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    libraries = {
        "mcp",
        "mcp_types",
        "starlette",
        "uvicorn",
        "uvloop",
        "httpx2",
        "prometheus_client",
        "structlog",
    }
    assert loaded & libraries == set()
    servers = ("relay.server", "relay.sessions", "relay.calls", "relay.mcp_api", "relay.http")
    assert [name for name in loaded if name.startswith(servers)] == []


@pytest.mark.parametrize(
    ("arguments", "view"),
    [((), View.TOOLS), (("--default-view", "tools"), View.TOOLS), (("--default-view", "kinds"), View.KINDS)],
)
def test_the_view_of_a_url_without_one_is_the_operators_choice(
    relay: Relay, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], view: View
) -> None:
    views: list[View] = []
    monkeypatch.setattr("relay.cli.serve.serve", lambda config, _reload: views.append(config.default_view))
    assert relay(*RUN, *arguments).code == 0
    assert views == [view]
