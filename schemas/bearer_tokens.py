"""What a client may send as a bearer token. Must not verify it: that is ``tokens``."""

import re

# More than RFC 6750 section 2.1 allows, as issuers differ; but nothing that could end the header's line.
_TOKEN = re.compile(r"[!-~]{1,8192}")


def is_bearer_token(text: str) -> bool:
    """Return whether ``text`` can be sent as a bearer token."""
    return _TOKEN.fullmatch(text) is not None
