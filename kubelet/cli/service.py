"""``kubelet service``: the node's daemon as a service of systemd.

Must not take a step itself: it only says what of the service is this program's.
"""

from pathlib import Path

import kubelet
from kubelet.config import SERVICE_KINDS, SERVICE_SOCKET, SERVICE_STATE_DIR
from kubelet.settings import KUBELET
from schemas.process.cli_manual import group
from schemas.process.cli_service import add_commands
from schemas.process.service_steps import Service

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
