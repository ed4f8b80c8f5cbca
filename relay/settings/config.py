"""The operator's configuration of a relay, and the paths of its state.

Must not read a file or the environment: the loader of the settings does.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from relay.limits.rate_limits import PER_AGENT, Allowance
from schemas.addresses import (
    PLAIN_OPTION,
    AddressError,
    BrokerAddress,
    HostPort,
    View,
    check_private_broker,
    check_private_url,
    is_loopback,
)
from schemas.lines import LogLevel

if TYPE_CHECKING:
    from relay.settings.openid import OpenidConfig

DEFAULT_LISTEN = "127.0.0.1:8700"
DEFAULT_PUBLIC_URL = f"http://{DEFAULT_LISTEN}"
DEFAULT_TENANT = "default"
CALLER_TIMEOUT_S = 60.0

_MAX_URL = 256  # the bound of a token's iss


class AuditSync(StrEnum):
    """When a line of the audit is synced to the disk."""

    LATER = "later"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class AuditKeep:
    """How old a full file of the audit becomes, and how large all of them together; None is without limit."""

    max_age_ms: int | None = None
    max_bytes: int | None = None


KEEP_ALL = AuditKeep()


class EnvelopeMode(Enum):
    """What happens to a call that is not a valid envelope: nothing, a log line, or a refusal."""

    OFF = "off"
    SHADOW = "shadow"
    ENFORCE = "enforce"


@dataclass(frozen=True, slots=True)
class ExternalIssuerConfig:
    """The issuer of agents' tokens besides the relay itself.

    Attributes:
        issuer: exactly as in ``iss`` and in the metadata for clients.
        jwks_url: where its keys are.
    """

    issuer: str
    jwks_url: str

    @classmethod
    def parse(cls, issuer: str, jwks_url: str, public_url: str) -> "ExternalIssuerConfig":
        """Return the issuer, if its keys cannot be replaced on the way.

        Raises:
            AddressError: one of the two is no URL for that, or the issuer has the relay's own name.
        """
        for option, url in (("--issuer", issuer), ("--jwks", jwks_url)):
            if not is_trustworthy(url):
                # Not repeated: what is wrong with it may be the password in it.
                raise AddressError(f"{option} must be an https URL without credentials, or http on loopback")
        if issuer == public_url:
            raise AddressError(f"--issuer {issuer} is this relay, whose own tokens are accepted without it")
        return cls(issuer, jwks_url)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate, with its chain in the same file, and its key; both PEM."""

    certificate: Path
    key: Path


def account_of(fleet: str) -> str:
    """Return the NATS account of ``fleet`` where none is named."""
    return f"edge_{fleet}"


