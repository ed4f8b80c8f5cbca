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
        typer.echo(f"{name:<{width}}  {'none' if value is None else value}")


def say(text: str) -> None:
    """Print what is not part of the result."""
    typer.echo(text, err=True)
