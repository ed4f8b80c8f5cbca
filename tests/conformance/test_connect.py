"""``relay connect`` and the clients themselves: each reads what was written for it.

Claude Code and Codex are run, for calls with a model that is scripted. Claude Desktop and VS Code are desktop
programs: what is written for them is held against their documentation, in
``tests/relay/client/test_connect.py``, and the command in their entry is run here.
"""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from relay.calls.executor import FOLLOWED_S
from tests.fakes.demo import Demo
from tests.fakes.npm import NpmPrograms
from tests.fakes.scripted_model import ask_claude_code, ask_codex, scripted_model

pytestmark = pytest.mark.long

RELAY = str(Path(sys.executable).parent / "relay")


class ClientMachine:
    """A home directory, and the programs that run in it."""

    def __init__(self, home: Path, demo: Demo, npm: NpmPrograms) -> None:
        self.home = home
        self.demo = demo
        self.npm = replace(npm, home=home)
        self.token = str(demo.facts["token"])
        self.token_file = home / "token"
        self.token_file.write_text(self.token)
        self.token_file.chmod(0o600)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.npm.execute(command)

    def connect(self, client: str, *options: str) -> subprocess.CompletedProcess[str]:
        return self.run(
            *(RELAY, "connect", client, "--url", self.demo.base_url),
            *("--token-file", str(self.token_file), *options),
        )

    def without_token(self) -> None:
        """Assert that no file below the home directory holds the token, but its own."""
        holding = [
            path
            for path in self.home.rglob("*")
            if path.is_file() and path != self.token_file and self.token.encode() in path.read_bytes()
        ]
        assert holding == []


INTERVAL_MS = 1000
SLOW_MS = 5_000
"""What a busy machine may add to a promised time."""

KINDS_VIEW = {"sys-snapshot", "sys-subscribe", "sysecho-invoke", "find_nodes"}


@pytest.fixture
def machine(tmp_path: Path, demo: Demo, npm: NpmPrograms) -> ClientMachine:
    return ClientMachine(tmp_path, demo, npm)


def test_claude_code_connects_with_the_headers_of_its_helper(machine: ClientMachine) -> None:
    done = machine.connect("claude-code", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tools"] == len(KINDS_VIEW)
    assert "headersHelper" in done.stderr

    checked = machine.run(machine.npm.claude_code(), "mcp", "list")
    assert "edge" in checked.stdout
    assert "Connected" in checked.stdout, checked.stdout + checked.stderr
    machine.without_token()

    # The helper reads the file again: another token counts at once.
    machine.token_file.write_text("a.bad.token")
    refused = machine.run(machine.npm.claude_code(), "mcp", "list")
    assert "Connected" not in refused.stdout


def test_claude_code_without_the_server_knows_nothing_of_it(machine: ClientMachine) -> None:
    assert machine.connect("claude-code").returncode == 0
    removed = machine.connect("claude-code", "--remove")
    assert removed.returncode == 0, removed.stderr
    assert "edge" not in machine.run(machine.npm.claude_code(), "mcp", "list").stdout


def test_codex_lists_the_server_and_keeps_what_its_user_wrote(machine: ClientMachine) -> None:
    config = machine.home / ".codex" / "config.toml"
    config.parent.mkdir()
    config.write_text('# mine\nmodel = "some-model"\n')
    done = machine.connect("codex", "--view", "kinds")
    assert done.returncode == 0, done.stderr
    assert config.read_text().startswith('# mine\nmodel = "some-model"\n')

    listed = machine.run(*machine.npm.command("codex", "mcp", "list", "--json"))
    assert listed.returncode == 0, listed.stderr
    [server] = json.loads(listed.stdout)
    entry = tomllib.loads(config.read_text())["mcp_servers"]["edge"]
    assert server["name"] == "edge"
    assert server["transport"]["command"] == entry["command"]
    assert server["transport"]["args"] == entry["args"]
    machine.without_token()


@pytest.mark.parametrize("client", ["claude-code", "codex"])
@pytest.mark.parametrize("view", ["tools", "kinds"])
def test_a_subscription_comes_back_to_the_model(machine: ClientMachine, client: str, view: str) -> None:
    # Both send a progress token with every call, and show their model nothing before the call has ended.
    node = machine.demo.real_node
    name, arguments = f"sys-{node}-sysmetrics-subscribe", dict[str, Any](interval_ms=INTERVAL_MS)
    if view == "kinds":
        name, arguments = "sys-subscribe", {**arguments, "node": node, "for_s": 3}
    assert machine.connect(client, "--view", view).returncode == 0
    ask = {"claude-code": ask_claude_code, "codex": ask_codex}[client]
    with scripted_model(name, arguments) as model:
        done = ask(machine.npm, model)
    assert done.returncode == 0, done.stderr
    assert len(model.answers) == 1, done.stdout + done.stderr
    sample = model.answer
    started, ended = [line for line in machine.demo.audit() if "tool" in line][-2:]
    assert (started["decision"], ended["outcome"]) == ("allow", "ok")
    assert sample["node_id"] == started["node_id"] == node
    # The last sample, not the first: the client has sent a token, and was kept no longer than is promised.
    assert sample["ts_ms"] - started["ts_ms"] > INTERVAL_MS
    assert ended["duration_ms"] < FOLLOWED_S * 1000 + SLOW_MS


@pytest.mark.parametrize(
    ("client", "file", "section"),
    [
        ("claude-desktop", ".config/Claude/claude_desktop_config.json", "mcpServers"),
        ("vscode", ".config/Code/User/mcp.json", "servers"),
        ("codex", ".codex/config.toml", "mcp_servers"),
    ],
)
async def test_the_command_of_an_entry_is_an_mcp_server(
    machine: ClientMachine, client: str, file: str, section: str
) -> None:
    config = machine.home / file
    config.parent.mkdir(parents=True)
    done = machine.connect(client)
    assert done.returncode == 0, done.stderr
    text = config.read_text()
    document: dict[str, Any] = tomllib.loads(text) if file.endswith("toml") else json.loads(text)
    entry = document[section]["edge"]
    server = StdioServerParameters(
        command=entry["command"], args=entry["args"], env={"PATH": os.defpath, "HOME": str(machine.home)}
    )
    async with Client(stdio_client(server)) as agent:
        tools = (await agent.list_tools()).tools
    assert {tool.name for tool in tools} == KINDS_VIEW
    machine.without_token()