@dataclass(frozen=True, slots=True)
class ClusterServer:
    """One server of NATS; ``tls``: its connections are encrypted from their first byte."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        return f"{'tls' if self.tls else 'nats'}://{HostPort(self.host, self.port)}"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The relays that this one shares its fleet with.

    Attributes:
        servers: of NATS; one of them is enough to reach all relays.
        credentials: a certificate with its key, or the seed of a user's nkey.
        root: the roots of the servers' certificates, PEM; None: those that this machine trusts.
        fleet: names the fleet in the subjects.
        account: of NATS, which this fleet has for itself.
    """

    servers: tuple[ClusterServer, ...]
    credentials: Path
    root: Path | None
    fleet: str
    account: str

    @property
    def uses_tls(self) -> bool:
        return any(server.tls for server in self.servers)


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """How one relay connects, and is reached. What is not described here is as the setting of its name.

    Attributes:
        broker: as the relay reaches it; None: it works by the nodes' sessions alone.
        public_url: in its normal form; nodes sign for it, and agents' tokens are for its ``/mcp``.
        listen: the one address that everything is served on but the metrics.
        per_agent: what one agent may use with all its tokens together.
        external_issuer: who else issues agents' tokens, if anyone.
        tls: what is served with; None where a proxy terminates TLS, or there is none.
        own_root: whether ``tls`` is issued by the relay's own CA: then nodes trust its root alone.
        plain_allowed: whether the operator accepts transports that others can read.
        broker_root: the roots that the broker is verified by, PEM; None: those of the relay's own CA.
        broker_directory: where what the broker reads is written; None: in the state directory.
        broker_pid_file: names the process to signal for new access lists; None: none is signalled.
        node_broker: the broker as nodes reach it, which enrolment returns; None: as the relay reaches it.
        own_broker: where the ``broker`` listens that the relay runs itself, over TLS or on loopback; None:
            others run it, or there is none.
        kinds: the kinds of installed packages that nodes may have besides those that ship.
        otlp: the collector to which spans are sent; None: they are logged alone.
        cluster: the relays that share the fleet; None: this one has it alone.
        metrics_listen: where the metrics are served, on loopback or a Unix socket; None: see ``old_metrics``.
        sign_in: whether people may sign in, once one is invited, or ``oidc`` is set.
        oidc: the OpenID Connect provider at which people sign in; None: by passkeys alone.

    Raises:
        AddressError: something would travel in the clear between machines, or the URL says so.
    """

    broker: BrokerAddress | None
    public_url: str
    listen: HostPort
    state: "StateFiles"
    per_agent: Allowance = PER_AGENT
    envelope_mode: EnvelopeMode = EnvelopeMode.ENFORCE
    external_issuer: ExternalIssuerConfig | None = None
    tls: TlsFiles | None = None
    own_root: bool = False
    plain_allowed: bool = False
    broker_root: Path | None = None
    broker_directory: Path | None = None
    broker_pid_file: Path | None = None
    node_broker: BrokerAddress | None = None
    own_broker: BrokerAddress | None = None
    default_view: View = View.TOOLS
    caller_timeout_s: float = CALLER_TIMEOUT_S
    log_level: LogLevel = LogLevel.INFO
    kinds: tuple[str, ...] = ()
    otlp: str | None = None
    cluster: ClusterConfig | None = None
    metrics_listen: HostPort | Path | None = None
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    sign_in: bool = True
    oidc: "OpenidConfig | None" = None
    fetch_client_documents: bool = True
    audit_keep: AuditKeep = KEEP_ALL
    audit_sync: AuditSync = AuditSync.LATER

    def __post_init__(self) -> None:
        check_private_url(self.public_url, plain_allowed=self.plain_allowed)
        for broker in (self.broker, self.node_broker):
            if broker is not None:
                check_private_broker(broker, plain_allowed=self.plain_allowed)
        if self.tls is not None and not self.public_url.startswith("https://"):
            raise AddressError(f"{self.public_url} is not over TLS, but is served so: --public-url is https")
        if self.tls is None and not (self.plain_allowed or is_loopback(self.listen.host)):
            raise AddressError(
                f"{self.listen} is open to others and would speak plain HTTP: "
                f"use --tls-own, or --tls-certificate and --tls-key, or say {PLAIN_OPTION}"
            )
        for name, other in (("metrics_listen", self.metrics_listen), ("broker_listen", self.own_broker)):
            if (
                isinstance(other, HostPort | BrokerAddress)
                and HostPort(other.host, other.port) == self.listen
            ):
                raise AddressError(f"{name} and listen are both {self.listen}: give each a port of its own")
        if self.oidc is not None:
            if not is_trustworthy(self.public_url):
                raise AddressError(f"people.oidc needs a --public-url that is https: not {self.public_url}")
            if self.oidc.issuer == self.public_url:
                raise AddressError("people.oidc has this relay itself as its issuer")

    @property
    def uses_broker_tls(self) -> bool:
        """Whether there is a broker, and it is connected to over TLS."""
        return self.broker is not None and self.broker.tls

    @property
    def unnamed_proxy(self) -> bool:
        """Whether a proxy of this machine must be in front of the relay, and ``trusted_proxies`` has none."""
        is_public = not is_loopback(urlsplit(self.public_url).hostname or "")
        return is_loopback(self.listen.host) and is_public and not self.trusted_proxies

    @property
    def old_metrics(self) -> bool:
        """Whether ``listen`` answers /metrics under loopback's names too, as before 0.3; 0.4 will not.

        Only where TLS is served, and no proxy is named: else strangers' requests may come by one from here.
        """
        return self.metrics_listen is None and self.tls is not None and not self.trusted_proxies


