import os
import socket
import subprocess
import sys

import pytest

from relay.broker.ports import NoBrokerPortError, first_free, is_free, listening
from schemas.addresses import HostPort
from tests.fakes.ports import unused_port

pytestmark = pytest.mark.integration


def test_a_port_that_is_free_is_taken() -> None:
    port = unused_port()
    assert is_free(HostPort("127.0.0.1", port))
    assert first_free("127.0.0.1", port) == HostPort("127.0.0.1", port)


def test_of_a_port_that_is_in_use_the_next_free_one_is_taken() -> None:
    with socket.create_server(("127.0.0.1", unused_port())) as server:
        port = int(server.getsockname()[1])
        assert not is_free(HostPort("127.0.0.1", port))
        assert first_free("127.0.0.1", port).port > port


def test_an_address_of_another_machine_is_an_error_that_names_the_option() -> None:
    with pytest.raises(NoBrokerPortError, match="--broker-listen"):
        first_free("192.0.2.1", 1883)


def test_only_the_process_that_listens_does() -> None:
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1])"
    command = [sys.executable, "-P", "-u", "-c", f"{code}; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        assert port in listening(other.pid)
        assert port not in listening(os.getpid())
        # The number of a connection's own end is no port that it listens on.
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert client.getsockname()[1] not in listening(os.getpid())
        other.communicate(b"", 10)
    assert port not in listening(other.pid)
