"""An enrolled node that floods its relay with empty pings, and comes back at once whenever it is cut off.

Run as a process, it listens on a port of its own once it floods, so that the measurement can begin. Must be a
process of its own where anything is measured: its own cost must not be taken for the relay's.
"""

import asyncio
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from kubelet.announce.signer import ManifestSigner
from kubelet.handlers.factory import make_handlers
from kubelet.session.link import answer_to
from schemas.addresses import connect_url
from schemas.frames import SUBPROTOCOL, FrameReader, Role
from schemas.identity_files import IdentityFiles, NodeIdentity
from schemas.manifest import fingerprint
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.session import ProtocolError, SessionMachine
from schemas.ulids import UlidSource

_PING = bytes([0x89, 0x80, 0, 0, 0, 0])  # empty, under a mask of zeros
_BYTES_PER_S = 1_000_000
_TICK_S = 0.01
_BETWEEN_ATTEMPTS_S = 0.01
_TTL_MS = 900_000


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class FloodingNode:
    """The node of ``identity``, at the relay of ``url``."""

    def __init__(self, identity: NodeIdentity, url: str) -> None:
        registry, log = SchemaRegistry(), make_logger("kubelet", sys.stderr)
        echo, _ = make_handlers(identity.node_id, log)
        self._identity = identity
        self._url = url
        self._reader = FrameReader(registry)
        self._ulids = UlidSource(_now_ms, os.urandom)
        self._signer = ManifestSigner(
            identity=identity,
            hw_fingerprint=fingerprint({"machine_id": identity.node_id}),
            capabilities=[echo.capability],
            ttl_ms=_TTL_MS,
            now_ms=_now_ms,
            registry=registry,
            last_issued=None,
            log=log,
        )
        self._manifest = self._signer.sign()
        self.floods = asyncio.Event()

    async def run(self) -> None:
        """Flood until cancelled."""
        while True:
            with suppress(OSError, WebSocketException, ProtocolError, TimeoutError):
                async with connect(
                    connect_url(self._url),
                    subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]  # a NewType over str
                    compression=None,
                    proxy=None,
                    close_timeout=0,
                ) as socket:
                    await self._join(socket)
                    await self._flood(socket)
            await asyncio.sleep(_BETWEEN_ATTEMPTS_S)

    async def _join(self, socket: ClientConnection) -> None:
        session = SessionMachine(Role.NODE, self._reader, time.monotonic)
        challenge = session.receive(await socket.recv(decode=False))
        if challenge is None or challenge.type != "challenge":
            raise ProtocolError("not admitted")
        auth = answer_to(challenge.payload, self._identity, self._url, self._ulids.new(), self._ulids.new())
        await socket.send(session.send("auth", self._ulids.new(), auth, challenge.msg_id))
        session.receive(await socket.recv(decode=False))
        await socket.send(session.send("announce", self._ulids.new(), self._manifest.wire))
        await socket.recv()

    async def _flood(self, socket: ClientConnection) -> None:
        pings = _PING * int(_BYTES_PER_S * _TICK_S / len(_PING))
        while not socket.transport.is_closing():
            # As much as the relay takes in.
            if socket.transport.get_write_buffer_size() < len(pings):
                socket.transport.write(pings)
            self.floods.set()
            await asyncio.sleep(_TICK_S)


async def main(identity: Path, url: str, ready_port: int) -> None:
    """Flood the relay of ``url``; listen on ``ready_port`` from then on."""

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    node = FloodingNode(IdentityFiles(identity).read(), url)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(node.run())
        await node.floods.wait()
        ready = await asyncio.start_server(greet, "127.0.0.1", ready_port)
        await ready.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
