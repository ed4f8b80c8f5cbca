"""Why a client's configuration is not changed.

Must not quote what is in it: it may have tokens of other servers.
"""

from schemas.error_roots import OperatorError


class ConnectError(OperatorError):
    """The client cannot be connected; the text says why, and what to do."""


class UnreadableConfigError(ConnectError):
    """The configuration cannot be changed without loss; the text continues the file's name."""
