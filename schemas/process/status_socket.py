"""A process tells its own operator what it does now, over a Unix socket in its state directory.

The process writes one JSON object to whom connects, and reads nothing: nothing can be asked of it or changed.
Its own user and root can connect, and its group where the directory shows the group what is no secret.
Must not hold what is shown.
"""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from schemas.error_roots import OperatorError, PeerError
from schemas.files import fits_socket, is_shown_to_group
from schemas.strict_json import StrictJsonError, loads

NAME = "status.sock"
TIMEOUT_S = 5.0
_PRIVATE = 0o600
_FOR_THE_GROUP = 0o660
_MAX_BYTES = 16 << 20  # a relay names each node that has a wrong clock, or is silent
_BACKLOG = 8
_AT_ONCE = 8

StatusSource = Callable[[], Mapping[str, Any]]
"""Returns what is shown: JSON values."""


class NotRunningError(OperatorError):
    """No process serves the state directory; the text names it."""


class StalledError(PeerError):
    """The process has taken the connection and says nothing: its event loop has stalled."""


@asynccontextmanager
async def served(directory: Path, status: StatusSource) -> AsyncIterator[None]:
    """Serve ``status`` in ``directory``, which this process alone uses, until the end of the block.

    Raises:
        OSError: the socket cannot be made.
    """
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S), at_once:
                writer.write(json.dumps(dict(status())).encode("ascii"))
                await writer.drain()
        except (OSError, TimeoutError):
            pass  # the client has gone, or does not read
        finally:
            writer.close()

    with _listening(directory) as listener:
        server = await asyncio.start_unix_server(answer, sock=listener)
        try:
            yield
        finally:
            server.close()


def read_status(directory: Path, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Return what the process of ``directory`` does now.

    Raises:
        NotRunningError: there is none.
        StalledError: it does not answer.
        OSError: it is another user's.
    """
    with _opened(directory) as path, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(timeout_s)
        try:
            client.connect(path)
            status = loads(_rest(client), max_bytes=2 * _MAX_BYTES)
        except (FileNotFoundError, ConnectionRefusedError):
            raise NotRunningError(
                f"nothing runs with {directory}: start it, or name its --state-dir"
            ) from None
        except PermissionError:
            who = "its own user, root and members of its group can ask"
            raise PermissionError(0, who, str(directory / NAME)) from None
        except (TimeoutError, StrictJsonError):
            status = None
    if not isinstance(status, dict):
        raise StalledError(f"the process of {directory} does not answer: its event loop stalls")
    return status


def _rest(client: socket.socket) -> bytes:
    text = bytearray()
    while (part := client.recv(65536)) and len(text) <= _MAX_BYTES:
        text += part
    return bytes(text)


@contextmanager
def _opened(directory: Path) -> Iterator[str]:
    """Hold the path of the socket in a form that is short however long the directory's is.

    As it is, if it is short: root that goes on as another user may not use its own ``/proc/self/fd``.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise NotRunningError(f"there is no directory {directory}: name the --state-dir") from None
    try:
        usual = directory / NAME
        yield str(usual) if fits_socket(usual) else f"/proc/self/fd/{descriptor}/{NAME}"
    finally:
        os.close(descriptor)


@contextmanager
def _listening(directory: Path) -> Iterator[socket.socket]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # Before it is bound: Linux gives the file this mode, so that it is never another's to use.
        os.fchmod(listener.fileno(), _PRIVATE)
        with _opened(directory) as path:
            with suppress(FileNotFoundError):
                Path(path).unlink()
            listener.bind(path)
            if is_shown_to_group(directory):
                Path(path).chmod(_FOR_THE_GROUP)
        listener.listen(_BACKLOG)
        yield listener
    finally:
        listener.close()
        with suppress(OSError):
            (directory / NAME).unlink()
