"""The NATS account of the fleet: that this relay is a user of it, and may not do what an administrator does.

Subjects and streams of one account do not exist in another, so a relay of another fleet on the same servers
reaches nothing of this one. Who may make or change a stream could have the servers copy any subject of the
account to another; the relays may not. Must not know what is sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define
from nats.aio.client import Client
from nats.errors import NoRespondersError

from relay.cluster.client import RELAYS_PERMISSIONS, ClusterConnectError
from relay.cluster.server_config import USER_INFO
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

_MAX_BYTES = 65_536
_ANSWER_S = 2.0
_SHOWN = 96
_SET_UP = "`relay cluster init` makes it, see docs/cluster.md"
_RIGHTS_OF_AN_ADMINISTRATOR = tuple(
    f"$JS.API.STREAM.{right}.>"
    for right in ("CREATE", "UPDATE", "DELETE", "PURGE", "MSG.DELETE", "SNAPSHOT", "RESTORE")
)


@define(eq=False, repr=False)
class FleetAccount:
    """The account that the settings name."""

    _account: str

    async def check(self, client: Client) -> None:
        """Ask the server whose user this is, before anything is said to other relays.

        Raises:
            ClusterConnectError: it is of another account, or may do what an administrator does.
        """
        try:
            answer = await client.request(USER_INFO, b"", _ANSWER_S)
            user = loads(answer.data, max_bytes=_MAX_BYTES)["data"]
            account, permissions = user["account"], user.get("permissions")
        except (NoRespondersError, TimeoutError, StrictJsonError, LookupError, TypeError, AttributeError):
            raise ClusterConnectError(
                "the server does not say to relays of --cluster-fleet whose user they are: each fleet has an "
                f"account of its own, here {self._account}: {_SET_UP}"
            ) from None
        if account != self._account:
            raise ClusterConnectError(
                f"--cluster-credentials is a user of the account {printable(str(account), _SHOWN)}, and not "
                f"of {self._account}, which this fleet is to have for itself: {_SET_UP}"
            )
        if (excess := excess_right(permissions)) is not None:
            raise ClusterConnectError(
                f"the user of --cluster-credentials may {printable(excess, _SHOWN)}, which is for an "
                f"administrator: give it {RELAYS_PERMISSIONS}"
            )


def excess_right(permissions: Any) -> str | None:
    """Return what ``permissions`` allow that only an administrator may; None if it is nothing."""
    publish = permissions.get("publish") if isinstance(permissions, Mapping) else None
    if not isinstance(publish, Mapping) or not (allowed := _subjects(publish.get("allow"))):
        return "publish on every subject"
    if permissions.get("responses") is not None:
        return "answer on every subject"
    denied = _subjects(publish.get("deny"))
    for right in _RIGHTS_OF_AN_ADMINISTRATOR:
        if any(_covers(each, right) for each in denied):
            continue
        if (found := next((each for each in allowed if _overlap(each, right)), None)) is not None:
            return f"publish {found}"
    return None


def _subjects(found: Any) -> Sequence[str]:
    """Return ``found`` if it is a list of subjects; else none."""
    is_list = isinstance(found, list) and all(isinstance(each, str) for each in found)
    return found if is_list else ()


def _overlap(one: str, other: str) -> bool:
    """Return whether a subject fits both."""
    words, others = one.split("."), other.split(".")
    for word, another in zip(words, others, strict=False):
        if ">" in {word, another}:
            return True
        if word != another and "*" not in {word, another}:
            return False
    return len(words) == len(others)


def _covers(one: str, other: str) -> bool:
    """Return whether every subject that fits ``other`` fits ``one``."""
    words, others = one.split("."), other.split(".")
    for word, another in zip(words, others, strict=False):
        if word == ">":
            return True
        if another == ">" or word not in {another, "*"}:
            return False
    return len(words) == len(others)
