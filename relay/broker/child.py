"""Becomes the broker, as a process that does not outlive the relay: ``python -P -m relay.broker.child``.

The kernel sends SIGTERM to this process when its parent ends, however that ends; the broker inherits it. Set
here and not between fork and exec in the relay, which has threads. Must not import the relay's other parts.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_MASK = 0o077
_ARGUMENTS = 4


def main(arguments: list[str]) -> None:
    """Run the program of ``arguments``: the parent's process id, the program, and its configuration."""
    if len(arguments) != _ARGUMENTS:
        raise SystemExit(2)
    _, parent, program, config = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise SystemExit(os.strerror(ctypes.get_errno()))
    if os.getppid() != int(parent):
        raise SystemExit("the relay has ended")
    os.umask(_MASK)
    # Ignored signals stay ignored by the program, which is to reload its configuration at SIGHUP.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Without the relay's environment, which may hold a token or a passphrase.
    os.execve(program, [program, "-c", config], {"PATH": os.defpath})  # noqa: S606 - what the relay has checked


if __name__ == "__main__":
    main(sys.argv)
