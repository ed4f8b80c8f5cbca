"""What the node's commands share: options, what these say with the settings, and how a result is printed.

Standard output holds results, standard error the rest. Must not run anything.
"""

import grp
import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kubelet.ceiling import Ceiling
from kubelet.config import (
    SERVICE_SOCKET,
    SERVICE_STATE_DIR,
    SOCKET_GROUP,
    NodeConfig,
    default_socket,
    kinds_directory,
    own_state_dir,
    read_stored,
)
from kubelet.process import fail
from kubelet.settings import KINDS, KUBELET, STATE_DIR, LoadedNodeSettings, ceiling_in, load_settings
from schemas.addresses import PLAIN_OPTION
from schemas.enrolment import JOIN_TOKEN_VARIABLE, JoinToken, JoinTokenError
from schemas.error_roots import NoStateDirError, OperatorError
from schemas.files import fits_socket, read_given, read_named_secret
from schemas.identity import CertificateFormatError, certificates_in
from schemas.process.command_errors import EXIT_USAGE
from schemas.process.state_owner import act_as_owner_of, home_directory, usual_directory
from schemas.settings import Settings, Sources, from_flags, read_sources

if TYPE_CHECKING:
    from schemas.registry import Contract


StateDir = Annotated[
    Path | None,
    typer.Option("--state-dir", metavar="DIRECTORY", help="The directory of the node's identity."),
]
Plain = Annotated[
    bool, typer.Option(PLAIN_OPTION, help="Let others on the network read the traffic, and change it.")
]
Socket = Annotated[Path | None, typer.Option("--socket", metavar="PATH", help="Where local agents connect.")]

