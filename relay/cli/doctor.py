"""``relay doctor``: what keeps calls from passing this relay, and what to do.

Must not change anything, nor need a relay that runs.
"""

import asyncio
import os
import queue
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from relay.audit.retention import disk_full_ms
from relay.cli.options import AsJson, settings_for_command
from relay.fleet.facts import warned
from relay.pki.authority import CertificateAuthority
from relay.pki.relay_tls import broker_context, issued_by
from relay.settings.config import KEEP_ALL, RelayConfig
from relay.settings.environment import now_ms
from relay.settings.table import RELAY, SIGN_IN, load_settings
from schemas import topics
from schemas.addresses import parse_mcp_url
from schemas.files import read_named
from schemas.identity import MAX_PEM_BYTES, CertificateFormatError, first_certificate_in, validity_of
from schemas.process import common_checks
from schemas.process.cli_config import takes_settings
from schemas.process.cli_manual import example, group
from schemas.process.common_checks import Publication, ask_health, probing
from schemas.process.doctor import DoctorChecks, Finding, NotCheckedError, run_doctor
from schemas.process.status_view import AskedProcess
from schemas.settings import Settings, Sources
from schemas.text import counted
from schemas.times import SystemClock, is_credible, iso
from schemas.tls import client_context, load_chain
from schemas.ulids import UlidSource

if TYPE_CHECKING:
    from relay.server.status import RelayStatusDocument

_RETURN_S = 2.0
_SOON_FULL_MS = 30 * 86_400_000

CHECKS = DoctorChecks["RelayChecks"]()
"""In the order in which a call depends on them: that of the methods below, each of which is a check."""
_check = CHECKS.add


