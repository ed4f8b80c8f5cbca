"""The server that commands use where their command line names none: what `relay login` keeps.

It names the file of the token and never holds the token. A whole profile is used or none of it: its token is
for its own server. Must not connect.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from relay.client.connect.errors import ConnectError
from schemas.files import PRIVATE, PRIVATE_DIRECTORY, read_named, write_atomic

_MAX_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Profile:
    """One server.

    Attributes:
        url: its URL, with path.
        token_file: the file that holds the bearer token.
        root: the file of the root of its certificate; None: those that this machine trusts.
        plain: whether an unencrypted connection to another machine is allowed.
    """

    url: str
    token_file: Path
    root: Path | None = None
    plain: bool = False

    def write(self, path: Path) -> None:
        """Keep it at ``path``, in a directory that only this user can enter."""
        path.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        write_atomic(path, json.dumps(asdict(self), default=str, indent=2) + "\n", PRIVATE)


def read_profile(path: Path) -> Profile | None:
    """Return the profile that is kept at ``path``; None if there is none.

    Raises:
        ConnectError: the file is damaged.
        OSError: it cannot be read, or another user can change it.
    """
    try:
        kept = json.loads(read_named(path, _MAX_BYTES))
        root = kept["root"]
        return Profile(
            str(kept["url"]),
            Path(kept["token_file"]),
            Path(root) if root is not None else None,
            plain=kept["plain"] is True,
        )
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConnectError(f"{path} is damaged: run `relay login` again") from None
