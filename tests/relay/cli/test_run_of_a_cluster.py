import os
from pathlib import Path

import pytest

from relay.cli.demo.more_relays import new_credentials
from schemas.files import PRIVATE, PUBLIC, write_atomic
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_CONFIG
from tests.fakes.relay_command import FREE_PORT
from tests.fakes.relay_command import RelayCommand as Relay

pytestmark = pytest.mark.integration

RUN = ["run", "--broker", "127.0.0.1:1", "--listen", f"127.0.0.1:{FREE_PORT}", "--cluster"]


@pytest.fixture
def seed(tmp_path: Path) -> Path:
    text, _ = new_credentials(os.urandom)
    write_atomic(file := tmp_path / "relay.seed", text, PRIVATE)
    return file


@pytest.fixture
def relay_with_a_ca(relay: Relay) -> Relay:
    assert relay("ca", "init").code == 0
    return relay


@pytest.mark.parametrize(
    "servers", ["foo", "http://a.example", "nats://a.example:0", "nats://a.example,b", "nats://u:secret@a"]
)
def test_what_is_no_list_of_servers_is_refused_with_the_form_that_it_must_have(
    relay: Relay, seed: Path, servers: str
) -> None:
    outcome = relay(*RUN, servers, "--cluster-credentials", seed)
    assert outcome.code == EXIT_CONFIG
    assert outcome.error.startswith("relay: --cluster: ")
    assert "nats://HOST:PORT or tls://HOST:PORT" in outcome.error
    assert "secret" not in outcome.error


def test_servers_without_credentials_are_refused_with_the_option_that_is_missing(relay: Relay) -> None:
    outcome = relay(*RUN, "nats://127.0.0.1")
    assert outcome.code == EXIT_CONFIG
    assert "--cluster-credentials" in outcome.error


def test_credentials_that_are_not_there_are_named(relay_with_a_ca: Relay, tmp_path: Path) -> None:
    outcome = relay_with_a_ca(*RUN, "nats://127.0.0.1", "--cluster-credentials", tmp_path / "missing")
    assert outcome.code == EXIT_CANNOT_RUN
    assert outcome.error == f"relay: --cluster-credentials: {tmp_path}/missing: No such file or directory"


def test_credentials_that_others_can_read_are_refused_with_what_to_do(
    relay_with_a_ca: Relay, seed: Path
) -> None:
    seed.chmod(PUBLIC)
    outcome = relay_with_a_ca(*RUN, "nats://127.0.0.1", "--cluster-credentials", seed)
    assert outcome.code == EXIT_CANNOT_RUN
    assert outcome.error.startswith(f"relay: --cluster-credentials: {seed} ")
    assert outcome.error.endswith(f"chmod 600 {seed}")


@pytest.mark.parametrize("content", ["what is secret in it", b"secret\xff"])
def test_a_file_that_holds_no_credentials_is_refused_with_what_it_must_hold(
    relay_with_a_ca: Relay, tmp_path: Path, content: str | bytes
) -> None:
    write_atomic(file := tmp_path / "nothing", content, PRIVATE)
    outcome = relay_with_a_ca(*RUN, "nats://127.0.0.1", "--cluster-credentials", file)
    assert outcome.code == EXIT_CANNOT_RUN
    assert outcome.error.startswith(f"relay: --cluster-credentials: {file} ")
    assert "a certificate with its key" in outcome.error
    assert "the seed of a user's nkey" in outcome.error
    assert "secret" not in outcome.error


def test_a_root_that_cannot_be_used_is_named_with_its_option(
    relay_with_a_ca: Relay, seed: Path, tmp_path: Path
) -> None:
    given = [*RUN, "tls://127.0.0.1", "--cluster-credentials", seed, "--cluster-root", tmp_path / "missing"]
    outcome = relay_with_a_ca(*given)
    assert outcome.code == EXIT_CANNOT_RUN
    assert outcome.error == f"relay: --cluster-root: {tmp_path}/missing: No such file or directory"


def test_a_server_that_is_named_twice_is_refused(relay: Relay, seed: Path) -> None:
    outcome = relay(*RUN, "nats://127.0.0.1:4222,nats://127.0.0.1:4222", "--cluster-credentials", seed)
    assert outcome.code == EXIT_CONFIG
    assert outcome.error == "relay: --cluster: cluster names 'nats://127.0.0.1:4222' twice"