@dataclass(frozen=True)
class RelayChecks:
    """The checks of one relay.

    Attributes:
        config: what it runs with; where none runs, what a start would give it.
        process: the relay that runs, if one does.
        expected: the settings that a start would give it.
        new_id: makes the id of a node.
    """

    config: RelayConfig
    process: AskedProcess
    expected: Settings
    authority: CertificateAuthority
    now_ms: SystemClock
    new_id: Callable[[], str]

    @property
    def status(self) -> "RelayStatusDocument":
        """What the relay does now.

        Raises:
            NotCheckedError: it does not say so.
        """
        return cast("RelayStatusDocument", self.process.status)

    @_check(
        "process",
        "Whether a relay runs with this state directory, and with the settings that a restart would "
        "give it: those of the file, of the environment and of this command's options. The other "
        "checks go by the settings that it runs with. If none runs, they go by those of a start, and "
        "what only a running relay knows is not checked.",
    )
    def running(self) -> Finding:
        return common_checks.process(self.process, self.expected)

    @_check(
        "keys",
        "The CA's key, the key of agents' tokens, join tokens and the relay's own TLS key must be "
        "readable by their user alone (mode 0600).",
    )
    def keys(self) -> Finding:
        state = self.config.state
        own = [*state.ca.glob("*.key"), state.token_key, state.join_tokens]
        served = [] if self.config.tls is None else [self.config.tls.key]
        shown = (state.own_tls.key, state.broker_client_tls.key, state.cluster_tls.key)
        return common_checks.keys([*own, *shown, *served])

    @_check(
        "certificates",
        "Each certificate must be valid now, and for more than a sixth of its life: the roots, the one"
        " that is served, and the one that the broker is shown. The relay renews those of its own CA;"
        " rotate a root in time, since its overlap takes 90 days.",
    )
    def certificates(self) -> Finding:
        found = [self._life("the root", self.authority.root_pem(), "run `relay ca rotate-root`")]
        servers = self.authority.servers
        if servers.exist():
            fix = "run `relay ca rotate-root --servers`"
            found.append(self._life("the root of servers", servers.roots()[0], fix))
        by_relay = "start the relay, which makes it"
        if (tls := self.config.tls) is not None:
            absent = by_relay if self.config.own_root else "supply it"
            fix = "supply another, or see the log"
            found.append(self._life_of("the server's certificate", tls.certificate, fix, absent))
        if self.config.uses_broker_tls:
            shown = self.config.state.broker_client_tls.certificate
            found.append(
                self._life_of("the broker client's certificate", shown, "see the relay's log", by_relay)
            )
        if (shown := self.config.state.cluster_tls.certificate).exists():
            name = "the certificate for the other relays"
            found.append(self._life_of(name, shown, "see the relay's log", by_relay))
        cluster = self.config.cluster
        if cluster is not None and "CERTIFICATE" in (pem := _pem(cluster.credentials)):
            found.append(self._life("the certificate of --cluster-credentials", pem, "`relay cluster renew`"))
        worst = max(found, key=lambda finding: finding.severity)
        texts = "; ".join(finding.found for finding in found if finding.severity is worst.severity)
        return Finding(worst.severity, texts, worst.fix)

    def _life_of(self, name: str, file: Path, fix: str, absent: str) -> Finding:
        """Judge the certificate in ``file``; ``absent`` is what to do if there is none."""
        if not file.exists():
            return Finding.failure(f"{name} {file} is not there", absent)
        return self._life(name, _pem(file), fix)

    def _life(self, name: str, pem: str, fix: str) -> Finding:
        try:
            begin_ms, end_ms = validity_of(first_certificate_in(pem))
        except CertificateFormatError as error:
            return Finding.failure(f"{name} cannot be read: {error}", fix)
        return common_checks.life(name, begin_ms, end_ms, self.now_ms(), fix)

    @_check(
        "chain",
        "The certificate that is served must fit its key, and with --tls-own be of the relay's own "
        "root: nodes trust nothing else.",
    )
    def chain(self) -> Finding:
        tls = self.config.tls
        if tls is None:
            return Finding.good("served without TLS, on loopback or behind a proxy")
        if not tls.certificate.exists():
            raise NotCheckedError("there is no certificate")
        load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tls.certificate, tls.key)
        if not self.config.own_root:
            return Finding.good("the certificate fits its key; `relay` shows whether it is trusted")
        pem = _pem(tls.certificate)
        if not any(issued_by(pem, root) for root in self.authority.servers.roots()):
            return Finding.failure("the certificate is of another root", "restart the relay, which renews it")
        return Finding.good("the certificate fits its key, and is of the relay's own root")

    @_check(
        "broker",
        "Connects to the broker as the relay does, subscribes to the nodes' topics, and publishes a "
        "heartbeat of a node that does not exist. If that comes back, the broker lets any of its "
        "clients publish for any node: signatures still hold, but any client can hide nodes.",
    )
    def broker(self) -> Finding:
        broker, ca = self.config.broker, self.authority
        if broker is None:
            return Finding.good("there is none: the nodes' sessions carry everything")
        is_own = self.config.own_broker is not None
        # Its own logs what it refuses, in the relay's log, which knows this id for the doctor's.
        told = self.status["broker"].get("probe_node") if is_own else None
        heartbeat = topics.heartbeat(told or self.new_id())

        def tls() -> ssl.SSLContext | None:
            if not broker.tls:
                return None
            shown = self.config.state.broker_client_tls
            return broker_context(shown, lambda: [*ca.servers.roots(), *ca.roots()], self.config.broker_root)

        client_id = f"edge-doctor-{self.new_id()}"
        with probing(broker, client_id, tls, tries_mqtt_5=not is_own) as probe:
            arrived = probe.subscribe(topics.ALL_HEARTBEATS)
            probe.try_to_publish(Publication(heartbeat, b"{}"))
            everyone_may = _arrives(arrived, heartbeat)
        if everyone_may and is_own and not broker.tls:
            return Finding.good(f"{broker} grants the subscription, and is for this machine alone")
        if everyone_may:
            return Finding.warning(
                f"{broker} lets its clients publish for any node", "set an access list: docs/brokers.md"
            )
        return Finding.good(f"{broker} grants the subscription, and lets no client publish for another")

    @_check(
        "clock",
        "The relay compares the system's clock with ticks, and with what nodes sign. While it is not "
        "trusted, correct the system's clock. Manifests of a node whose clock is wrong are refused: "
        "it is ahead if they are of the future, behind if they have expired when its session brings "
        "them.",
    )
    def clock(self) -> Finding:
        clock = self.status["subsystems"]["clock"]
        if not clock["ready"]:
            found = clock.get("state") or "not set, or was set by minutes"
            return Finding.failure(f"the system's clock is {found}", "run timedatectl set-ntp true")
        if (warning := warned("clock", self.status["nodes"])) is not None:
            return Finding.warning(*warning)
        return Finding.good(
            "the system's clock was not set by minutes since the start, nor do nodes contradict it"
        )

    @_check(
        "relay",
        "A request of /healthz at the public URL, verified as nodes verify it. Failures are those of "
        "DNS, of a proxy in front, or of the certificate.",
    )
    def relay(self) -> Finding:
        url = self.config.public_url

        def tls() -> ssl.SSLContext | None:
            if not url.startswith("https://"):
                return None
            return client_context("".join(self.authority.servers.roots()) if self.config.own_root else None)

        return common_checks.reach(ask_health(url, tls), url)

    @_check(
        "proxies",
        "Where the relay listens on loopback and its public URL is not there, a proxy of this machine is in "
        "front. Unless trusted_proxies names it, the limits of one address apply to all its clients "
        "together, and the audit has the proxy's address in place of theirs.",
    )
    def proxies(self) -> Finding:
        if self.config.unnamed_proxy:
            return Finding.warning(
                f"a proxy in front of {self.config.listen} is not named, so all its clients share one limit",
                "set trusted_proxies to 127.0.0.1 and ::1, and have the proxy add X-Forwarded-For",
            )
        named = ", ".join(map(str, self.config.trusted_proxies))
        return Finding.good(f"trusted: {named}" if named else "none is trusted, nor known to be in front")

    @_check(
        "metrics",
        "Where /metrics is served: metrics_listen names a loopback address or a Unix socket, for "
        "Prometheus on this machine. Without it a relay that serves TLS itself answers on its public "
        "port under loopback's names, which ends with 0.4; any other does not serve them.",
    )
    def metrics(self) -> Finding:
        if (listen := self.config.metrics_listen) is not None:
            return Finding.good(f"served on {listen}")
        if self.config.old_metrics:
            return Finding.warning(
                "/metrics is on the public listener, and will not be in 0.4",
                "set metrics_listen, such as 127.0.0.1:8702",
            )
        return Finding.good("not served: set metrics_listen, such as 127.0.0.1:8702, to read them")

    @_check(
        "sessions",
        "How many nodes are connected. None of those that are known is a warning: nothing can be called.",
    )
    def sessions(self) -> Finding:
        nodes = self.status["nodes"]
        if nodes["known"] == nodes["connected"] == 0:
            return Finding.good("no node is known yet: `relay join-token create`, then `edge-kubelet enroll`")
        found = f"{nodes['connected']} of {nodes['known']} known nodes are connected"
        if nodes["connected"] == 0:
            return Finding.warning(found, "start one; run `edge-kubelet doctor` there")
        return Finding.good(found)

    @_check(
        "announces",
        "The manifests that the broker should hold, against those that it has sent since the relay "
        "subscribed.",
    )
    def announces(self) -> Finding:
        if self.config.broker is None:
            return Finding.good("there is no broker: nodes announce by their sessions")
        broker = self.status["subsystems"]["broker"]
        if not broker["ready"]:
            return Finding.failure("the relay is not subscribed to the broker", "see `broker`, and the log")
        missing = self.status["broker"]["missing"]
        if missing:
            return Finding.warning(
                f"the broker has not sent the manifests of {missing} nodes that were known",
                "retire those that are gone; else see docs/brokers.md",
            )
        return Finding.good("the broker has sent the manifests of all nodes that were known")

    @_check(
        "cluster",
        "Whether the relay is connected to the servers of --cluster, and reads what other relays "
        "write there. Without that, calls of the nodes of other relays are E_NODE_OFFLINE.",
    )
    def cluster(self) -> Finding:
        if self.config.cluster is None:
            return Finding.good("there is none: this relay has the fleet alone")
        cluster = self.status["subsystems"]["cluster"]
        if cluster["ready"] and not self.status.get("cluster", {}).get("sealed"):
            found = f"{cluster['state']}; not sealed: who can write at its servers can act as a relay"
            return Finding.warning(found, "run `relay cluster seal` on the relay with the CA's key")
        if cluster["ready"]:
            return Finding.good(f"{cluster['state']}; sealed")
        return Finding.failure(cluster["state"], "see the relay's log: it names the server and the reason")

    @_check(
        "echo",
        "The relay's own echoes of the last minute, through its audit, its limits and the nodes' "
        "sessions and back.",
    )
    def echo(self) -> Finding:
        calls = self.status["subsystems"]["calls"]
        if not calls["ready"]:
            return Finding.failure(calls["state"], "see the relay's log: it names the hop that failed")
        if (found := warned("echo", self.status["nodes"])) is not None:
            text, fix = found
            return Finding.warning(f"{calls['state']}; {text}", fix)
        return Finding.good(calls["state"])

    @_check(
        "audit",
        "The audit must be writable: calls that cannot be recorded are not made. Without audit_keep none of "
        "its files is removed; the day on which its disk is full goes by what was written in the last week.",
    )
    def audit(self) -> Finding:
        if not self.status["subsystems"]["audit"]["ready"]:
            return Finding.failure(
                "the audit cannot be written, so no call is made", "free space on its disk"
            )
        if self.config.audit_keep != KEEP_ALL:
            return Finding.good("the audit is written, and its old files are removed")
        now_ms = self.now_ms()
        full_ms = disk_full_ms(self.config.state.audit, now_ms)
        if full_ms is None or not is_credible(full_ms):
            return Finding.good("the audit is written; at its rate the disk lasts, or it is too new to tell")
        found = f"the audit is written; at the last week's rate its disk is full on {iso(full_ms)[:10]}"
        if full_ms - now_ms < _SOON_FULL_MS:
            return Finding.warning(found, "set audit_keep, such as 90d or 10GiB, or use a larger disk")
        return Finding.good(found)

    @_check(
        "provider",
        "The OpenID Connect provider of people.oidc, asked for its metadata and keys as the relay asks: its "
        "issuer must be letter by letter that of the setting, with PKCE by S256; what it leads to on another "
        "host must be public. The client's secret must be readable by the relay's user alone.",
    )
    def provider(self) -> Finding:
        oidc = self.config.oidc
        if oidc is None:
            return Finding.good("there is none: people sign in with passkeys alone")
        if self.config.cluster is not None and not self.authority.can_issue():
            return Finding.good("the relay with the CA's key asks it, and has its secret")
        from relay.auth.openid_provider import OpenidError, asked_now  # noqa: PLC0415 - an option

        oidc.secret()
        if not self.config.sign_in:
            return Finding.warning("people.oidc is set, and sign_in is false: no person signs in", "set one")
        try:
            keys = asyncio.run(asked_now(oidc.issuer))
        except OpenidError as error:
            return Finding.failure(f"{oidc.issuer}: {error}", "no sign-in there: correct people.oidc")
        return Finding.good(f"{oidc.issuer} answers, with {counted(keys, 'key')}")

    @_check(
        "files",
        "The relay must have 64 file descriptors left: each node and each agent takes one.",
    )
    def files(self) -> Finding:
        return common_checks.files(self.status)

    @_check(
        "watchdog",
        "Every loop of the relay must make progress, and a service manager must restart it when one "
        "does not.",
    )
    def watchdog(self) -> Finding:
        return common_checks.watchdog(self.status)


