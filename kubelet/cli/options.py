"""The options of the node's commands, and the configuration that they make with that of the enrolment.

Must not run anything.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from kubelet.caller_tools.socket_file import MAX_PATH_BYTES
from kubelet.config import SERVICE_SOCKET, NodeConfig, default_socket, default_state_dir, read_stored
from kubelet.process import EXIT_USAGE, fail
from schemas.addresses import PLAIN_OPTION, normal_url, parse_broker
from schemas.enrolment import JoinToken, JoinTokenError
from schemas.error_roots import OperatorError
from schemas.files import read_named_secret
from schemas.identity import certificates_in

_TOKEN_VARIABLE = "EDGE_JOIN_TOKEN"  # noqa: S105 - the name of a variable, not a secret

StateDir = Annotated[Path | None, typer.Option("--state-dir", help="The directory of the node's identity.")]
Broker = Annotated[str, typer.Option("--broker", metavar="HOST:PORT", help="The MQTT broker.")]
Relay = Annotated[str, typer.Option("--relay", metavar="URL", help="The relay's public URL.")]
MaybeBroker = Annotated[str | None, typer.Option("--broker", metavar="HOST:PORT", help="The MQTT broker.")]
MaybeRelay = Annotated[str | None, typer.Option("--relay", metavar="URL", help="The relay's public URL.")]
Plain = Annotated[
    bool, typer.Option(PLAIN_OPTION, help="Let others on the network read the traffic, and change it.")
]
Socket = Annotated[Path | None, typer.Option("--socket", metavar="PATH", help="Where local agents connect.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Heartbeat = Annotated[
    float, typer.Option("--heartbeat", min=1.0, max=3600.0, help="Seconds between two heartbeats.")
]
Ttl = Annotated[
    int, typer.Option("--ttl-ms", min=1000, max=86_400_000, help="How long a manifest is good for.")
]


def stored_config(
    directory: Path, broker: str | None, relay: str | None, heartbeat_s: float, ttl_ms: int, *, plain: bool
) -> NodeConfig:
    """Return the configuration of the enrolment, but for what the command line overrides."""
    stored = read_stored(directory)
    if stored is not None:
        broker, relay = broker or str(stored.broker), relay or stored.relay_url
        plain = plain or stored.plain_allowed
    if broker is None or relay is None:
        fail("enrol first with `kubelet enroll`, or give --broker and --relay", EXIT_USAGE)
    own_root = stored is not None and stored.own_root
    return typed_config(broker, relay, heartbeat_s, ttl_ms, plain=plain, own_root=own_root)


def typed_config(
    broker: str, relay: str, heartbeat_s: float, ttl_ms: int, *, plain: bool = False, own_root: bool = False
) -> NodeConfig:
    """Return the configuration that was typed."""
    if ttl_ms < heartbeat_s * 1000 * 2:
        fail("--ttl-ms must span two heartbeats, or one late heartbeat unlists the node", EXIT_USAGE)
    return NodeConfig(parse_broker(broker), normal_url(relay), heartbeat_s, ttl_ms, plain, own_root)


def join_token(text: str | None, file: Path | None) -> JoinToken:
    """Return the join token that was typed, or lies in ``file``, or in the environment."""
    if text is not None and file is not None:
        fail("--token and --token-file exclude each other", EXIT_USAGE)
    if file is not None:
        text = _token_in(file)
    try:
        return JoinToken.parse(text or os.environ.get(_TOKEN_VARIABLE) or "")
    except JoinTokenError as error:
        fail(f"{error}; give it in {_TOKEN_VARIABLE}, with --token-file or with --token", EXIT_USAGE)


def _token_in(file: Path) -> str:
    try:
        return read_named_secret(file)
    except UnicodeDecodeError:
        fail(f"{file} holds no join token", EXIT_USAGE)


def named_pem(file: Path) -> str:
    """Return the text of a file with certificates that the operator named.

    Raises:
        OperatorError: it is not text, too large, or a certificate in it is not base64.
        OSError: it cannot be read.
    """
    try:
        text = file.read_text("utf-8")
        certificates_in(text)
    except UnicodeDecodeError:
        raise OperatorError(f"{file} is not PEM: it is not text") from None
    except ValueError as error:
        raise OperatorError(f"{file} is not PEM: {error}") from None
    return text


def socket_of(named: Path | None, directory: Path) -> Path | None:
    """Return the socket that was named, or the usual one; None where that one's path would be too long."""
    if named is not None:
        return named.absolute()
    usual = default_socket(directory)
    return usual if len(os.fsencode(usual)) <= MAX_PATH_BYTES else None


def agent_socket(named: Path | None, directory: Path) -> Path:
    """Return the socket that was named, or the one of ``directory``, or else that of the service."""
    if named is not None:
        return named.absolute()
    beside = default_socket(directory)
    return beside if beside.exists() else SERVICE_SOCKET


def directory_of(state_dir: Path | None) -> Path:
    """Return the state directory that was named, or the usual one."""
    return state_dir or default_state_dir(Path.home(), is_root=os.geteuid() == 0)
