"""The configuration of a node, from the command line or its enrolment, checked before anything starts.

Must not read a file or the environment: the loader of the settings does.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from schemas.addresses import (
    AddressError,
    BrokerAddress,
    check_one_fleet,
    check_private_broker,
    check_private_url,
    normal_url,
    parse_broker,
)
from schemas.error_roots import CommandLineError, StateError
from schemas.files import read_state, write_atomic
from schemas.kinds import kind_name
from schemas.lines import LogLevel
from schemas.strict_json import StrictJsonError, loads

DEFAULT_LOOPBACK_PORT = 8701
DEFAULT_HEARTBEAT_S = 60.0
DEFAULT_TTL_MS = 15 * 60_000

_STORED = "kubelet.json"
_MAX_STORED_BYTES = 65_536  # as many relays as a node takes, with names of the greatest length


class StoredConfigError(StateError):
    """What enrolment stored cannot be used; the text is what to do."""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """How one node reaches its relay and its broker.

    Attributes:
        broker: None where the relay has none: the manifest is sent by the session alone.
        relay_url: the fleet's public URL, in its normal form; it is the audience that this node signs for.
        other_relays: further URLs at which relays of the fleet are reached.
        heartbeat_s: seconds between two heartbeats, give or take a tenth.
        ttl_ms: how long a manifest is good for, in milliseconds.
        plain_allowed: whether the operator has allowed connections that others can read.
        own_root: whether the relay and the broker are trusted by the root of this node's leaf alone; else
            by what this machine trusts.
        log_level: the level from which on lines are logged.
        kinds: the kinds of installed packages that this node has besides its own.
        otlp: the collector to which spans are sent; None: they are logged alone.

    Raises:
        AddressError: relay or broker may not be reached like this.
    """

    broker: BrokerAddress | None
    relay_url: str
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    ttl_ms: int = DEFAULT_TTL_MS
    plain_allowed: bool = False
    own_root: bool = False
    log_level: LogLevel = LogLevel.INFO
    kinds: tuple[str, ...] = ()
    otlp: str | None = None
    other_relays: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_one_fleet(self.relays)
        for url in self.relays:
            check_private_url(url, plain_allowed=self.plain_allowed)
        if self.broker is not None:
            check_private_broker(self.broker, plain_allowed=self.plain_allowed)

    @property
    def relays(self) -> tuple[str, ...]:
        return (self.relay_url, *self.other_relays)


@dataclass(frozen=True, slots=True)
class DaemonPlan:
    """The arguments of the daemon. They hold no secret, so they may be on a command line.

    Attributes:
        socket: where local agents connect; None if they cannot.
        socket_group: the number of the group that may use it; None where there is no such group.
        settings: all settings, by name, as ``schemas.settings.Settings.serialized`` returns them; a reload
            compares.
        flags, config_file: what the command line gave, with which a reload reads the settings again.
        version: of this program, which the daemon shows.
    """

    config: NodeConfig
    state_dir: Path
    loopback_port: int
    socket: Path | None = None
    socket_group: int | None = None
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    config_file: Path | None = None
    version: str = ""

    def to_json(self) -> str:
        """Return the plan as text, for ``python -P -m kubelet.daemon``."""
        return json.dumps(asdict(self), default=str)  # what JSON cannot write is a path

    @classmethod
    def from_json(cls, text: str) -> "DaemonPlan":
        plan = json.loads(text)
        config, broker = plan["config"], plan["config"]["broker"]
        return cls(
            config=NodeConfig(
                **{
                    **config,
                    "broker": None if broker is None else BrokerAddress(**broker),
                    "log_level": LogLevel(config["log_level"]),
                    "kinds": tuple(config["kinds"]),
                    "other_relays": tuple(config["other_relays"]),
                }
            ),
            state_dir=Path(plan["state_dir"]),
            loopback_port=plan["loopback_port"],
            socket=_path(plan["socket"]),
            socket_group=plan["socket_group"],
            settings=plan["settings"],
            flags=plan["flags"],
            config_file=_path(plan["config_file"]),
            version=plan["version"],
        )


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def store(config: NodeConfig, state_dir: Path) -> None:
    """Write what ``kubelet run`` needs to know of ``config``. It holds no secret."""
    stored: dict[str, Any] = {
        "relay": config.relay_url,
        "broker": None if config.broker is None else str(config.broker),
        "own_root": config.own_root,
        "insecure_plain_transports": config.plain_allowed,
    }
    if config.other_relays:
        stored["other_relays"] = list(config.other_relays)
    if config.kinds:
        stored["kinds"] = list(config.kinds)
    write_atomic(stored_file(state_dir), json.dumps(stored, indent=2) + "\n")


def stored_file(state_dir: Path) -> Path:
    """Return the file that ``store`` writes."""
    return state_dir / _STORED


def kinds_directory(state_dir: Path) -> Path:
    """Return where `kubelet kind install` puts packages, for their kinds alone.

    Those of the service belong to root: what its handlers run, they cannot change.
    """
    return SERVICE_KINDS if state_dir == SERVICE_STATE_DIR else state_dir / "kinds"


def last_issued_file(state_dir: Path) -> Path:
    """Return the file that remembers the newest manifest's time."""
    return state_dir / "last_issued_ms"


