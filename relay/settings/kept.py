"""Settings that the relay was given and keeps in its state: its public URL, its broker, the usual tenant.

So that later commands need not repeat it, and cannot contradict it by a default: a token for another URL than
the relay's is worthless. Must not hold a secret, and must not decide what overrides what.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from schemas.error_roots import StateError
from schemas.files import make_private_directory, read_state, write_atomic
from schemas.strict_json import StrictJsonError, loads

_MAX_BYTES = 16_384


class KeptSettingsError(StateError):
    """The file is damaged; the text names it."""


@dataclass(frozen=True, slots=True)
class KeptSettings:
    """Each as it was given on a command line, or chosen; None: it never was.

    Attributes:
        public_url: the URL of the relay for nodes and agents.
        broker, node_broker: the broker, as the relay reaches it and as nodes do.
        tenant: the tenant of commands that name none.
        own_broker: where the broker listens that the relay runs itself, in place of ``broker``. Chosen once,
            and not changed without need: nodes are given its port.
    """

    public_url: str | None = None
    broker: str | None = None
    node_broker: str | None = None
    tenant: str | None = None
    own_broker: str | None = None


def read_kept(path: Path) -> KeptSettings:
    """Return what is kept in ``path``; nothing if there is no such file.

    Raises:
        KeptSettingsError: the file is damaged.
        OSError: it cannot be read, or others can write it.
    """
    try:
        document = loads(read_state(path, _MAX_BYTES), max_bytes=_MAX_BYTES)
    except FileNotFoundError:
        return KeptSettings()
    except StrictJsonError:
        raise _damaged(path) from None
    names = {field.name for field in fields(KeptSettings)}
    if not isinstance(document, dict) or not document.keys() <= names:
        raise _damaged(path)
    if not all(isinstance(value, str) for value in document.values()):
        raise _damaged(path)
    return KeptSettings(**document)


def write_kept(path: Path, settings: KeptSettings) -> None:
    """Keep ``settings`` in ``path``, in place of what is kept there.

    Raises:
        OSError: it cannot be written.
    """
    make_private_directory(path.parent)
    document = {name: value for name, value in asdict(settings).items() if value is not None}
    write_atomic(path, json.dumps(document, indent=2) + "\n")


def _damaged(path: Path) -> KeptSettingsError:
    return KeptSettingsError(f"{path} is damaged: remove it, and name what it held in the next commands")
