"""What tests give the relay's commands, and what they look at in the files that those write."""

import stat
from pathlib import Path

from schemas.certificates import make_csr
from tests.fakes.relay_command import FREE_PORT
from tests.fakes.signer import NODE_ID, key_named

CSR = make_csr(key_named("the node"), NODE_ID)
RUN = ["run", "--broker", "127.0.0.1:1", "--listen", f"127.0.0.1:{FREE_PORT}"]


def mode(path: Path) -> int:
    """Return the permissions of the file."""
    return stat.S_IMODE(path.stat().st_mode)


def written_ms(path: Path) -> int:
    """Return when the file was written, in ms since the epoch."""
    return path.stat().st_mtime_ns // 1_000_000
