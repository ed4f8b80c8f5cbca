"""TLS of a node: which servers it trusts, and which certificate it presents.

Everything is read from the node's files when a connection is made, so that a renewed leaf and a changed root
count from the next one on. Must not import the certificate library: the daemon does without it.
"""

from ssl import SSLContext

from schemas.addresses import BrokerAddress, is_secure
from schemas.files import read_state
from schemas.identity_files import IdentityFiles
from schemas.tls import FreshContext, TlsFilesError, client_context

_CERTIFICATE = "-----BEGIN CERTIFICATE-----"


class NodeTls:
    """The contexts of the node whose identity is ``files``.

    ``own_root``: relay and broker are trusted by the roots of their own CA alone; else the relay by the roots
    of this machine. A node that was enrolled before its CA had roots of servers trusts servers by the root of
    its leaf until it is told of them.
    """

    def __init__(self, files: IdentityFiles, *, own_root: bool) -> None:
        self._files = files
        self._own_root = own_root

    def to_relay(self, relay_url: str) -> SSLContext | None:
        """Return a context for one connection to the relay; None where that is not over TLS.

        The node presents no certificate here: it authenticates in the session, once the relay is verified.

        Raises:
            OSError: the root is not there, or is none.
        """
        if not is_secure(relay_url):
            return None
        return client_context((self._server_roots() or self._root()) if self._own_root else None)

    def to_broker(self, broker: BrokerAddress) -> SSLContext | None:
        """Return a context for all connections to the broker; None where they are not over TLS.

        The broker identifies the node by its leaf, and allows it its own topics alone. Its certificate may
        always be of our CA: a relay with a public one may have a broker of its own beside it, and
        nothing that goes there is secret. The root of nodes is trusted here too: a broker's certificate from
        before there were roots of servers is of that one, and no leaf of a node is a server's.
        """
        if not broker.tls:
            return None
        shown = (self._files.leaf, self._files.key)

        def make() -> SSLContext:
            roots = self._server_roots() + self._root()
            return client_context(roots, shown, system_too=not self._own_root)

        return FreshContext.of(make)

    def _root(self) -> str:
        return read_state(self._files.root_certificate).decode("ascii", "replace")

    def _server_roots(self) -> str:
        file = self._files.server_roots
        try:
            roots = read_state(file).decode("ascii", "replace")
        except FileNotFoundError:
            return ""
        if _CERTIFICATE not in roots:
            # A node that was told of them must not trust servers by the root of nodes again.
            raise TlsFilesError(f"{file} holds no certificate")
        return roots
