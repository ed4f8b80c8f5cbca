"""``kubelet service``: the node's daemon as a service of systemd.

Must not take a step itself: it only says what of the service is this program's.
"""

import grp
from pathlib import Path

import kubelet
from kubelet.config import SERVICE_KINDS, SERVICE_SOCKET, SERVICE_STATE_DIR
from kubelet.settings import KUBELET
from schemas.process.cli_manual import group
from schemas.process.cli_service import add_commands
from schemas.process.service_host import Service, ServiceError

_NEXT = """next, once: edge-kubelet enroll URL --token-file FILE
then: systemctl start edge-kubelet"""

SERVICE = Service(
    name="edge-kubelet",
    units=Path(kubelet.__path__[0]) / "units",
    program=KUBELET,
    directories=(SERVICE_STATE_DIR, SERVICE_SOCKET.parent, SERVICE_KINDS),
    state_mark="node.key",
    kinds=SERVICE_KINDS,
)
app = group("The daemon as a service of systemd.")
add_commands(app, SERVICE, _NEXT)


def check_group(name: str, purpose: str) -> None:
    """Check that this system has the group ``name``: the unit would not start again with one that it lacks.

    Raises:
        ServiceError: it has none; the text says its ``purpose``.
    """
    try:
        grp.getgrnam(name)
    except KeyError:
        raise ServiceError(f"this system has no group {name}, {purpose}") from None
