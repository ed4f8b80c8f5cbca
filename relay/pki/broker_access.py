"""What the broker must know of who may come in, as files that it reads, and the signal to read them.

| file | mode | holds |
|---|---|---|
| `roots.pem` | 0640 | the roots that are trusted now |
| `nats-users.conf` | 0640 | the users of a nats-server |
| `revoked.pem` | 0640 | the list of the revoked, for mosquitto |
| `generation` | 0640 | what differs after every change of the three; written last, when they are in place |

The group is the directory's, which has the setgid bit where another user's broker reads it: so nothing has to
be copied by root. What a user may do stands here as well: a node writes below its own topic and reads
nothing, the relay reads and writes nothing. Must not know how the broker is spoken to.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import psutil
from structlog.typing import FilteringBoundLogger

from relay.ledger import LedgerError
from relay.pki.authority import AuthorityError
from relay.pki.own_certificate import RELAY_NAME
from schemas.files import make_private_directory, write_atomic
from schemas.projection import is_node_id
from schemas.text import printable

# A process writes its number down after it has started; clocks are a little apart.
_TOLERANCE_S = 5.0
_DIRECTORY_MODE = 0o750
_FILE_MODE = 0o640


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
        self._revoked = ""
        self._generation = ""
        self._told = ""
        self._said: tuple[str, dict[str, str]] | None = None

    async def follow(self) -> bool:
        """Refresh on a thread: with thousands of nodes there is much to read, to sign and to write."""
        return await asyncio.to_thread(self.refresh)

    def refresh(self) -> bool:
        """Write what is true now, and tell the broker; return whether that is done.

        What cannot be done is said in the log: it is no reason to stop serving.
        """
        try:
            whole = self._write()
        except (AuthorityError, LedgerError, OSError) as error:
            self._say_once("broker access not written", reason=printable(str(error)))
            return False
        if self._told != self._generation:
            if self._pid_file is not None and not self._tell(self._pid_file):
                return False
            self._told = self._generation
        if whole:
            self._said = None
        return whole

    def _say_once(self, event: str, **facts: str) -> None:
        """Say why it failed, unless that is why it failed the last time: it is tried again and again."""
        if self._said != (event, facts):
            self._log.error(event, **facts)
        self._said = (event, facts)

    def _write(self) -> bool:
        """Write the files, and then the generation; return whether the list of the revoked is up to date.

        That list takes the root's key, which an operator may keep elsewhere. A nats-server does without it:
        it is told of its users all the same.
        """
        roots, users = "".join(self._ca.roots()), nats_users(self._ca.in_force())
        whole = True
        try:
            self._revoked = self._ca.crl_pem()
        except AuthorityError as error:
            self._say_once("broker access not written", reason=printable(str(error)))
            whole = False
        make_private_directory(self._directory.parent)
        self._directory.mkdir(_DIRECTORY_MODE, exist_ok=True)
        self._put("roots.pem", roots)
        self._put("nats-users.conf", users)
        if self._revoked:
            self._put("revoked.pem", self._revoked)
        generation = sha256(f"{roots}\0{users}\0{self._revoked}".encode()).hexdigest()
        if generation != self._generation:
            self._put("generation", generation + "\n")
            self._generation = generation
        return whole

    def _put(self, name: str, text: str) -> None:
        write_atomic(self._directory / name, text, _FILE_MODE)

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