_TIME = "_at_ms"
_UNIT = "edge-kubelet.service"
_UNIT_DIRECTORIES = ("etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
_SYSTEMD_RUNS = "run/systemd/system"
"""sd_booted(3)."""


def typed_config(flags: Mapping[str, str]) -> NodeConfig:
    """Return the configuration of nodes that ``flags`` alone make: no file, no environment, no enrolment."""
    settings = Settings(KUBELET.table, [from_flags(KUBELET.table, flags)])
    return LoadedNodeSettings(settings, Path(), own_root=False).config()


def join_token(text: str | None, file: Path | None) -> JoinToken:
    """Return the join token that was typed, or lies in ``file``, or in the environment."""
    if text is not None and file is not None:
        fail("--token and --token-file exclude each other", EXIT_USAGE)
    if file is not None:
        try:
            text = read_named_secret(file)
        except UnicodeDecodeError:
            fail(f"{file} holds no join token", EXIT_USAGE)
    try:
        return JoinToken.parse(text or os.environ.get(JOIN_TOKEN_VARIABLE) or "")
    except JoinTokenError as error:
        fail(f"{error}; give it in {JOIN_TOKEN_VARIABLE}, with --token-file or with --token", EXIT_USAGE)


def named_pem(file: Path) -> str:
    """Return the text of a file with certificates that the operator named.

    Raises:
        OperatorError: it is not text, too large, or a certificate in it is not base64.
        OSError: it cannot be read.
    """
    try:
        text = read_given(file).decode("utf-8")
        certificates_in(text)
    except UnicodeDecodeError:
        raise OperatorError(f"{file} is not PEM: it is not text") from None
    except CertificateFormatError as error:
        raise OperatorError(f"{file} is not PEM: {error}") from None
    return text


def socket_of(named: Path | None, directory: Path) -> Path | None:
    """Return the socket that was named, or the usual one; None where that one's path would be too long."""
    if named is not None:
        return named.absolute()
    usual = default_socket(directory)
    return usual if fits_socket(usual) else None


def socket_group() -> int | None:
    """Return the group whose members may use the socket; None if this machine has none of that name.

    Looked up by the command line: the daemon would keep in memory what the system needs to look up names.
    """
    try:
        return grp.getgrnam(SOCKET_GROUP).gr_gid
    except KeyError:
        return None


def agent_socket(named: Path | None, directory: Path) -> Path:
    """Return the socket that was named, or the one of ``directory``, or else that of the service."""
    if named is not None:
        return named.absolute()
    beside = default_socket(directory)
    return beside if beside.exists() else SERVICE_SOCKET


def directory_of(state_dir: Path | None) -> Path:
    """Return the state directory that was named: here, in the environment or the file; else the usual one.

    Root goes on as its owner.

    Raises:
        ConfigError: it is not named here, and the settings cannot be used; or it is named nowhere, and there
            is no usual one.
    """
    if state_dir is None:
        state_dir = read_sources(KUBELET, {}, None, os.environ).value(STATE_DIR)
    directory = state_dir or usual_state_dir()
    if directory is None:
        raise NoStateDirError
    act_as_owner_of(directory)
    return directory


def settings_of_start(sources: Sources, *, for_good: bool = False) -> LoadedNodeSettings:
    """Return the settings of the node as a start has them. Root goes on as their owner.

    Raises:
        ConfigError: as ``load_settings``; or ``sources`` are of another file than an earlier start was told.
        StoredConfigError, OSError: as ``load_settings``.
    """
    loaded = load_settings(sources, usual_state_dir(), partial(act_as_owner_of, for_good=for_good))
    if loaded.told is not None:
        loaded.told.check_file(sources)
    return loaded


def settings_for_command(sources: Sources) -> LoadedNodeSettings:
    """Return the settings of the node, of the file that a start was told unless ``sources`` name one.

    Raises:
        ConfigError, StoredConfigError, OSError: as ``load_settings``.
    """
    loaded = load_settings(sources, usual_state_dir(), act_as_owner_of)
    told = None if loaded.told is None else loaded.told.other_file(sources)
    if told is None:
        return loaded
    flags = {**sources.flags, STATE_DIR.name: str(loaded.state_dir)}
    return load_settings(read_sources(KUBELET, flags, told, os.environ), loaded.state_dir)


def contract_of_settings(directory: Path) -> "Contract":
    """Return the contract with the kinds that environment or file name, for the state in ``directory``.

    Where they name none, those that are kept there, if this user may read it.

    Raises:
        ConfigError: one of them cannot be used, or the settings cannot.
    """
    from schemas.registry import read_contract  # noqa: PLC0415 - the validator, for commands that need it

    names = read_sources(KUBELET, {}, None, os.environ).value(KINDS)
    if names is None:
        with suppress(OSError):
            names = stored.kinds if (stored := read_stored(directory)) is not None else None
    return read_contract(names or (), kinds_directory(directory))


def ceiling_of_settings() -> Ceiling:
    """Return the ceiling of the board's owner, as the file has it.

    Raises:
        ConfigError: the settings cannot be used.
    """
    return Ceiling(ceiling_in(read_sources(KUBELET, {}, None, os.environ).settings()))


def usual_state_dir() -> Path | None:
    """Return the state directory that is used unless the operator names another; None if there is none."""
    return usual_directory(SERVICE_STATE_DIR, own_state_dir(home_directory()))


def print_facts(facts: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the result of a command, for programs or for people."""
    if as_json:
        typer.echo(json.dumps(facts))
        return
    width = max(len(name.removesuffix(_TIME)) for name in facts)
    for name, value in facts.items():
        if name.endswith(_TIME):
            text = f"{datetime.fromtimestamp(value // 1000, UTC):%Y-%m-%d %H:%M} UTC"
        elif isinstance(value, bool):
            text = "yes" if value else "no"
        else:
            text = "none" if value is None else str(value)
        typer.echo(f"{name.removesuffix(_TIME):<{width}}  {text}")


def say(text: str) -> None:
    """Print what is not part of the result."""
    typer.echo(text, err=True)


def next_step(state_dir: Path, usual: Path | None, root: Path = Path("/")) -> str:
    """Return the command that lets an enrolled node run: its service where there is one, else the daemon.

    ``usual`` is the state directory of this user's commands that name none; ``root`` stands for the root of
    the file system.
    """
    directory = Path(os.path.abspath(state_dir))  # noqa: PTH100 - links stay as they are named
    if directory == SERVICE_STATE_DIR and (root / _SYSTEMD_RUNS).is_dir():
        if any((root / units / _UNIT).exists() for units in _UNIT_DIRECTORIES):
            return "systemctl enable --now edge-kubelet"
        return "edge-kubelet service install, and then: systemctl enable --now edge-kubelet"
    if directory == usual:
        return "edge-kubelet run"
    return f"edge-kubelet run --state-dir {shlex.quote(str(directory))}"
