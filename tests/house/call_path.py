"""Lists the modules that a call passes through on its way to the node, in their order, for ``make house``.

A relay on a real socket has one connected node. After a first ``tools/call`` of the new era, others on the
same connection are traced, each from its first byte until its frame is sent to the node: every module of
``relay`` or ``schemas`` in which a function in Python begins or goes on, on any thread. Listed in order is
what all of them pass through; what only some do is of timers and other tasks, and is listed apart. ``--json``
prints all of it.
"""

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from schemas.registry import SchemaRegistry
from tests.fakes.hub import Hub
from tests.fakes.served_relay import ServedRelay, mcp_request
from tests.fakes.serving import Server
from tests.fakes.signer import NODE_ID, NOW_MS

CALLS = 5
PRODUCT = ("relay", "schemas")


class Trace:
    """What runs from when the relay receives from the agent at port ``agent`` until it sends to anyone else.

    Attributes:
        calls: the modules of each call, in order.
    """

    def __init__(self, relay: int, agent: int) -> None:
        self._relay, self._agent = relay, agent
        self._runs = False
        self.calls: list[dict[str, None]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Trace this thread, and those that start in the meantime."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__", "")
            if self._runs and module.split(".")[0] in PRODUCT:
                self.calls[-1].setdefault(module)
        elif event == "c_return" and argument.__name__.startswith("recv"):
            if self._peer(argument) == self._agent and not self._runs:
                self._runs = True
                self.calls.append({})
        elif event == "c_call" and argument.__name__.startswith("send"):
            self._runs = self._runs and self._peer(argument) in {None, self._agent}

    def _peer(self, method: Any) -> int | None:
        """Return the other end's port, if ``method`` is that of a connection that the relay has accepted."""
        connection = method.__self__
        if not isinstance(connection, socket.socket) or connection.family != socket.AF_INET:
            return None
        try:
            own, peer = connection.getsockname()[1], connection.getpeername()[1]
        except OSError:
            return None
        return int(peer) if own == self._relay else None


async def traced(directory: Path) -> list[dict[str, None]]:
    """Return the modules of each of some calls."""
    hub = Hub(directory, SchemaRegistry())
    tool = f"sysecho.{NODE_ID}.echo.invoke"
    body, headers = mcp_request("tools/call", {"name": tool, "arguments": {"message": "ping"}})
    async with Server.running() as server, ServedRelay.open(hub, server) as relay:
        headers += [("Host", str(relay.address)), ("Authorization", f"Bearer {hub.token()}")]
        lines = ["POST /mcp HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
        request = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode("ascii") + body
        async with relay.session(hub.ca.issue()) as node:
            reader, writer = await relay.connect()
            trace = Trace(relay.address.port, writer.get_extra_info("sockname")[1])

            result = {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}

            async def call() -> None:
                writer.write(request)
                await node.acknowledge(await node.receive("cmd"), result)
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                answer = json.loads(await reader.readexactly(int(length)))
                assert answer["result"]["structuredContent"] == result, answer

            await call()
            with trace.running():
                for _ in range(CALLS):
                    await call()
            writer.close()
    hub.close()
    return trace.calls


def lists(calls: list[dict[str, None]]) -> dict[str, list[str]]:
    """Return the modules of every call by their package, and those of some calls alone."""
    first, *others = calls
    every = [module for module in first if all(module in call for call in others)]
    return {
        **{package: [name for name in every if name.split(".")[0] == package] for package in PRODUCT},
        "only sometimes": sorted({module for call in calls for module in call} - {*every}),
    }


if __name__ == "__main__":
    with TemporaryDirectory() as state:
        found = lists(asyncio.run(traced(Path(state))))
    if "--json" in sys.argv[1:]:
        print(json.dumps(found, indent=2))
    else:
        for title, modules in found.items():
            print(f"{title}: {len(modules)} modules")
            print(*(f"{number:4}  {module}" for number, module in enumerate(modules, 1)), sep="\n")
