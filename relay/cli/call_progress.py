"""The progress of a call that takes longer than a second, for a person. Must not know what is called."""

import asyncio
import sys

import typer

from schemas.text import printable

_PROGRESS_AFTER_S = 1.0


class CallProgress:
    """One line on standard error while a call takes more than a second; rewritten if that is a terminal."""

    def __init__(self) -> None:
        self._text = ""

    async def note(self, progress: float, total: float | None, message: str | None) -> None:
        """Keep what the server reports."""
        share = f"{progress:g}" if total is None else f"{progress:g} of {total:g}"
        self._text = " ".join(part for part in (share, printable(message or "", 60)) if part)

    async def show(self) -> None:
        """Show the seconds and what the server reported, until cancelled."""
        is_terminal = sys.stderr.isatty()
        second = 0
        try:
            while True:
                await asyncio.sleep(_PROGRESS_AFTER_S)
                second += 1
                line = f"waiting, {second} s  {self._text}".rstrip()
                if is_terminal:
                    typer.echo(f"\r{line:<79}", err=True, nl=False)
                elif second == 1:
                    typer.echo(line, err=True)
        finally:
            if is_terminal and second:
                typer.echo("\r" + " " * 79 + "\r", err=True, nl=False)
