"""``relay fleet``: a running relay's nodes and tools in the terminal."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relay.auth.permissions import Rights
from relay.cli.fleet import FleetReadError, read_nodes, read_tools
from relay.client.credentials import RenewableToken
from relay.client.stdio_bridge.http_client import RelayHttp
from relay.limits.rate_limits import Allowance
from relay.mcp_api.resources import FleetResources
from relay.routing.port import NoResponderError, PeerHandler
from schemas.files import PRIVATE, make_private_directory, write_atomic
from schemas.keys import private_key_to_pem
from schemas.labels import NodeName
from schemas.tls import client_context
from tests.fakes.callers import TOKEN_KEY
from tests.fakes.hub import Hub
from tests.fakes.raw_http_server import Asked, RawServer, http_answer
from tests.fakes.refusals import audited_refusals
from tests.fakes.relay_command import Outcome, RelayCommand
from tests.fakes.served_relay import ServedRelay
from tests.fakes.serving import Server
from tests.fakes.signer import NODE_ID, TENANT

pytestmark = pytest.mark.integration
in_the_servers_loop = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 60


@pytest_asyncio.fixture(loop_scope="module")
async def served(hub: Hub, server: Server, state: Path) -> AsyncIterator[ServedRelay]:
    """A relay with one node, whose token key is in the state directory."""
    make_private_directory(state)
    write_atomic(state / "token.key", private_key_to_pem(TOKEN_KEY), PRIVATE)
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi", ("gateway",))})
    hub.connect(hub.ca.issue())
    async with ServedRelay.open(hub, server) as relay:
        yield relay


async def started(
    served: ServedRelay, state: Path, *arguments: str, token: str | None = None, group: str = "fleet"
) -> asyncio.subprocess.Process:
    where = (
        "--url",
        f"http://{served.address}",
        "--public-url",
        served.hub.public_url,
        "--state-dir",
        str(state),
    )
    environment = {name: value for name, value in os.environ.items() if name != "EDGE_TOKEN"}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", CLOCKED.format(now_ms=served.hub.clock())),
        *(group, *arguments, *where),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment | ({"EDGE_TOKEN": token} if token else {}),
    )


# The command's clock is the served relay's, which does not run.
CLOCKED = """
import sys
import relay.settings.environment
relay.settings.environment.now_ms = lambda: {now_ms}
from relay.cli.entry import main
sys.argv[0] = "relay"
main()
"""


async def ended(process: asyncio.subprocess.Process) -> Outcome:
    async with asyncio.timeout(BOUND_S):
        out, err = await process.communicate()
    return Outcome(process.returncode or 0, out.decode(), err.decode())


@in_the_servers_loop
async def test_nodes_are_shown_with_a_token_that_the_command_signs(served: ServedRelay, state: Path) -> None:
    outcome = await ended(await started(served, state, "nodes", "--tenant", TENANT))
    assert (outcome.code, outcome.err) == (0, "")
    header, row = outcome.out.splitlines()
    assert header.split()[:3] == ["LABEL", "NODE", "ONLINE"]
    assert row.startswith(f"greenhouse pi  {NODE_ID}  yes")
    assert row.endswith("gateway")
    live = await ended(await started(served, state, "list", "--live", "--tenant", TENANT, group="node"))
    assert live == outcome


@in_the_servers_loop
async def test_tools_are_shown_as_json_with_a_token_that_is_given(served: ServedRelay, state: Path) -> None:
    (state / "token.key").unlink()
    token = served.hub.token()
    outcome = await ended(await started(served, state, "tools", "--json", token=token))
    assert outcome.code == 0
    titles = {tool["title"] for tool in json.loads(outcome.out)}
    assert titles == {"greenhouse pi: CPU, memory, disks", "greenhouse pi: Echo"}
    refused = await ended(await started(served, state, "tools"))
    assert refused.code == 3
    assert "token.key is missing" in refused.error


@pytest.mark.long
@in_the_servers_loop
async def test_of_several_relays_the_one_that_holds_the_node_is_shown(
    hub: Hub, server: Server, state: Path
) -> None:
    make_private_directory(state)
    write_atomic(state / "token.key", private_key_to_pem(TOKEN_KEY), PRIVATE)
    hub.connect(hub.ca.issue())
    hub.peers = OtherRelay()
    async with ServedRelay.open(hub, server) as served:
        for what in ("nodes", "tools"):
            table = await ended(await started(served, state, what, "--tenant", TENANT))
            header, *rows = table.out.splitlines()
            assert header.endswith("  RELAY"), table
            assert all(row.endswith(f"  {OtherRelay.relay}") for row in rows)
            document = await ended(await started(served, state, what, "--tenant", TENANT, "--json"))
            assert {row["relay"] for row in json.loads(document.out)} == {OtherRelay.relay}


@in_the_servers_loop
async def test_another_tenants_nodes_are_not_shown(served: ServedRelay, state: Path) -> None:
    outcome = await ended(await started(served, state, "nodes", "--tenant", "globex", "--json"))
    assert (outcome.code, outcome.out) == (0, "[]\n")
    outcome = await ended(await started(served, state, "nodes", "--tenant", "globex"))
    assert outcome.err == "relay: tenant globex has no nodes\n"


@in_the_servers_loop
async def test_watching_shows_a_change_and_ends_with_a_signal(served: ServedRelay, state: Path) -> None:
    process = await started(served, state, "nodes", "--tenant", TENANT, "--watch", "--json")
    assert process.stdout is not None
    async with asyncio.timeout(BOUND_S):
        assert json.loads(await process.stdout.readline())[0]["label"] == "greenhouse pi"
        served.hub.fleet.rename({NODE_ID: NodeName(TENANT, "barn")})
        assert json.loads(await process.stdout.readline())[0]["label"] == "barn"
    process.terminate()
    assert (await ended(process)).code == 0


def test_a_relay_that_is_not_reached_is_an_error_of_one_line(bare: RelayCommand, state: Path) -> None:
    make_private_directory(state)
    write_atomic(state / "token.key", private_key_to_pem(TOKEN_KEY), PRIVATE)
    outcome = bare("fleet", "nodes", "--url", "http://127.0.0.1:FREE_PORT/mcp")
    assert outcome.code == 3
    assert "Connection refused; is the relay running? --url says where it is" in outcome.error


def test_a_tenant_and_a_token_of_another_are_not_taken_together(
    bare: RelayCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    write_atomic(token, "t", PRIVATE)
    outcome = bare("fleet", "nodes", "--tenant", "acme", "--token-file", token)
    assert (outcome.code, "--tenant and --token-file exclude each other" in outcome.error) == (2, True)
    monkeypatch.setenv("EDGE_TOKEN", "t")
    outcome = bare("fleet", "nodes", "--tenant", "acme")
    assert (outcome.code, "--tenant and EDGE_TOKEN exclude each other" in outcome.error) == (2, True)


def test_a_list_of_the_files_asks_no_relay(bare: RelayCommand) -> None:
    outcome = bare("node", "list", "--watch")
    assert (outcome.code, "need --live" in outcome.error) == (2, True)


def test_no_token_is_sent_in_the_clear_to_another_machine(bare: RelayCommand) -> None:
    assert bare("fleet", "nodes", "--url", "http://192.0.2.1:8700").code == 2


def test_a_malformed_tenant_is_a_wrong_command_line(bare: RelayCommand, state: Path) -> None:
    make_private_directory(state)
    write_atomic(state / "token.key", private_key_to_pem(TOKEN_KEY), PRIVATE)
    outcome = bare("fleet", "tools", "--tenant", "Not A Tenant")
    assert outcome.code == 2
    assert "--tenant" in outcome.error


@pytest_asyncio.fixture(loop_scope="module")
async def unnamed(hub: Hub, server: Server) -> AsyncIterator[ServedRelay]:
    async with ServedRelay.open(hub, server) as relay:
        yield relay


async def read(unnamed: ServedRelay, what: str, token: str | None = None) -> list[str]:
    http = RelayHttp(
        f"http://{unnamed.address}/mcp",
        RenewableToken(token or unnamed.hub.token()),
        client_context(),
    )
    try:
        found: Sequence[Mapping[str, Any]] = await (read_nodes if what == "nodes" else read_tools)(http)
    finally:
        await http.close()
    return [each.get("node_id") or each["name"] for each in found]


@in_the_servers_loop
async def test_nodes_and_tools_are_read_over_all_pages(
    unnamed: ServedRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.mcp_api.resources.NODES_PER_PAGE", 2)
    monkeypatch.setattr("relay.mcp_api.tool_list.PAGE_SIZE", 3)
    ids = [f"01hzx9k3m4p7q8r9s0t1v2{number:04}" for number in range(5)]
    for node_id in ids:
        unnamed.hub.connect(unnamed.hub.ca.issue(node_id))
    assert await read(unnamed, "nodes") == ids
    tools = await read(unnamed, "tools")
    assert len(tools) == len(set(tools)) == 10
    assert await read(unnamed, "nodes", unnamed.hub.token(tenant="globex")) == []


@in_the_servers_loop
async def test_what_the_rate_of_the_token_refuses_is_asked_again(
    hub: Hub, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.mcp_api.resources.NODES_PER_PAGE", 2)
    for number in range(4):
        hub.connect(hub.ca.issue(f"01hzx9k3m4p7q8r9s0t1v2{number:04}"))
    monkeypatch.setattr(hub, "gateway", partial(hub.gateway, per_agent=Allowance(2, 1.5, 9)))
    async with ServedRelay.open(hub, server) as narrow:
        for _ in range(2):
            assert len(await read(narrow, "nodes")) == 4
    assert {each["reason"] for each in audited_refusals(hub)} == {"E_RATE_LIMITED"}


@in_the_servers_loop
@pytest.mark.parametrize(("relays", "pages"), [(1, 1), (2, 3)])
async def test_for_the_tools_no_more_of_the_nodes_is_read_than_which_relay_has_them(
    hub: Hub, server: Server, monkeypatch: pytest.MonkeyPatch, relays: int, pages: int
) -> None:
    asked = []

    def counted(resources: FleetResources, rights: Rights, path: str, query: str) -> str | None:
        asked.append(query)
        return read_document(resources, rights, path, query)

    read_document = FleetResources.read
    monkeypatch.setattr(FleetResources, "read", counted)
    monkeypatch.setattr("relay.mcp_api.resources.NODES_PER_PAGE", 2)
    if relays > 1:
        hub.peers = OtherRelay()
    async with ServedRelay.open(hub, server) as unnamed:
        assert await read(unnamed, "tools") == []
        assert asked == []
        for number in range(5):
            hub.connect(hub.ca.issue(f"01hzx9k3m4p7q8r9s0t1v2{number:04}"))
        assert len(await read(unnamed, "tools")) == 10
    assert len(asked) == pages


@in_the_servers_loop
async def test_a_token_that_is_not_accepted_is_an_error(unnamed: ServedRelay) -> None:
    with pytest.raises(FleetReadError, match="the relay refuses"):
        await read(unnamed, "nodes", "no-token")
    with pytest.raises(FleetReadError, match="the relay refuses"):
        await read(unnamed, "nodes", unnamed.hub.token(["sessions:message"]))


@in_the_servers_loop
@pytest.mark.parametrize("text", ["[]", "null", "no JSON", json.dumps({"nodes": None}), "{}"])
async def test_a_malformed_list_of_nodes_is_an_error(
    unnamed: ServedRelay, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr("relay.mcp_api.resources.FleetResources.read", lambda *_: text)
    with pytest.raises(FleetReadError, match="malformed"):
        await read(unnamed, "nodes")


@in_the_servers_loop
async def test_nodes_with_members_of_other_types_are_an_error(
    served: ServedRelay, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = json.dumps({"nodes": [{"node_id": NODE_ID, "finding": {}}]})
    monkeypatch.setattr("relay.mcp_api.resources.FleetResources.read", lambda *_: page)
    outcome = await ended(await started(served, state, "nodes", "--tenant", TENANT))
    assert (outcome.code, outcome.err.count("\n"), "is malformed" in outcome.error) == (3, 1, True)


async def test_a_malformed_list_of_tools_is_shown_as_it_is() -> None:
    tools = [{"name": ["no name"]}, {}]
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "result": {"tools": tools}}).encode()
    async with RawServer.running(http_answer(200, body, **{"Content-Type": "application/json"})) as server:
        http = RelayHttp(server.url, RenewableToken("t"), client_context())
        with pytest.raises(FleetReadError, match="malformed"):
            await read_nodes(http)
        assert await read_tools(http) == tools
        await http.close()


@pytest.mark.parametrize("what", [read_nodes, read_tools])
@pytest.mark.parametrize(("cursors", "most"), [(1, 100), (100, 3)])
async def test_a_list_without_end_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
    what: Callable[[RelayHttp], Awaitable[object]],
    cursors: int,
    most: int,
) -> None:
    monkeypatch.setattr("relay.cli.fleet.MAX_PAGES", most)
    asked = 0

    async def respond(_asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        page = {"nodes": [], "nextCursor": f"c{asked % cursors}"}
        result = {**page, "tools": [], "contents": [{"text": json.dumps(page)}]}
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "result": result}).encode()
        writer.write(http_answer(200, body, **{"Content-Type": "application/json"}))
        await writer.drain()

    async with RawServer.running(respond) as server, asyncio.timeout(BOUND_S):
        http = RelayHttp(server.url, RenewableToken("t"), client_context())
        with pytest.raises(FleetReadError, match=r"has no end; .*--url"):
            await what(http)
        await http.close()
    assert asked <= 4


async def test_what_a_signal_ends_before_there_is_an_answer_has_not_ended_well(state: Path) -> None:
    asked = asyncio.Event()

    async def respond(_asked: Asked, _writer: asyncio.StreamWriter) -> None:
        asked.set()
        await process.wait()

    async with RawServer.running(respond) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "relay", "fleet", "nodes", "--json", "--url", server.url),
            *("--state-dir", str(state)),
            env={**os.environ, "EDGE_TOKEN": "t"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(BOUND_S):
            await asked.wait()
        process.terminate()
        assert await ended(process) == Outcome(130, "", "")


# --- Another relay of the fleet, as far as one is told which relay a node is connected to.


class OtherRelay:
    """The only other relay of the fleet, which has every node."""

    relay = "01HZX9K3M4P7Q8R9S0T1V2W3XD"

    def running(self) -> Collection[str]:
        """Return none: it answers nothing."""
        return ()

    def relay_of(self, _node_id: str) -> str | None:
        """Return this relay, of any node."""
        return self.relay

    def answer(self, _kind: str, _handler: PeerHandler) -> None:
        """Have no questions answered."""

    async def ask(
        self, _relay: str, _kind: str, _body: Mapping[str, Any], _timeout_s: float, _token: str = ""
    ) -> Mapping[str, Any]:
        """Fail: it does not run."""
        raise NoResponderError("none runs")
