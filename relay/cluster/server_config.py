"""The configuration of the nats-servers that join the relays of a fleet: one account, and who its users are.

The account is a file of its own, which every server includes: a relay is added by a line there. Files are
named as they are in the directory that a server is started in. Must not write a file, nor import the library
of NATS, which an administrator's machine may lack.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schemas.addresses import HostPort

USER_INFO = "$SYS.REQ.USER.INFO"
"""Where a server says who is asking."""


def ledger_of(fleet: str) -> str:
    """Return the name of the stream with the shared ledgers of ``fleet``."""
    return f"edge_{fleet}_ledger"


def bucket_of(fleet: str) -> str:
    """Return the name of the bucket that says which relay each node is connected to."""
    return f"edge_{fleet}_presence"


def relay_permissions(fleet: str) -> dict[str, dict[str, list[str]]]:
    """Return what the user of a relay of ``fleet`` may publish and subscribe to."""
    read = [subject for stream in (ledger_of(fleet), f"KV_{bucket_of(fleet)}") for subject in _read(stream)]
    allowed = [f"edge.{fleet}.>", f"$KV.{bucket_of(fleet)}.>", USER_INFO, *read]
    return {"publish": {"allow": allowed}, "subscribe": {"allow": [f"edge.{fleet}.>"]}}


def _read(stream: str) -> list[str]:
    return [
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}.>",
        f"$JS.API.CONSUMER.INFO.{stream}.>",
        f"$JS.API.CONSUMER.NAMES.{stream}",
        f"$JS.API.CONSUMER.DELETE.{stream}.>",
        f"$JS.FC.{stream}.>",
    ]


def administrator_permissions() -> dict[str, dict[str, list[str]]]:
    """Return what the user who makes the streams may do: all of JetStream, and no subject of the relays."""
    return {"publish": {"allow": ["$JS.API.>", USER_INFO]}, "subscribe": {"allow": ["_INBOX.>"]}}


User = Mapping[str, str]
"""As NATS names it: ``{"user": "CN=…"}`` by the subject of its certificate, or ``{"nkey": "U…"}``."""


def account_file(account: str) -> str:
    """Return the name of the file with the account."""
    return f"{account}.conf"


def account_text(account: str, fleet: str, administrator: User, relays: Sequence[User]) -> str:
    """Return the file with the account of ``fleet``."""
    users: list[Mapping[str, object]] = [{**administrator, "permissions": administrator_permissions()}]
    users += [{**each, "permissions": relay_permissions(fleet)} for each in relays]
    lines = ",\n".join(f"    {json.dumps(each)}" for each in users)
    return f"{json.dumps(account)}: {{\n  jetstream: enabled\n  users: [\n{lines}\n  ]\n}}\n"


@dataclass(frozen=True, slots=True)
class Routes:
    """How a server and the others of its cluster reach each other: it at ``listen``, they at ``others``.

    ``advertise`` is what a server tells of itself to those that others name to it, if that is not ``listen``.
    """

    cluster: str
    listen: HostPort
    others: Sequence[HostPort]
    advertise: HostPort | None = None


_SERVER = """\
server_name: {name}
listen: {listen}
# Relays refuse a server that takes less than 1 000 KiB, their largest message.
max_payload: 1048576
jetstream {{
  store_dir: {store}
  max_memory_store: 67108864
  max_file_store: 1073741824
}}
accounts {{
  include {account}
}}
"""
_TLS = """\
# From the first byte: relays refuse to agree on it in the clear. The certificate says which user a client is.
tls {
  cert_file: "server.pem"
  key_file: "server.key"
  ca_file: "relays-root.pem"
  verify_and_map: true
  handshake_first: true
}
"""
_ROUTES = """\
cluster {{
  name: {cluster}
  listen: {listen}
  routes: {routes}
{advertise}{tls}}}
"""
# Not by the root of the relays: whatever is admitted here has every account.
_ROUTES_TLS = """\
  tls {
    cert_file: "server.pem"
    key_file: "server.key"
    ca_file: "servers-root.pem"
    verify: true
  }
"""


def server_text(  # noqa: PLR0913 - what a server is told
    name: str,
    listen: HostPort,
    account: str,
    *,
    store: str = "store",
    tls: bool,
    routes: Routes | None = None,
) -> str:
    """Return the configuration of one server, which includes the file of ``account``.

    Without ``tls`` it is for loopback alone.
    """
    quoted = {"name": name, "listen": str(listen), "store": store, "account": account_file(account)}
    text = _SERVER.format(**{key: json.dumps(value) for key, value in quoted.items()})
    if tls:
        text += _TLS
    if routes is not None:
        text += _ROUTES.format(
            cluster=json.dumps(routes.cluster),
            listen=json.dumps(str(routes.listen)),
            routes=json.dumps([f"nats-route://{each}" for each in routes.others]),
            advertise=""
            if routes.advertise is None
            else f"  advertise: {json.dumps(str(routes.advertise))}\n",
            tls=_ROUTES_TLS if tls else "",
        )
    return text
