"""Runs the command line, and ends an expected error with one line.

Must not import more than the standard library and ``schemas`` before it can report an error: a node's
installation has this script, but not the relay's dependencies.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper

from relay.cli.exits import fail
from schemas.process.command_errors import EXIT_CANNOT_RUN, errors_in_one_line, have_streams

_OUR_PACKAGES = frozenset({"relay", "schemas"})


def main() -> None:
    """Run the command line."""
    have_streams()
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal of another encoding shows an escape for a letter that it lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    with reporting():
        from relay.cli.main import app  # noqa: PLC0415 - so that a missing dependency can be reported

        app()


@contextmanager
def reporting() -> Iterator[None]:
    """End a mistake of the operator, and a missing dependency, with one line; a fault has a traceback."""
    with errors_in_one_line(fail):
        try:
            yield
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in _OUR_PACKAGES:
                raise
            fail(
                f"{package} is not installed: the relay's programs need the extra 'relay' (docs/install.md)",
                EXIT_CANNOT_RUN,
            )