def relay_kinds_file(state_dir: Path) -> Path:
    """Return the file that remembers which kinds the relay knows."""
    return state_dir / "relay_kinds.json"


def caller_ids_file(state_dir: Path) -> Path:
    """Return the file that remembers to whom the callers' ids belong."""
    return state_dir / "caller_ids.json"


def forget(state_dir: Path) -> None:
    """Remove what ``store`` wrote."""
    stored_file(state_dir).unlink(missing_ok=True)


def read_stored(state_dir: Path) -> NodeConfig | None:
    """Return what ``store`` wrote; None if nothing did.

    Raises:
        StoredConfigError: it is damaged, or was changed into what may not be.
    """
    file = stored_file(state_dir)
    try:
        stored = loads(read_state(file), max_bytes=_MAX_STORED_BYTES)
        flags = (stored["insecure_plain_transports"], stored["own_root"])
        if not all(isinstance(flag, bool) for flag in flags):
            raise StoredConfigError(f"{file} is damaged: a flag is neither true nor false")
        broker = None if stored["broker"] is None else parse_broker(stored["broker"])
        relay_url = normal_url(stored["relay"])
        others = tuple(map(normal_url, stored.get("other_relays", [])))
        return NodeConfig(
            broker,
            relay_url,
            plain_allowed=flags[0],
            own_root=flags[1],
            other_relays=others,
            kinds=tuple(map(kind_name, stored.get("kinds", []))),
        )
    except FileNotFoundError:
        return None
    except (AddressError, CommandLineError) as error:
        raise StoredConfigError(f"{file}: {error}") from None
    except (StrictJsonError, KeyError, TypeError, AttributeError):
        raise StoredConfigError(f"{file} is damaged: remove it, and say --broker and --relay") from None


SERVICE_STATE_DIR = Path("/var/lib/edge-kubelet")
SERVICE_SETTINGS = Path("/etc/edge-kubelet")
SERVICE_KINDS = SERVICE_SETTINGS / "kinds"
SERVICE_SOCKET = Path("/run/edge-kubelet/relay.sock")
SOCKET_GROUP = "edge-kubelet"


def default_socket(state_dir: Path) -> Path:
    """Return where local agents connect to the node in ``state_dir``, unless the operator names a place."""
    return SERVICE_SOCKET if state_dir == SERVICE_STATE_DIR else state_dir / "relay.sock"


def own_state_dir(home: Path | None) -> Path | None:
    """Return the state directory of a user's own node; None for a user without a home directory."""
    return None if home is None else home / ".local/state/edge-kubelet"
