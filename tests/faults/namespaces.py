"""Another view of the file system for one process: a mount namespace of its own, without root.

Must not be used for what can be done to a process without it: not every machine gives namespaces.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

_UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")


def mounted(files: Mapping[Path, Path]) -> Sequence[str]:
    """Return the prefix of a command that sees each file where it is to be seen: by the place, the file."""
    return _prefix(*(f"mount --bind '{file}' '{place}'" for place, file in files.items()))


def read_only(directory: Path) -> Sequence[str]:
    """Return the prefix of a command that can only read what is in ``directory``."""
    return _prefix(f"mount --bind '{directory}' '{directory}'", f"mount -o remount,bind,ro '{directory}'")


def _prefix(*mounts: str) -> Sequence[str]:
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this machine gives no namespaces: {tried.stderr.strip()}")
    return (*_UNSHARE, "sh", "-c", " && ".join((*mounts, 'exec "$@"')), "-")
