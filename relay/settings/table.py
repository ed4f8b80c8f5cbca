"""The settings of the relay: the table, and the configuration that follows from it and what is kept.

Everything that decides how a relay runs is read here, for `relay run`, for `relay config`, and for the reload
of a running relay. Must not start anything, and must not write what is kept.
"""

import re
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import TYPE_CHECKING

from relay.limits.rate_limits import AGENT_BURST_S, PER_AGENT, Allowance
from relay.settings.broker import (
    BROKER,
    BROKER_ALTERNATIVES,
    BROKER_DIRECTORY,
    BROKER_LISTEN,
    BROKER_PID_FILE,
    BROKER_ROOT,
    NO_BROKER,
    NODE_BROKER,
    BrokerChoice,
    FindFree,
    broker_options,
    choose_broker,
    kept_broker,
)
from relay.settings.config import (
    CALLER_TIMEOUT_S,
    DEFAULT_LISTEN,
    DEFAULT_PUBLIC_URL,
    KEEP_ALL,
    SERVICE_STATE_DIR,
    AuditKeep,
    AuditSync,
    ClusterConfig,
    ClusterServer,
    EnvelopeMode,
    ExternalIssuerConfig,
    RelayConfig,
    StateFiles,
    TlsFiles,
    account_of,
    kinds_directory,
)
from relay.settings.kept import KeptSettings, read_kept
from schemas.addresses import (
    AddressError,
    HostPort,
    View,
    is_loopback,
    normal_url,
    parse_host_port,
)
from schemas.error_roots import ConfigError, NoStateDirError, OperatorError
from schemas.files import fits_socket
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
    one_of,
    parse_flag,
    parse_path,
    read_run_options,
    whole_number,
)
from schemas.text import quoted
from schemas.times import DurationError, duration_between, duration_text

if TYPE_CHECKING:
    from relay.settings.openid import OpenidConfig

_PORT = 4222
_MAX_NETWORK = 64
_HAS_PORT = re.compile(r":\d*$")
_ACCOUNT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_FLEET = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")


def parse_server(text: str) -> ClusterServer:
    """Return the server of ``nats://HOST[:PORT]`` or ``tls://HOST[:PORT]``.

    Only a ``nats://`` on loopback is not encrypted.

    Raises:
        AddressError: it is malformed.
    """
    scheme, _, rest = text.partition("://")
    address = rest if _HAS_PORT.search(rest) else f"{rest}:{_PORT}"
    # Not repeated: what is wrong with it may be the password in it.
    wrong = AddressError("has a server that is not nats://HOST:PORT or tls://HOST:PORT, without credentials")
    if scheme not in {"nats", "tls"}:
        raise wrong
    try:
        server = parse_host_port(address)
    except AddressError:
        raise wrong from None
    return ClusterServer(server.host, server.port, tls=scheme == "tls" or not is_loopback(server.host))


def fleet_name(text: str) -> str:
    """Return ``text`` if it can name a fleet in a subject and in a bucket.

    Raises:
        OperatorError: it cannot.
    """
    if not _FLEET.fullmatch(text):
        raise OperatorError("is not 1 to 32 lower-case letters, digits and hyphens")
    return text


def account_name(text: str) -> str:
    """Return ``text`` if it can name the account of a fleet: not ``$G`` or ``$SYS``, which every server has.

    Raises:
        OperatorError: it cannot.
    """
    if not _ACCOUNT.fullmatch(text):
        raise OperatorError("is not 1 to 128 letters, digits, hyphens and underscores")
    return text


def local_listener(text: str) -> HostPort | Path:
    """Return the loopback address, or the path of a Unix socket, that ``text`` names.

    Raises:
        OperatorError: it is neither.
    """
    if text.startswith("/"):
        if not fits_socket(path := parse_path(text)):
            raise OperatorError("is too long for the path of a Unix socket")
        return path
    if not is_loopback((listen := parse_host_port(text)).host):
        raise OperatorError(f"{listen} is not on loopback: use 127.0.0.1, or the path of a Unix socket")
    return listen


def proxy_network(text: str) -> IPv4Network | IPv6Network:
    """Return the network that ``text`` names, or that of one address.

    Raises:
        OperatorError: it names none, or all addresses.
    """
    try:
        network = ip_network(text)
    except ValueError:
        shown = quoted(text, _MAX_NETWORK)
        raise OperatorError(f"{shown} is not an address or a network, such as 192.0.2.0/24") from None
    if network.prefixlen == 0:
        raise OperatorError(f"{network} has every address: name the proxies alone")
    return network


