"""A client for the Unix socket on which a relay serves its metrics."""

from pathlib import Path

import httpx2

_TIMEOUT_S = 60


def metrics_client(socket: Path) -> httpx2.AsyncClient:
    """Return a client whose requests go to ``socket``."""
    transport = httpx2.AsyncHTTPTransport(uds=str(socket))
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=_TIMEOUT_S)
