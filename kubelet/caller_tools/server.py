"""The socket that local agents connect to: who is accepted, and who is notified of what.

Must not interpret what a client sends: ``client`` and ``methods`` do.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from kubelet.caller_tools.client import READ_BYTES, Client, ClientParts
from kubelet.caller_tools.peers import Peer, peer_of
from kubelet.caller_tools.sessions import Session
from kubelet.caller_tools.socket_file import BoundSocket
from schemas.faults import OncePerPlace

MAX_CLIENTS = 16
MAX_CLIENTS_OF_ONE_USER = 8
_LOG_INTERVAL_S = 1.0


class SocketServer:
    """The connections of all local clients."""

    def __init__(self, parts: ClientParts) -> None:
        self._parts = parts
        self._clients: dict[Client, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._logged = OncePerPlace(_LOG_INTERVAL_S)
        self._group: int | None = None
        parts.sessions.on_change(self._changed)

    def __len__(self) -> int:
        return len(self._clients)

    @asynccontextmanager
    async def serving(self, bound: BoundSocket) -> AsyncIterator[None]:
        """Accept clients for the length of the block; at its end they are disconnected."""
        self._group = bound.group
        server = await asyncio.start_unix_server(self._connected, sock=bound.listener, limit=READ_BYTES)
        try:
            yield
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            if self._tasks:
                await asyncio.wait(list(self._tasks))

    def deliver(self, session: Session, message: str) -> None:
        """Notify the clients of ``session`` of a message; keep it for the next one if there is none."""
        receivers = [client for client in self._clients if client.session() is session]
        for client in receivers:
            client.deliver(session, message)
        if not receivers and not session.keep_unread(message):
            self._parts.counts["messages_dropped"] += 1
            self._parts.log.warning("oldest message of a caller dropped: no local client reads it")

    def _changed(self, _ended: Session | None) -> None:
        for client in list(self._clients):
            client.refresh()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: those that asyncio makes for coroutines cannot be awaited at the end.
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            peer = peer_of(writer.get_extra_info("socket"))
            if self._is_accepted(peer):
                client = Client(reader, writer, self._parts)
                self._clients[client] = peer
                try:
                    await client.run()
                finally:
                    del self._clients[client]
        except OSError:
            self._parts.counts["connections_broken"] += 1
        except Exception:
            # A bug must cost one connection, not the daemon.
            self._parts.log.exception("connection of a local client failed")
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _is_accepted(self, peer: Peer) -> bool:
        if not peer.may_use(self._group):
            return self._log(peer, "refused: neither its user nor its group may connect")
        users = Counter(other.uid for other in self._clients.values())
        if len(self._clients) >= MAX_CLIENTS or users[peer.uid] >= MAX_CLIENTS_OF_ONE_USER:
            return self._log(peer, "refused: too many connections")
        self._log(peer, "connected")
        return True

    def _log(self, peer: Peer, what: str) -> bool:
        """Log what became of a connection, and return False; one line a second for each user."""
        if what != "connected":
            self._parts.counts["connections_refused"] += 1
        place = f"{what} {peer.uid}"
        before = self._logged.suppressed_before(place, asyncio.get_running_loop().time())
        if before is not None:
            report = self._parts.log.info if what == "connected" else self._parts.log.warning
            report(f"local client {what}", pid=peer.pid, uid=peer.uid, gid=peer.gid, kept_back=before)
        return False
