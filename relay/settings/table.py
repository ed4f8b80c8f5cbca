"""The settings of the relay: the table, and the configuration that follows from it and what is kept.

Everything that decides how a relay runs is read here, for `relay run`, for `relay config`, and for the reload
of a running relay. Must not start anything, and must not write what is kept.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path

from relay.limits.rate_limits import Allowance
from relay.settings.broker import (
    BROKER,
    BROKER_ALTERNATIVES,
    BROKER_DIRECTORY,
    BROKER_LISTEN,
    BROKER_PID_FILE,
    BROKER_ROOT,
    NO_BROKER,
    NODE_BROKER,
    broker_options,
    kept_broker,
)
from relay.settings.broker_choice import BrokerChoice, FindFree, choose_broker
from relay.settings.cluster import CLUSTER_SETTINGS, cluster_of
from relay.settings.config import (
    AGENT_BURST_S,
    CALLER_TIMEOUT_S,
    DEFAULT_LISTEN,
    DEFAULT_PUBLIC_URL,
    PER_AGENT,
    EnvelopeMode,
    ExternalIssuerConfig,
    RelayConfig,
    StateFiles,
    TlsFiles,
    View,
    kinds_directory,
)
from relay.settings.kept import KeptSettings, read_kept
from schemas.addresses import PLAIN_OPTION, HostPort, collector_url, normal_url, parse_host_port
from schemas.durations import duration_between, duration_text
from schemas.error_roots import ConfigError, OperatorError
from schemas.kinds import kind_name
from schemas.log_level import LogLevel
from schemas.process.home_directory import NoStateDirError
from schemas.settings import (
    Form,
    Given,
    Setting,
    Settings,
    Source,
    list_of,
    one_of,
    parse_flag,
    parse_path,
    whole_number,
)
from schemas.settings_sources import Program, Sources
from schemas.told_settings import Alternatives, ToldSettings, read_told

_MOST = 1_000_000

STATE_DIR = Setting("state_dir", parse_path, "The relay's state directory.", "DIRECTORY")
PUBLIC_URL = Setting(
    "public_url",
    normal_url,
    "The URL of the relay for nodes and agents. It is kept for later starts.",
    "URL",
    DEFAULT_PUBLIC_URL,
)
LISTEN = Setting("listen", parse_host_port, "Where to serve.", "HOST:PORT", DEFAULT_LISTEN)
JWKS = Setting("jwks", str, "The keys of another issuer of agents' tokens.", "URL")
ISSUER = Setting("issuer", str, "That issuer, as in its tokens.")
TLS_CERTIFICATE = Setting(
    "tls_certificate", parse_path, "Serve over TLS with this certificate and its chain, PEM.", "FILE"
)
TLS_KEY = Setting("tls_key", parse_path, "Its key, PEM, mode 0600.", "FILE")
TLS_OWN = Setting(
    "tls_own",
    parse_flag,
    "Serve over TLS with a certificate of the relay's own CA.",
    default="false",
    form=Form.FLAG,
)
AGENT_RPS = Setting(
    "agent_rps",
    whole_number(1, _MOST),
    "Calls that one agent may make a second.",
    "N",
    f"{PER_AGENT.rate:g}",
    Form.NUMBER,
    reloads=True,
)
AGENT_CONCURRENCY = Setting(
    "agent_concurrency",
    whole_number(1, _MOST),
    "Calls that one agent may have in flight.",
    "N",
    str(PER_AGENT.concurrency),
    Form.NUMBER,
    reloads=True,
)
CALLER_TIMEOUT = Setting(
    "caller_timeout",
    duration_between("1s", "1h"),
    "How long a caller has to answer for a tool that it lends.",
    "DURATION",
    duration_text(int(CALLER_TIMEOUT_S * 1000)),
    reloads=True,
)
ENVELOPE = Setting(
    "envelope",
    one_of(EnvelopeMode),
    "What to do about a call whose envelope is malformed.",
    "off|shadow|enforce",
    EnvelopeMode.ENFORCE.value,
    reloads=True,
)
DEFAULT_VIEW = Setting(
    "default_view",
    one_of(View),
    "What clients see at /mcp without ?view=: each node's tools, or one of a kind.",
    "tools|kinds",
    View.TOOLS.value,
    reloads=True,
)
KINDS = Setting(
    "kinds",
    list_of(kind_name),
    "Kinds of installed packages that nodes may have besides those that ship.",
    "NAME,...",
    form=Form.LIST,
)
OTLP = Setting(
    "otlp",
    collector_url,
    "Send the spans of traced calls to this collector, by OTLP over HTTP. Needs the extra `otel`.",
    "URL",
)
LOG_LEVEL = Setting(
    "log_level",
    one_of(LogLevel),
    "The level from which on lines are logged. The line of each call always is.",
    "info|warning|error",
    LogLevel.INFO.value,
    reloads=True,
)
PLAIN = Setting(
    PLAIN_OPTION.removeprefix("--").replace("-", "_"),
    parse_flag,
    "Allow connections without TLS: others on the network can read and write.",
    default="false",
    form=Form.FLAG,
)

_TLS = frozenset({TLS_OWN.name, TLS_CERTIFICATE.name, TLS_KEY.name})
_ALTERNATIVES = (Alternatives(_TLS, _TLS), BROKER_ALTERNATIVES)

RELAY = Program(
    "relay",
    (
        STATE_DIR,
        BROKER,
        BROKER_LISTEN,
        NO_BROKER,
        NODE_BROKER,
        PUBLIC_URL,
        LISTEN,
        TLS_OWN,
        TLS_CERTIFICATE,
        TLS_KEY,
        BROKER_ROOT,
        BROKER_DIRECTORY,
        BROKER_PID_FILE,
        *CLUSTER_SETTINGS,
        JWKS,
        ISSUER,
        AGENT_RPS,
        AGENT_CONCURRENCY,
        CALLER_TIMEOUT,
        ENVELOPE,
        DEFAULT_VIEW,
        KINDS,
        LOG_LEVEL,
        OTLP,
        PLAIN,
    ),
)


_KEPT_AS_CHOSEN = frozenset(
    setting.name for setting in (STATE_DIR, PUBLIC_URL, BROKER, BROKER_LISTEN, NODE_BROKER)
)
"""What is kept whether or not it was told: in ``settings.json``."""
_TOLD = frozenset(setting.name for setting in RELAY.table) - _KEPT_AS_CHOSEN


@dataclass(frozen=True, slots=True)
class LoadedRelaySettings:
    """The settings of a relay, and what they were made of.

    Attributes:
        kept: what is kept in its state directory.
        told: what earlier starts were told besides.
        named: the names of the settings that the operator gives.
    """

    settings: Settings
    state: StateFiles
    kept: KeptSettings
    told: ToldSettings
    named: frozenset[str]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that an installed package must bring."""
        return self.settings.get(KINDS) or ()

    @property
    def kinds_directory(self) -> Path:
        """Where packages are installed for their kinds alone."""
        return kinds_directory(self.state.root)

    def broker(self, find_free: FindFree = HostPort) -> BrokerChoice:
        """Return the relay's broker; ``find_free`` finds a port for its own, by default without looking.

        Raises:
            ConfigError: the settings contradict each other, or the broker has no port.
        """
        try:
            asked = broker_options(self.settings, self.named)
            listen, public_url = self.settings[LISTEN], self.settings[PUBLIC_URL]
            return choose_broker(asked, self.kept, listen, public_url, find_free)
        except OperatorError as error:
            raise ConfigError([str(error)]) from None

    def config(self, broker: BrokerChoice | None = None) -> RelayConfig:
        """Return the configuration of the relay, with the broker that was chosen.

        Raises:
            ConfigError: the settings contradict each other.
        """
        try:
            return _config_of(self.settings, self.state, broker or self.broker())
        except OperatorError as error:
            raise ConfigError([str(error)]) from None

    def keep_told(self, sources: Sources) -> Sequence[str]:
        """Keep what the command line says for later starts, and return what that replaces.

        Raises:
            OSError: it cannot be written.
        """
        return self.told.keep(sources.flags.keys() & _TOLD, self.settings, sources.named_file)

    def to_keep(self, broker: BrokerChoice) -> KeptSettings:
        """Return what later commands and starts should find as kept."""
        return replace(broker.kept, public_url=self.settings[PUBLIC_URL])


