"""The roots of this project's exceptions: whose fault something is, is a type.

    EdgeError
    ├── OperatorError   what the operator gave cannot be used: a file, an option, an address
    │   ├── ConfigError      the settings of a program: a restart does not help before they are changed
    │   └── CommandLineError a word of the command line is not known, missing or wrong
    ├── PeerError       the other end broke a rule: a node, a relay, a broker, an issuer, an agent
    ├── StateError      what this program keeps on its machine is missing, damaged or cannot be written
    ├── ToolError       a call failed, for whichever reason (``schemas.errors``)
    └── FailedError     the program has ended by a fault that is in its log (``schemas.faults``)

What is none of these is a fault of our own, and is never blamed on the operator or on the other end. Must not
hold an error of one module: those are defined where they are raised.
"""

from collections.abc import Sequence


class EdgeError(Exception):
    """Any error that this project expects."""


class OperatorError(EdgeError):
    """What the operator gave cannot be used. Its text, one line, states what to do and holds no secret."""


class ConfigError(OperatorError):
    """The settings of a program cannot be used. ``problems`` are all that is wrong with them, a line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        others = len(problems) - 1
        super().__init__(problems[0] + (f" (and {others} more: see `config check`)" if others else ""))
        self.problems = tuple(problems)


class NoStateDirError(ConfigError):
    """No state directory is named, and there is no home directory for the usual one."""

    def __init__(self) -> None:
        super().__init__(["name the state directory with --state-dir: this user has no home directory"])


class CommandLineError(OperatorError):
    """The command line is wrong: a word is not known, or not of its form. Its text says what to write."""


class PeerError(EdgeError):
    """The other end broke a rule. The text is for a log, and holds nothing that came from there unescaped."""


class StateError(EdgeError):
    """What this program keeps on its machine cannot be used: a damaged ledger, a full disk, a lost key.

    A root of its own: the operator's last input did not cause it, and a node or an agent blamed for it would
    give up. Its text, one line, names the file and states what to do.
    """
