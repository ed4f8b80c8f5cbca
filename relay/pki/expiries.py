"""When the relay's certificates end, for its metrics and its status. Must not decide whether that is soon."""

from collections.abc import Callable

from relay.settings.config import RelayConfig
from schemas.error_roots import StateError
from schemas.files import read_state
from schemas.identity import CertificateFormatError, first_certificate_in, validity_of


class Expiries:
    """The ends of the certificates that ``config`` and ``root_pem`` name, in ms since the epoch."""

    def __init__(self, config: RelayConfig, root_pem: Callable[[], str]) -> None:
        self._root_pem = root_pem
        served = {} if config.tls is None else {"server": config.tls.certificate}
        shown = (
            {"broker_client": config.state.broker_client_tls.certificate} if config.uses_broker_tls else {}
        )
        self._files = served | shown

    @property
    def names(self) -> tuple[str, ...]:
        """What certificates there are: ``root``, ``server``, ``broker_client``."""
        return ("root", *self._files)

    def end_ms(self, name: str) -> int:
        """Return when the certificate ``name`` ends; 0 if it cannot be read."""
        try:
            pem = self._root_pem() if name == "root" else read_state(self._files[name]).decode("ascii")
            return validity_of(first_certificate_in(pem))[1]
        except (OSError, StateError, UnicodeDecodeError, CertificateFormatError):
            return 0
