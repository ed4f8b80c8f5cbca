"""What commands present to a server: the bearer token, and the profile that ``relay login`` keeps.

The profile names the file of the token and never holds the token. A whole profile is used or none of it: its
token is for its own server. Must not log, print or make a token, and must not import the HTTP client: `relay
stdio` reports a missing token without it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from schemas.error_roots import OperatorError
from schemas.files import PRIVATE, PRIVATE_DIRECTORY, read_named, read_named_secret, write_atomic
from schemas.text import is_bearer_token

TOKEN_VARIABLE = "EDGE_TOKEN"  # noqa: S105 - the name of a variable, not a secret
_MAX_BYTES = 16_384


class TokenMissingError(OperatorError):
    """There is no token where it should be; the text names the place."""


class ProfileError(OperatorError):
    """The file of the profile is damaged."""


class RenewableToken:
    """The bearer token, and the file that a newer one is read from, if it came from a file."""

    def __init__(self, text: str, file: Path | None = None) -> None:
        self._file = file
        self.text = text

    @classmethod
    def find(cls, file: Path | None, environment: Mapping[str, str]) -> "RenewableToken":
        """Return the token in ``file``, or else that of the environment.

        Raises:
            TokenMissingError: there is none.
            OSError: the file cannot be read, or others can read it.
        """
        if file is not None:
            text = _read_token(file)
            where = f"{file} holds no token"
        else:
            text = environment.get(TOKEN_VARIABLE, "").strip()
            where = f"there is no token: give one with --token-file, or in {TOKEN_VARIABLE}"
        if not is_bearer_token(text):
            raise TokenMissingError(where)
        return cls(text, file)

    @property
    def advice(self) -> str:
        if self._file is not None:
            return "Put a new one into the file that --token-file names."
        return f"Put a new one into {TOKEN_VARIABLE}, and start this program again."

    def is_newer_than(self, refused: str) -> bool:
        """Read the file again, and return whether there is another token than ``refused``."""
        if self._file is not None:
            try:
                text = _read_token(self._file)
            except OSError:
                text = ""  # perhaps it is being replaced
            if is_bearer_token(text):
                self.text = text
        return self.text != refused


def _read_token(file: Path) -> str:
    try:
        return read_named_secret(file).strip()
    except UnicodeDecodeError:
        return ""


def check_token_file(path: Path) -> Path:
    """Return the absolute path of a file that holds a token.

    Raises:
        TokenMissingError: it holds none.
        OSError: it cannot be read, or others can read it.
    """
    if not is_bearer_token(_read_token(path)):
        raise TokenMissingError(f"{path} holds no token: write the output of `relay token issue` into it")
    return path.absolute()


def keep_token(path: Path, text: str) -> None:
    """Write the token ``text`` to ``path``, in a directory that only this user can enter.

    Raises:
        TokenMissingError: it is no token.
        OSError: it cannot be written.
    """
    if not is_bearer_token(text.strip()):
        raise TokenMissingError("what was given is no token: it is the output of `relay token issue`")
    _keep(path, text.strip())


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    write_atomic(path, text + "\n", PRIVATE)


@dataclass(frozen=True, slots=True)
class Profile:
    """The server that commands use where their command line names none.

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
        _keep(path, json.dumps(asdict(self), default=str, indent=2))


def read_profile(path: Path) -> Profile | None:
    """Return the profile that is kept at ``path``; None if there is none.

    Raises:
        ProfileError: the file is damaged.
        OSError: it cannot be read, or another user can change it.
    """
    try:
        kept: dict[str, Any] = json.loads(read_named(path, _MAX_BYTES))
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
        raise ProfileError(f"{path} is damaged: run `relay login` again") from None
