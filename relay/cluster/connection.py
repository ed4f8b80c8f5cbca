"""The one connection of this relay to NATS: made, watched, and made again when it is lost.

Each connection is a client of its own, and what it has not sent is dropped with it: the library's own
reconnect would send commands long after their deadline. Whatever needs the connection is a *work* that runs
for as long as one lasts, and that begins anew with the next. Must not know what is sent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from attrs import define, field
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError, NoServersError
from structlog.typing import FilteringBoundLogger

from relay.cluster.client import (
    END_TIMEOUT_S,
    Accept,
    ClusterConnectError,
    DirectClient,
    closed,
    connect,
    ended,
    reason_of,
    reason_of_end,
    respond_now,
    until_lost,
)
from relay.cluster.credentials import Credentials
from relay.routing.port import NoResponderError
from relay.settings.config import ClusterServer
from schemas.error_roots import EdgeError
from schemas.health import Loop
from schemas.pacing import Backoff, TokenBucket
from schemas.text import printable

PROBE_INTERVAL_S = 2.5
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 5.0
_LOOP_S = 60.0
_REPORTS_RATE, _REPORTS_BURST = 0.1, 30.0
"""Of what is logged of a connection: a relay can have the others drop thousands of its messages a second."""

ConnectionWork = Callable[[Client], Awaitable[None]]
"""Uses a connection until cancelled. It starts with each one, and must expect that it is lost at any time."""


@define(eq=False, repr=False)
class ClusterConnection:
    """The connection to one of ``servers``, with ``credentials``. ``name`` is what the servers show of it.

    ``inbox`` is the subject below which answers come: only relays may subscribe there.

    Attributes:
        loop: its progress.
        server: the one that it is connected to, if any.
        problem: why it is connected to none, by the last attempt; None while it is connected.
    """

    _servers: Sequence[ClusterServer]
    _credentials: Callable[[], Credentials]
    _name: str = field(kw_only=True)
    _inbox: str = field(kw_only=True)
    loop: Loop = field(kw_only=True)
    _log: FilteringBoundLogger = field(kw_only=True)
    _sleep: Callable[[float], Awaitable[None]] = field(kw_only=True, default=asyncio.sleep)
    _probe_interval_s: float = field(kw_only=True, default=PROBE_INTERVAL_S)
    _probe: str = field(init=False)
    _turn: int = field(init=False, default=0)
    _client: DirectClient | None = field(init=False, default=None)
    _checks: list[ConnectionWork] = field(init=False, factory=list)
    _works: list[ConnectionWork] = field(init=False, factory=list)
    _last: list[ConnectionWork] = field(init=False, factory=list)
    _reported: set[tuple[ClusterServer, str]] = field(init=False, factory=set)
    server: ClusterServer | None = field(init=False, default=None)
    problem: str | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._probe = f"{self._inbox}.probe"

    @property
    def is_connected(self) -> bool:
        """Whether requests can be sent now."""
        return self._client is not None and self._client.is_connected

    def before(self, check: ConnectionWork) -> None:
        """Do ``check`` on every connection before the works. If it raises, the connection is not used."""
        self._checks.append(check)

    def during(self, work: ConnectionWork) -> None:
        """Run ``work`` during every connection. Call it before ``run``."""
        self._works.append(work)

    def at_end(self, work: ConnectionWork) -> None:
        """Run ``work`` once, and not for long, when this relay ends; not when a connection is lost."""
        self._last.append(work)

    async def request(
        self,
        subject: str,
        payload: bytes,
        timeout_s: float,
        headers: dict[str, str] | None = None,
        accept: Accept | None = None,
    ) -> bytes:
        """Return the answer to ``payload``, as ``DirectClient.ask`` does.

        Raises:
            NoResponderError: it was not sent, or is not answered.
            TimeoutError: there was no answer in time.
        """
        client = self._client
        if client is None or not client.is_connected:
            raise NoResponderError("not connected to the cluster")
        try:
            return await client.ask(subject, payload, timeout_s, headers, accept)
        except NatsError:
            # Raised before anything is written: the connection has just ended.
            raise NoResponderError("the connection to the cluster was lost") from None

    async def publish(self, subject: str, payload: bytes) -> None:
        """Send ``payload``; it is lost if there is no connection."""
        if self._client is not None:
            with suppress(NatsError):
                await self._client.publish(subject, payload)

    async def run(self) -> None:
        """Connect, and run the tasks of a connection, again and again until cancelled."""
        backoff, failed = Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S), 0
        while True:
            self.loop.busy(_LOOP_S)
            server = self._servers[self._turn % len(self._servers)]
            self._turn += 1
            lost = asyncio.Event()
            try:
                await self._serve(await self._connected(server, lost), server, lost)
            except (EdgeError, NatsError, OSError) as error:
                self.problem = reason_of(error)
                # Once, until a server can be used, or the reason is another.
                if (server, self.problem) not in self._reported:
                    self._reported.add((server, self.problem))
                    self._log.warning("cluster not connected", server=str(server), reason=self.problem)
            except Exception as error:  # noqa: BLE001 - what a server answers must not end the relay
                self.problem = reason_of(error)
                self._failed(server, error)
            else:
                backoff.reset()
                failed = 0
                continue
            failed += 1
            if failed % len(self._servers) == 0:  # each was tried
                await self._sleep(backoff.next_s())

    async def move(self, check: ConnectionWork, reason: str) -> bool:
        """Return whether another server passes ``check``: that raises no error of the library.

        The next connection is to that one, because of ``reason``. A work that has called this then ends the
        present connection by returning.
        """
        for turn in range(self._turn, self._turn + len(self._servers) - 1):
            server = self._servers[turn % len(self._servers)]
            if await self._passes(server, check):
                self._log.warning(
                    "cluster server left", server=str(self.server), to=str(server), reason=reason
                )
                self._turn, self.problem = turn, reason
                return True
        return False

    async def _passes(self, server: ClusterServer, check: ConnectionWork) -> bool:
        client: Client | None = None
        try:
            client = await self._connected(server, asyncio.Event())
            await check(client)
        except (EdgeError, NatsError, OSError):
            return False
        except Exception as error:  # noqa: BLE001 - the present connection goes on
            self._failed(server, error)
            return False
        finally:
            if client is not None:
                await closed(client)
        return True

    def _failed(self, server: ClusterServer, error: Exception) -> None:
        self._log.error("cluster connection failed", server=str(server), exc_info=error)

    async def _connected(self, server: ClusterServer, lost: asyncio.Event) -> DirectClient:
        """Return a new client of ``server``; ``lost`` is set when its connection has ended.

        Raises:
            ClusterConnectError, NatsError, OSError: the server cannot be used.
        """
        # In a task of its own: a cancellation that the library swallows would be lost here.
        connecting = asyncio.ensure_future(self._connect(server, lost))
        try:
            await asyncio.wait({connecting})
        except asyncio.CancelledError:
            lost.set()
            await ended([connecting])
            if connecting.done() and not connecting.cancelled() and connecting.exception() is None:
                await closed(connecting.result())
            raise
        return connecting.result()

    async def _connect(self, server: ClusterServer, lost: asyncio.Event) -> DirectClient:
        async def has_ended() -> None:
            lost.set()

        credentials, client = self._credentials(), DirectClient(self._probe, self._log)
        reported: list[Exception] = []

        seconds, left_out = asyncio.get_running_loop().time, 0
        bucket = TokenBucket(_REPORTS_RATE, _REPORTS_BURST, seconds())

        async def failed(error: Exception) -> None:
            nonlocal left_out
            if self._client is not client:
                reported.append(error)
            elif bucket.take(seconds()) > 0:
                left_out += 1
            else:
                # The server names what it does not permit.
                self._log.warning("cluster reports", reason=printable(str(error)), left_out=left_out)
                left_out = 0

        try:
            await connect(
                client,
                server,
                credentials,
                name=self._name,
                inbox=self._inbox,
                closed=has_ended,
                failed=failed,
            )
            await self._check(client, reported)
            await client.take_replies()
        except BaseException as error:
            await closed(client)
            if isinstance(error, NoServersError) and reported:
                raise ClusterConnectError(reason_of(reported[0])) from None  # it says only that none is left
            raise
        if lost.is_set():  # given up meanwhile, or lost
            await closed(client)
        return client

    async def _check(self, client: Client, reported: list[Exception]) -> None:
        reported.clear()  # of an attempt before the one that has succeeded
        for check in self._checks:
            await check(client)
        if reported:  # the server does not permit what every relay needs
            raise ClusterConnectError(reason_of(reported[0]))

    async def _serve(self, client: DirectClient, server: ClusterServer, lost: asyncio.Event) -> None:
        self._client, self.server, self.problem = client, server, None
        self.loop.waits()
        self._reported.clear()
        self._log.info("cluster connected", server=str(server))
        probing = until_lost(client, lost, self._probe, self._probe_interval_s)
        tasks = [asyncio.ensure_future(work) for work in (probing, *(work(client) for work in self._works))]
        last: Sequence[ConnectionWork] = ()
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            last = self._last
            raise
        finally:
            self._client = self.server = None
            lost.set()
            await ended(tasks)
            with suppress(TimeoutError):
                async with asyncio.timeout(END_TIMEOUT_S):
                    await asyncio.gather(*(work(client) for work in last))
            await closed(client)
        errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        if bugs := [error for error in errors if not isinstance(error, NatsError | TimeoutError | None)]:
            raise BaseExceptionGroup("what used the connection failed", bugs)
        if self.problem is None:  # else ``move`` has given a reason
            self.problem = reason_of_end(done)
        self._log.warning("cluster lost", server=str(server), reason=self.problem)


MAX_WAITING = 4096
"""How many answers of one part wait for a server that does not read. The deadline tells of the others."""


@define(eq=False, repr=False)
class Replies:
    """Sends answers: at once, or as soon as the server reads again."""

    _waiting: set[asyncio.Task[None]] = field(init=False, factory=set)

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, message: Msg, answer: bytes) -> None:
        """Answer ``message``, if it wants an answer."""
        if not message.reply or respond_now(message, answer) or len(self._waiting) >= MAX_WAITING:
            return
        task = asyncio.create_task(respond(message, answer))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def close(self) -> None:
        if waiting := list(self._waiting):
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)


async def respond(message: Msg, answer: bytes) -> None:
    """Answer, unless the connection has ended: then the deadline tells the relay that has asked.

    Raises:
        MaxPayloadError: the answer is too large, which is a bug: whatever answers has a limit below that.
    """
    try:
        await message.respond(answer)
    except MaxPayloadError:
        raise
    except NatsError:
        return
