"""The settings of the relay's broker: a part of the table, and what the operator's and the kept ones make.

Must not decide which broker is used (``relay.settings.broker_choice``).
"""

from collections.abc import Set as AbstractSet
from pathlib import Path

from relay.settings.broker_choice import BrokerOptions
from relay.settings.kept import KeptSettings
from schemas.addresses import parse_broker
from schemas.settings import Form, Given, Setting, Settings, Source, parse_flag, parse_path
from schemas.told_settings import Alternatives

BROKER = Setting("broker", parse_broker, "The MQTT broker. It is kept for later starts.", "URL")
BROKER_LISTEN = Setting(
    "broker_listen",
    parse_broker,
    "Where the broker listens that the relay runs if no other is named. It is kept for later starts.",
    "mqtts://HOST:PORT",
)
NO_BROKER = Setting(
    "no_broker",
    parse_flag,
    "Work without a broker, by the nodes' sessions alone.",
    default="false",
    form=Form.FLAG,
)
NODE_BROKER = Setting(
    "node_broker", parse_broker, "The broker as nodes reach it. Without it: as the relay does.", "HOST:PORT"
)
BROKER_ROOT = Setting(
    "broker_root",
    parse_path,
    "The root of the broker's certificate, PEM. Without it: that of the relay's own CA.",
    "FILE",
)
BROKER_DIRECTORY = Setting(
    "broker_directory",
    parse_path,
    "Where to write what the broker reads. Without it: in the state directory.",
    "DIRECTORY",
)
BROKER_PID_FILE = Setting(
    "broker_pid_file", parse_path, "The broker's pid file: SIGHUP when access lists change.", "FILE"
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
