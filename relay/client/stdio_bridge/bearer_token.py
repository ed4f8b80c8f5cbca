"""The bearer token of the bridge: where it is read from, and read again when the relay rejects it.

Must not log the token, and must not import the HTTP client: `relay stdio` reports a missing token without it.
"""

from collections.abc import Mapping
from pathlib import Path

from schemas.bearer_tokens import is_bearer_token
from schemas.error_roots import OperatorError
from schemas.files import read_named_secret

TOKEN_VARIABLE = "EDGE_TOKEN"  # noqa: S105 - the name of a variable, not a secret


class TokenMissingError(OperatorError):
    """There is no token where it should be; the text names the place."""


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
        """What to do about a token that is refused."""
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
