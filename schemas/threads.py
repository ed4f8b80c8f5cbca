"""Starting a thread where the system may have none left: the limits of tasks of a service, or of a user.

Must not decide what a program does without it.
"""

import threading

from schemas.error_roots import StateError


class NoThreadError(StateError):
    """The system has no thread left for this process."""

    def __init__(self) -> None:
        super().__init__("no thread can be started: raise TasksMax= of the service, or the user's limit")


def started(thread: threading.Thread) -> threading.Thread:
    """Start ``thread`` and return it.

    Raises:
        NoThreadError: the system has none left.
    """
    try:
        thread.start()
    except RuntimeError:
        # That of threading, and nothing else is raised by a thread that is new.
        raise NoThreadError from None
    return thread
