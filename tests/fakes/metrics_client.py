"""A client for the Unix socket on which a relay serves its metrics. The stories run without ``bench``."""

from pathlib import Path

import httpx2

_TIMEOUT_S = 60
# The relay closes what is idle for five seconds, perhaps as the next request is on its way.
_NONE_KEPT = httpx2.Limits(max_keepalive_connections=0)


def metrics_client(socket: Path) -> httpx2.AsyncClient:
    """Return a client whose requests go to ``socket``."""
    transport = httpx2.AsyncHTTPTransport(uds=str(socket), limits=_NONE_KEPT)
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=_TIMEOUT_S)
