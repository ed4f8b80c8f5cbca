"""The closed registry of kinds: what a node can offer, and how each verb is presented to an agent.

RFC-0001 sections 2, 3.2 and 5, RFC-0005 sections 2 and 9. A new kind of the contract is one row here, its
documents (with the amendment of the manifest's enum and clamp) and one handler file on the node; a kind of an
operator's own comes in a package (``schemas.kind_packages``). Must not contain behaviour.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from schemas.error_roots import CommandLineError
from schemas.images import ImageMember
from schemas.text import changed_at, free_text, inert, printable

MANIFEST_REF = "manifest@1.1.0"

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*){1,3}")
_MAX_NAME = 64


@dataclass(frozen=True, slots=True)
class ForeignText:
    r"""A text of a result that a third party may have chosen, and that a model reads.

    ``path`` is the path of member names to it, through every element of lists. A name that ``usual`` matches
    completely is passed on unchanged. In any other, every character but letters, digits and ``._-/:@+\`` is
    escaped, spaces too, and it is cut to ``limit`` characters: enough to recognise it, not a sentence.

    Where ``usual`` is None it is a free text, such as a line of a log: a sentence that stays readable. Node
    and relay both escape, and what has been escaped stays as it is.
    """

    path: tuple[str, ...]
    usual: re.Pattern[str] | None
    limit: int

    def shown(self, text: str) -> str:
        """Return ``text`` as a model may read it."""
        if self.usual is None:
            return free_text(text, self.limit)
        return text if self.usual.fullmatch(text) else inert(text, self.limit)


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb of a kind. ``title`` and ``description`` are static: a node cannot change them.

    Attributes:
        verbatim: the members of the result that must equal the argument of the same name.
        foreign_texts: the texts of the result that are escaped: names that do not match their usual pattern,
            and free texts.
        images: the members of the result that are images, which leave it for content blocks of their own.
        streams: the call starts telemetry, of which its result is the first sample.
    """

    name: str
    input_ref: str
    output_ref: str
    title: str
    description: str
    idempotent: bool
    verbatim: tuple[str, ...] = ()
    foreign_texts: tuple[ForeignText, ...] = ()
    streams: bool = False
    images: tuple[ImageMember, ...] = ()

    def shown(self, result: Any) -> Any:
        """Return ``result`` with the texts that a third party may have chosen as a model may read them."""
        for text in self.foreign_texts:
            result = changed_at(result, text.path, text.shown)
        return result


@dataclass(frozen=True, slots=True)
class Fault:
    """What an agent reads when a handler fails for a reason that its kind states: as static as a title."""

    message: str
    suggested_fix: str


@dataclass(frozen=True, slots=True)
class Kind:
    """One row: a kind, the token that its tool names start with, and its verbs.

    ``schema_ref`` is what a capability of this kind cites in the manifest. A verb that the RFC defines but
    that has no row is not listed and cannot be called. ``faults`` are the reasons, by code, that its handler
    can state for a failure.
    """

    name: str
    short: str
    safety_class: str
    schema_ref: str
    verbs: Mapping[str, Verb]
    faults: Mapping[str, Fault] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class NamedKind:
    """A kind that does not ship: an installed package brings it, and the operator has named it.

    Attributes:
        most_rate_rps, most_deadline_ms: the most that a capability may state in its constraints.
        documents: what its row cites, by reference.
        load_handler: imports the package's code, returns what its entry point names. For the node alone.
    """

    kind: Kind
    most_rate_rps: float
    most_deadline_ms: int
    documents: Mapping[str, Mapping[str, Any]]
    load_handler: Callable[[], object]


def kind_name(text: str) -> str:
    """Return ``text``, the name of a kind, which may be one that does not ship.

    Raises:
        CommandLineError: it is no such name.
    """
    if len(text) > _MAX_NAME or not _NAME.fullmatch(text):
        raise CommandLineError(
            f"{printable(text, _MAX_NAME)!r} is not the name of a kind, such as acme.relay_board"
        )
    return text


def _verbs(*verbs: Verb) -> Mapping[str, Verb]:
    return MappingProxyType({verb.name: verb for verb in verbs})


# The names come from the label of a USB stick or the export of a network share.
_DISK_TEXTS = (
    ForeignText(("disk", "mount"), re.compile(r"/|(/[A-Za-z0-9._@+:-]{1,64}){1,12}"), limit=64),
    ForeignText(("disk", "fs_type"), re.compile(r"[a-z0-9][a-z0-9._-]*"), limit=32),
)

SYSTEM_METRICS = Kind(
    name="system.metrics",
    short="sys",
    safety_class="read_only",
    schema_ref="mcp://schemas/system.metrics@1.0.0",
    verbs=_verbs(
        Verb(
            name="snapshot",
            input_ref="system.metrics.snapshot.input@1.0.0",
            output_ref="system.metrics.sample@1.0.0",
            title="CPU, memory, disks",
            description=(
                "Read the CPU usage, memory, load averages, uptime and disks of one Linux node now. "
                "Sizes in bytes, usage in percent, uptime in seconds."
            ),
            idempotent=True,
            foreign_texts=_DISK_TEXTS,
        ),
        Verb(
            name="subscribe",
            input_ref="system.metrics.subscribe.input@1.0.0",
            output_ref="system.metrics.sample@1.0.0",
            title="CPU, memory, disks, followed",
            description=(
                "Sample a Linux node every interval_ms. Returns a sample; read more at node://{node_id}/telemetry."
            ),
            idempotent=True,
            streams=True,
            foreign_texts=_DISK_TEXTS,
        ),
    ),
)

SYSTEM_ECHO = Kind(
    name="system.echo",
    short="sysecho",
    safety_class="read_only",
    schema_ref="mcp://schemas/system.echo.invoke.input@1.0.0",
    verbs=_verbs(
        Verb(
            name="invoke",
            input_ref="system.echo.invoke.input@1.0.0",
            output_ref="system.echo.invoke.output@1.0.0",
            title="Echo",
            description=(
                "Send a short printable ASCII message to one node and get it back, with the time at which "
                "the node received it. Use it to check that the node can be reached."
            ),
            idempotent=True,
            verbatim=("message",),  # RFC-0005 section 4
        ),
    ),
)

KINDS = (SYSTEM_METRICS, SYSTEM_ECHO)
"""Every kind that is shipped."""


class KindRegistry:
    """The kinds that a process knows, by name and by short token.

    Raises:
        ValueError: two kinds share a name or a short token.
    """

    def __init__(self, kinds: Iterable[Kind] = KINDS) -> None:
        self._kinds = tuple(kinds)
        self._by_name = {kind.name: kind for kind in self._kinds}
        self._by_short = {kind.short: kind for kind in self._kinds}
        if not len(self._kinds) == len(self._by_name) == len(self._by_short):
            raise ValueError("two kinds share a name or a short token")

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._kinds)

    def get(self, name: str) -> Kind | None:
        """Return the kind called ``name``."""
        return self._by_name.get(name)

    def by_short(self, short: str) -> Kind | None:
        """Return the kind whose tool names start with ``short``."""
        return self._by_short.get(short)
