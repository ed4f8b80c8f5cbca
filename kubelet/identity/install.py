"""``python -P -m kubelet.identity.install STATE_DIR``: installs a renewed leaf: JSON on standard input.

A process of its own, since verifying takes the certificate library, which the daemon does without. Exit code
0 when it is installed; else standard error states why not, and nothing has changed.
"""

import sys
from pathlib import Path

from kubelet.identity.provisioning import Issued, install_renewed
from kubelet.process import fail, now_ms
from schemas.frames import MAX_FRAME_BYTES
from schemas.identity_files import IdentityFiles
from schemas.process.command_errors import errors_in_one_line
from schemas.strict_json import loads


def main() -> None:
    """Install what comes in."""
    with errors_in_one_line(fail):
        issued = loads(sys.stdin.buffer.read(MAX_FRAME_BYTES + 1), max_bytes=MAX_FRAME_BYTES)
        files = IdentityFiles(Path(sys.argv[1]))
        install_renewed(files, Issued(**issued), now_ms())


if __name__ == "__main__":
    main()
