"""Which broker a relay uses: one that is named, its own, or none. Options decide, then what is kept.

Its own is chosen where nothing names one. Its port is chosen once, since nodes are told it when they enrol.
Its settings are a part of the table. Must not start anything, and must not read or write what is kept.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path

from relay.settings.kept import KeptSettings
from schemas.addresses import (
    AddressError,
    BrokerAddress,
    HostPort,
    host_of,
    is_loopback,
    parse_broker,
)
from schemas.settings import Alternatives, Form, Given, Setting, Settings, Source, parse_flag, parse_path

_PLAIN_PORT, _TLS_PORT = 1883, 8883
"""The ports that are registered for MQTT, without and with TLS."""
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, and not bound


FindFree = Callable[[str, int], HostPort]
"""Returns where to listen on a host: at a port if that is free, else at another."""


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """What the command line says.

    Attributes:
        broker, node_broker: a broker of the operator, as the relay reaches it and as nodes do.
        listen: where the relay's own is to listen, ``mqtts://HOST:PORT`` with TLS.
        none: whether the relay is to work without a broker.
        of_a_named_one: the options that were given and that only a broker of the operator has.
    """

    broker: str | None = None
    node_broker: str | None = None
    listen: str | None = None
    none: bool = False
    of_a_named_one: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BrokerChoice:
    """The broker of one relay.

    Attributes:
        broker: as the relay reaches it; None: there is none.
        node_broker: as nodes reach it, where that differs.
        own: where the relay's own broker listens; None: it has none.
        kept: the settings with what is to be kept of this choice.
        notes: what the operator is to be told, one line each.
    """

    broker: BrokerAddress | None
    node_broker: BrokerAddress | None
    own: BrokerAddress | None
    kept: KeptSettings
    notes: tuple[str, ...] = ()


def choose_broker(
    options: BrokerOptions,
    kept: KeptSettings,
    listen: HostPort,
    public_url: str,
    find_free: FindFree,
) -> BrokerChoice:
    """Return the broker of a relay that listens at ``listen`` and is reached by ``public_url``.

    Raises:
        AddressError: options exclude each other, an address is malformed, or nodes could not
            reach an own broker.
        NoPortError: an own broker finds no port.
    """
    _check_alone(options)
    if options.none:
        # What is kept stays so: a start that names a broker takes its own again at the same port.
        return BrokerChoice(None, None, None, kept)
    if options.broker is not None or (kept.broker is not None and options.listen is None):
        return _named(options, kept)
    if options.of_a_named_one:
        raise AddressError(f"{options.of_a_named_one[0]} is for a broker of yours: name that with --broker")
    return _own(options, kept, listen, public_url, find_free)


def broker_of_nodes(kept: KeptSettings, public_url: str) -> BrokerAddress | None:
    """Return the broker that nodes are given when they enrol, by what is kept; None if nothing is."""
    if named := kept.node_broker or kept.broker:
        return parse_broker(named)
    if kept.own_broker is None:
        return None
    own = parse_broker(kept.own_broker)
    return BrokerAddress(host_of(public_url) if own.tls else own.host, own.port, own.tls)


def _changed(new: str, old: str) -> str:
    return (
        f"the broker is {new} from now on, and no longer the relay's own at {old}: enrolled nodes go on by "
        "their sessions, and publish there once they are run with --broker"
    )


def _check_alone(options: BrokerOptions) -> None:
    others = [
        *(["--broker"] if options.broker else []),
        *(["--node-broker"] if options.node_broker else []),
        *(["--broker-listen"] if options.listen else []),
        *options.of_a_named_one,
    ]
    if options.none and others:
        raise AddressError(f"--no-broker and {others[0]} exclude each other")
    if options.broker and options.listen:
        raise AddressError("--broker and --broker-listen exclude each other: that is for the relay's own")


def _named(options: BrokerOptions, kept: KeptSettings) -> BrokerChoice:
    notes: list[str] = []
    if options.broker is None:
        # Kept together: the way of nodes to another broker is no way to this one.
        broker, node_broker = kept.broker or "", options.node_broker or kept.node_broker
    else:
        broker, node_broker = options.broker, options.node_broker
        if kept.own_broker is not None:
            notes.append(_changed(broker, kept.own_broker))
    return BrokerChoice(
        parse_broker(broker),
        parse_broker(node_broker) if node_broker else None,
        None,
        replace(kept, broker=broker, node_broker=node_broker, own_broker=None),
        tuple(notes),
    )


def _own(
    options: BrokerOptions,
    kept: KeptSettings,
    listen: HostPort,
    public_url: str,
    find_free: FindFree,
) -> BrokerChoice:
    is_open = not (is_loopback(listen.host) and is_loopback(host_of(public_url)))
    before = parse_broker(kept.own_broker) if kept.own_broker else None
    notes: list[str] = []
    if options.listen is not None:
        own = _asked(options.listen, is_open=is_open)
    elif before is not None and (before.tls or not is_open):
        own = before
    else:
        own = _first(listen, find_free, notes, is_open=is_open)
    if before is not None and own != before:
        notes.append(_changed(str(own), str(before)))
    # The way of nodes to another broker is no way to this one.
    node_broker = options.node_broker or (kept.node_broker if own == before else None)
    to_keep = replace(kept, broker=None, node_broker=node_broker, own_broker=str(own))
    return BrokerChoice(
        BrokerAddress(_WILDCARDS.get(own.host, own.host), own.port, own.tls),
        broker_of_nodes(to_keep, public_url),
        own,
        to_keep,
        tuple(notes),
    )


def _asked(text: str, *, is_open: bool) -> BrokerAddress:
    own = parse_broker(text)
    if not own.tls and (is_open or not is_loopback(own.host)):
        raise AddressError(
            f"{own} has no TLS, and other machines are to reach the broker: --broker-listen mqtts://HOST:PORT"
        )
    return own


def _first(listen: HostPort, find_free: FindFree, notes: list[str], *, is_open: bool) -> BrokerAddress:
    if is_open and is_loopback(listen.host):
        raise AddressError(
            "the relay listens on loopback and its public URL is elsewhere: nodes reach no broker beside it. "
            f"Give --broker-listen mqtts://0.0.0.0:{_TLS_PORT}, name one with --broker, or give --no-broker"
        )
    wanted = _TLS_PORT if is_open else _PLAIN_PORT
    own = find_free(listen.host if is_open else "127.0.0.1", wanted)
    if own.port != wanted:
        notes.append(f"port {wanted} is in use on {own.host}: the broker takes {own.port}, and keeps it")
    return BrokerAddress(own.host, own.port, tls=is_open)


BROKER = Setting(
    "broker",
    parse_broker,
    "The MQTT broker. It is kept for later starts.",
    "URL",
    example="mqtts://mqtt.example",
)
BROKER_LISTEN = Setting(
    "broker_listen",
    parse_broker,
    "Where the broker listens that the relay runs if no other is named. It is kept for later starts.",
    "mqtts://HOST:PORT",
    example="mqtts://0.0.0.0:8883",
)
NO_BROKER = Setting(
    "no_broker",
    parse_flag,
    "Work without a broker, by the nodes' sessions alone.",
    default="false",
    form=Form.FLAG,
)
NODE_BROKER = Setting(
    "node_broker",
    parse_broker,
    "The broker as nodes reach it. Without it: as the relay does.",
    "HOST:PORT",
    example="mqtts://mqtt.example",
)
BROKER_ROOT = Setting(
    "broker_root",
    parse_path,
    "The root of the broker's certificate, PEM. Without it: that of the relay's own CA.",
    "FILE",
    example="/etc/edge-kubelet/mqtt-root.pem",
)
BROKER_DIRECTORY = Setting(
    "broker_directory",
    parse_path,
    "Where to write what the broker reads. Without it: in the state directory.",
    "DIRECTORY",
    example="/etc/edge-kubelet/broker",
)
BROKER_PID_FILE = Setting(
    "broker_pid_file",
    parse_path,
    "The broker's pid file: SIGHUP when access lists change.",
    "FILE",
    example="/run/mosquitto.pid",
)
_OF_A_NAMED_BROKER = (BROKER_ROOT, BROKER_DIRECTORY, BROKER_PID_FILE)

BROKER_ALTERNATIVES = Alternatives(
    choices=frozenset({BROKER.name, BROKER_LISTEN.name, NO_BROKER.name}),
    members=frozenset({NO_BROKER.name, *(setting.name for setting in _OF_A_NAMED_BROKER)}),
)
"""Which broker it is; what was told of another one is not kept."""


def broker_options(settings: Settings, named: AbstractSet[str]) -> BrokerOptions:
    """Return what the operator says of the broker; ``named`` are the names of the settings that are given."""
    broker, node_broker, listen = (
        settings.given[setting.name].text if setting.name in named else None
        for setting in (BROKER, NODE_BROKER, BROKER_LISTEN)
    )
    others = tuple(setting.flag for setting in _OF_A_NAMED_BROKER if setting.name in named)
    return BrokerOptions(broker, node_broker, listen, settings[NO_BROKER], others)


def kept_broker(kept: KeptSettings, named: AbstractSet[str], file: Path) -> Source:
    """Return what is kept of the broker in ``file``: nothing where the operator says which it is.

    All of it together: the way of nodes to another broker is no way to this one.
    """
    if named & BROKER_ALTERNATIVES.choices:
        return {}
    texts = {BROKER: kept.broker, BROKER_LISTEN: kept.own_broker, NODE_BROKER: kept.node_broker}
    return {
        setting.name: Given(text, f"kept in {file}") for setting, text in texts.items() if text is not None
    }
