"""What the loopback pages show of a daemon, as the test sets it."""

from kubelet.loopback import Readiness
from schemas.health import Health

WIRE = b'{"manifest_version":"1.1.0"}'
ETAG = "ab" * 32
QUOTED = f'"{ETAG}"'


class LoopbackState:
    """What a daemon would say of itself."""

    def __init__(self) -> None:
        self.published: tuple[bytes, str] | None = (WIRE, ETAG)
        self.ready = Readiness(
            ready=True, subsystems={"relay": Health.passive(ready=True, state="connected")}
        )
        self.bug: Exception | None = None

    def manifest(self) -> tuple[bytes, str] | None:
        return self.published

    def readiness(self) -> Readiness:
        if self.bug is not None:
            raise self.bug
        return self.ready
