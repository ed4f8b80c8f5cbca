"""``relay ca``: the certificate authority that nodes are enrolled with."""

import os
from pathlib import Path
from typing import Annotated

import typer

from relay.ca import CertificateAuthority
from relay.commands.common import EXIT_USAGE, StateDir, Tenant, fail, state_files

app = typer.Typer(help="The certificate authority that nodes are enrolled with.", no_args_is_help=True)


@app.command("init")
def ca_init(state_dir: StateDir = None) -> None:
    """Make the root of trust. Once; it is never overwritten."""
    ca = authority(state_dir)
    ca.create()
    typer.echo(ca.root_file)


@app.command("issue")
def ca_issue(
    csr: Annotated[Path | None, typer.Argument(metavar="CSR", help="A node's certificate request.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where the leaf goes.")] = None,
    tenant: Tenant = "default",
    replace: Annotated[bool, typer.Option(help="Revoke the leaf that the node has.")] = False,
    mock: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Make N whole mock identities.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The directory for --mock.")] = None,
    state_dir: StateDir = None,
) -> None:
    """Issue the leaf that a certificate request asks for, or mock identities for `kubelet fleet`."""
    ca = authority(state_dir)
    if mock is not None:
        if csr is not None or out is None:
            fail("--mock N goes with --out DIR, and without a CSR", EXIT_USAGE)
        node_ids = ca.issue_mock(mock, out, tenant)
        typer.echo(f"{len(node_ids)} identities in {out}", err=True)
        return
    if csr is None:
        fail("name the CSR, or say --mock N --out DIR", EXIT_USAGE)
    if output is not None:
        output.touch()  # what cannot be written must be known before the ledger says that it was issued
    leaf = ca.issue(csr.read_text("utf-8", "replace"), tenant, replace=replace)
    if output is None:
        typer.echo(leaf, nl=False)
    else:
        output.write_text(leaf, "utf-8")
        typer.echo(f"{output}; its root is {ca.root_file}", err=True)


def authority(state_dir: Path | None) -> CertificateAuthority:
    """Return the CA of that state directory."""
    from relay.app import now_ms  # noqa: PLC0415 - the server's parts only when they are needed

    return CertificateAuthority(state_files(state_dir).ca, now_ms, os.urandom)
