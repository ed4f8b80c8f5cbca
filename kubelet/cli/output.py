"""How the node's commands print. Standard output holds results, standard error the rest.

Must not decide what is printed.
"""

import json
from collections.abc import Mapping
from typing import Any

import typer


def print_facts(facts: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the result of a command, for programs or for people."""
    if as_json:
        typer.echo(json.dumps(facts))
        return
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}  {_word(value)}")


def _word(value: Any) -> str:
    """Return a value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def say(text: str) -> None:
    """Print what is not part of the result."""
    typer.echo(text, err=True)
