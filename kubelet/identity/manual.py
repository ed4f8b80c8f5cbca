"""A node's enrolment by hand: an operator has copied the leaf and the roots from the CA.

It leaves behind what ``kubelet enroll`` does. Must not be imported by the running daemon: it needs the X.509
library.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kubelet.config import NodeConfig
from kubelet.identity.provisioning import Enrolled, Issued, install_certificate, install_enrolled, roots_in
from schemas.addresses import normal_url, parse_broker
from schemas.endorsement import is_server_root
from schemas.error_roots import OperatorError
from schemas.identity import Identity, to_pem
from schemas.identity_files import IdentityFiles


class ServerRootsMissingError(OperatorError):
    """The relay is to be verified by roots of its own, and there are none."""

    def __init__(self) -> None:
        super().__init__(
            "--root holds no root of servers: make it with `relay ca roots --pem`, or give --system-roots if "
            "this machine trusts the relay's certificate already"
        )


@dataclass(frozen=True, slots=True)
class ManualEnrolment:
    """The leaf, and the roots of both kinds in one text, in any order; during a rotation two of a kind."""

    files: IdentityFiles
    leaf_pem: str
    roots_pem: str
    now_ms: int

    def install(self) -> Identity:
        """Install leaf and roots alone.

        Raises:
            IdentityFilesError: as ``install_certificate``.
        """
        return install_certificate(self.files, self._issued(), self.now_ms)

    def install_with(
        self, relays: Sequence[str], broker: str, *, system_roots: bool, plain_allowed: bool
    ) -> Enrolled:
        """Install them, and how the relays, the public URL first, and the broker are reached and verified.

        Raises:
            IdentityFilesError: as ``install_certificate``.
            ServerRootsMissingError: the relay is to be verified by roots of servers.
            AddressError: relay or broker may not be reached like this.
        """
        issued, (relay_url, *others) = self._issued(), dict.fromkeys(map(normal_url, relays))
        own_root = relay_url.startswith("https://") and not system_roots
        if own_root and not issued.server_roots:
            raise ServerRootsMissingError
        config = NodeConfig(
            parse_broker(broker),
            relay_url,
            plain_allowed=plain_allowed,
            own_root=own_root,
            other_relays=tuple(others),
        )
        return install_enrolled(self.files, issued, config, self.now_ms)

    def _issued(self) -> Issued:
        roots = roots_in(self.roots_pem)
        servers = [root for root in roots if is_server_root(root)]
        nodes = [root for root in roots if root not in servers]
        return Issued(self.leaf_pem, to_pem(nodes), to_pem(servers))
