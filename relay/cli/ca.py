"""``relay ca``: the certificate authority that nodes are enrolled with.

Must not reach a relay that runs: it reads what these commands write to the ledger.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from relay.cli.backup.commands import ca_backup, ca_restore
from relay.cli.exits import fail
from relay.cli.options import (
    AsJson,
    StateDir,
    answer,
    keep_first,
    listing,
    seconds,
    state_files,
    tenant_name,
    usual_state_dir,
    utc,
)
from relay.cli.state import NodeDirectory, authority, labels, token_keys
from relay.pki.authority import issue_reader_files, issue_server_files
from relay.pki.errors import UnknownTargetError
from relay.pki.roots import MAX_OVERLAP_DAYS
from relay.settings.config import SERVICE_STATE_DIR
from relay.settings.environment import now_ms
from relay.state.certificates import KID_DIGITS
from relay.state.key_files import load_or_create_key
from schemas.certificates import end_of
from schemas.files import PUBLIC, read_given
from schemas.identity import first_certificate_in, kid_of
from schemas.kinds import RFC_0001, shipped_names
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_NO, EXIT_USAGE
from schemas.process.state_owner import as_operator
from schemas.settings import keep_run_options

app = group("The certificate authority that nodes are enrolled with.")
app.command("backup", epilog=example("relay ca backup relay.age --recipient age1ql3z7hjy54pw3hyww5ayyfg"))(
    ca_backup
)
app.command("restore", epilog=example("relay ca restore relay.age --identity key.txt"))(ca_restore)


@app.command("init", epilog=example("relay ca init"))
def ca_init(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Make the roots of trust, and the key that signs agents' tokens. Once; none is overwritten."""
    _check_alone(state_files(state_dir).root, is_named=state_dir is not None)
    ca = authority(state_dir)
    if not (ca.root_file.exists() and ca.add_server_root()):
        ca.create()
        from relay.settings.table import KINDS  # noqa: PLC0415 - the other commands do without

        # A new hub knows all that boards of its version may announce; one that is upgraded keeps what it had.
        boards = [name for name in shipped_names() if name not in RFC_0001]
        keep_run_options(state_files(state_dir).root, {KINDS.name: ",".join(boards)})
    key = load_or_create_key(state_files(state_dir).token_key, os.urandom)
    token_keys(state_dir).add(bytes(key.verify_key), now_ms())
    roots = {"root": str(ca.root_file), "server_root": str(ca.servers.root_file)}
    answer(roots, as_json=as_json, result="\n".join(roots.values()))


