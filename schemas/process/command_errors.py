"""How a command ends that fails: an expected error is one line and its exit code, a fault has a traceback.

The exit codes keep their meaning: scripts and units of systemd rely on them.
Must not import the command line's library, nor what only the relay has: the node's daemon does without the
first, and a node's installation, which has the script of the relay too, without the second.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from schemas.error_roots import CommandLineError, ConfigError, OperatorError, PeerError, StateError
from schemas.faults import FailedError, traceback_text
from schemas.files import os_error_text


def have_streams() -> None:
    """Let a command read nothing, and discard what it prints, that was started without input or output."""
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 - until the end
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the end


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


EXIT_NO = 1
EXIT_USAGE = 2
EXIT_CANNOT_RUN = 3
EXIT_FAULT = 70
EXIT_CONFIG = 78
"""EX_CONFIG of sysexits.h: a restart does not help."""
