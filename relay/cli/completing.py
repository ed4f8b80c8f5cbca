"""What a shell completes beyond commands and options: the labels of nodes, and scopes.

A completion is no place for an error: what cannot be read has none. Must not change anything.
"""

import os
import re
from collections.abc import Iterator

import typer

from relay.auth.permissions import SCOPES
from relay.cli.state import name_ledger
from relay.state.labels import typed_form
from schemas.error_roots import EdgeError

_SPECIAL_TO_BASH = re.compile(r"[^\w.,/+@%-]")


def labels(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the labels that begin so, in their letters, or else as they are typed in ASCII."""
    try:
        named = name_ledger(ctx.params.get("state_dir")).read().by_node.values()
    except (EdgeError, OSError):
        return []
    forms = ((name.label, typed_form(name.label)) for name in named if name.label)
    found = (next((form for form in each if form.startswith(incomplete)), None) for each in forms)
    return sorted(_for_shell(form) for form in found if form is not None)


def scopes(incomplete: str) -> Iterator[str]:
    """Yield the scopes that begin so."""
    return (scope for scope in SCOPES if scope.startswith(incomplete))


def _for_shell(label: str) -> str:
    # zsh and fish quote what they insert.
    if os.environ.get("_RELAY_COMPLETE") != "complete_bash":
        return label
    return _SPECIAL_TO_BASH.sub(lambda found: f"\\{found[0]}", label)
