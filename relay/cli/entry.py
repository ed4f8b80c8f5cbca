"""The console script ``relay``: runs the command line, and ends an expected error with one line.

Must not import more than the standard library and ``schemas`` before it can report an error: a node's
installation has this script, but not the relay's dependencies.
"""

from typing import NoReturn

from relay.cli.exits import fail
from schemas.addresses import AddressError
from schemas.error_roots import CommandLineError, ConfigError, OperatorError, PeerError, StateError
from schemas.faults import FailedError, traceback_text
from schemas.process.exit_codes import EXIT_CANNOT_RUN, EXIT_CONFIG, EXIT_FAULT, EXIT_USAGE

_OUR_PACKAGES = frozenset({"relay", "schemas"})


def main() -> None:
    """Run the command line. An operator's mistake is one line; a fault of our own has a traceback."""
    try:
        from relay.cli.main import app  # noqa: PLC0415 - so that a missing dependency can be reported

        app()
    except ConfigError as error:
        fail(str(error), EXIT_CONFIG)
    except (AddressError, CommandLineError) as error:
        fail(str(error), EXIT_USAGE)
    except (OperatorError, PeerError, StateError, FailedError) as error:
        fail(str(error), EXIT_CANNOT_RUN)
    except OSError as error:
        fail(
            f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error),
            EXIT_CANNOT_RUN,
        )
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in _OUR_PACKAGES:
            _fault(error)
        fail(
            f"{package} is not installed; the relay's programs need: pip install 'edge-kubelet[relay]'",
            EXIT_CANNOT_RUN,
        )
    except Exception as error:  # noqa: BLE001 - so that no fault has the exit code of an answer
        _fault(error)


def _fault(error: Exception) -> NoReturn:
    # Not printed by Python: the message may hold bytes from outside, or a secret.
    fail(f"fault\nTraceback, innermost call first:\n{traceback_text(error)}", EXIT_FAULT)
