"""The command line of the node.

Exit codes: 0 done; 1 the answer is no; 2 the command line is wrong; 3 it cannot run as things are (a file
is missing, damaged or exposed, a port is taken). Standard output holds results, standard error the rest.
Must not hold what the commands do: each calls one function of another module, imported when it is needed.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kubelet.config import (
    DEFAULT_HEARTBEAT_S,
    DEFAULT_LOOPBACK_PORT,
    DEFAULT_TTL_MS,
    DaemonPlan,
    NodeConfig,
    default_state_dir,
)
from kubelet.process import EXIT_NO, EXIT_USAGE, errors_in_one_line, fail, run_until_told
from schemas.addresses import normal_url, parse_broker
from schemas.identity_files import IdentityFiles
from schemas.manifest import MAX_MANIFEST_BYTES

app = typer.Typer(
    name="kubelet",
    help="The edge node: announces what it can do, and does what the relay sends down.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

StateDir = Annotated[Path | None, typer.Option("--state-dir", help="Where the node's identity lies.")]
Broker = Annotated[str, typer.Option("--broker", metavar="HOST:PORT", help="The MQTT broker.")]
Relay = Annotated[str, typer.Option("--relay", metavar="URL", help="The relay's public URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Heartbeat = Annotated[
    float, typer.Option("--heartbeat", min=1.0, max=3600.0, help="Seconds between two heartbeats.")
]
Ttl = Annotated[
    int, typer.Option("--ttl-ms", min=1000, max=86_400_000, help="How long a manifest is good for.")
]


def main() -> None:
    """Run the command line, and say an error in one line."""
    with errors_in_one_line():
        app()


@app.command()
def init(
    state_dir: StateDir = None,
    certificate: Annotated[Path | None, typer.Option(help="The leaf that a CA issued, PEM.")] = None,
    root: Annotated[Path | None, typer.Option(help="The root that vouches for it, PEM.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make this node's identity, or install the certificate that a CA issued for it."""
    from kubelet.agent import now_ms  # noqa: PLC0415 - the daemon's parts, and their memory, only when needed
    from kubelet.provisioning import create_identity, install_certificate  # noqa: PLC0415

    if (certificate is None) != (root is None):
        fail("--certificate and --root go together", EXIT_USAGE)
    files = IdentityFiles(_directory(state_dir))
    if not files.exists():
        create_identity(files, now_ms(), os.urandom)
    if certificate is not None and root is not None:
        install_certificate(files, certificate.read_text("utf-8"), root.read_text("utf-8"), now_ms())
    identity = files.read()
    facts = {
        "node_id": identity.node_id,
        "state_dir": str(files.root),
        "csr": str(files.csr),
        "leaf": str(files.leaf),
        "kid": identity.kid,
        "enrolled": identity.root_pem is not None,
    }
    _print(facts, as_json=as_json)
    if identity.root_pem is None and not as_json:
        _say(f"\nnext: relay ca issue {files.csr} -o leaf.pem")
        _say("      kubelet init --certificate leaf.pem --root root.pem")


@app.command()
def announce(
    state_dir: StateDir = None,
    broker: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The MQTT broker.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Print the manifest, publish nothing.")] = False,
    ttl_ms: Ttl = DEFAULT_TTL_MS,
) -> None:
    """Sign a manifest now, and publish it once or print it."""
    from kubelet.once import publish_once, sign_once  # noqa: PLC0415

    directory = _directory(state_dir)
    identity = IdentityFiles(directory).read()
    if identity.root_pem is None:
        _say("the leaf is only self-signed: no relay will trust this manifest")
    if dry_run:
        sys.stdout.buffer.write(sign_once(identity, directory, ttl_ms, sys.stderr, remember=False).wire)
        sys.stdout.buffer.flush()
        return
    if broker is None:
        fail("say where to publish with --broker HOST:PORT, or use --dry-run", EXIT_USAGE)
    address = parse_broker(broker)
    manifest = sign_once(identity, directory, ttl_ms, sys.stderr, remember=True)
    if not asyncio.run(publish_once(identity, manifest, address, sys.stderr)):
        fail(f"the broker at {address} did not take the manifest", EXIT_NO)
    _say(f"published {manifest.etag}")


