"""How a client of NATS starts: what it is told, and which servers it may use.

Must not do anything with the connection, and must not make it again.
"""

from collections.abc import Awaitable, Callable

from nats.aio.client import Client
from nats.errors import Error as NatsError

from relay.cluster.credentials import Credentials
from relay.cluster.peer_messages import MAX_PEER_BYTES
from relay.settings.config import ClusterServer
from schemas.error_roots import EdgeError, PeerError

CONNECT_TIMEOUT_S = 2
_FLUSH_TIMEOUT_S = 0.2
"""How long a call waits for a server that does not read: by itself the call would wait without a limit."""


class ClusterConnectError(PeerError):
    """A server cannot be used."""


async def connect(  # noqa: PLR0913 - what the library is told
    client: Client,
    server: ClusterServer,
    credentials: Credentials,
    *,
    name: str,
    inbox: str,
    closed: Callable[[], Awaitable[None]],
    failed: Callable[[Exception], Awaitable[None]],
) -> None:
    """Connect ``client`` once. It calls ``closed`` when it has ended, and ``failed`` with each error before.

    Raises:
        ClusterConnectError, NatsError, OSError: the server cannot be used.
    """
    try:
        await client.connect(
            str(server),
            name=name,
            inbox_prefix=inbox,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=CONNECT_TIMEOUT_S,
            flush_timeout=_FLUSH_TIMEOUT_S,
            # Else TLS is agreed by what the server says in the clear, where it could be left out.
            tls=credentials.tls,
            tls_handshake_first=credentials.tls is not None,
            tls_hostname=server.host if credentials.tls is not None else None,
            nkeys_seed_str=credentials.seed,
            closed_cb=closed,
            error_cb=failed,
        )
        _check_max_payload(client)
    except (EdgeError, NatsError, OSError):
        raise
    except Exception as error:
        # The library parses what a server says first without checks.
        raise ClusterConnectError(f"it is no server of NATS ({type(error).__name__})") from error


def _check_max_payload(client: Client) -> None:
    if client.max_payload < MAX_PEER_BYTES:
        raise ClusterConnectError(f"its max_payload is below {MAX_PEER_BYTES} bytes")