@app.command("issue", epilog=example("relay ca issue node.csr --leaf leaf.pem"))
def ca_issue(
    csr: Annotated[Path | None, typer.Argument(metavar="CSR", help="A node's certificate request.")] = None,
    leaf_file: Annotated[
        Path | None, typer.Option("-o", "--leaf", metavar="FILE", help="Where the certificate goes.")
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(help="The tenant. Default: as before with --replace, else as for other commands."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Revoke the one that the node has.")] = False,
    mock: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Make N whole mock identities.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Where the identities of --mock go.")
    ] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Issue a node's certificate by its request, or mock identities for `edge-kubelet fleet`."""
    if mock is not None and (csr is not None or out is None):
        fail("--mock N goes with --out DIR, and without a CSR", EXIT_USAGE)
    if mock is None and csr is None:
        fail("name the CSR, or use --mock N --out DIR", EXIT_USAGE)
    request = "" if csr is None else read_given(csr).decode("utf-8", "replace")
    ca, state = authority(state_dir), state_files(state_dir)
    if mock is not None and out is not None:
        node_ids = ca.issue_mock(mock, out, tenant_name(tenant, state), as_operator)
        facts = {"directory": str(out), "node_ids": list(node_ids)}
        answer(facts, as_json=as_json, note=f"{len(node_ids)} identities in {out}")
        return
    used = tenant if replace else tenant_name(tenant, state)
    with _writable(leaf_file) if leaf_file is not None else nullcontext():
        leaf = ca.issue(request, used, replace=replace)
        if leaf_file is not None:
            with as_operator():
                leaf_file.write_text(leaf, "utf-8")
    keep_first(state, tenant=tenant)
    answer(
        {"certificate": leaf, "file": None if leaf_file is None else str(leaf_file)},
        as_json=as_json,
        result=leaf.removesuffix("\n") if leaf_file is None else "",
        note="" if leaf_file is None else f"{leaf_file}; the roots: relay ca roots --pem",
    )


@app.command("list", epilog=example("relay ca list --json"))
def ca_list(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Show every certificate that was issued, and its state."""
    records, now = authority(state_dir).records(), now_ms()
    listing(
        [{**each.facts(), "state": records.state(each, now)} for each in records.issued.values()],
        ("NODE OR SERVER", "TENANT", "KID", "ISSUED (UTC)", "EXPIRES (UTC)", "STATE"),
        lambda each: (
            each.get("name") or each["node_id"],
            each.get("tenant") or "-",
            each["kid"][:KID_DIGITS],
            utc(each["issued_ms"]),
            utc(each["not_after_ms"]),
            each["state"],
        ),
        as_json=as_json,
    )


@app.command(
    "revoke",
    epilog=example('relay ca revoke "greenhouse pi"', "relay ca revoke --relay edge-relay-5f1c2a9b8d3e4f60"),
)
def ca_revoke(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="NODE|KID",
            help="A node by its id, label or the beginning of its id; or a certificate by its kid.",
            autocompletion=labels,
        ),
    ] = None,
    relay: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Another relay of the fleet, as `relay status` names it."),
    ] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Revoke every certificate of a node or of a relay, or one; running relays apply it within a second."""
    ca = authority(state_dir)
    if (target is None) is (relay is None):
        fail("name either a node, a kid, or a relay by --relay", EXIT_USAGE)
    try:
        # An id or a kid first: a damaged ledger of names must not prevent a revocation.
        kids = ca.revoke(target.lower()) if target is not None else ca.revoke_relay(relay or "")
    except UnknownTargetError as error:
        if target is None:
            fail(str(error), EXIT_NO)
        kids = ca.revoke(NodeDirectory.of(state_dir).find(target, "relay ca list").node_id)
    note = "" if kids else "no certificate of it is in force: it was revoked before"
    answer({"revoked": kids}, as_json=as_json, result="\n".join(kids), note=note)


@app.command("roots", epilog=example("relay ca roots --pem"))
def ca_roots(
    pem: Annotated[bool, typer.Option("--pem", help="Print them, for `edge-kubelet init --root`.")] = False,
    servers: Annotated[bool, typer.Option("--servers", help="Those of servers alone, for agents.")] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Show the roots that are trusted now: of nodes, and of servers. Each kind's newest comes first."""
    ca = authority(state_dir)
    kinds = {"nodes": [] if servers else ca.roots(), "servers": ca.servers.roots()}
    if pem:
        typer.echo("".join(root for roots in kinds.values() for root in roots), nl=False)
        return
    facts = [
        {"of": kind, "kid": kid_of(first_certificate_in(root)), "not_after_ms": end_of(root)}
        for kind in kinds
        for root in kinds[kind]
    ]
    listing(
        facts,
        ("ROOT OF", "KID", "EXPIRES (UTC)"),
        lambda root: (root["of"], root["kid"][:KID_DIGITS], utc(root["not_after_ms"])),
        as_json=as_json,
    )


@app.command("rotate-root", epilog=example("relay ca rotate-root --overlap 90d"))
def ca_rotate_root(
    servers: Annotated[bool, typer.Option("--servers", help="The root of servers, not of nodes.")] = False,
    overlap: Annotated[
        str, typer.Option(metavar="DURATION", help="How long both roots are trusted: whole days.")
    ] = "90d",
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Make a new root. Nodes get it when they renew; until then the old one is trusted too."""
    days, rest = divmod(seconds(overlap), 86_400)
    if rest or days > MAX_OVERLAP_DAYS:
        fail(f"--overlap is 1 to {MAX_OVERLAP_DAYS} whole days, for example 90d", EXIT_USAGE)
    ca = authority(state_dir)
    until_ms = ca.servers.rotate(days) if servers else ca.rotate_root(days)
    made = str(ca.servers.root_file if servers else ca.root_file)
    todo = (
        "let agents trust the new one too (`relay ca roots --servers --pem`), and after that day issue the "
        "certificates of brokers and other servers again"
        if servers
        else "on that day its certificates end with it"
    )
    note = f"the old root is trusted until {utc(until_ms)} UTC: make a backup now, {todo}"
    answer({"root": made, "old_root_until_ms": until_ms}, as_json=as_json, result=made, note=note)


@app.command("issue-server", epilog=example("relay ca issue-server mqtt.example 192.0.2.7 --out broker-tls"))
def ca_issue_server(
    hosts: Annotated[list[str], typer.Argument(metavar="HOST", help="The names and addresses it is for.")],
    out: Annotated[
        Path, typer.Option(metavar="DIRECTORY", help="Where server.key, server.pem and roots.pem go.")
    ],
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Issue a broker's or another server's certificate. An existing key in --out is kept."""
    issue_server_files(authority(state_dir), hosts, out, os.urandom, as_operator)
    note = f"server.key, server.pem and roots.pem are in {out}"
    answer({"directory": str(out), "hosts": hosts}, as_json=as_json, note=note)


@app.command("issue-reader", epilog=example("relay ca issue-reader inventory --out reader-tls"))
def ca_issue_reader(
    name: Annotated[str, typer.Argument(help="What it is called in `relay ca list`, behind edge-reader-.")],
    out: Annotated[
        Path, typer.Option(metavar="DIRECTORY", help="Where reader.key, reader.pem and roots.pem go.")
    ],
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Issue a certificate for an MQTT client that reads the manifests of all nodes, and nothing else.

    It shows it to the broker and subscribes to $devices/+/announce. An existing key in --out is kept.
    """
    user = issue_reader_files(authority(state_dir), name, out, os.urandom, as_operator)
    note = f"reader.key, reader.pem and roots.pem are in {out}; mosquitto's access list needs {user} too"
    answer({"directory": str(out), "user": user}, as_json=as_json, note=note)


@contextmanager
def _writable(output: Path) -> Iterator[None]:
    """Make ``output``, for what the block writes, and remove it again if the block fails.

    A path that cannot be written must fail before the ledger records the certificate.
    """
    with as_operator():
        is_new = not output.exists()
        # Without blocking: a pipe that has no reader is refused.
        os.close(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, PUBLIC))
    try:
        yield
    except BaseException as error:
        if is_new:
            with as_operator():
                output.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror, str(output)) from None
        raise


def _check_alone(directory: Path, *, is_named: bool) -> None:
    """End the command where it would make a second CA unasked: beside that of the machine's service."""
    is_beside = directory == usual_state_dir() != SERVICE_STATE_DIR
    if is_beside and not is_named and os.path.lexists(SERVICE_STATE_DIR):
        fail(
            f"the relay of this machine has its CA in {SERVICE_STATE_DIR}, and this would be a second "
            f"one in {directory}: sudo relay ca init; or, if you want two, --state-dir {directory}",
            EXIT_CANNOT_RUN,
        )
