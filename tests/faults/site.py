"""A broker, a relay and one node in processes of their own, to which faults of the machine happen.

Limits are set on processes that run, as ``prlimit`` does, so that no test needs root. Heartbeats are a second
apart: what is right again within one is so within a test. Must not decide what must happen.
"""

import asyncio
import json
import os
import resource
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import httpx2
import pytest

from relay.auth.agent_tokens import TokenIssuer
from relay.cli.demo.local_system import READ_ONLY, TENANT, Plan, relay_command, start_broker
from relay.cli.demo.processes import Processes, StartError
from relay.pki.authority import CertificateAuthority
from relay.state.key_files import load_or_create_key
from schemas.addresses import MCP_PATH, mcp_url
from schemas.registry import SchemaRegistry
from schemas.times import SystemMs
from schemas.ulids import UlidSource
from tests.fakes.demo import plan_below
from tests.fakes.mcp_wire import ERA_META, NEW

BOUND_S = 40.0
HEARTBEAT_S = 1
NODE, RELAY, BROKER = "kubelet", "relay", "broker"
NO_LIMIT = resource.RLIM_INFINITY
TOKEN_DAYS = 30

_POLL_S = 0.1
_DAY_S = 86_400

# Every client would load the machine's roots, which takes longer than a call.
_PLAIN: Final[Mapping[str, Any]] = {
    "trust_env": False,
    "timeout": BOUND_S,
    "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
}

LOG_THROUGH_PIPE = ("bash", "-c", 'exec "$@" > >(exec cat) 2>&1', "-")
"""Prefixed to a program whose files are to be limited, and its log not."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call has ended with: ``ok``, or the code of the error; and the envelope of that."""

    code: str
    envelope: dict[str, Any] = field(default_factory=dict)


