"""``kubelet kinds``: the kinds that this node offers, what each needs and exposes, and its operator's choice.

The choice is kept beside what the enrolment decided, and counts less than the file, a variable or an option.
Must not write a ceiling, nor choose a kind by itself: an upgrade enables nothing, and no relay does.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from ssl import SSLContext, SSLError
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import typer

from kubelet.ceiling import FLAGS, LISTS, NUMBERS
from kubelet.cli.options import StateDir, print_facts, say, settings_for_command
from kubelet.cli.service import SERVICE, check_group
from kubelet.config import SERVICE_STATE_DIR, NodeConfig, read_stored, store, stored_file
from kubelet.process import fail
from kubelet.settings import (
    CEILING,
    KINDS,
    KUBELET,
    STATE_DIR,
    LoadedNodeSettings,
    ceiling_in,
    enrolled_in,
)
from schemas.error_roots import CommandLineError, ConfigError, OperatorError
from schemas.identity_files import IdentityFiles
from schemas.kind_packages import read_named_kinds
from schemas.kinds import RFC_0001, ROW, SHIPPED, kind_name, shipped_names
from schemas.process.cli_config import AsJson
from schemas.process.cli_manual import example, group
from schemas.process.cli_service import DryRun
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_NO
from schemas.process.service_host import (
    PACKAGED_UNITS,
    UNITS,
    Host,
    Remove,
    Run,
    ServiceError,
    Step,
    Write,
    as_document,
    as_lines,
)
from schemas.process.state_owner import as_operator
from schemas.process.status_view import AskedProcess
from schemas.settings import forget_run_options, list_of, read_sources
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable, unknown

BY_ENROLMENT = ("linux.health", "linux.network", "linux.packages", "linux.sensors", "linux.units")
"""What an enrolment enables unless it is told otherwise: nothing that is sensitive."""
NONE = "none"
_ASK_S = 5.0
_GROUP = "SupplementaryGroups="
LOOSENED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Seccomp cannot look at the mode that openat2 is given, so systemd refuses all of it.
        "linux.files": ("RestrictSUIDSGID=no",),
        "linux.journal": (f"{_GROUP}systemd-journal",),
        "linux.network": ("RestrictAddressFamilies=AF_NETLINK",),
        "linux.processes": ("ProtectProc=default",),
    }
)
"""The directives without which a kind does not see in the shipped unit what it shows."""


class KindRow(NamedTuple):
    """What the row of a kind says to its operator."""

    name: str
    sentence: str
    sensitive: bool
    about: Mapping[str, str]

    @classmethod
    def of(cls, name: str, directory: Path | None) -> "KindRow":
        """Return the row of a kind that ships, or of an installed package.

        Raises:
            CommandLineError: there is no such kind.
            ConfigError: its package cannot be used.
        """
        if name in shipped_names():
            row = json.loads((SHIPPED / name / ROW).read_bytes())
            verb = next(iter(row["verbs"].values()))
            return cls(
                name, _sentence(verb["description"]), row.get("sensitive", False), row.get("about", {})
            )
        try:
            [named] = read_named_kinds((kind_name(name),), directory)
        except ConfigError as error:
            raise CommandLineError(
                f"{error}; of those that ship, {unknown('kind', name, shipped_names())}"
            ) from None
        verb = next(iter(named.kind.verbs.values()))
        return cls(name, _sentence(verb.description), named.kind.sensitive, named.kind.about)


def _sentence(description: str) -> str:
    return description.partition(". ")[0].rstrip(".") + "."


def drop_in_steps(kinds: Sequence[str], *, remove: bool = False) -> Iterator[Step]:
    """Yield what lets the service see what ``kinds`` show, or no more."""
    directory = UNITS / f"{SERVICE.unit}.d"
    for kind in kinds:
        file = directory / f"kind-{kind}.conf"
        if remove:
            yield Remove(file)
        elif kind in LOOSENED:
            yield Write(file, "\n".join(("[Service]", *LOOSENED[kind])) + "\n")
    if remove:
        yield Remove(directory, if_empty=True)
    yield Run(("systemctl", "daemon-reload"))


def service_steps(directory: Path, kinds: Sequence[str], *, remove: bool = False) -> list[Step]:
    """Return the steps that are due for ``kinds`` of the service; none for another daemon.

    Raises:
        ServiceError: this system has no group that a kind needs.
    """
    is_installed = any((place / SERVICE.unit).exists() for place in (UNITS, PACKAGED_UNITS))
    if directory != SERVICE_STATE_DIR or not is_installed:
        return []
    for directive in (each for kind in kinds for each in LOOSENED.get(kind, ()) if not remove):
        if directive.startswith(_GROUP):
            check_group(directive.removeprefix(_GROUP), "which may read what the kind shows")
    due = Host().due(drop_in_steps(kinds, remove=remove))
    changes = [
        step for step in due if isinstance(step, Write) or (isinstance(step, Remove) and not step.if_empty)
    ]
    return due if changes else []


def apply_steps(steps: Sequence[Step], command: str) -> None:
    """Apply ``steps`` as the user that typed the command, who has to be root.

    Raises:
        ServiceError: it is another user; the text names ``command``.
    """
    if not steps:
        return
    if os.getuid() != 0:
        raise ServiceError(f"the service's unit needs a drop-in, which takes root: sudo {command}")
    with as_operator():
        Host().apply(steps)


def chosen(text: str, directory: Path | None) -> tuple[str, ...]:
    """Return the kinds that ``--kinds`` names.

    Raises:
        CommandLineError: one of them is not known, or is named twice.
        ConfigError: two of them cannot be there together.
    """
    if text.strip() == NONE:
        return ()
    try:
        names = list_of(kind_name)(text)
    except OperatorError as error:
        raise CommandLineError(f"--kinds: {error}") from None
    if not names:
        raise CommandLineError(f"--kinds names no kind: name some, or {NONE}")
    found = tuple(KindRow.of(name, directory).name for name in names if name not in RFC_0001)
    read_named_kinds(found, directory)
    return found


async def known_by(url: str, tls: SSLContext | None) -> AbstractSet[str] | None:
    """Return the shipped kinds whose documents the relay at ``url`` serves; None if it does not say.

    It only leaves out some of what this node would enable by itself.
    """
    from kubelet.identity.http_exchange import (  # noqa: PLC0415 - for the enrolment alone
        HttpRequest,
        NoAnswerError,
        exchange,
    )
    from schemas.tls import client_context  # noqa: PLC0415 - as above

    try:
        answer = await exchange(HttpRequest(url, "/schemas/"), tls or client_context(), _ASK_S)
        refs = loads(answer.body, max_bytes=64 * 1024)["schemas"]
        names = {str(ref).rpartition("@")[0] for ref in refs}
    except (NoAnswerError, SSLError, StrictJsonError, LookupError, TypeError):
        return None
    return {kind for kind in shipped_names() if any(name.startswith(f"{kind}.") for name in names)}


async def enable_at_enrolment(
    files: IdentityFiles, config: NodeConfig, wanted: tuple[str, ...] | None, url: str
) -> NodeConfig:
    """Keep the kinds ``wanted``, or else those of the usual ones that the relay at ``url`` knows.

    The daemon announces none that its relay does not know.
    """
    from kubelet.session.tls import NodeTls  # noqa: PLC0415 - for the enrolment alone

    if wanted is None:
        known = await known_by(url, NodeTls(files, own_root=config.own_root).to_relay(url))
        wanted = tuple(each for each in BY_ENROLMENT if known is not None and each in known)
        if left := [each for each in BY_ENROLMENT if each not in wanted]:
            why = "does not say which kinds it knows" if known is None else f"does not know {', '.join(left)}"
            say(f"\nthe relay {why}: name them in its setting kinds, and then: kubelet kinds enable KIND")
    enabled = replace(config, kinds=wanted)
    store(enabled, files.root)
    forget_run_options(files.root, frozenset({KINDS.name}))  # a start may have been told others before
    unseen = "\nthe service does not see all that its kinds show"
    try:
        steps = service_steps(files.root, wanted)
        if steps and os.getuid() != 0:
            say(f"{unseen}: sudo kubelet kinds enable {wanted[0]}")
        else:
            apply_steps(steps, "kubelet enroll")
    except (ServiceError, OSError) as error:
        # No failure of the command: the node is enrolled, and its token is spent.
        say(f"{unseen}: {error}; once that is mended: kubelet kinds enable {wanted[0]}")
    return enabled


class _Node(NamedTuple):
    """The settings of this node, and what its daemon says, if it runs."""

    loaded: LoadedNodeSettings
    status: Mapping[str, Any] | None

    @classmethod
    def read(cls, state_dir: Path | None) -> "_Node":
        flags = {} if state_dir is None else {STATE_DIR.name: str(state_dir)}
        loaded = settings_for_command(read_sources(KUBELET, flags, None, os.environ))
        answer = AskedProcess.ask(KUBELET, loaded.state_dir).answer
        return cls(loaded, None if isinstance(answer, Exception) else answer)

    @property
    def directory(self) -> Path:
        return self.loaded.state_dir

    def names(self) -> list[str]:
        """Return the kinds that ship, and those of packages that are enabled."""
        return sorted({*shipped_names(), *self.loaded.kinds})

    def state(self, name: str) -> str:
        """Return whether ``name`` is enabled, and what the daemon that runs says of it."""
        if name in RFC_0001:
            return "always on"
        is_on = name in self.loaded.kinds
        texts = ["on" if is_on else "off"]
        if self.status is not None:
            said = self.status.get("kinds", {}).get(name)
            if (said is not None) != is_on:
                texts.append("from the next start")
            elif said and said["lacks"] is not None:
                texts.append(("" if said["announced"] else "not announced: ") + printable(said["lacks"]))
        return "; ".join(texts)


app = group("The kinds that this node offers.")


@app.callback(invoke_without_command=True, no_args_is_help=False)
def kinds(context: typer.Context, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """List the kinds: a sentence, the state, what each needs, and what it exposes.

    Kinds of packages are listed where they are enabled; `kubelet kind list` has those that are installed.
    """
    if context.invoked_subcommand is not None:
        return
    node = _Node.read(state_dir)
    rows = [(KindRow.of(name, node.loaded.kinds_directory), node.state(name)) for name in node.names()]
    if as_json:
        shown = [{**row._asdict(), "about": dict(row.about), "state": state} for row, state in rows]
        typer.echo(json.dumps(shown))
        return
    width = max(len(row.name) for row, _ in rows)
    for row, state in rows:
        typer.echo(f"{row.name:<{width}}  {state}")
        facts = {
            "": row.sentence,
            **{name: row.about[name] for name in ("needs", "exposes") if name in row.about},
        }
        for name, text in facts.items():
            typer.echo(f"{'':<{width}}  {f'{name}: ' if name else ''}{text}")


Kind = Annotated[str, typer.Argument(metavar="KIND", help="The kind, such as linux.journal.")]


@app.command(epilog=example("kubelet kinds show linux.journal"))
def show(name: Kind, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Show one kind, and what the tables of kubelet.toml let be asked of it."""
    node = _Node.read(state_dir)
    row, settings = KindRow.of(name, node.loaded.kinds_directory), node.loaded.settings
    facts: dict[str, Any] = {
        "kind": name,
        "state": node.state(name),
        "chosen": None if name in RFC_0001 else settings.source(KINDS),
        "what": row.sentence,
        **row.about,
        "sensitive": row.sensitive,
    }
    if name in LISTS:
        table, place = ceiling_in(settings)[name], next(each for each in CEILING if each.name == name)
        facts["ceiling"] = settings.source(place)
        for what in LISTS[name]:
            allowed, denied = table.allowed(what), table.denied(what)
            text = "all" if allowed == ("*",) else ", ".join(allowed) or NONE
            facts[what] = f"{text}; not {', '.join(denied)}" if denied else text
        facts |= {flag: flag in table.flags for flag in FLAGS.get(name, ())}
        facts |= {each: table.thresholds[each] for each in NUMBERS.get(name, ())}
    print_facts(facts, as_json=as_json)


