"""The command line of the node.

Exit codes: 0 done; 1 the answer is no; 2 the command line is wrong; 3 it cannot run as things are (a file
is missing, damaged or exposed, a port is taken); 70 a fault of our own; 78 the settings cannot be used, and
a restart does not help; 130 a signal has ended it before it had an answer. Standard output holds results,
standard error the rest.
Must not hold what the commands do: what only one of them needs is imported when it runs, since `run` only
becomes the daemon, and each board waits for it at each start. So the MCP SDK, of an extra, is `mcp`'s alone.
"""

import os
import re
import signal
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar

import typer

from kubelet.cli.options import (
    Plain,
    Socket,
    StateDir,
    agent_socket,
    ceiling_of_settings,
    contract_of_settings,
    directory_of,
    join_token,
    named_pem,
    next_step,
    print_facts,
    say,
    settings_for_command,
    settings_of_start,
    socket_group,
    socket_of,
    typed_config,
    usual_state_dir,
)
from kubelet.config import DaemonPlan, kinds_directory, read_stored
from kubelet.process import fail, hold_alone, now_ms, run_until_signal
from kubelet.settings import (
    BROKER,
    HEARTBEAT,
    KINDS,
    KUBELET,
    LOOPBACK_PORT,
    NO_BROKER,
    RELAY,
    SOCKET,
    STATE_DIR,
    TTL,
)
from schemas.addresses import PLAIN_OPTION, host_of, is_loopback, normal_url
from schemas.files import read_given
from schemas.identity_files import IdentityFiles
from schemas.manifest import MAX_MANIFEST_BYTES
from schemas.process.cli_config import AsJson, add_commands, takes_settings
from schemas.process.cli_manual import Manual, example, group, program
from schemas.process.command_errors import (
    EXIT_CANNOT_RUN,
    EXIT_CONFIG,
    EXIT_NO,
    EXIT_USAGE,
    errors_in_one_line,
    have_streams,
)
from schemas.settings import PLAIN, Sources
from schemas.text import quoted


class _Commands(Manual):
    on_demand: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "status": "kubelet.cli.status:app",
            "doctor": "kubelet.cli.doctor:app",
            "service": "kubelet.cli.service:app",
            "kind": "kubelet.cli.kind:app",
            "kinds": "kubelet.cli.kinds:app",
        }
    )


app = program(
    "kubelet", "The edge node: announces what it can do, and does what the relay sends down.", _Commands
)
_config = group("The settings that the daemon runs with.")
add_commands(_config, KUBELET, settings_of_start)
app.add_typer(_config, name="config")


def main() -> None:
    """Run the command line. An expected error is one line; a fault of our own has a traceback."""
    have_streams()
    with errors_in_one_line(fail):
        app()


@app.command(epilog=example("edge-kubelet init"))
def init(
    state_dir: StateDir = None,
    certificate: Annotated[Path | None, typer.Option(help="The leaf that a CA issued, PEM.")] = None,
    root: Annotated[Path | None, typer.Option(help="The roots that are trusted, PEM.")] = None,
    relay: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="The relay's public URL; again, for others of its fleet."),
    ] = None,
    broker: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The MQTT broker.")] = None,
    system_roots: Annotated[
        bool,
        typer.Option(
            "--system-roots", help="The relay runs without --tls-own: verify it as this machine does."
        ),
    ] = False,
    plain: Plain = False,
    as_json: AsJson = False,
) -> None:
    """Make this node's identity, or install what a CA issued for it, and where its relay and broker are."""
    from kubelet.identity.provisioning import (  # noqa: PLC0415
        create_identity,
        install_by_hand,
        install_certificate,
        issued_by_hand,
    )

    if (certificate is None) != (root is None):
        fail("--certificate and --root go together", EXIT_USAGE)
    if (not relay) != (broker is None) or (relay and root is None):
        fail("--relay and --broker go together, and with --certificate and --root", EXIT_USAGE)
    given = None if certificate is None or root is None else (named_pem(certificate), named_pem(root))
    files = IdentityFiles(directory_of(state_dir))
    if not files.exists():
        create_identity(files, now_ms(), os.urandom)
    if given is not None:
        issued = issued_by_hand(*given)
        if relay and broker is not None:
            install_by_hand(
                files, issued, relay, broker, system_roots=system_roots, plain_allowed=plain, now_ms=now_ms()
            )
        else:
            install_certificate(files, issued, now_ms())
    identity = files.read()
    facts = {
        "node_id": identity.node_id,
        "state_dir": str(files.root),
        "csr": str(files.csr),
        "leaf": str(files.leaf),
        "kid": identity.kid,
        "enrolled": identity.root_pem is not None,
    }
    print_facts(facts, as_json=as_json)
    if identity.root_pem is None and not as_json:
        say(f"\nnext: relay ca issue {files.csr} -o leaf.pem && relay ca roots --pem > roots.pem")
        say("      edge-kubelet init --certificate leaf.pem --root roots.pem --relay URL --broker URL")


