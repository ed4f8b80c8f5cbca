"""``python -P -m kubelet.daemon PLAN``: the daemon, without the command line's library.

``kubelet run`` checks the options and then becomes this process. Must not import the library that parses
options: with what it needs it would stay in the memory of every board for as long as the daemon runs, and is
a fifth of it.
"""

import faulthandler
import sys

from schemas.process.interrupts import QuietInterrupt
from schemas.process.lazy_imports import LazyImports, do_without

_ABSENT = (
    "rich",  # structlog loads it where it can, for tracebacks in colour: four mebibytes
    "bz2",  # shutil loads both where it can, for archives: a third of one
    "lzma",
)
"""What libraries do without, and a daemon never uses."""
_UNUSED = (
    "importlib.metadata",  # websockets, which needs it while its version is not a release
    "structlog.stdlib",  # structlog
    "structlog.threadlocal",  # structlog
    "locale",  # subprocess, for output that is text
    "shutil",  # tempfile, for directories
    "calendar",  # email
    "email.base64mime",  # email, for bodies of messages
    "email.errors",  # email
    "email.quoprimime",  # email, as above
    "glob",  # psutil, for sensors
    "inspect",  # asyncio and dataclasses; with the parser of Python
    "jsonschema_rs.canonical",  # jsonschema_rs
    "stringprep",  # encodings.idna, for host names beyond ASCII
    "structlog.twisted",  # structlog
    "textwrap",  # traceback, for what it prints by itself
    "tokenize",  # linecache, for the lines of a traceback
    "urllib.request",  # paho and websockets, for proxies; with the client of HTTP
    "uuid",  # paho, and for the tools of callers
)
"""What libraries import and a running node does not use, and by which of them it is imported."""
_UNUSED_BUT_A_PART = {"pickle": "_pickle"}  # structlog, for one exception
"""The same, and the module in C that has what is imported from it by name."""


def main() -> None:
    """Run the daemon by the plan in the first argument."""
    # The watchdog ends a process that hangs by SIGABRT: it then prints the stack of each thread.
    faulthandler.enable()
    do_without(*_ABSENT)
    sys.meta_path.insert(0, LazyImports(*_UNUSED, parts=_UNUSED_BUT_A_PART))
    # After that: each of them loads what would load those.
    from kubelet.config import DaemonPlan  # noqa: PLC0415
    from kubelet.daemon.composition import run_daemon  # noqa: PLC0415
    from kubelet.process import fail, run_until_signal  # noqa: PLC0415
    from schemas.process.command_errors import errors_in_one_line  # noqa: PLC0415

    with errors_in_one_line(fail):
        plan = DaemonPlan.from_json(sys.argv[1])
        run_until_signal(run_daemon(plan, sys.stderr))


if __name__ == "__main__":
    with QuietInterrupt():
        main()