def _arrives(arrived: "queue.Queue[str]", topic: str) -> bool:
    """Return whether something arrives on ``topic`` in time."""
    try:
        while arrived.get(timeout=_RETURN_S) != topic:
            pass
    except queue.Empty:
        return False
    return True


def _pem(file: Path) -> str:
    return read_named(file, MAX_PEM_BYTES).decode("ascii", "replace")


app = group("What keeps calls from passing this relay.")


@app.command(epilog=example("relay doctor", "relay doctor --sign-in https://relay.example"))
@takes_settings(RELAY, *(setting for setting in RELAY.options if setting is not SIGN_IN))
def doctor(
    sources: Sources,
    explain: Annotated[str | None, typer.Option(metavar="CHECK", help="Explain one check.")] = None,
    sign_in: Annotated[
        str | None,
        typer.Option(
            "--sign-in", metavar="URL", help="Check from outside whether clients can sign in at URL."
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if there is a warning.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check what calls through this relay need, or with --sign-in what clients need, one line each.

    The settings are those that the running relay has. The options are those of `relay run`: what a restart
    would give it.

    Exit code 0: calls flow, whatever the warnings; 1: a warning, with --strict; 3: they cannot.
    """
    if sign_in is not None:
        from relay.cli import sign_in_doctor  # noqa: PLC0415 - with the HTTP client

        url, _ = parse_mcp_url(sign_in)
        rows = sign_in_doctor.CHECKS
        checks = partial(sign_in_doctor.SignInChecks, url)
        raise SystemExit(run_doctor(rows, checks, explain, as_json=as_json, strict=strict))
    raise SystemExit(run_doctor(CHECKS, partial(_checks, sources), explain, as_json=as_json, strict=strict))


def _checks(sources: Sources) -> RelayChecks:
    """Return the checks of the relay that runs, or that ``sources`` would start."""
    expected = settings_for_command(sources)
    process = AskedProcess.ask(RELAY, expected.state.root)
    running = process.sources()
    config = (expected if running is None else load_settings(running, expected.state.root)).config()
    authority = CertificateAuthority(config.state.ca, now_ms, os.urandom)
    ulids = UlidSource(now_ms, os.urandom)

    def new_id() -> str:
        return ulids.new().lower()

    return RelayChecks(config, process, expected.settings, authority, now_ms, new_id)
