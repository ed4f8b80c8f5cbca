"""The settings of the node: the table, and the configuration that follows from it and from the enrolment.

Everything that decides how a node runs is read here, for `kubelet run`, for `kubelet config`, and for the
reload of a running daemon. Must not start anything.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kubelet.ceiling import FLAGS, LISTS, KindCeiling, table_of
from kubelet.config import (
    DEFAULT_HEARTBEAT_S,
    DEFAULT_LOOPBACK_PORT,
    DEFAULT_TTL_MS,
    SERVICE_SOCKET,
    SERVICE_STATE_DIR,
    NodeConfig,
    kinds_directory,
    read_stored,
    stored_file,
)
from schemas.addresses import AddressError, normal_url, parse_broker
from schemas.error_roots import ConfigError, NoStateDirError
from schemas.kinds import kind_name
from schemas.settings import (
    OTLP,
    PLAIN,
    Alternatives,
    Form,
    Given,
    Program,
    RunOptions,
    Setting,
    Settings,
    Source,
    Sources,
    list_of,
    log_level_setting,
    parse_flag,
    parse_path,
    read_run_options,
    whole_number,
)
from schemas.times import duration_between, duration_text

STATE_DIR = Setting(
    "state_dir",
    parse_path,
    "The directory of the node's identity.",
    "DIRECTORY",
    example=str(SERVICE_STATE_DIR),
)
RELAY = Setting(
    "relay",
    list_of(normal_url),
    "The public URL of the relay, and then others at which relays of its fleet are reached. "
    "Without it: as enrolled.",
    "URL,...",
    form=Form.LIST,
    example="https://relay.example",
)
BROKER = Setting(
    "broker",
    parse_broker,
    "The MQTT broker. Without it: as enrolled.",
    "HOST:PORT",
    example="mqtts://mqtt.example",
)
NO_BROKER = Setting(
    "no_broker",
    parse_flag,
    "The relay has no broker: announce by the session alone. Without it: as enrolled.",
    default="false",
    form=Form.FLAG,
)
LOOPBACK_PORT = Setting(
    "loopback_port",
    whole_number(0, 65_535),
    "The port on 127.0.0.1 of /readyz; 0 for any that is free.",
    "PORT",
    str(DEFAULT_LOOPBACK_PORT),
    Form.NUMBER,
)
HEARTBEAT = Setting(
    "heartbeat",
    duration_between("1s", "1h"),
    "The time between two heartbeats, or less if the relay asks for it; more only without this setting.",
    "DURATION",
    duration_text(int(DEFAULT_HEARTBEAT_S * 1000)),
    reloads=True,
)
TTL = Setting(
    "ttl",
    duration_between("1s", "24h"),
    "How long a manifest is valid; at least two heartbeats.",
    "DURATION",
    duration_text(DEFAULT_TTL_MS),
    reloads=True,
)
SOCKET = Setting(
    "socket",
    parse_path,
    "Where local agents connect. Without it: in the state directory.",
    "PATH",
    example=str(SERVICE_SOCKET),
)
KINDS = Setting(
    "kinds",
    list_of(kind_name),
    "The kinds that this node has besides system.echo and system.metrics, in place of those that are kept.",
    "NAME,...",
    form=Form.LIST,
    example="linux.health",
)
LOG_LEVEL = log_level_setting("The level from which on lines are logged.")
CEILING: tuple[Setting[KindCeiling], ...] = tuple(
    Setting(
        kind,
        partial(table_of, kind),
        f"What of {kind} may be asked for: {' and '.join((*LISTS[kind], *FLAGS.get(kind, ())))}.",
        "table",
        "{}",
        Form.TABLE,
        reloads=True,
    )
    for kind in sorted(LISTS)
)
"""The ceiling of the board's owner, a table for each kind (``kubelet.ceiling``)."""

KUBELET = Program(
    "kubelet",
    (
        STATE_DIR,
        RELAY,
        BROKER,
        NO_BROKER,
        LOOPBACK_PORT,
        HEARTBEAT,
        TTL,
        SOCKET,
        KINDS,
        LOG_LEVEL,
        OTLP,
        PLAIN,
        *CEILING,
    ),
)


BY_ENROLMENT = frozenset(setting.name for setting in (RELAY, BROKER, NO_BROKER, PLAIN))
"""What an enrolment decides: it counts more than what starts were told before it."""
_BROKERS = frozenset({BROKER.name, NO_BROKER.name})
_ALTERNATIVES = (Alternatives(_BROKERS, _BROKERS),)
_TOLD = frozenset(setting.name for setting in KUBELET.options) - {STATE_DIR.name}


