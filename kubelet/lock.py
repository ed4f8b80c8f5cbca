"""One daemon a state directory: two with one identity would end each other's sessions again and again.

Must not wait for the lock: the other daemon may run for months.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schemas.files import open_state
from schemas.identity_files import IdentityFilesError


@contextmanager
def held_alone(state_dir: Path) -> Iterator[None]:
    """Hold ``state_dir`` alone; the kernel lets go of it when the process ends, however it ends.

    Raises:
        IdentityFilesError: another process holds it.
        OSError: its lock file cannot be used.
    """
    descriptor = open_state(state_dir / "lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise IdentityFilesError(f"another kubelet runs with {state_dir}: stop it first") from None
        yield
    finally:
        os.close(descriptor)