class StateFiles:
    """The relay's state directory.

    | path | holds |
    |---|---|
    | `ca/` | the CA: `root.pem`, `server-root.pem`, their keys (0600), those before them, `ledger.jsonl` |
    | `token.key` | the key that agent tokens are signed with (0600) |
    | `token_keys.jsonl` | the keys that agent tokens are verified with, as the CA endorses them (0600) |
    | `join_tokens.jsonl` | the join tokens, by which nodes may enrol, and their keys (0600) |
    | `marks/` | `marks.sqlite3`, the newest manifest accepted from each node, and verified leaves (0700) |
    | `issued_tokens.jsonl` | what the agent tokens that were issued allow, without the tokens (0600) |
    | `revoked_tokens.jsonl` | the agent tokens that were revoked (0600) |
    | `node_names.jsonl` | the labels and tags of nodes (0600) |
    | `cluster_seal.jsonl` | that relays of the fleet seal what they say to each other (0600) |
    | `people.jsonl` | the people who may sign in, and their passkeys (0600) |
    | `grants.jsonl` | what people have given to clients (0600) |
    | `redemptions.jsonl` | which codes and refresh tokens were redeemed in a fleet of several relays (0600) |
    | `settings.json` | the public URL, the broker and the tenant that commands were given (0600) |
    | `run.json` | what `relay run` was told besides: a later start that is told less does the same |
    | `tls/` | certificates of the relay's own CA and their keys (0600): `server.pem`, which is served with, \
`relay.pem`, which the broker is shown, and `cluster.pem`, for the other relays of the fleet |
    | `broker/` | what a broker reads, unless `--broker-directory` is given: see `broker_access`; with the |
    | | relay's own broker also its configuration, certificate, key (0600), and `store/` (0700) |
    | `audit-verified.json` | the newest line of the audit when it was last verified |
    | `audit.jsonl` | one line a decision and one an outcome (0600); when full, `audit-000001.jsonl`, … |
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ca = root / "ca"
        self.token_key = root / "token.key"
        self.token_keys = root / "token_keys.jsonl"
        self.join_tokens = root / "join_tokens.jsonl"
        self.marks = root / "marks"
        self.issued_tokens = root / "issued_tokens.jsonl"
        self.settings = root / "settings.json"
        self.revoked_tokens = root / "revoked_tokens.jsonl"
        self.node_names = root / "node_names.jsonl"
        self.cluster_seal = root / "cluster_seal.jsonl"
        self.people = root / "people.jsonl"
        self.grants = root / "grants.jsonl"
        self.redemptions = root / "redemptions.jsonl"
        self.own_tls = TlsFiles(root / "tls" / "server.pem", root / "tls" / "server.key")
        self.broker_client_tls = TlsFiles(root / "tls" / "relay.pem", root / "tls" / "relay.key")
        self.cluster_tls = TlsFiles(root / "tls" / "cluster.pem", root / "tls" / "cluster.key")
        self.broker = root / "broker"
        self.broker_tls = TlsFiles(self.broker / "server.pem", self.broker / "server.key")
        self.audit = root / "audit.jsonl"
        self.audit_verified = root / "audit-verified.json"


def is_trustworthy(url: str) -> bool:
    """Return whether ``url`` is https, or http within this machine, and contains no secret."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # an invalid port raises only here
    except ValueError:
        return False
    private = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
    plain = url.isascii() and url.isprintable() and not set(url) & set(' "\\#') and len(url) <= _MAX_URL
    return private and plain and bool(parts.hostname) and "@" not in parts.netloc


SERVICE_STATE_DIR = Path("/var/lib/edge-relay")
SERVICE_KINDS = Path("/etc/edge-kubelet/relay-kinds")


def kinds_directory(state_dir: Path) -> Path:
    """Return where `relay kind install` puts packages. Those of the service belong to root."""
    return SERVICE_KINDS if state_dir == SERVICE_STATE_DIR else state_dir / "kinds"


def own_state_dir(home: Path | None) -> Path | None:
    """Return the state directory of a user's own relay; None for a user without a home directory."""
    return None if home is None else home / ".local/state/edge-relay"