def load_settings(
    sources: Sources, default_state_dir: Path | None, enter: Callable[[Path], object] | None = None
) -> LoadedRelaySettings:
    """Return the settings of a relay that runs with ``sources``.

    ``enter`` is called with the state directory, before anything in it is read.

    Raises:
        ConfigError: they cannot be used; or name no state directory, and there is no default one.
        KeptSettingsError, OSError: what is kept cannot be read.
    """
    usual = {} if default_state_dir is None else {STATE_DIR.name: Given(str(default_state_dir), "default")}
    state_dir = sources.settings(usual).get(STATE_DIR)
    if state_dir is None:
        raise NoStateDirError
    if enter is not None:
        enter(state_dir)
    state = StateFiles(state_dir)
    kept = read_kept(state.settings)
    named = frozenset(name for source in sources.by_precedence for name in source)
    told = read_told(state_dir, _TOLD, named, _ALTERNATIVES)
    kept_sources = _kept_source(named | told.texts.keys(), kept, state), told.source()
    return LoadedRelaySettings(sources.settings(usual, *kept_sources), state, kept, told, named)


def _kept_source(named: AbstractSet[str], kept: KeptSettings, state: StateFiles) -> Source:
    found = {}
    if kept.public_url is not None:
        found[PUBLIC_URL.name] = Given(kept.public_url, f"kept in {state.settings}")
    return {**found, **kept_broker(kept, named, state.settings)}


