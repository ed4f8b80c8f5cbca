"""The program that appends to the audit: what it reads from its standard input goes to its standard output.

Each message of the socket that is its input is written by one write, and answered by a byte; one more byte
says at first that it runs. What cannot be written whole ends it: the size of the file says how much was. It
is run as a file and must import nothing, because all that it takes is memory.
"""

import os

MOST_BYTES = 128 * 1024
"""So long a message is at most."""
_INPUT, _FILE = 0, 1


def main() -> None:
    """Append until no more can be sent, or something cannot be written whole."""
    _answer()
    while data := _message():
        try:
            written = os.write(_FILE, data)
        except OSError:
            return
        if written != len(data):
            return
        _answer()


def _message() -> bytes:
    try:
        return os.read(_INPUT, MOST_BYTES)
    except ConnectionResetError:
        # The relay was killed with answers unread, which is said once, before what it has sent.
        return os.read(_INPUT, MOST_BYTES)


def _answer() -> None:
    try:  # noqa: SIM105 - nothing is imported
        os.write(_INPUT, b"+")
    except OSError:  # the relay was killed: what it has sent is written all the same
        pass


if __name__ == "__main__":
    main()
