"""What the broker must know of who may come in, as files that it reads, and the signal to read them.

Both kinds of broker: nats-server gets its users, mosquitto the list of revoked leaves, and both the roots.
What a user may do stands here as well: a node writes below its own topic and reads nothing, the relay reads
and writes nothing. Must not know how the broker is spoken to.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil
from structlog.typing import FilteringBoundLogger

from relay.ca import AuthorityError
from relay.ledger import LedgerError
from relay.own_certificate import RELAY_NAME
from schemas.files import make_private_directory, write_atomic
from schemas.projection import is_node_id
from schemas.text import printable

# A process writes its number down after it has started; clocks are a little apart.
_TOLERANCE_S = 5.0
_DIRECTORY_MODE = 0o755


class AccessAuthority(Protocol):
    """The part of the CA that says who is in force."""

    def roots(self) -> list[str]:
        """Return the roots that are trusted now."""
        ...

    def crl_pem(self) -> str:
        """Return the list of the revoked, one for each root."""
        ...

    def in_force(self) -> Mapping[str, Any]:
        """Return what is in force, by node id."""
        ...


class BrokerAccess:
    """The files in ``directory``, and the process whose number is in ``pid_file``, if it is to be told."""

    def __init__(
        self, ca: AccessAuthority, directory: Path, pid_file: Path | None, log: FilteringBoundLogger
    ) -> None:
        self._ca = ca
        self._directory = directory
        self._pid_file = pid_file
        self._log = log
        self._said: tuple[str, dict[str, str]] | None = None

    async def follow(self) -> bool:
        """Refresh on a thread: with thousands of nodes there is much to read, to sign and to write."""
        return await asyncio.to_thread(self.refresh)

    def refresh(self) -> bool:
        """Write what is true now, and tell the broker; return whether that is done.

        What cannot be done is said in the log: it is no reason to stop serving.
        """
        try:
            self._write()
        except (AuthorityError, LedgerError, OSError) as error:
            self._say_once("broker access not written", reason=printable(str(error)))
            return False
        if self._pid_file is None or self._tell(self._pid_file):
            self._said = None
            return True
        return False

    def _say_once(self, event: str, **facts: str) -> None:
        """Say why it failed, unless that is why it failed the last time: it is tried again and again."""
        if self._said != (event, facts):
            self._log.error(event, **facts)
        self._said = (event, facts)

    def _write(self) -> None:
        make_private_directory(self._directory.parent)
        self._directory.mkdir(_DIRECTORY_MODE, exist_ok=True)
        write_atomic(self._directory / "roots.pem", "".join(self._ca.roots()))
        write_atomic(self._directory / "nats-users.conf", nats_users(self._ca.in_force()))
        # Last: it takes the root's key, which an operator may keep elsewhere.
        write_atomic(self._directory / "revoked.pem", self._ca.crl_pem())

    def _tell(self, pid_file: Path) -> bool:
        """Send SIGHUP to the broker, at which both kinds read their files again; return whether it went."""
        try:
            process = psutil.Process(int(pid_file.read_text("ascii")))
            if process.pid <= 1 or process.create_time() > pid_file.stat().st_mtime + _TOLERANCE_S:
                # Somebody else's by now: SIGHUP would be the end of most.
                raise psutil.NoSuchProcess(process.pid)
            os.kill(process.pid, signal.SIGHUP)
        except (OSError, ValueError, OverflowError, psutil.Error) as error:
            reason = printable(f"{type(error).__name__}: {error}")
            self._say_once("broker not told of new access lists", pid_file=str(pid_file), reason=reason)
            return False
        return True


def nats_users(node_ids: Iterable[str]) -> str:
    """Return the users of a nats-server, whose names are the subjects of their certificates."""
    users = [_user(node_id, [f"$devices.{node_id}.>"], []) for node_id in sorted(node_ids)]
    # What is of QoS 1 comes on a subject of the broker's own making.
    users.append(_user(RELAY_NAME, [], ["$devices.>", "$MQTT.sub.>"]))
    return "authorization {\n  users: [\n" + "".join(f"    {user}\n" for user in users) + "  ]\n}\n"


def _user(name: str, publish: list[str], subscribe: list[str]) -> str:
    if name != RELAY_NAME and not is_node_id(name):
        raise AuthorityError(f"{printable(name)!r} is no node id")
    permissions = {"publish": _allowed(publish), "subscribe": _allowed(subscribe)}
    return json.dumps({"user": f"CN={name}", "permissions": permissions})


def _allowed(subjects: list[str]) -> dict[str, list[str]]:
    return {"allow": subjects} if subjects else {"deny": [">"]}