@app.command()
def verify(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="The manifest; - for standard input.")],
    state_dir: StateDir = None,
    root: Annotated[Path | None, typer.Option(help="The trusted root, PEM.")] = None,
    identity: Annotated[Path | None, typer.Option(help="The leaf, PEM.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a manifest as a relay would. Without --root and --identity, those of this node."""
    from kubelet.agent import now_ms  # noqa: PLC0415
    from kubelet.verification import verify_manifest  # noqa: PLC0415

    files = IdentityFiles(_directory(state_dir))
    # One byte over the limit is enough to be refused, and all that is read.
    with sys.stdin.buffer if file == "-" else Path(file).open("rb") as source:
        wire = source.read(MAX_MANIFEST_BYTES + 1)
    leaf_pem = (identity or files.leaf).read_text("utf-8")
    if root is None and not files.root_certificate.exists():
        _say("no root is given or installed: this checks the node's own signature, not who it is")
        root = files.leaf
    root_pem = (root or files.root_certificate).read_text("utf-8")
    finding = verify_manifest(wire.rstrip(b"\n"), leaf_pem, root_pem, now_ms())
    if finding.manifest is None:
        if as_json:
            _print({"valid": False, "reason": finding.reason}, as_json=True)
        fail(f"not valid: {finding.reason}", EXIT_NO)
    manifest = finding.manifest
    facts = {
        "valid": True,
        "node_id": manifest.identity.node_id,
        "tenant": manifest.identity.tenant,
        "kid": manifest.identity.kid,
        "etag": manifest.etag,
        "expires_at_ms": manifest.expires_at_ms,
    }
    _print(facts, as_json=as_json)


@app.command()
def run(
    broker: Broker,
    relay: Relay,
    state_dir: StateDir = None,
    loopback_port: Annotated[int, typer.Option(min=0, max=65535)] = DEFAULT_LOOPBACK_PORT,
    heartbeat: Heartbeat = DEFAULT_HEARTBEAT_S,
    ttl_ms: Ttl = DEFAULT_TTL_MS,
) -> None:
    """Run the daemon."""
    plan = DaemonPlan(_config(broker, relay, heartbeat, ttl_ms), _directory(state_dir), loopback_port)
    # The same process goes on as the daemon, without what only a command line needs.
    command = [sys.executable, "-m", "kubelet.daemon", plan.to_json()]
    os.execv(command[0], command)  # noqa: S606 - our own interpreter, with what was just checked


@app.command()
def fleet(
    identities: Annotated[Path, typer.Option(help="What `relay ca issue --mock N --out DIR` made.")],
    broker: Broker,
    relay: Relay,
    heartbeat: Heartbeat = DEFAULT_HEARTBEAT_S,
    ttl_ms: Ttl = DEFAULT_TTL_MS,
) -> None:
    """Run mock nodes in one process: real signatures, real sessions, made-up metrics."""
    from kubelet.agent import surroundings  # noqa: PLC0415
    from kubelet.fleet import read_identities, run_fleet  # noqa: PLC0415

    config = _config(broker, relay, heartbeat, ttl_ms)
    nodes = read_identities(identities)
    around = surroundings(config, f"edge-fleet-{os.getpid()}", sys.stderr)
    run_until_told(run_fleet(nodes, around))


def _config(broker: str, relay: str, heartbeat_s: float, ttl_ms: int) -> NodeConfig:
    if ttl_ms < heartbeat_s * 1000 * 2:
        fail("--ttl-ms must span two heartbeats, or one late heartbeat unlists the node", EXIT_USAGE)
    return NodeConfig(parse_broker(broker), normal_url(relay), heartbeat_s, ttl_ms)


def _directory(state_dir: Path | None) -> Path:
    return state_dir or default_state_dir(Path.home(), is_root=os.geteuid() == 0)


def _print(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts))
        return
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}  {value}")


def _say(text: str) -> None:
    typer.echo(text, err=True)
