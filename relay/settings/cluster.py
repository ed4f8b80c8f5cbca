"""The settings of a fleet that several relays share: a part of the table, and what follows from it.

Must not read the credentials.
"""

import re

from relay.settings.config import ClusterConfig, ClusterServer
from schemas.addresses import AddressError, is_loopback, parse_host_port
from schemas.error_roots import OperatorError
from schemas.settings import Form, Setting, Settings, list_of, parse_path

_PORT = 4222
_HAS_PORT = re.compile(r":\d*$")
_FLEET = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")


def parse_server(text: str) -> ClusterServer:
    """Return the server of ``nats://HOST[:PORT]`` or ``tls://HOST[:PORT]``.

    Only a ``nats://`` on loopback is not encrypted.

    Raises:
        AddressError: it is none.
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


CLUSTER = Setting(
    "cluster",
    list_of(parse_server),
    "Servers of NATS over which several relays share this fleet. Needs the extra `cluster`.",
    "nats://HOST:PORT,...",
    form=Form.LIST,
)
CLUSTER_CREDENTIALS = Setting(
    "cluster_credentials",
    parse_path,
    "What the relay shows these servers: a certificate and its key, PEM, or the seed of an nkey. Mode 0600.",
    "FILE",
)
CLUSTER_ROOT = Setting(
    "cluster_root",
    parse_path,
    "The root of the servers' certificates, PEM. Without it: those that this machine trusts.",
    "FILE",
)
CLUSTER_FLEET = Setting(
    "cluster_fleet", fleet_name, "The name of the fleet, the same for all its relays.", "NAME", "main"
)
CLUSTER_SETTINGS = (CLUSTER, CLUSTER_CREDENTIALS, CLUSTER_ROOT, CLUSTER_FLEET)


def cluster_of(settings: Settings) -> ClusterConfig | None:
    """Return the cluster that ``settings`` name, if any.

    Raises:
        OperatorError: they contradict each other.
    """
    servers, credentials = settings.get(CLUSTER), settings.get(CLUSTER_CREDENTIALS)
    root, fleet = settings.get(CLUSTER_ROOT), settings[CLUSTER_FLEET]
    if servers and credentials is not None:
        return ClusterConfig(servers, credentials, root, fleet)
    if servers or credentials is not None:
        raise OperatorError("--cluster and --cluster-credentials go together")
    if root is not None or fleet != CLUSTER_FLEET.default:
        # This relay would serve alone, and look as if it were one of several.
        named = CLUSTER_FLEET if root is None else CLUSTER_ROOT
        raise OperatorError(f"{named.flag} is of no use without --cluster and --cluster-credentials")
    return None
