"""TLS of a node: which servers it trusts, and which certificate it presents.

Everything is read from the node's files when a connection is made, so that a renewed leaf and a changed root
count from the next one on. Must not import the certificate library: the daemon does without it.
"""

import ssl

from schemas.addresses import BrokerAddress
from schemas.files import read_state
from schemas.identity_files import IdentityFiles
from schemas.tls import FreshContext, client_context


class NodeTls:
    """The contexts of the node whose identity is ``files``.

    ``own_root``: servers are trusted by the root of the node's leaf alone; else the relay by the roots of
    this machine.
    """

    def __init__(self, files: IdentityFiles, *, own_root: bool) -> None:
        self._files = files
        self._own_root = own_root

    def to_relay(self, relay_url: str) -> ssl.SSLContext | None:
        """Return a context for one connection to the relay; None where that is not over TLS.

        The node presents no certificate here: it authenticates in the session, once the relay is verified.

        Raises:
            OSError: the root is not there, or is none.
        """
        if not relay_url.startswith("https://"):
            return None
        return client_context(self._root() if self._own_root else None)

    def to_broker(self, broker: BrokerAddress) -> ssl.SSLContext | None:
        """Return a context for all connections to the broker; None where they are not over TLS.

        The broker identifies the node by its leaf, and allows it its own topics alone. Its certificate may
        always be of our root: a relay with a public one may have a broker of its own beside it, and
        nothing that goes there is secret.
        """
        if not broker.tls:
            return None
        shown = (self._files.leaf, self._files.key)
        return FreshContext.of(lambda: client_context(self._root(), shown, system_too=not self._own_root))

    def _root(self) -> str:
        return read_state(self._files.root_certificate).decode("ascii", "replace")
