"""Where the token lies that a client's entry refers to: a file of its own, which only this user can read.

Must not print or return a token, and must not make one: tokens come from ``relay token issue``.
"""

from pathlib import Path

from relay.client.connect.errors import ConnectError
from schemas.bearer_tokens import is_bearer_token
from schemas.files import PRIVATE, PRIVATE_DIRECTORY, read_named_secret, write_atomic


def check_token_file(path: Path) -> Path:
    """Return the absolute path of a file that holds a token.

    Raises:
        ConnectError: it holds none.
        OSError: it cannot be read, or others can read it.
    """
    try:
        text = read_named_secret(path).strip()
    except UnicodeDecodeError:
        text = ""
    if not is_bearer_token(text):
        raise ConnectError(f"{path} holds no token: write the output of `relay token issue` into it")
    return path.absolute()


def keep_token(path: Path, text: str) -> None:
    """Write the token ``text`` to ``path``, in a directory that only this user can enter.

    Raises:
        ConnectError: it is no token.
        OSError: it cannot be written.
    """
    if not is_bearer_token(text.strip()):
        raise ConnectError("what was given is no token: it is the output of `relay token issue`")
    path.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    write_atomic(path, text.strip() + "\n", PRIVATE)
