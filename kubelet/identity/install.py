"""``python -P -m kubelet.identity.install STATE_DIR``: installs a renewed leaf: JSON on standard input.

A process of its own, since verifying takes the certificate library, which the daemon does without. Exit code
0 when it is installed; else one line is why not, and nothing has changed.
"""

import json
import sys
from pathlib import Path

from kubelet.clock import now_ms
from kubelet.identity.provisioning import install_renewed
from kubelet.process import errors_in_one_line
from schemas.identity_files import IdentityFiles


def main() -> None:
    """Install what comes in."""
    with errors_in_one_line():
        issued = json.load(sys.stdin)
        files = IdentityFiles(Path(sys.argv[1]))
        endorsement = issued.get("endorsement")
        install_renewed(files, issued["certificate"], issued["roots"], now_ms(), endorsement)


if __name__ == "__main__":
    main()
