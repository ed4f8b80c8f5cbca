"""How the node's commands print. Standard output holds results, standard error the rest.

Must not decide what is printed.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import typer

_TIME = "_at_ms"


def print_facts(facts: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the result of a command, for programs or for people."""
    if as_json:
        typer.echo(json.dumps(facts))
        return
    shown = dict(_shown(name, value) for name, value in facts.items())
    width = max(len(name) for name in shown)
    for name, text in shown.items():
        typer.echo(f"{name:<{width}}  {text}")


def _shown(name: str, value: Any) -> tuple[str, str]:
    """Return a fact as people read it: a time in milliseconds as a date."""
    if name.endswith(_TIME):
        at = datetime.fromtimestamp(value // 1000, UTC)
        return name.removesuffix(_TIME), f"{at:%Y-%m-%d %H:%M} UTC"
    return name, _word(value)


def _word(value: Any) -> str:
    """Return a value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def say(text: str) -> None:
    """Print what is not part of the result."""
    typer.echo(text, err=True)
