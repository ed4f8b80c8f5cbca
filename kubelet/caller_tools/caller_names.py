"""Which caller_id belongs to whom on this node: to the principal that first used it.

A caller_id is what the local agent sees of a caller. It must not pass to another principal, not even after a
restart: the local agent would take that one for the caller that it knows. So it is kept in a file, until an
operator removes it. Must not decide what a caller may do.
"""

import json
from collections import Counter
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from schemas.error_roots import StateError
from schemas.files import PRIVATE, read_state, write_atomic
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

MAX_NAMES = 1024
MAX_NAMES_OF_ONE_OWNER = 16
_MAX_FILE_BYTES = 1 << 20


class CallerNamesError(StateError):
    """The file cannot be used; the text states what to do."""


class CallerNames:
    """The owners of caller_ids, kept in ``file``; in memory alone without one.

    Raises:
        CallerNamesError: the file is damaged.
        OSError: it cannot be read, or is not to be believed.
    """

    def __init__(self, file: Path | None, log: FilteringBoundLogger) -> None:
        self._file = file
        self._log = log
        self._owners = {} if file is None else _read(file)

    def claim(self, caller_id: str, owner: str) -> bool:
        """Return whether ``caller_id`` is, or now becomes, the ``owner``'s."""
        known = self._owners.get(caller_id)
        if known is not None:
            return known == owner
        if len(self._owners) >= MAX_NAMES or Counter(self._owners.values())[owner] >= MAX_NAMES_OF_ONE_OWNER:
            self._log.warning("caller_id refused: no more are kept", caller_id=printable(caller_id, 64))
            return False
        owners = {**self._owners, caller_id: owner}
        if self._file is not None:
            try:
                write_atomic(self._file, json.dumps(owners, indent=1) + "\n", PRIVATE)
            except OSError as error:
                # Fail closed: a name that is not kept could be taken by another after a restart.
                self._log.error("caller_id refused: it cannot be kept", exc_info=error)
                return False
        self._owners = owners
        return True


def _read(file: Path) -> dict[str, str]:
    try:
        owners = loads(read_state(file, _MAX_FILE_BYTES), max_bytes=_MAX_FILE_BYTES)
    except FileNotFoundError:
        return {}
    except StrictJsonError:
        owners = None
    if not isinstance(owners, dict) or not all(isinstance(owner, str) for owner in owners.values()):
        raise CallerNamesError(f"{file} is damaged: remove it; caller_ids then belong to their next users")
    return owners
