"""How a command ends that fails: an expected error is one line and its exit code, a fault has a traceback.

Must not import the command line's library, nor what only the relay has: the node's daemon does without the
first, and a node's installation, which has the script of the relay too, without the second.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from schemas.error_roots import CommandLineError, ConfigError, OperatorError, PeerError, StateError
from schemas.faults import FailedError, traceback_text
from schemas.process.exit_codes import EXIT_CANNOT_RUN, EXIT_CONFIG, EXIT_FAULT, EXIT_USAGE
from schemas.process.state_owner import sees_as_member

MEMBERS_READ = "its group sees what is no secret, and changes nothing: run this as root, with sudo"


def os_error_text(error: OSError) -> str:
    """Return what a call of the system failed for, and with which file, without the number of the error."""
    text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    return f"{text}: {MEMBERS_READ}" if is_kept_from_member(error) else text


def is_kept_from_member(error: OSError) -> bool:
    """Return whether it takes more than the rights of the group of a state directory."""
    return error.errno == errno.EACCES and bool(error.filename) and sees_as_member(Path(error.filename))


@contextmanager
def errors_in_one_line(fail: Callable[[str, int], NoReturn]) -> Iterator[None]:
    """End an error of the body by ``fail``, which takes the text and the exit code."""
    try:
        yield
    except ConfigError as error:
        fail(str(error), EXIT_CONFIG)
    except CommandLineError as error:
        fail(str(error), EXIT_USAGE)
    except (OperatorError, PeerError, StateError, FailedError) as error:
        fail(str(error), EXIT_CANNOT_RUN)
    except OSError as error:
        fail(os_error_text(error), EXIT_CANNOT_RUN)
    except Exception as error:  # noqa: BLE001 - so that no fault has the exit code of an answer
        # Not printed by Python: the message may hold bytes from outside, or a secret.
        fail(f"fault\nTraceback, innermost call first:\n{traceback_text(error)}", EXIT_FAULT)