@app.command(epilog=example("edge-kubelet run --ttl 15m --heartbeat 1m"))
@takes_settings(KUBELET)
def run(sources: Sources) -> None:
    """Run the daemon. Broker and relay are those of the enrolment unless given.

    Each option is also a setting: --ttl is ttl in kubelet.toml, and the variable KUBELET_TTL.
    `edge-kubelet config show` prints which value holds, and where it stands.
    """
    loaded = settings_of_start(sources, for_good=True)
    config, directory, settings = loaded.config(), loaded.state_dir, loaded.settings
    if not IdentityFiles(directory).are_absent():
        with hold_alone(directory):  # not while another daemon runs by what is kept
            replaced = loaded.keep_told(sources)
        if replaced:
            typer.echo(f"kubelet: not as it was told before: {', '.join(replaced)}", err=True)
    place = socket_of(settings.get(SOCKET), directory)
    if place is None:
        typer.echo(
            "local agents cannot connect: the state directory's path is too long; name a --socket", err=True
        )
    plan = DaemonPlan(
        config,
        directory,
        settings[LOOPBACK_PORT],
        place,
        socket_group(),
        settings=settings.serialized(),
        flags=sources.flags,
        config_file=sources.named_file,
        version=version("edge-kubelet"),
    )
    # The same process goes on as the daemon, without what only a command line needs. -P: else Python would
    # run a json.py of the working directory, and run it as root. no_debug_ranges: a traceback names the line
    # without the column, and each loaded module takes less memory.
    command = [sys.executable, "-P", "-X", "no_debug_ranges", "-m", "kubelet.daemon", plan.to_json()]
    # One arena: glibc would give each thread of the daemon one of its own, for memory that few of them need.
    environment = {"MALLOC_ARENA_MAX": "1", **os.environ}
    os.execve(command[0], command, environment)  # noqa: S606 - our own interpreter, with what was just checked


@app.command(epilog=example("edge-kubelet mcp --session gogol_20261122_093000_1a2b3c4d"))
def mcp(
    socket: Socket = None,
    session: Annotated[
        str | None, typer.Option(metavar="ID", help="The one session whose tools to show.")
    ] = None,
    state_dir: StateDir = None,
) -> None:
    """Serve MCP to an agent on this machine: its own tools, and those that a caller lends.

    Speaks MCP on standard input and output, and connects to the daemon's socket: by default the one beside
    the state directory, or else that of the service. The agent's user has to be a member of the group
    edge-kubelet.

    A lent tool is named CALLER_TOOL, and is listed while its caller has a session with this node. Without
    --session the tools are those of the one live session; while there are two, none is listed.

    Needs the extra 'agent' (docs/install.md), or the Debian package edge-kubelet-agent.
    """
    from schemas.caller_tools import SESSION_ID_PATTERN  # noqa: PLC0415 - for this command alone

    if session is not None and re.fullmatch(SESSION_ID_PATTERN, session) is None:
        wanted = "the id of a session, for example gogol_20261122_093000_1a2b3c4d"
        fail(f"--session {quoted(session, 64)} is not {wanted}", EXIT_USAGE)
    try:
        from kubelet.local_agent.mcp_server import run_local_agent  # noqa: PLC0415
    except ModuleNotFoundError as error:
        remedy = "install the extra 'agent' (docs/install.md), or Debian's edge-kubelet-agent"
        fail(f"{error.name} is not installed: {remedy}", EXIT_CANNOT_RUN)
    import asyncio  # noqa: PLC0415

    directory = directory_of(state_dir)
    # The system's default ends the process at once: a read of standard input cannot be interrupted.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    place, contract = agent_socket(socket, directory), contract_of_settings(directory)
    ceiling = ceiling_of_settings()
    asyncio.run(run_local_agent(place, session, directory, contract, ceiling, sys.stderr))


