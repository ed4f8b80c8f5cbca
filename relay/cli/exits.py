"""The exit codes of the relay's commands, and the form of an error.

Exit codes: 0 done; 1 the answer is no; 2 the command line is wrong; 3 it cannot run as things are (a file
is missing or exposed, a port is taken), or the relay has failed; 4 something that was there is lost; 70 a
fault of our own in a command; 78 the settings cannot be used, and a restart does not help. Results go to
standard output, everything else to standard error. Must not import what an installation of a node lacks.
"""

import sys
from typing import NoReturn

EXIT_LOST = 4


def fail(text: str, code: int) -> NoReturn:
    """Print ``text`` as one line of error, and exit with ``code``."""
    print(f"relay: {text}", file=sys.stderr)  # noqa: T201 - the output of a command
    raise SystemExit(code)