CLUSTER = Setting(
    "cluster",
    list_of(parse_server),
    "Servers of NATS over which several relays share this fleet. Needs the extra `cluster`.",
    "nats://HOST:PORT,...",
    form=Form.LIST,
    example="tls://nats.example:4222",
)
CLUSTER_CREDENTIALS = Setting(
    "cluster_credentials",
    parse_path,
    "What the relay shows these servers: a certificate and its key, PEM, or the seed of an nkey. Mode 0600.",
    "FILE",
    example="/etc/edge-kubelet/cluster.nk",
)
CLUSTER_ROOT = Setting(
    "cluster_root",
    parse_path,
    "The root of the servers' certificates, PEM. Without it: those that this machine trusts.",
    "FILE",
    example="/etc/edge-kubelet/nats-root.pem",
)
CLUSTER_FLEET = Setting(
    "cluster_fleet", fleet_name, "The name of the fleet, the same for all its relays.", "NAME", "main"
)
CLUSTER_ACCOUNT = Setting(
    "cluster_account",
    account_name,
    "The NATS account that this fleet has for itself. Without it: edge_ and the fleet's name.",
    "NAME",
    example="edge_main",
)
CLUSTER_SETTINGS = (CLUSTER, CLUSTER_CREDENTIALS, CLUSTER_ROOT, CLUSTER_FLEET, CLUSTER_ACCOUNT)


def cluster_of(settings: Settings) -> ClusterConfig | None:
    """Return the cluster that ``settings`` name, if any.

    Raises:
        OperatorError: they contradict each other.
    """
    servers, credentials = settings.get(CLUSTER), settings.get(CLUSTER_CREDENTIALS)
    root, fleet, account = settings.get(CLUSTER_ROOT), settings[CLUSTER_FLEET], settings.get(CLUSTER_ACCOUNT)
    if servers and credentials is not None:
        return ClusterConfig(servers, credentials, root, fleet, account or account_of(fleet))
    if servers or credentials is not None:
        raise OperatorError("--cluster and --cluster-credentials go together")
    alone = {CLUSTER_ROOT.flag: root, CLUSTER_ACCOUNT.flag: account}
    alone[CLUSTER_FLEET.flag] = None if fleet == CLUSTER_FLEET.default else fleet
    if named := next((flag for flag, value in alone.items() if value), None):
        # This relay would serve alone, and look as if it were one of several.
        raise OperatorError(f"{named} is of no use without --cluster and --cluster-credentials")
    return None


_MOST = 1_000_000

STATE_DIR = Setting(
    "state_dir", parse_path, "The relay's state directory.", "DIRECTORY", example=str(SERVICE_STATE_DIR)
)
PUBLIC_URL = Setting(
    "public_url",
    normal_url,
    "The URL of the relay for nodes and agents. It is kept for later starts.",
    "URL",
    DEFAULT_PUBLIC_URL,
)
LISTEN = Setting("listen", parse_host_port, "Where to serve.", "HOST:PORT", DEFAULT_LISTEN)
METRICS_LISTEN = Setting(
    "metrics_listen",
    local_listener,
    "Where to serve /metrics: a loopback address, or the path of a Unix socket. Without it: nowhere.",
    "HOST:PORT|FILE",
    example="127.0.0.1:9464",
)
TRUSTED_PROXIES = Setting(
    "trusted_proxies",
    list_of(proxy_network),
    "Proxies in front that say whom they forward, by X-Forwarded-For or the PROXY protocol v2.",
    "CIDR,...",
    form=Form.LIST,
    example="127.0.0.1",
)
JWKS = Setting(
    "jwks",
    str,
    "The keys of another issuer of agents' tokens.",
    "URL",
    example="https://issuer.example/jwks.json",
)
ISSUER = Setting("issuer", str, "That issuer, as in its tokens.", example="https://issuer.example")
TLS_CERTIFICATE = Setting(
    "tls_certificate",
    parse_path,
    "Serve over TLS with this certificate and its chain, PEM.",
    "FILE",
    example="/etc/edge-kubelet/relay.pem",
)
TLS_KEY = Setting(
    "tls_key", parse_path, "Its key, PEM, mode 0600.", "FILE", example="/etc/edge-kubelet/relay.key"
)
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
MOST_KINDS = 64
"""So that nodes can be told of all of them in one frame of 8 KiB."""
KINDS = Setting(
    "kinds",
    list_of(kind_name, MOST_KINDS),
    "The kinds that nodes may have besides system.echo and system.metrics, in place of those that are kept.",
    "NAME,...",
    form=Form.LIST,
    example="linux.health",
)
SIGN_IN = Setting(
    "sign_in",
    parse_flag,
    "Whether people sign in here for their clients, once one is invited by `relay people invite`.",
    default="true",
    form=Form.FLAG,
)
FETCH_CLIENT_DOCUMENTS = Setting(
    "fetch_client_documents",
    parse_flag,
    "Whether sign-in fetches the documents by which clients describe themselves, from public addresses; "
    "without them only known clients and those that register can ask, and none proves itself by a key.",
    default="true",
    form=Form.FLAG,
)


