"""``relay doctor``: what keeps calls from passing this relay, and what to do.

Must not change anything, nor need a relay that runs.
"""

import os
import queue
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from relay.cli.options import AsJson, usual_state_dir
from relay.fleet.facts import warned
from relay.pki.authority import CertificateAuthority
from relay.pki.relay_tls import broker_context, issued_by
from relay.settings.config import RelayConfig
from relay.settings.environment import now_ms
from relay.settings.table import RELAY, load_settings
from schemas import topics
from schemas.addresses import host_of, is_loopback
from schemas.files import read_named
from schemas.identity import MAX_PEM_BYTES, CertificateFormatError, first_certificate_in, validity_of
from schemas.process import common_checks
from schemas.process.cli_config import takes_settings
from schemas.process.cli_manual import example, group
from schemas.process.common_checks import Publication, ask_health, probing
from schemas.process.doctor import DoctorCheck, Finding, NotCheckedError, Severity, run_doctor
from schemas.process.state_owner import act_as_owner_of
from schemas.process.status_view import AskedProcess
from schemas.settings import Settings
from schemas.settings_sources import Sources
from schemas.tls import client_context, load_chain
from schemas.ulids import UlidSource

_RETURN_S = 2.0


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
    now_ms: Callable[[], int]
    new_id: Callable[[], str]

    @property
    def status(self) -> Mapping[str, Any]:
        """What the relay does now.

        Raises:
            NotCheckedError: it does not say so.
        """
        return self.process.status

    def running(self) -> Finding:
        """Check that the relay runs, and with the settings that a restart would give it."""
        return common_checks.process(self.process, self.expected)

    def keys(self) -> Finding:
        """Check the owner and the rights of the files with secrets."""
        state = self.config.state
        own = [*state.ca.glob("*.key"), state.token_key, state.join_tokens]
        served = [] if self.config.tls is None else [self.config.tls.key]
        return common_checks.keys([*own, state.own_tls.key, state.broker_client_tls.key, *served])

    def certificates(self) -> Finding:
        """Check how long each certificate is valid; return the worst finding."""
        found = [self._life("the root", self.authority.root_pem(), "run `relay ca rotate-root`")]
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

    def chain(self) -> Finding:
        """Check that the served certificate fits its key, and is of the own root where it should be."""
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

    def broker(self) -> Finding:
        """Subscribe as the relay does, and publish for a node that does not exist."""
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

    def clock(self) -> Finding:
        """Read whether the relay trusts the system's clock, and whether nodes sign by it."""
        clock = self.status["subsystems"]["clock"]
        if not clock["ready"]:
            found = clock.get("state") or "not set, or was set by minutes"
            return Finding.failure(f"the system's clock is {found}", "run timedatectl set-ntp true")
        if (found := warned("clock", self.status["nodes"])) is not None:
            return Finding.warning(*found)
        return Finding.good(
            "the system's clock was not set by minutes since the start, nor do nodes contradict it"
        )

    def relay(self) -> Finding:
        """Check that the public URL answers, as a node verifies it."""
        url = self.config.public_url

        def tls() -> ssl.SSLContext | None:
            if not url.startswith("https://"):
                return None
            return client_context("".join(self.authority.servers.roots()) if self.config.own_root else None)

        return common_checks.reach(ask_health(url, tls), url)

    def sessions(self) -> Finding:
        """Read how many nodes are connected."""
        nodes = self.status["nodes"]
        if nodes["known"] == nodes["connected"] == 0:
            return Finding.good("no node is known yet: `relay join-token create`, then `edge-kubelet enroll`")
        found = f"{nodes['connected']} of {nodes['known']} known nodes are connected"
        if nodes["connected"] == 0:
            return Finding.warning(found, "start one; run `edge-kubelet doctor` there")
        return Finding.good(found)

    def announces(self) -> Finding:
        """Read whether the broker sends the manifests that it should hold."""
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

    def cluster(self) -> Finding:
        """Read whether the nodes of the other relays can be reached."""
        if self.config.cluster is None:
            return Finding.good("there is none: this relay has the fleet alone")
        cluster = self.status["subsystems"]["cluster"]
        if cluster["ready"]:
            return Finding.good(cluster["state"])
        return Finding.failure(cluster["state"], "see the relay's log: it names the server and the reason")

    def echo(self) -> Finding:
        """Read how the relay's own echoes went."""
        calls = self.status["subsystems"]["calls"]
        if not calls["ready"]:
            return Finding.failure(calls["state"], "see the relay's log: it names the hop that failed")
        if (found := warned("echo", self.status["nodes"])) is not None:
            text, fix = found
            return Finding.warning(f"{calls['state']}; {text}", fix)
        return Finding.good(calls["state"])

    def audit(self) -> Finding:
        """Read whether the audit can be written."""
        if self.status["subsystems"]["audit"]["ready"]:
            return Finding.good("the audit is written")
        return Finding.failure("the audit cannot be written, so no call is made", "free space on its disk")

    def file_descriptors(self) -> Finding:
        """Read how many file descriptors the relay has left."""
        return common_checks.files(self.status)

    def watchdog(self) -> Finding:
        """Read whether the relay is restarted when it stalls; one for this machine alone may do without."""
        finding = common_checks.watchdog(self.status)
        if finding.severity is Severity.WARNING and is_loopback(host_of(self.config.public_url)):
            return Finding.good(f"{finding.found}; it serves this machine alone")
        return finding


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


