"""``kubelet init``: makes an identity, and enrols by hand. Must not hold what it calls."""

import os
from pathlib import Path
from typing import Annotated

import typer

from kubelet.cli.options import AsJson, Plain, StateDir, directory_of, named_pem
from kubelet.cli.output import print_facts, say
from kubelet.clock import now_ms
from kubelet.process import fail
from schemas.identity_files import IdentityFiles
from schemas.process.command_errors import EXIT_USAGE


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
    from kubelet.identity.manual import ManualEnrolment  # noqa: PLC0415
    from kubelet.identity.provisioning import create_identity  # noqa: PLC0415

    if (certificate is None) != (root is None):
        fail("--certificate and --root go together", EXIT_USAGE)
    if (not relay) != (broker is None) or (relay and root is None):
        fail("--relay and --broker go together, and with --certificate and --root", EXIT_USAGE)
    given = None if certificate is None or root is None else (named_pem(certificate), named_pem(root))
    files = IdentityFiles(directory_of(state_dir))
    if not files.exists():
        create_identity(files, now_ms(), os.urandom)
    if given is not None:
        enrolment = ManualEnrolment(files, *given, now_ms())
        if relay and broker is not None:
            enrolment.install_with(relay, broker, system_roots=system_roots, plain_allowed=plain)
        else:
            enrolment.install()
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
