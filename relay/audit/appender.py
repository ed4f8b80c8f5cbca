"""The process that appends to the audit what the event loop sends it, while calls are many.

A thread that writes needs the interpreter's lock after each write, and takes it from the event loop. This
process (``relay.audit.append``) needs none. It holds the lock of the audit too: where a relay is killed, no
other begins before what was sent is written. Must not know what a line says.
"""

import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from select import POLLIN, poll

from attrs import define, field

from relay.audit.append import MOST_BYTES

_PROGRAM = Path(__file__).with_name("append.py")
_END_S = 1.0
_WAIT_MS = 10


@define(eq=False, repr=False)
class Appender:
    """A process that appends to the open file ``descriptor``, and keeps ``lock`` open too.

    Attributes:
        runs: whether it has said so, and has not ended since: only then may something be sent.
        ended: whether it writes no more.

    Raises:
        OSError: no process can be started.
    """

    descriptor: int
    lock: int
    runs: bool = field(init=False, default=False)
    ended: bool = field(init=False, default=False)
    _socket: socket.socket = field(init=False)
    _process: subprocess.Popen[bytes] = field(init=False)

    def __attrs_post_init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # What ends a relay is sent to all processes of its service or terminal. This one ends by itself.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
        try:
            ours.settimeout(0)
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", "-I", "-S", str(_PROGRAM)],
                stdin=theirs.fileno(),
                stdout=self.descriptor,
                pass_fds=[self.lock],
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        self._socket = ours

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> bool:
        """Return whether ``data`` will be written whole if nothing fails: after all that was sent before."""
        if len(data) > MOST_BYTES:
            return False
        try:
            self._socket.send(data)
        except OSError:  # it has ended, or too much waits
            return False
        return True

    def answered(self) -> bool:
        """Return whether one more message is written whole; it may not be known yet."""
        if self.ended:  # answers may follow the error that says so: the size of the file says more
            return False
        try:
            self.ended = not self._socket.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            self.ended = True
        began, self.runs = not self.runs, not self.ended
        return self.runs and not began

    def wait(self) -> None:
        """Wait until ``answered`` can tell more, or not long: another thread may have asked it since."""
        waits = poll()
        waits.register(self._socket, POLLIN)
        waits.poll(_WAIT_MS)

    def kill(self) -> None:
        """Have it write nothing that it does not write now: the size of the file says what that was."""
        self._process.kill()

    def end(self) -> int | None:
        """Have it end, which has written all, and return its exit status, or None if it takes too long."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_S)
        self._process.kill()  # it hangs, and must not keep the lock
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_S)
        return None

    def close(self) -> None:
        """Close the socket, once nothing looks at it any more."""
        self._socket.close()
