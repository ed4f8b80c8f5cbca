import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def free_listener() -> Iterator[Callable[[], int]]:
    """Return what opens a port of this machine that takes connections and says nothing."""
    with ExitStack() as open_ones:

        def listen() -> int:
            listener = open_ones.enter_context(socket.create_server(("127.0.0.1", 0)))
            return int(listener.getsockname()[1])

        yield listen