@app.command(epilog=example("edge-kubelet enroll https://relay.example --token-file join-token"))
def enroll(
    relay: Annotated[
        list[str] | None, typer.Argument(metavar="URL", help="The relay, and then others of its fleet.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The join token; others here can see it.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="The file that holds the join token.")] = None,
    again: Annotated[
        bool,
        typer.Option("--again", help="With a new key; it keeps its id if the token was made --for it."),
    ] = False,
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="none|NAME,...", help="The kinds to enable, instead of those that show how a board is."
        ),
    ] = None,
    state_dir: StateDir = None,
    plain: Plain = False,
    as_json: AsJson = False,
) -> None:
    """Enrol this node at a relay. The join token may also be in EDGE_JOIN_TOKEN.

    It enables linux.health, network, packages, sensors and units, as far as the relay knows them; none that
    shows logs, processes or files. `kubelet kinds` changes that later.

    With --again, a node that was revoked; its relay need not be named, and it keeps its kinds.
    """
    import asyncio  # noqa: PLC0415

    from kubelet.cli.kinds import chosen, enable_at_enrolment  # noqa: PLC0415
    from kubelet.identity.enrolment import (  # noqa: PLC0415
        Enroller,
        EnrolmentError,
        enrol_again,
    )

    given = join_token(token, token_file)
    files = IdentityFiles(directory_of(state_dir))
    wanted = None if kinds is None else chosen(kinds, kinds_directory(files.root))
    stored = read_stored(files.root) if again else None
    if not relay and stored is None:
        fail("name the relay: kubelet enroll URL", EXIT_USAGE)
    before = files.read_node_id() if again else None
    url, *others = dict.fromkeys(map(normal_url, relay or (stored.relays if stored else ())))
    enroller = Enroller(files, given, url, plain, now_ms, os.urandom, tuple(others))
    try:
        enrolled = asyncio.run(enrol_again(enroller) if again else enroller.run())
    except EnrolmentError as error:
        fail(str(error), EXIT_NO)
    wanted = stored.kinds if wanted is None and stored is not None else wanted
    config = asyncio.run(enable_at_enrolment(files, enrolled.config, wanted, url))
    identity = enrolled.identity
    facts = {
        "node_id": identity.node_id,
        "tenant": identity.tenant,
        "kid": identity.kid,
        "relay": config.relay_url,
        "other_relays": list(config.other_relays) if as_json else ", ".join(config.other_relays) or None,
        "broker": None if config.broker is None else str(config.broker),
        "kinds": list(config.kinds) if as_json else ", ".join(config.kinds) or None,
        "state_dir": str(files.root),
    }
    print_facts(facts, as_json=as_json)
    if before not in {None, identity.node_id}:
        say(f"\nthis is a new node: its token was not made by `relay join-token create --for {before}`")
    if config.relay_url != url:
        say(f"\nthe relay's public URL is {config.relay_url}: this node will use that")
    if config.broker is None:
        say("\nthe relay has no broker: this node announces itself by its session alone")
    elif is_loopback(config.broker.host) and not is_loopback(host_of(config.relay_url)):
        say("\nthe relay names a broker on this machine: if there is none, ask for `relay run --node-broker`")
    if not as_json:
        say(f"\nnext: {next_step(files.root, usual_state_dir())}")