Names = Annotated[list[str], typer.Argument(metavar="KIND...", help="The kinds, such as linux.journal.")]


@app.command(epilog=example("kubelet kinds enable linux.journal --dry-run"))
def enable(
    names: Names, state_dir: StateDir = None, dry_run: DryRun = False, as_json: AsJson = False
) -> None:
    """Let this node offer kinds: keep the choice, and write the drop-ins that its service needs.

    What may be asked of them, kubelet.toml says: this changes nothing there.
    """
    node = _Node.read(state_dir)
    rows = [KindRow.of(name, node.loaded.kinds_directory) for name in names]
    kept = _choosable(node, names)
    config = replace(kept, kinds=tuple(dict.fromkeys((*kept.kinds, *names))))
    read_named_kinds(config.kinds, node.loaded.kinds_directory)
    steps = service_steps(node.directory, names)
    _choose(node.directory, config, steps, f"enable {' '.join(names)}", dry_run=dry_run, as_json=as_json)
    if as_json:
        return
    for row in (row for row in rows if row.sensitive):
        command = f"relay token issue --sub NAME --kinds 'system.*,linux.*,{row.name}'"
        say(f"only a token that names {row.name} reaches it: {command}")
    if "linux.files" in names:
        say('linux.files shows nothing until ["linux.files"] in kubelet.toml names directories')


