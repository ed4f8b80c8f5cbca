"""``relay service``: the relay as a service of systemd.

Must not take a step itself: it only says what of the service is this program's.
"""

from pathlib import Path

import relay
from relay.settings.config import SERVICE_KINDS, SERVICE_STATE_DIR
from relay.settings.table import RELAY
from schemas.process.cli_manual import group
from schemas.process.cli_service import add_commands
from schemas.process.service_steps import Service

_NEXT = """next, once: relay ca init
            and its settings in /etc/edge-kubelet/relay.toml
then: systemctl start edge-relay"""

SERVICE = Service(
    name="edge-relay",
    units=Path(relay.__path__[0]) / "units",
    program=RELAY,
    directories=(SERVICE_STATE_DIR, Path("/var/lib/edge-relay-broker"), SERVICE_KINDS),
    state_mark="ca/root.pem",
    kinds=SERVICE_KINDS,
    groups=("edge-broker",),
)
app = group("The relay as a service of systemd.")
add_commands(app, SERVICE, _NEXT)
