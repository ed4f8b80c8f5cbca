import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from relay.cli.server_process import ServerPlan
from relay.pki.authority import CertificateAuthority
from relay.settings.environment import now_ms
from schemas.addresses import View
from tests.fakes.command_lines import RUN, without_home
from tests.fakes.ports import unused_port
from tests.fakes.relay_command import RelayCommand as Relay
from tests.fakes.relay_command import run_here

LINE_BYTES = 1 << 20


@pytest.mark.parametrize("arguments", [["--help"], ["ca", "--help"], ["token", "issue", "--help"]])
def test_help_is_a_result(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_here(monkeypatch, capsys, *arguments)
    assert outcome.code == 0
    assert "Usage" in outcome.out


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
    outcome = run_here(monkeypatch, capsys, *arguments)
    printed = outcome.err.removeprefix("relay: ")
    assert outcome.code == 78
    assert printed == "name the state directory with --state-dir: this user has no home directory\n"


def test_a_user_without_a_home_directory_needs_none_where_the_state_directory_is_named(
    bare: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_home(monkeypatch)
    assert bare("ca", "init").code == 0
    assert bare("config", "check", "--no-broker").code == 0


@pytest.mark.integration
def test_the_module_is_the_same_command(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "relay", "run", "--broker", "x", "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith("relay: ")
    assert done.stderr.count("\n") == 1


def test_a_fault_of_our_own_has_an_escaped_traceback_and_the_exit_code_of_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    def broken(_state_dir: Path | None) -> None:
        raise KeyError("a fault\x1b[31m from outside")

    monkeypatch.setattr("relay.cli.ca.authority", broken)
    outcome = run_here(monkeypatch, capsys, "ca", "list", "--state-dir", str(state))
    assert outcome.code == 70
    assert "KeyError: 'a fault" in outcome.err
    assert "\x1b" not in outcome.err


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
    assert "the extra 'relay' (docs/install.md)" in done.stderr


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


# Prints at a signal which modules it has loaded, without those that it has only postponed.
SERVER = """
import signal, sys
def tell(*_):
    print(*(name for name, each in sys.modules.items() if each and type(each) is not _PostponedModule))
    sys.stdout.flush()
signal.signal(signal.SIGUSR1, tell)
from schemas.process.lazy_imports import _PostponedModule
from relay.cli.server_process import main
main()
"""

UNUSED = {
    # What the command line needs.
    *("typer", "click", "rich", "pygments"),
    # What is made to look absent, or is postponed.
    *("bz2", "lzma", "httpx2", "jsonschema_rs.canonical", "logging.config", "psutil"),
    # Debian's Python up to 3.13 uses it while it loads tempfile.
    *(() if hasattr(tempfile, "_rmtree") else ("shutil",)),
    *("structlog.stdlib", "structlog.threadlocal", "mcp", "mcp.server", "uvicorn", "uvicorn.main"),
    # What those bring along.
    *("greenlet", "idna", "mcp.client", "mcp.server.mcpserver", "multiprocessing", "uvicorn.supervisors"),
}


@pytest.mark.integration
async def test_a_relay_that_serves_has_loaded_no_module_that_it_can_do_without(tmp_path: Path) -> None:
    CertificateAuthority(tmp_path / "ca", now_ms, os.urandom).create()
    plan = ServerPlan({"no_broker": "true", "listen": f"127.0.0.1:{unused_port()}"}, None, tmp_path)
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", SERVER, plan.to_json()),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
    )
    assert server.stdout is not None
    assert server.stderr is not None
    async with asyncio.timeout(60):
        while b"relay started" not in (line := await server.stderr.readline()):
            assert line, "it ended before it served"
        server.send_signal(signal.SIGUSR1)
        loaded = set((await server.stdout.readline()).decode().split())
        server.terminate()
        await server.communicate()
    assert "relay.mcp_api.endpoint" in loaded
    assert loaded & UNUSED == set()
    assert server.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "view"),
    [((), View.TOOLS), (("--default-view", "tools"), View.TOOLS), (("--default-view", "kinds"), View.KINDS)],
)
def test_the_view_of_a_url_without_one_is_the_operators_choice(
    bare: Relay, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], view: View
) -> None:
    views: list[View] = []
    monkeypatch.setattr(
        "relay.cli.server_process.serve_config", lambda config, _reload: views.append(config.default_view)
    )
    assert bare(*RUN, *arguments).code == 0
    assert views == [view]