def _openid(text: str) -> "OpenidConfig | None":
    if text == OIDC.default:
        return None
    from relay.settings.openid import openid_config  # noqa: PLC0415 - an option of an option

    return openid_config(text)


OIDC = Setting(
    "people.oidc",
    _openid,
    "The OpenID Connect provider of people: docs/sign-in.md.",
    "table",
    "{}",
    Form.TABLE,
)
_SIZE = re.compile(r"([0-9]{1,6})(MiB|GiB|TiB)")
_SHIFTS = {"MiB": 20, "GiB": 30, "TiB": 40}
_LEAST_AUDIT_BYTES = 16 << 20


def audit_keep(text: str) -> AuditKeep:
    """Return what ``90d``, ``10GiB`` or both, separated by a comma, lets the audit keep.

    Raises:
        OperatorError: it is none of these.
    """
    ages, sizes = list[int](), list[int]()
    for part in text.split(","):
        if match := _SIZE.fullmatch(part):
            sizes.append(int(match[1]) << _SHIFTS[match[2]])
        else:
            try:
                ages.append(duration_between("1d", "36500d")(part))
            except DurationError:
                raise OperatorError(
                    "is not an age of 1d or more, such as 90d, a size, such as 10GiB, or both: 90d,10GiB"
                ) from None
    if len(ages) > 1 or len(sizes) > 1:
        raise OperatorError("has two ages or two sizes: write one of each at most, such as 90d,10GiB")
    if sizes and sizes[0] < _LEAST_AUDIT_BYTES:
        raise OperatorError(f"is less than {_LEAST_AUDIT_BYTES >> 20}MiB, which four full files need")
    return AuditKeep(ages[0] if ages else None, sizes[0] if sizes else None)


AUDIT_KEEP = Setting(
    "audit_keep",
    audit_keep,
    "Remove full files of the audit: those older than an age, or the oldest above a size. Without it: none.",
    "AGE|SIZE|AGE,SIZE",
    reloads=True,
    example="90d,10GiB",
)
AUDIT_SYNC = Setting(
    "audit_sync",
    one_of(AuditSync),
    "When a line of the audit is synced to the disk: within 5 s, or always before its call is made.",
    "later|always",
    AuditSync.LATER.value,
    reloads=True,
)
LOG_LEVEL = log_level_setting("The level from which on lines are logged. The line of each call always is.")

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
        METRICS_LISTEN,
        TRUSTED_PROXIES,
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
        AUDIT_KEEP,
        AUDIT_SYNC,
        ENVELOPE,
        DEFAULT_VIEW,
        KINDS,
        SIGN_IN,
        FETCH_CLIENT_DOCUMENTS,
        LOG_LEVEL,
        OTLP,
        PLAIN,
        OIDC,
    ),
)

READ_AT_START = (TLS_CERTIFICATE, TLS_KEY, BROKER_ROOT, CLUSTER_CREDENTIALS, CLUSTER_ROOT)
"""Name files without which a start fails."""
_KEPT_AS_CHOSEN = frozenset(
    setting.name for setting in (STATE_DIR, PUBLIC_URL, BROKER, BROKER_LISTEN, NODE_BROKER)
)
"""What is kept whether or not it was told: in ``settings.json``."""
_TOLD = frozenset(setting.name for setting in RELAY.options) - _KEPT_AS_CHOSEN


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
    told: RunOptions
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
    told = read_run_options(state_dir, _TOLD, named, _ALTERNATIVES)
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
        metrics_listen=settings.get(METRICS_LISTEN),
        trusted_proxies=settings.get(TRUSTED_PROXIES) or (),
        sign_in=settings[SIGN_IN],
        oidc=settings.get(OIDC),
        fetch_client_documents=settings[FETCH_CLIENT_DOCUMENTS],
        audit_keep=settings.get(AUDIT_KEEP) or KEEP_ALL,
        audit_sync=settings[AUDIT_SYNC],
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
