"""The node's end of a session over a real WebSocket, by hand: it sends what a test gives it, true or not."""

import asyncio
import base64
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from nacl.signing import SigningKey
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from schemas.addresses import CONNECT_PATH, HostPort
from schemas.frames import SUBPROTOCOL, Frame, FrameReader, Role
from schemas.session import SessionMachine
from schemas.ulids import UlidSource
from tests.fakes.signer import NOW_MS, SimulatedNode

BOUND_S: Final = 30
BOOT_ID: Final = "01HZX9K3M4P7Q8R9S0T1V2W3XA"
OTHER_BOOT_ID: Final = "01HZX9K3M4P7Q8R9S0T1V2W3XB"


def device_token(
    node: SimulatedNode,
    challenge: Mapping[str, Any],
    *,
    key: SigningKey | None = None,
    kid: str | None = None,
    **claims: object,
) -> str:
    """Return the token that answers ``challenge``, with anything in it overridden."""
    issued_s = int(challenge["server_time_ms"]) // 1000
    good = {
        "iss": node.node_id,
        "sub": node.node_id,
        "aud": challenge["audience"],
        "nonce": challenge["nonce"],
        "iat": issued_s,
        "exp": issued_s + 60,
        "jti": "jti-1",
        "scope": "device:connect",
        "token_class": "device_runtime",
    }
    header = {"alg": "EdDSA", "kid": kid or node.kid}
    signing_input = f"{_segment(json.dumps(header).encode())}.{_segment(json.dumps(good | claims).encode())}"
    signature = (key or node.key).sign(signing_input.encode()).signature
    return f"{signing_input}.{_segment(signature)}"


class NodeEnd:
    """One connection of ``node``."""

    def __init__(self, socket: ClientConnection, node: SimulatedNode, reader: FrameReader) -> None:
        self.node = node
        self.session_id = ""
        self._socket = socket
        self._machine = SessionMachine(Role.NODE, reader, time.monotonic)
        self._ulids = UlidSource(lambda: NOW_MS, os.urandom)

    @classmethod
    @asynccontextmanager
    async def connected(
        cls,
        address: HostPort,
        node: SimulatedNode,
        reader: FrameReader,
        subprotocols: Sequence[str] = (SUBPROTOCOL,),
    ) -> AsyncIterator["NodeEnd"]:
        """Hold a connection on which nothing has been said yet, of a node that speaks ``subprotocols``."""
        url = f"ws://{address}{CONNECT_PATH}"
        protocols = [Subprotocol(name) for name in subprotocols]
        async with connect(url, subprotocols=protocols, compression=None, proxy=None) as socket:
            yield cls(socket, node, reader)

    async def receive(self, type_: str | None = None) -> Frame:
        """Return the next frame, which is of ``type_`` if that is given."""
        async with asyncio.timeout(BOUND_S):
            frame = self._machine.receive(await self._socket.recv())
        assert frame is not None
        assert type_ in {None, frame.type}
        return frame

    async def send(
        self, type_: str, payload: Mapping[str, Any] | bytes, in_reply_to: str | None = None
    ) -> str:
        """Send a frame that belongs here and return its ``msg_id``."""
        msg_id = self._ulids.new()
        await self._socket.send(self._machine.send(type_, msg_id, payload, in_reply_to))
        return msg_id

    async def send_raw(self, data: str | bytes) -> None:
        await self._socket.send(data)

    async def authenticate(
        self, boot_id: str = BOOT_ID, *, resume: str | None = None, **members: Any
    ) -> Frame:
        """Answer the challenge and return the welcome."""
        await self.answer_challenge(boot_id, resume=resume, **members)
        welcome = await self.receive("welcome")
        self.session_id = str(welcome.payload["session_id"])
        return welcome

    async def answer_challenge(
        self,
        boot_id: str = BOOT_ID,
        *,
        resume: str | None = None,
        token: Mapping[str, Any] | None = None,
        **members: Any,
    ) -> None:
        """Answer the challenge with ``members`` and, in the token, ``token`` in place of what is true."""
        challenge = await self.receive("challenge")
        auth: dict[str, Any] = {
            "node_id": self.node.node_id,
            "certificate": self.node.leaf_pem,
            "token": device_token(self.node, challenge.payload, **(token or {})),
            "boot_id": boot_id,
        }
        if resume is not None:
            auth["resume"] = resume
        await self.send("auth", auth | members, challenge.msg_id)

    async def acknowledge(self, command: Frame, result: Mapping[str, Any]) -> None:
        await self.send("cmd_ack", {"ok": True, "result": result}, command.msg_id)

    async def close(self) -> None:
        """Close without a ``bye``."""
        await self._socket.close()

    async def until_closed(self) -> tuple[int, list[Frame]]:
        """Wait until the relay closes; return its code and the frames that came before."""
        frames: list[Frame] = []
        try:
            while True:
                frames.append(await self.receive())
        except ConnectionClosed as closed:
            return (closed.rcvd.code if closed.rcvd else 1006), frames


def _segment(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