CHECKS: Sequence[DoctorCheck[RelayChecks]] = (
    DoctorCheck(
        "process",
        RelayChecks.running,
        "Whether a relay runs with this state directory, and with the settings that a restart would "
        "give it: those of the file, of the environment and of this command's options. The other "
        "checks go by the settings that it runs with. If none runs, they go by those of a start, and "
        "what only a running relay knows is not checked.",
    ),
    DoctorCheck(
        "keys",
        RelayChecks.keys,
        "The CA's key, the key of agents' tokens, join tokens and the relay's own TLS key must be "
        "readable by their user alone (mode 0600).",
    ),
    DoctorCheck(
        "certificates",
        RelayChecks.certificates,
        "Each certificate must be valid now, and for more than a sixth of its life: the root, the one"
        " that is served, and the one that the broker is shown. The relay renews those of its own CA;"
        " rotate the root in time, since its overlap takes 90 days.",
    ),
    DoctorCheck(
        "chain",
        RelayChecks.chain,
        "The certificate that is served must fit its key, and with --tls-own be of the relay's own "
        "root: nodes trust nothing else.",
    ),
    DoctorCheck(
        "broker",
        RelayChecks.broker,
        "Connects to the broker as the relay does, subscribes to the nodes' topics, and publishes a "
        "heartbeat of a node that does not exist. If that comes back, the broker lets any of its "
        "clients publish for any node: signatures still hold, but any client can hide nodes.",
    ),
    DoctorCheck(
        "clock",
        RelayChecks.clock,
        "The relay compares the system's clock with ticks, and with what nodes sign. While it is not "
        "trusted, correct the system's clock. Manifests of a node whose clock is wrong are refused: "
        "it is ahead if they are of the future, behind if they have expired when its session brings "
        "them.",
    ),
    DoctorCheck(
        "relay",
        RelayChecks.relay,
        "A request of /healthz at the public URL, verified as nodes verify it. Failures are those of "
        "DNS, of a proxy in front, or of the certificate.",
    ),
    DoctorCheck(
        "sessions",
        RelayChecks.sessions,
        "How many nodes are connected. None of those that are known is a warning: nothing can be called.",
    ),
    DoctorCheck(
        "announces",
        RelayChecks.announces,
        "The manifests that the broker should hold, against those that it has sent since the relay "
        "subscribed.",
    ),
    DoctorCheck(
        "cluster",
        RelayChecks.cluster,
        "Whether the relay is connected to the servers of --cluster, and reads what other relays "
        "write there. Without that, calls of the nodes of other relays are E_NODE_OFFLINE.",
    ),
    DoctorCheck(
        "echo",
        RelayChecks.echo,
        "The relay's own echoes of the last minute, through its audit, its limits and the nodes' "
        "sessions and back.",
    ),
    DoctorCheck(
        "audit",
        RelayChecks.audit,
        "The audit must be writable: calls that cannot be recorded are not made.",
    ),
    DoctorCheck(
        "files",
        RelayChecks.file_descriptors,
        "The relay must have 64 file descriptors left: each node and each agent takes one.",
    ),
    DoctorCheck(
        "watchdog",
        RelayChecks.watchdog,
        "Every loop of the relay must make progress, and a service manager must restart it when one "
        "does not.",
    ),
)
"""In the order in which a call depends on them; each explains how it checks, why, and what to do."""


app = group("What keeps calls from passing this relay.")


@app.command(epilog=example("relay doctor", "relay doctor --explain broker"))
@takes_settings(RELAY)
def doctor(
    sources: Sources,
    explain: Annotated[str | None, typer.Option(metavar="CHECK", help="Explain one check.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check what calls through this relay need, one line each.

    The settings are those that the running relay has. The options are those of `relay run`: what a restart
    would give it. Exit code 0: all is well; 1: something will fail, or is not safe; 3: calls cannot be made.
    """
    raise SystemExit(run_doctor(CHECKS, partial(_checks, sources), explain, as_json=as_json))


def _checks(sources: Sources) -> RelayChecks:
    """Return the checks of the relay that runs, or that ``sources`` would start."""
    expected = load_settings(sources, usual_state_dir(), act_as_owner_of)
    process = AskedProcess.ask(RELAY, expected.state.root)
    running = process.sources()
    config = (expected if running is None else load_settings(running, expected.state.root)).config()
    authority = CertificateAuthority(config.state.ca, now_ms, os.urandom)
    ulids = UlidSource(now_ms, os.urandom)

    def new_id() -> str:
        return ulids.new().lower()

    return RelayChecks(config, process, expected.settings, authority, now_ms, new_id)