@app.command(epilog=example("edge-kubelet announce --dry-run"))
@takes_settings(KUBELET, STATE_DIR, BROKER, TTL, KINDS, PLAIN)
def announce(
    sources: Sources,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the manifest, publish nothing. Without an identity, of a throw-away key."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Sign a manifest now, and publish it once or print it."""
    import asyncio  # noqa: PLC0415

    from kubelet.cli.announce_once import publish_once, sign_once  # noqa: PLC0415
    from kubelet.identity.provisioning import throw_away_identity  # noqa: PLC0415
    from kubelet.session.tls import NodeTls  # noqa: PLC0415

    loaded = settings_for_command(sources)
    directory, settings = loaded.state_dir, loaded.settings
    files, ttl_ms, kinds = IdentityFiles(directory), settings[TTL], settings.get(KINDS) or ()
    if dry_run and files.are_absent():
        identity = throw_away_identity(now_ms(), os.urandom)
        say(f"there is no identity in {directory}: node id and signature are of a throw-away key")
    else:
        identity = files.read()
    if identity.root_pem is None:
        say("the leaf is only self-signed: no relay will trust this manifest")
    if dry_run:
        manifest = sign_once(identity, directory, ttl_ms, sys.stderr, kinds, remember=False)
        sys.stdout.buffer.write(manifest.wire)
        sys.stdout.buffer.flush()
        return
    address = settings.get(BROKER)
    if address is None:
        fail(
            "enrol first with `edge-kubelet enroll`, name a --broker HOST:PORT, or use --dry-run", EXIT_CONFIG
        )
    if not (settings[PLAIN] or address.is_private):
        fail(f"{address} is not encrypted: use mqtts, or give {PLAIN_OPTION}", EXIT_CONFIG)
    tls = NodeTls(files, own_root=loaded.own_root).to_broker(address)
    manifest = sign_once(identity, directory, ttl_ms, sys.stderr, kinds, remember=True)
    if not asyncio.run(publish_once(identity, manifest, address, sys.stderr, tls)):
        fail(f"the broker at {address} did not take the manifest", EXIT_NO)
    if as_json:
        print_facts({"etag": manifest.etag, "broker": str(address)}, as_json=True)
    else:
        say(f"published {manifest.etag}")


@app.command(epilog=example("edge-kubelet verify manifest.json --root root.pem --identity leaf.pem"))
def verify(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="The manifest; - for standard input.")],
    state_dir: StateDir = None,
    root: Annotated[Path | None, typer.Option(help="The trusted root, PEM.")] = None,
    identity: Annotated[Path | None, typer.Option(help="The leaf, PEM.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a manifest as a relay would. Without --root and --identity, those of this node."""
    from kubelet.identity.verification import verify_manifest  # noqa: PLC0415

    # One byte over the limit is enough to be refused.
    wire = sys.stdin.buffer.read(MAX_MANIFEST_BYTES + 1) if file == "-" else read_given(Path(file))
    given_leaf, given_root = (named_pem(given) if given else None for given in (identity, root))
    directory = directory_of(state_dir)
    files = IdentityFiles(directory)
    leaf_pem = files.leaf_pem() if given_leaf is None else given_leaf
    root_pem = files.root_pem() if given_root is None else given_root
    if root_pem is None:
        say("no root is given or installed: this checks the node's own signature, not who it is")
        root_pem = files.leaf_pem()
    manifest = verify_manifest(
        wire.rstrip(b"\n"), leaf_pem, root_pem, now_ms(), contract_of_settings(directory)
    )
    if isinstance(manifest, str):
        if as_json:
            print_facts({"valid": False, "reason": manifest}, as_json=True)
        fail(f"not valid: {manifest}", EXIT_NO)
    facts = {
        "valid": True,
        "node_id": manifest.identity.node_id,
        "tenant": manifest.identity.tenant,
        "kid": manifest.identity.kid,
        "etag": manifest.etag,
        "expires_at_ms": manifest.expires_at_ms,
    }
    print_facts(facts, as_json=as_json)


@app.command(epilog=example("edge-kubelet retire --yes"))
@takes_settings(KUBELET, STATE_DIR, RELAY, BROKER, NO_BROKER, PLAIN)
def retire(
    sources: Sources,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Retire this node: its leaf is revoked, and its identity removed. Stop the daemon first."""
    import asyncio  # noqa: PLC0415

    from kubelet.cli.retire import RetirementError  # noqa: PLC0415
    from kubelet.cli.retire import retire as retire_node  # noqa: PLC0415

    loaded = settings_for_command(sources)
    config, directory = loaded.config(), loaded.state_dir
    node_id = IdentityFiles(directory).read().node_id
    try:
        if not yes and not typer.confirm(f"Retire {node_id} for good?", err=True):
            fail("not retired", EXIT_NO)
    except typer.Abort:
        fail("not retired: there was no answer; --yes does without", EXIT_NO)
    try:
        forgotten = asyncio.run(retire_node(config, directory, sys.stderr))
    except RetirementError as error:
        fail(str(error), EXIT_NO)
    if not forgotten:
        say(f"the broker at {config.broker} still holds the last manifest, which no relay accepts any more")
    if as_json:
        print_facts({"retired": node_id, "broker_has_forgotten": forgotten}, as_json=True)
    else:
        typer.echo(f"{node_id} is retired")


@app.command(
    epilog=example(
        "edge-kubelet fleet --identities mocks \\", "  --broker 127.0.0.1:1883 --relay http://127.0.0.1:8700"
    )
)
def fleet(
    identities: Annotated[Path, typer.Option(metavar="DIRECTORY", help="What `relay ca issue --mock` made.")],
    broker: Annotated[str, typer.Option(metavar="HOST:PORT", help="The MQTT broker.")],
    relay: Annotated[
        list[str], typer.Option(metavar="URL", help="The relay's public URL, and then others of its fleet.")
    ],
    heartbeat: Annotated[
        str, typer.Option(metavar="DURATION", help=f"{HEARTBEAT.doc} Default: {HEARTBEAT.default}.")
    ] = HEARTBEAT.default or "",
    ttl: Annotated[
        str, typer.Option(metavar="DURATION", help=f"{TTL.doc} Default: {TTL.default}.")
    ] = TTL.default or "",
    part: Annotated[str | None, typer.Option(hidden=True, metavar="K/N")] = None,
) -> None:
    """Run mock nodes, thousands if need be: real signatures, real sessions, made-up metrics."""
    from kubelet.cli.fleet import run_all, run_part  # noqa: PLC0415

    config = typed_config({"broker": broker, "relay": ",".join(relay), "heartbeat": heartbeat, "ttl": ttl})
    if config.broker is not None and config.broker.tls:
        fail(
            "a fleet shares one connection, which cannot show the certificate of each node: "
            "use a broker without TLS, on this machine",
            EXIT_USAGE,
        )
    run_until_signal(run_all(identities, config) if part is None else run_part(identities, config, part))
