"""What the broker needs for admitting clients, as files that it reads, and the signal to reload them.

| file | mode | holds |
|---|---|---|
| `roots.pem` | 0640 | the roots that are trusted now |
| `nats-users.conf` | 0640 | the users of a nats-server |
| `revoked.pem` | 0640 | the list of the revoked, for mosquitto |
| `generation` | 0640 | a digest of the three; written last, when they are in place |

The group is the directory's, which has the setgid bit where another user's broker reads it, so nothing has to
be copied by root. A node may publish its own four topics and not subscribe; the relay may subscribe and not
publish, and a reader may subscribe to manifests alone (RFC-0001 section 1). Must not connect to the broker.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import psutil
from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.pki.authority import READER
from relay.pki.errors import AuthorityStateError
from schemas import topics
from schemas.certificates import RELAY_NAME
from schemas.error_roots import StateError
from schemas.files import make_private_directory, read_given, write_atomic
from schemas.projection import is_node_id
from schemas.text import printable, quoted

# A process writes its number after it has started; the two times differ a little.
_TOLERANCE_S = 5.0
_DIRECTORY_MODE = 0o750
_FILE_MODE = 0o640
_MAX_PID_BYTES = 32


class AccessAuthority(Protocol):
    """The part of the CA that access is derived from; see ``CertificateAuthority``."""

    def roots(self) -> list[str]: ...
    def crl_pem(self) -> str: ...
    def in_force(self) -> Mapping[str, Any]: ...
    def readers(self) -> Sequence[str]: ...


class OwnBroker(Protocol):
    """The part of the relay's own broker that concerns access, if it runs one."""

    @property
    def users(self) -> Sequence[str]:
        """Whom it admits besides nodes and the relay, as its list of users has them."""
        ...

    def reload(self) -> bool:
        """Have it read the files again; return whether that is done."""
        ...


@define(eq=False, repr=False)
class BrokerAccess:
    """The files in ``directory``, and the process to signal, whose number is in ``pid_file``, if any."""

    _ca: AccessAuthority
    _directory: Path
    _pid_file: Path | None
    _log: FilteringBoundLogger
    _own_broker: OwnBroker | None = None
    _revoked: str = field(init=False, default="")
    _generation: str = field(init=False, default="")
    _notified: str = field(init=False, default="")
    _logged: tuple[str, dict[str, str]] | None = field(init=False, default=None)

    async def follow(self) -> bool:
        """Refresh on a thread: with thousands of nodes, reading, signing and writing take long."""
        return await asyncio.to_thread(self.refresh)

    def refresh(self) -> bool:
        """Write the files anew, and signal the broker; return whether that is done.

        A failure is logged; the relay goes on serving.
        """
        try:
            whole = self.write()
        except (StateError, OSError) as error:
            self._log_once("broker access not written", reason=printable(str(error)))
            return False
        if self._notified != self._generation:
            if self._pid_file is not None and not self._notify(self._pid_file):
                return False
            if self._own_broker is not None and not self._own_broker.reload():
                return False
            self._notified = self._generation
        if whole:
            self._logged = None
        return whole

    def _log_once(self, event: str, **facts: str) -> None:
        """Log a failure, unless it is the same as the last: each refresh tries again."""
        if self._logged != (event, facts):
            self._log.error(event, **facts)
        self._logged = (event, facts)

    def write(self) -> bool:
        """Write the files, and then the generation; return whether the list of the revoked is up to date.

        That list needs the root's key, which an operator may keep elsewhere. A nats-server's
        users are written without it.

        Raises:
            StateError, OSError: the CA cannot be read, or a file cannot be written.
        """
        roots = "".join(self._ca.roots())
        further = () if self._own_broker is None else self._own_broker.users
        users = nats_users(self._ca.in_force(), self._ca.readers(), further)
        whole = True
        try:
            self._revoked = self._ca.crl_pem()
        except AuthorityStateError as error:
            self._log_once("broker access not written", reason=printable(str(error)))
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

    def _notify(self, pid_file: Path) -> bool:
        """Send SIGHUP to the broker, at which both kinds reload their files; return whether it was sent."""
        try:
            process = psutil.Process(int(read_given(pid_file, _MAX_PID_BYTES, wait_s=0)))
            if process.pid <= 1 or process.create_time() > pid_file.stat().st_mtime + _TOLERANCE_S:
                # The number was reused by another process, which SIGHUP could end.
                raise psutil.NoSuchProcess(process.pid)
            if not _survives_sighup(process.pid):
                raise ProcessLookupError("the process does not handle SIGHUP, or not yet")
            os.kill(process.pid, signal.SIGHUP)
        except (OSError, ValueError, OverflowError, psutil.Error) as error:
            reason = printable(f"{type(error).__name__}: {error}")
            self._log_once("broker not signalled for new access lists", pid_file=str(pid_file), reason=reason)
            return False
        return True


def _survives_sighup(pid: int) -> bool:
    """Return whether the process catches or blocks SIGHUP.

    mosquitto writes its pid file before it installs its handler: a signal in between would end it.
    """
    lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith((b"SigCgt:", b"SigBlk:"))]
    return any(mask >> (signal.SIGHUP - 1) & 1 for mask in masks)


def nats_users(node_ids: Iterable[str], readers: Iterable[str] = (), further: Sequence[str] = ()) -> str:
    """Return the users of a nats-server, whose names are the subjects of their certificates, and ``further``.

    A node may write its four topics, and not below: each of any number of topics would retain a message.
    """
    users = [
        _user(node_id, [topics.subject(topic) for topic in topics.written_by(node_id)], [])
        for node_id in sorted(node_ids)
    ]
    # The broker delivers QoS 1 on a subject of its own, which no client can subscribe to.
    users += [_user(name, [], ["$devices.*.announce", "$MQTT.sub.>"]) for name in readers]
    users += [_user(RELAY_NAME, [], ["$devices.>", "$MQTT.sub.>"]), *further]
    return "authorization {\n  users: [\n" + "".join(f"    {user}\n" for user in users) + "  ]\n}\n"


def _user(name: str, publish: list[str], subscribe: list[str]) -> str:
    if name != RELAY_NAME and not is_node_id(name) and not READER.fullmatch(name):
        raise AuthorityStateError(f"{quoted(name)} is no node id")
    permissions = {"publish": _permission(publish), "subscribe": _permission(subscribe)}
    return json.dumps({"user": f"CN={name}", "permissions": permissions})


def _permission(subjects: list[str]) -> dict[str, list[str]]:
    return {"allow": subjects} if subjects else {"deny": [">"]}
