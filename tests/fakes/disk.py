"""A disk that is full: writes fail, or stop half way, because the kernel says so."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil


@contextmanager
def full_disk(size: int = 0) -> Iterator[None]:
    """Let no file of this process, and of those that it has started, grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for process in (this := psutil.Process(), *this.children()):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                process.rlimit(psutil.RLIMIT_FSIZE, (size, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
