"""A real nats-server for the relays of a test's fleet, in a process of its own."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from relay.broker.nats_server import find_nats_server
from relay.cli.demo.more_relays import cluster_server_config, new_credentials
from relay.pki.issuing import issue_client
from relay.pki.roots import server_key_to_pem
from relay.settings.config import ClusterConfig, ClusterServer
from schemas.addresses import HostPort
from schemas.files import PRIVATE, write_atomic
from schemas.keys import private_key_to_pem
from tests.fakes.ports import unused_port
from tests.fakes.server_ca import SimulatedServerCa, server_key_named
from tests.fakes.signer import SimulatedCa, key_named

FLEET = "main"
BOUND_S = 20
SHIPPED = Path(__file__).parents[2] / "docs" / "cluster" / "nats-server.conf"
_POLL_S = 0.01


class NatsServer:
    """A server for one fleet on loopback, with its files in ``directory``. ``others`` are users besides."""

    def __init__(self, directory: Path, others: str = "") -> None:
        self.address = HostPort("127.0.0.1", unused_port())
        self.directory = self._directory = directory
        self._others = others
        self._process: subprocess.Popen[bytes] | None = None
        self.credentials = directory / "relay.seed"
        seed, self.public_key = new_credentials(os.urandom)
        write_atomic(self.credentials, seed + "\n", PRIVATE)

    @classmethod
    @contextmanager
    def running(cls, directory: Path, others: str = "") -> Iterator[Self]:
        """Hold one that accepts connections."""
        server = cls(directory, others)
        server.start()
        try:
            yield server
        finally:
            server.stop()

    @property
    def url(self) -> str:
        """The server as ``--cluster`` names it."""
        return f"nats://{self.address}"

    @property
    def config(self) -> ClusterConfig:
        """What a relay of the fleet is configured with."""
        server = ClusterServer(self.address.host, self.address.port, tls=False)
        return ClusterConfig((server,), self.credentials, None, FLEET)

    def config_text(self) -> str:
        """Return what it is configured with."""
        text = cluster_server_config(self.address, self._directory / "store", self.public_key, FLEET)
        return self._with_others(text)

    def _with_others(self, text: str) -> str:
        return text.replace("  users: [\n", f"  users: [\n{self._others}")

    def start(self) -> None:
        """Start it, and return when it accepts connections."""
        config = self._directory / "nats-server.conf"
        config.write_text(self.config_text(), "utf-8")
        log = self._directory / "nats-server.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(find_nats_server()), "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        give_up = time.monotonic() + BOUND_S
        while self._process.poll() is None and time.monotonic() < give_up:
            try:
                socket.create_connection((self.address.host, self.address.port), 1).close()
            except OSError:
                time.sleep(_POLL_S)  # a program says in no other way that it listens
            else:
                return
        self.stop()
        raise AssertionError(log.read_text("utf-8"))

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(BOUND_S)
            self._process = None

    def kill(self) -> None:
        """End it without a chance to write anything."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(BOUND_S)
        self._process = None

    def suspend(self) -> None:
        """Let it neither read nor write, with its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def lose_all(self) -> None:
        """Delete what it keeps, while it is stopped."""
        shutil.rmtree(self._directory / "store")


_PUT_IN = {
    "0.0.0.0:4222": "{address}",
    "/etc/nats/edge-cluster/": "{files}/",
    "/var/lib/nats/edge-cluster": "{store}",
}


class TlsNatsServer(NatsServer):
    """The same with the configuration that ships, and certificates for itself and for ``relay-1``."""

    @classmethod
    @contextmanager
    def trusting(cls, directory: Path, root_pem: str, others: str = "") -> Iterator[Self]:
        """Hold one that accepts connections, also by certificates from another root."""
        server = cls(directory, others)
        roots = directory / "roots.pem"
        write_atomic(roots, roots.read_text("ascii") + root_pem)
        server.start()
        try:
            yield server
        finally:
            server.stop()

    def __init__(self, directory: Path, others: str = "") -> None:
        super().__init__(directory, others)
        now_ms = time.time_ns() // 1_000_000
        servers, clients = SimulatedServerCa("of the servers", now_ms), SimulatedCa("of the relays", now_ms)
        self.root = directory / "server-root.pem"
        write_atomic(self.root, servers.root_pem)
        key = server_key_named("a server of the cluster")
        served = servers.issue("nats", ["127.0.0.1"], key.public_key(), 90)
        write_atomic(directory / "server.pem", served)
        write_atomic(directory / "server.key", server_key_to_pem(key), PRIVATE)
        write_atomic(directory / "roots.pem", clients.root_pem)
        self.credentials = self.credentials_of("relay-1", clients, now_ms)
        self.stranger = self.credentials_of("stranger", clients, now_ms)

    def credentials_of(self, name: str, ca: SimulatedCa, now_ms: int) -> Path:
        """Return the file with the certificate and the key of a client."""
        key = key_named(name)
        certificate = issue_client(
            ca.root_pem,
            ca.key,
            name=name,
            uri=f"urn:edge-kubelet:{name}",
            public_key=bytes(key.verify_key),
            now_ms=now_ms,
            valid_days=90,
            serial=len(name),
        )
        file = self.directory / f"{name}.pem"
        write_atomic(file, certificate + private_key_to_pem(key), PRIVATE)
        return file

    @property
    def config(self) -> ClusterConfig:
        """What a relay of the fleet is configured with."""
        server = ClusterServer(self.address.host, self.address.port, tls=True)
        return ClusterConfig((server,), self.credentials, self.root, FLEET)

    def config_text(self) -> str:
        """Return what ships, with an address and paths of its own."""
        text = SHIPPED.read_text("utf-8")
        put_in = {"address": self.address, "files": self.directory, "store": self.directory / "store"}
        for theirs, ours in _PUT_IN.items():
            assert theirs in text
            text = text.replace(theirs, ours.format(**put_in))
        return self._with_others(text)
