"""One daemon a state directory: two with one identity would shut each other out of the relay for ever."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schemas.identity_files import IdentityFilesError


@contextmanager
def held_alone(state_dir: Path) -> Iterator[None]:
    """Hold ``state_dir`` alone; the kernel lets go of it when the process ends, however it ends.

    Raises:
        IdentityFilesError: another process holds it.
    """
    with (state_dir / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise IdentityFilesError(f"another kubelet runs with {state_dir}: stop it first") from None
        yield