def ceiling_in(settings: Settings) -> Mapping[str, KindCeiling]:
    """Return the tables of the ceiling that ``settings`` have, by kind."""
    return {setting.name: settings[setting] for setting in CEILING}


@dataclass(frozen=True, slots=True)
class LoadedNodeSettings:
    """The settings of a node, and what they were made of.

    Attributes:
        own_root: whether the node was enrolled at a relay with a certificate of its own CA.
        told: what earlier starts were told; None where there were none.
    """

    settings: Settings
    state_dir: Path
    own_root: bool
    told: RunOptions | None = None

    @property
    def kinds_directory(self) -> Path:
        return kinds_directory(self.state_dir)

    def keep_told(self, sources: Sources) -> Sequence[str]:
        """Keep what the command line says for later starts, and return what that replaces.

        Raises:
            OSError: it cannot be written.
        """
        if self.told is None:
            return ()
        return self.told.keep(sources.flags.keys() & _TOLD, self.settings, sources.named_file)

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.settings.get(KINDS) or ()

    def config(self) -> NodeConfig:
        """Return the configuration of the node.

        Raises:
            ConfigError: broker or relay are not named, or the settings contradict each other.
        """
        settings = self.settings
        broker, relay = settings.get(BROKER), settings.get(RELAY)
        if broker is not None and settings[NO_BROKER]:
            raise ConfigError(["--broker and --no-broker exclude each other"])
        if not relay or (broker is None and not settings[NO_BROKER]):
            raise ConfigError(
                ["enrol first with `edge-kubelet enroll`, or give --relay, and --broker or --no-broker"]
            )
        if settings[TTL] < 2 * settings[HEARTBEAT]:
            raise ConfigError(["--ttl must span two heartbeats, or one late heartbeat unlists the node"])
        try:
            return NodeConfig(
                broker,
                relay[0],
                heartbeat_s=settings[HEARTBEAT] / 1000,
                ttl_ms=settings[TTL],
                plain_allowed=settings[PLAIN],
                own_root=self.own_root,
                log_level=settings[LOG_LEVEL],
                kinds=self.kinds,
                otlp=settings.get(OTLP),
                other_relays=tuple(url for url in dict.fromkeys(relay) if url != relay[0]),
            )
        except AddressError as error:
            raise ConfigError([str(error)]) from None


def load_settings(
    sources: Sources, default_state_dir: Path | None, enter: Callable[[Path], object] | None = None
) -> LoadedNodeSettings:
    """Return the settings of a node that runs with ``sources``.

    ``enter`` is called with the state directory, before anything in it is read.

    Raises:
        ConfigError: they cannot be used; or name no state directory, and there is no default one.
        StoredConfigError, OSError: what enrolment stored cannot be read.
    """
    usual = {} if default_state_dir is None else {STATE_DIR.name: Given(str(default_state_dir), "default")}
    state_dir = sources.settings(usual).get(STATE_DIR)
    if state_dir is None:
        raise NoStateDirError
    if enter is not None:
        enter(state_dir)
    stored = read_stored(state_dir)
    named = frozenset(name for source in sources.by_precedence for name in source)
    told = read_run_options(state_dir, _TOLD, named, _ALTERNATIVES)
    enrolled = {} if stored is None else _enrolled(stored, state_dir, named | told.texts.keys())
    settings = sources.settings(usual, enrolled, told.source())
    return LoadedNodeSettings(settings, state_dir, stored is not None and stored.own_root, told)


def _enrolled(stored: NodeConfig, state_dir: Path, named: AbstractSet[str]) -> Source:
    texts: dict[Setting[Any], str] = {
        RELAY: ",".join(stored.relays),
        PLAIN: "true" if stored.plain_allowed else "false",
    }
    # Not beside what the operator gives: the two exclude each other.
    if not named & _BROKERS:
        texts |= {NO_BROKER: "true"} if stored.broker is None else {BROKER: str(stored.broker)}
    if stored.kinds:
        texts[KINDS] = ",".join(stored.kinds)
    return {setting.name: Given(text, enrolled_in(state_dir)) for setting, text in texts.items()}


def enrolled_in(state_dir: Path) -> str:
    """Return where what an enrolment decided stands, for people."""
    return f"enrolled, in {stored_file(state_dir)}"