@app.command(epilog=example("kubelet kinds disable linux.journal"))
def disable(
    names: Names, state_dir: StateDir = None, dry_run: DryRun = False, as_json: AsJson = False
) -> None:
    """Let this node offer kinds no longer, and remove the drop-ins of its service."""
    node = _Node.read(state_dir)
    kept = _choosable(node, names)
    for name in {*names} - {*kept.kinds}:
        KindRow.of(name, node.loaded.kinds_directory)
    config = replace(kept, kinds=tuple(each for each in kept.kinds if each not in names))
    steps = service_steps(node.directory, names, remove=True)
    _choose(node.directory, config, steps, f"disable {' '.join(names)}", dry_run=dry_run, as_json=as_json)


def _choosable(node: _Node, names: Sequence[str]) -> NodeConfig:
    """Return what the enrolment keeps, which may be changed."""
    for name in (name for name in names if name in RFC_0001):
        fail(f"every node has {name}: it is neither enabled nor disabled", EXIT_NO)
    kept, place = read_stored(node.directory), node.loaded.settings.source(KINDS)
    if KINDS.name in node.loaded.settings.given and place != enrolled_in(node.directory):
        fail(f"kinds is set, which counts more than what is kept: change it there, {place}", EXIT_NO)
    if kept is None:
        fail(
            f"enrol first with `edge-kubelet enroll`, or name them in kinds of {KUBELET.usual_file}",
            EXIT_CANNOT_RUN,
        )
    return kept


def _choose(
    directory: Path, config: NodeConfig, steps: Sequence[Step], command: str, *, dry_run: bool, as_json: bool
) -> None:
    """Keep ``config``, and apply ``steps``; or show that this would be done."""
    if not dry_run:
        apply_steps(steps, f"kubelet kinds {command}")
        store(config, directory)
    if as_json:
        facts = {"applied": not dry_run, "kinds": list(config.kinds), "steps": as_document(steps)}
        typer.echo(json.dumps(facts))
        return
    if dry_run:
        typer.echo(f"keep {', '.join(config.kinds) or NONE} in {stored_file(directory)}")
        for line in as_lines(steps):
            typer.echo(line)
    is_service = directory == SERVICE_STATE_DIR
    how = "systemctl restart edge-kubelet" if is_service else "stop the daemon, and run it again"
    say(f"it takes effect with a restart: {how}")