class Site:
    """The parts, in the directory of ``plan``.

    Attributes:
        node_id: the one node.
        node, relay: what the commands are prefixed with: a program that starts another.
        node_options: what the node's command has besides.
        relay_url, broker: where the node finds both.
    """

    def __init__(self, plan: Plan, processes: Processes) -> None:
        self.plan = plan
        self.processes = processes
        self.node: Sequence[str] = ()
        self.relay: Sequence[str] = ()
        self.node_options: Sequence[str] = ()
        self.relay_url = plan.public_url
        self.broker = plan.broker
        ca = CertificateAuthority(plan.state.ca, _days_ago_ms, os.urandom)
        ca.create()
        (self.node_id,) = ca.issue_mock(1, plan.mocks, TENANT)
        self._token = _token(plan)

    @classmethod
    @asynccontextmanager
    async def stopped(cls, directory: Path, **plan_options: tuple[str, ...]) -> AsyncIterator["Site"]:
        """Hold the parts, none of which runs. ``plan_options`` are those of ``Plan``."""
        plan = replace(plan_below(directory), **plan_options)  # type: ignore[arg-type]  # mypy names no members
        async with Processes.running(directory) as processes:
            yield cls(plan, processes)

    @classmethod
    @asynccontextmanager
    async def running(
        cls, directory: Path, *, node: Sequence[str] = (), relay: Sequence[str] = ()
    ) -> AsyncIterator["Site"]:
        """Hold the parts, which run, and through which calls flow."""
        async with cls.stopped(directory) as site:
            site.node, site.relay = node, relay
            await site.start_all()
            yield site

    @property
    def node_state(self) -> Path:
        return self.plan.mocks / self.node_id

    @property
    def relay_state(self) -> Path:
        return self.plan.state.root

    # --- processes

    async def start_all(self) -> None:
        """Start the parts, and return when a call has succeeded."""
        await self.start_broker()
        await self.start_relay()
        await self.start_node()
        await self.until_called()

    async def start_broker(self) -> None:
        """Start the broker, and return when it listens."""
        await start_broker(self.plan, self.processes)

    def set_relay_options(self, *options: str) -> None:
        """Set what the relay's command has besides; of an option given twice the last counts."""
        self.plan = replace(self.plan, relay_options=options)

    async def start_relay(self) -> None:
        """Start the relay, and return when it answers."""
        await self.processes.start(RELAY, [*self.relay, *relay_command(self.plan)])
        await self.until_page(RELAY, lambda _: True)

    async def start_node(self, name: str = NODE, state: Path | None = None) -> None:
        """Start the node, or another with a copy of its state."""
        options = {
            "--state-dir": str(state or self.node_state),
            "--loopback-port": "0" if state else str(self.plan.loopback_port),
            "--broker": self.broker,
            "--relay": self.relay_url,
            "--heartbeat": f"{HEARTBEAT_S}s",
        }
        if self.plan.kinds:
            options["--kinds"] = ",".join(self.plan.kinds)
        command = [*self.node, sys.executable, "-P", "-m", "kubelet", "run"]
        texts = [text for option in options.items() for text in option]
        await self.processes.start(name, [*command, *texts, *self.node_options])

    async def refused(self, program: str) -> str:
        """Start a program that cannot run; return its exit status and what it has printed last."""
        command = relay_command(self.plan)
        if program == NODE:
            await self.start_node()
        else:
            await self.processes.start(RELAY, [*self.relay, *command])
        with_status: list[str] = []

        async def ended() -> bool:
            try:
                self.processes.check()
            except StartError as error:
                with_status.append(str(error))
            return bool(with_status)

        await until(ended)
        await self.processes.stop(program)
        return with_status[0]

    def leave_address_space(self, program: str, room: int) -> None:
        """Limit a process to the address space that it has taken and ``room`` bytes; raise no limit."""
        pid = self.processes.pid(program)
        pages = Path(f"/proc/{pid}/statm").read_text("ascii").split()[0]
        left = int(pages) * resource.getpagesize() + room
        limit = resource.prlimit(pid, resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY or left < limit:
            self.limit(program, resource.RLIMIT_AS, left)

    def limit(self, program: str, what: int, soft: int) -> None:
        """Set a limit of the process that runs."""
        pid = self.processes.pid(program)
        resource.prlimit(pid, what, (soft, resource.prlimit(pid, what)[1]))

    # --- calls and pages

    @asynccontextmanager
    async def agent(self) -> AsyncIterator["Agent"]:
        """Hold an agent that keeps its connection."""
        headers = {"authorization": f"Bearer {self._token}"}
        async with httpx2.AsyncClient(base_url=self.plan.public_url, headers=headers, **_PLAIN) as http:
            yield Agent(http, self.node_id)

    async def call(self) -> Answer:
        """Call echo once, over a connection of its own."""
        async with self.agent() as agent:
            return await agent.call()

    async def until_called(self, code: str = "ok") -> Answer:
        """Call echo until a call ends with ``code``."""
        answers: list[Answer] = []

        async def called() -> bool:
            try:
                answers.append(await self.call())
            except httpx2.HTTPError:  # the relay is not up
                self.processes.check()
                return False
            return answers[-1].code == code

        await until(called)
        return answers[-1]

    async def until_page(self, program: str, shows: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the subsystems of ``/readyz`` of the node or the relay once ``shows`` holds of them."""
        base = self.plan.public_url if program == RELAY else f"http://127.0.0.1:{self.plan.loopback_port}"
        found: dict[str, Any] = {}

        async def shown() -> bool:
            try:
                async with httpx2.AsyncClient(**_PLAIN) as http:
                    found.update((await http.get(f"{base}/readyz")).json()["subsystems"])
            except httpx2.HTTPError:  # it is not up
                self.processes.check()
                return False
            return shows(found)

        await until(shown)
        return found

    # --- logs

    def log(self, program: str, event: str | None = None) -> list[dict[str, Any]]:
        """Return the lines of a program's log, or those of one event."""
        lines = self.processes.log(program).read_text("utf-8").splitlines()
        entries = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [entry for entry in entries if event is None or entry["event"] == event]

    async def until_logged(
        self, program: str, event: str, reason: str = "", times: int = 1
    ) -> dict[str, Any]:
        """Return the first line of ``event`` whose reason contains ``reason``, once there are ``times``."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.log(program, event) if reason in line.get("reason", "")]

        async def logged() -> bool:
            self.processes.check()
            return len(found()) >= times

        await until(logged)
        return found()[0]


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent that calls one node."""

    http: httpx2.AsyncClient
    node_id: str

    async def call(self, tool: str = "sysecho.{}.echo.invoke", **arguments: Any) -> Answer:
        """Call echo, or another tool of the node: ``{}`` stands for its id."""
        tool = tool.format(self.node_id)
        params = {"name": tool, "arguments": arguments or {"message": "ping"}}
        result = await self._ask("tools/call", params, {"mcp-name": tool})
        if not result["isError"]:
            assert result["structuredContent"]["node_id"] == self.node_id
            return Answer("ok")
        envelope = json.loads(result["content"][0]["text"])
        return Answer(envelope["code"], envelope)

    async def tools(self) -> list[str]:
        """Return the names of the tools that are listed."""
        return [tool["name"] for tool in (await self._ask("tools/list", {}))["tools"]]

    async def _ask(
        self, method: str, params: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": {**ERA_META}}}
        own = {
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": NEW,
            "mcp-method": method,
        }
        response = await self.http.post(MCP_PATH, json=message, headers={**own, **(headers or {})})
        result: dict[str, Any] = response.json()["result"]
        return result


def not_made(reason: str) -> NoReturn:
    """Skip the test, whose fault this machine cannot make; in CI, which installs what it takes, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Return when ``condition`` holds: another process has no event for it."""
    async with asyncio.timeout(BOUND_S):
        while not await condition():  # noqa: ASYNC110 - as above
            await asyncio.sleep(_POLL_S)


def _token(plan: Plan) -> str:
    """Return an agent's token."""
    key, since_ms = load_or_create_key(plan.state.token_key, os.urandom), _days_ago_ms()
    issuer = TokenIssuer(key, plan.public_url, mcp_url(plan.public_url), SchemaRegistry())
    jti = UlidSource(_days_ago_ms, os.urandom).new()
    return issuer.issue(
        sub="agent",
        tenant=TENANT,
        scopes=list(READ_ONLY),
        now_s=since_ms // 1000,
        ttl_s=TOKEN_DAYS * _DAY_S,
        jti=jti,
    )


def _days_ago_ms() -> SystemMs:
    """Return a time from which on certificates and tokens are valid also by a clock that is a day behind."""
    return SystemMs(time.time_ns() // 1_000_000 - 3 * _DAY_S * 1000)
