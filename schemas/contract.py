"""The contract that one process works by: documents and kinds, with those that its operator named.

Must not read a package by itself: a process without named kinds does without what that needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from schemas.kinds import KindRegistry, NamedKind, rfc_kinds
from schemas.registry import SchemaRegistry


@dataclass(frozen=True, slots=True)
class Contract:
    """Documents and kinds that belong together.

    Attributes:
        named: the kinds besides RFC-0001's, in the order in which the operator named them.
    """

    registry: SchemaRegistry
    kinds: KindRegistry
    named: tuple[NamedKind, ...] = ()


def read_contract(names: tuple[str, ...], directory: Path | None = None) -> Contract:
    """Return the contract with the kinds ``names``, shipped or of installed packages, beside RFC-0001's.

    ``directory`` has packages that are installed for their kinds alone.

    Raises:
        ConfigError: one of them is not installed, is damaged, or cannot be told from another kind.
    """
    if not names:
        return contract_of(())
    from schemas.kind_packages import read_named_kinds  # noqa: PLC0415 - as in the module's docstring

    return contract_of(read_named_kinds(names, directory))


def contract_of(named: Sequence[NamedKind]) -> Contract:
    """Return the contract with the kinds ``named`` beside RFC-0001's."""
    kinds = KindRegistry([*rfc_kinds(), *(each.kind for each in named)])
    return Contract(SchemaRegistry(kinds=kinds, named=named), kinds, tuple(named))
