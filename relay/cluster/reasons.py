"""Why the servers of NATS cannot be used, in one line, with the setting to change where that is known.

Must not repeat unescaped what a server has sent.
"""

import ssl
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nats.js.errors import ServiceUnavailableError

from schemas.error_roots import EdgeError
from schemas.faults import connection_fault, connection_reason
from schemas.text import printable

if TYPE_CHECKING:
    import asyncio

_MAX_REASON = 1024
_NOT_ADMITTED, _NOT_PERMITTED = "authorization violation", "permissions violation"
_PERMISSIONS = "docs/cluster/nats-server.conf"


def reason_of(error: Exception) -> str:
    """Return why ``error`` was raised where the servers were used, as printable ASCII."""
    text = printable(str(error) or type(error).__name__, _MAX_REASON)
    if isinstance(error, EdgeError):
        return text
    if isinstance(error, OSError):
        reason = connection_reason(error)
        is_untrusted = isinstance(connection_fault(error), ssl.SSLCertVerificationError)
        return f"{reason}: see --cluster-root, and the names in the certificate" if is_untrusted else reason
    if isinstance(error, ServiceUnavailableError) and not error.description:
        return "no server that is reached has JetStream: enable it in the configuration of the servers"
    if _NOT_ADMITTED in text.lower():
        return "the server does not admit what --cluster-credentials names: give it a user there"
    if _NOT_PERMITTED in text.lower():
        # Without the subject, in which each connection has a part of its own: the reason is logged once.
        return f"the server does not permit what relays of --cluster-fleet need: see {_PERMISSIONS}"
    return text


def reason_of_end(done: Iterable["asyncio.Future[str | None]"]) -> str:
    """Return why a connection is not used any more, by the tasks of which one has ended first."""
    for task in done:
        if isinstance(error := task.exception(), Exception):
            return reason_of(error)
        if (lost := task.result()) is not None:
            return printable(lost, _MAX_REASON)
    return "a part of this relay has ended it: see the line before"
