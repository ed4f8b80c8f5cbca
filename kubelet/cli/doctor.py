"""``kubelet doctor``: what keeps calls from reaching this node, and what to do.

Sessions are not opened: a second one would end the daemon's. What only the daemon can know, it tells over its
socket. Must not change anything, nor need a daemon that runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import typer

from kubelet.announce.signer import read_last_issued_ms
from kubelet.cli.kinds import LOOSENED
from kubelet.cli.options import settings_for_command
from kubelet.config import NodeConfig, last_issued_file
from kubelet.process import now_ms
from kubelet.session.tls import NodeTls
from kubelet.settings import KUBELET, load_settings
from schemas import topics
from schemas.certificates import IdentityError, verify_leaf
from schemas.files import MEMBERS_READ, sees_as_member
from schemas.identity import first_certificate_in, validity_of
from schemas.identity_files import IdentityFiles, IdentityFilesError, NodeIdentity
from schemas.manifest import MAX_FUTURE_MS
from schemas.process import common_checks
from schemas.process.cli_config import AsJson, takes_settings
from schemas.process.cli_manual import example, group
from schemas.process.common_checks import (
    BrokerProbeError,
    HealthAnswer,
    Publication,
    UnreachedError,
    ask_health,
    probing,
)
from schemas.process.doctor import DoctorChecks, Finding, NotCheckedError, Severity, run_doctor
from schemas.process.status_view import AskedProcess
from schemas.settings import Settings, Sources
from schemas.text import counted, printable

_RENEW = "the daemon renews it while it is connected; its log says why it did not. Else enrol again"
_SURE_AFTER = 2
"""So many acknowledgements: the first announce by the broker may arrive after the first heartbeat."""

CHECKS = DoctorChecks["NodeChecks"]()
"""In the order in which a call depends on them; each explains how it checks, why, and what to do."""
_check = CHECKS.add


@dataclass(frozen=True)
class NodeChecks:
    """The checks of the node in ``files``.

    Attributes:
        config: what its daemon runs with; where none runs, what a start would give it.
        process: the daemon that runs, if one does.
        expected: the settings that a start would give it.
    """

    config: NodeConfig
    process: AskedProcess
    expected: Settings
    files: IdentityFiles
    now_ms: Callable[[], int]

    @cached_property
    def identity(self) -> NodeIdentity:
        """The node's identity.

        Raises:
            NotCheckedError: it cannot be used, and ``certificate`` says why; or its key is not this user's.
        """
        if self._lacks_key:
            raise NotCheckedError(f"{self.files.key}: {MEMBERS_READ}")
        try:
            return self.files.read()
        except (IdentityFilesError, OSError):
            raise NotCheckedError("the node's identity cannot be used") from None

    @property
    def _lacks_key(self) -> bool:
        """Whether this user sees the certificates alone."""
        return sees_as_member(self.files.key)

    @property
    def status(self) -> Mapping[str, Any]:
        """What the daemon does now.

        Raises:
            NotCheckedError: it does not say so.
        """
        return self.process.status

    @property
    def _calls_flow(self) -> bool:
        """Whether the daemon says so."""
        try:
            return bool(self.status["subsystems"]["calls"]["ready"])
        except NotCheckedError:
            return False

    @cached_property
    def answers(self) -> Mapping[str, HealthAnswer | UnreachedError]:
        """What each relay of the fleet answers to a request without any identity, by its URL."""
        tls = NodeTls(self.files, own_root=self.config.own_root)

        def answer_of(url: str) -> HealthAnswer | UnreachedError:
            try:
                return ask_health(self.config.relay_url, lambda: tls.to_relay(url), at=url)
            except UnreachedError as error:
                return error

        return {url: answer_of(url) for url in self.config.relays}

    @property
    def answer(self) -> HealthAnswer:
        """The answer of the first relay that gives one.

        Raises:
            NotCheckedError: none does; ``relay`` says why.
        """
        for answer in self.answers.values():
            if isinstance(answer, HealthAnswer):
                return answer
        raise NotCheckedError("no relay is reached")

    @_check(
        "process",
        "Whether a daemon runs with this state directory, and with the settings that a restart would "
        "give it: those of the file, of the environment and of this command's options. The other "
        "checks go by the settings that it runs with. If none runs, they go by those of a start, "
        "and what only a running daemon knows is not checked.",
    )
    def running(self) -> Finding:
        return common_checks.process(self.process, self.expected)

    @_check(
        "keys",
        "The node's key must be readable by its user alone (mode 0600): who reads it can be this node.",
    )
    def keys(self) -> Finding:
        return common_checks.keys([self.files.key])

    @_check(
        "certificate",
        "The leaf certificate must be valid now, and for more than a sixth of its life. It is "
        "renewed over the session from two thirds of its life on; one that has ended cannot "
        "be: enrol the node again.",
    )
    def certificate(self) -> Finding:
        leaf_pem = self.files.leaf_pem() if self._lacks_key else self.files.read().leaf_pem
        begin_ms, end_ms = validity_of(first_certificate_in(leaf_pem))
        return common_checks.life("the leaf", begin_ms, end_ms, self.now_ms(), _RENEW)

    @_check(
        "chain",
        "The leaf must be issued by the root that this node trusts, for this node. Otherwise "
        "the relay refuses the session with 4001.",
    )
    def chain(self) -> Finding:
        if self._lacks_key:
            leaf_pem, root_pem = self.files.leaf_pem(), self.files.root_pem()
        else:
            leaf_pem, root_pem = self.identity.leaf_pem, self.identity.root_pem
        if root_pem is None:
            return Finding.failure("no CA has issued the leaf", "enrol with `edge-kubelet enroll`")
        try:
            leaf = verify_leaf(leaf_pem, [root_pem], self.now_ms())
        except IdentityError as error:
            return Finding.failure(
                f"the leaf is not accepted: {error.reason}", "enrol with `edge-kubelet enroll`"
            )
        return Finding.good(f"the leaf is the root's, for tenant {leaf.tenant}")

    @_check(
        "relay",
        "A request of /healthz at each URL of the relay, verified as the daemon verifies it. "
        "Failures are those of the network, of DNS, of a proxy, or of a certificate that is "
        "not trusted.",
    )
    def relay(self) -> Finding:
        findings = [
            Finding.failure(str(answer), "see --explain relay")
            if isinstance(answer, UnreachedError)
            else common_checks.reach(answer, url)
            for url, answer in self.answers.items()
        ]
        bad = [finding for finding in findings if finding.severity is not Severity.OK]
        if not bad:
            return Finding.good(", ".join(finding.found for finding in findings))
        found = "; ".join(finding.found for finding in bad)
        if len(bad) < len(findings):
            return Finding.warning(f"{found}; another relay answers", bad[0].fix)
        return Finding.failure(found, bad[0].fix)

    @_check(
        "clock",
        "This clock against the relay's, which is in its answer. A relay refuses manifests "
        "that are five minutes ahead of it, and agents do not see a node whose manifests have "
        "expired.",
    )
    def clock(self) -> Finding:
        if self.answer.date_ms is None:
            return Finding.warning("the relay does not say its time", "compare the clocks by hand")
        file, now_ms = last_issued_file(self.files.root), self.now_ms()
        compared = common_checks.clock(now_ms - self.answer.date_ms)
        ahead_ms = read_last_issued_ms(file) - now_ms
        if compared.severity is not Severity.OK or ahead_ms <= MAX_FUTURE_MS:
            return compared
        return Finding.warning(
            f"{compared.found}, but the newest manifest was signed by a clock {ahead_ms // 60_000} min ahead",
            "run the daemon, whose relay replaces that time; if its log still has `relay rejects the "
            f"manifest`, upgrade the relay, or stop the daemon and remove {file}",
        )

    @_check(
        "broker",
        "Connects to the broker with the node's certificate, publishes its identity once more, "
        "retained, and waits for the confirmation. A broker of MQTT 5 says when its access "
        "list refuses; one of MQTT 3.1.1 confirms also then, which is what `announce` is for.",
    )
    def broker(self) -> Finding:
        broker = self.config.broker
        if broker is None:
            return Finding.good("there is none: the session carries everything")
        tls = NodeTls(self.files, own_root=self.config.own_root)
        node_id = self.identity.node_id
        message = Publication(topics.identity(node_id), self.identity.chain_pem.encode("ascii"), retain=True)
        try:
            with probing(broker, f"edge-doctor-{node_id}", lambda: tls.to_broker(broker)) as probe:
                probe.publish(message)
        except BrokerProbeError as error:
            if not self._calls_flow:
                raise
            return Finding.warning(f"{error}; the session carries calls meanwhile", "see --explain broker")
        if probe.tells_refusals:
            return Finding.good(f"{broker} has taken the identity, and would have said if it refused it")
        return Finding.good(f"{broker} has confirmed the identity; see `announce` for whether it refused it")

    @_check(
        "session",
        "The state of the daemon's WebSocket to the relay. It is ready when the relay has "
        "accepted the node's manifest.",
    )
    def session(self) -> Finding:
        relay = self.status["subsystems"]["relay"]
        found = f"the daemon's session: {relay['state']}"
        return Finding.good(found) if relay["ready"] else Finding.failure(found, "see the daemon's log")

    @_check(
        "announce",
        "With each heartbeat, the relay names the announce that it received last by the "
        "broker. It must be one of the last that were published here.",
    )
    def announce(self) -> Finding:
        if self.config.broker is None:
            return Finding.good("the session carries the announce, because there is no broker")
        relay, broker = self.status["relay"], self.status["broker"]
        if not relay["gets_echo"]:
            return Finding.warning(
                "the relay does not say what it receives: no session, or it is older than 0.2",
                "see `session`; upgrade the relay",
            )
        if broker["relay_received"] is None and relay["acknowledgements"] < _SURE_AFTER:
            return Finding.warning(
                "the relay had not received an announce by the broker when the session began",
                f"make this check again after the next heartbeat, in {relay['heartbeat_s']:g} s",
            )
        if broker["relay_received"] in broker["published"]:
            return Finding.good("the relay receives by the broker what this node publishes")
        if self._calls_flow and not self.status["subsystems"]["broker"]["ready"]:
            return Finding.warning("the broker is away: the session carries the announce", "see `broker`")
        found, fix = (
            "another announce by the broker than what is published here",
            "check the broker's access list: it refuses this node, or lets others publish for it",
        )
        if broker["relay_received"] is None:
            found = "no announce of this node by the broker"
            fix = "check that both use the same broker, and its access list (docs/brokers.md)"
        return Finding.failure(f"the relay has received {found}", fix)

    @_check(
        "echo",
        "After each welcome the relay calls this node's echo, as an agent would. Calls flow "
        "when that was answered, and while heartbeats are acknowledged.",
    )
    def echo(self) -> Finding:
        calls = self.status["subsystems"]["calls"]
        if not calls["ready"]:
            return Finding.failure(calls["state"], "run `relay doctor` on the hub")
        if not self.status["relay"]["gets_echo"]:
            return Finding.warning(
                "heartbeats are acknowledged; this relay sends no echo", "upgrade the relay to 0.2"
            )
        return Finding.good("the relay's echo was answered, and heartbeats are acknowledged")

    @_check(
        "kinds",
        "Each kind that is enabled must see what it shows. The daemon looks from within its sandbox, the "
        "unit with its drop-ins. What this machine does not have is told, and is no mistake.",
    )
    def kinds(self) -> Finding:
        kinds: Mapping[str, Any] = self.status["kinds"]
        by_reason: dict[str, list[str]] = {}
        for name, said in kinds.items():
            if said["lacks"] is not None:
                by_reason.setdefault(printable(said["lacks"]), []).append(name)
        told = [counted(len(kinds), "kind"), *(f"{', '.join(of)}: {why}" for why, of in by_reason.items())]
        if unknown := [name for name, said in kinds.items() if not said.get("relay", True)]:
            return Finding.warning("; ".join(told), f"name them in kinds of relay.toml: {', '.join(unknown)}")
        for name in (name for of in by_reason.values() for name in of if name in LOOSENED):
            return Finding.warning("; ".join(told), f"sudo kubelet kinds enable {name}")
        return Finding.good("; ".join(told))

    @_check(
        "files",
        "The daemon must have 64 file descriptors left: without, it can neither reconnect nor renew.",
    )
    def file_descriptors(self) -> Finding:
        return common_checks.files(self.status)

    @_check(
        "watchdog",
        "Every loop of the daemon must make progress, and a service manager must restart it "
        "when one does not.",
    )
    def watchdog(self) -> Finding:
        return common_checks.watchdog(self.status)


app = group("What keeps calls from reaching this node.")


@app.command(epilog=example("edge-kubelet doctor", "edge-kubelet doctor --explain broker"))
@takes_settings(KUBELET)
def doctor(
    sources: Sources,
    explain: Annotated[str | None, typer.Option(metavar="CHECK", help="Explain one check.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if there is a warning.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check what calls to this node need, one line each.

    The settings are those that the running daemon has. The options are those of `edge-kubelet run`: what a
    restart would give it.

    Exit code 0: calls flow, whatever the warnings; 1: a warning, with --strict; 3: they cannot.
    """

    def checks() -> NodeChecks:
        """Return the checks of the daemon that runs, or that ``sources`` would start."""
        expected = settings_for_command(sources)
        files, process = IdentityFiles(expected.state_dir), AskedProcess.ask(KUBELET, expected.state_dir)
        running = process.sources()
        config = (expected if running is None else load_settings(running, expected.state_dir)).config()
        return NodeChecks(config, process, expected.settings, files, now_ms)

    raise SystemExit(run_doctor(CHECKS, checks, explain, as_json=as_json, strict=strict))