def _config_of(settings: Settings, state: StateFiles, broker: BrokerChoice) -> RelayConfig:
    url = settings[PUBLIC_URL]
    return RelayConfig(
        broker.broker,
        url,
        settings[LISTEN],
        state,
        external_issuer=_issuer_of(settings, url),
        tls=_tls_of(settings, state),
        own_root=settings[TLS_OWN],
        plain_allowed=settings[PLAIN],
        broker_root=settings.get(BROKER_ROOT),
        broker_directory=settings.get(BROKER_DIRECTORY),
        broker_pid_file=settings.get(BROKER_PID_FILE),
        node_broker=broker.node_broker,
        own_broker=broker.own,
        envelope_mode=settings[ENVELOPE],
        default_view=settings[DEFAULT_VIEW],
        caller_timeout_s=settings[CALLER_TIMEOUT] / 1000,
        log_level=settings[LOG_LEVEL],
        kinds=settings.get(KINDS) or (),
        otlp=settings.get(OTLP),
        cluster=cluster_of(settings),
        per_agent=Allowance(
            settings[AGENT_RPS], settings[AGENT_RPS] * AGENT_BURST_S, settings[AGENT_CONCURRENCY]
        ),
    )


def _issuer_of(settings: Settings, public_url: str) -> ExternalIssuerConfig | None:
    jwks, issuer = settings.get(JWKS), settings.get(ISSUER)
    if (jwks is None) != (issuer is None):
        raise OperatorError("--jwks and --issuer go together: the URL of the keys, and their issuer")
    return None if jwks is None or issuer is None else ExternalIssuerConfig.parse(issuer, jwks, public_url)


def _tls_of(settings: Settings, state: StateFiles) -> TlsFiles | None:
    certificate, key = settings.get(TLS_CERTIFICATE), settings.get(TLS_KEY)
    if settings[TLS_OWN]:
        if certificate or key:
            raise OperatorError("--tls-own and --tls-certificate exclude each other")
        return state.own_tls
    if certificate is not None and key is not None:
        return TlsFiles(certificate, key)
    if certificate is not None or key is not None:
        raise OperatorError("--tls-certificate and --tls-key go together")
    return None
