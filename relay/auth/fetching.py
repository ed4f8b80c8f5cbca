"""One request to a server that the operator has named: an issuer of tokens, or a provider of sign-in.

The bare transport: no proxy, no cookie, no redirect, and no decompression of a few bytes into many. Must not
choose whom to connect to, nor read what it returns.
"""

import ssl
from contextlib import aclosing
from typing import Final

import httpx2

MAX_BYTES: Final = 64 * 1024
OK: Final = 200


async def answer_to(request: "httpx2.Request", tls: ssl.SSLContext) -> tuple[int, bytes | None]:
    """Return the status, and the body if that is 200; None for a body of more than ``MAX_BYTES``.

    Its time is bounded by the caller.

    Raises:
        httpx2.TransportError, OSError: the server is not reached, or does not answer in HTTP.
    """
    request.headers["accept-encoding"] = "identity"
    async with httpx2.AsyncHTTPTransport(verify=tls, trust_env=False) as transport:
        response = await transport.handle_async_request(request)
        body = bytearray()
        async with aclosing(response.aiter_raw()) as chunks:
            if response.status_code == OK:
                async for chunk in chunks:
                    body += chunk
                    if len(body) > MAX_BYTES:
                        return OK, None
    return response.status_code, bytes(body)
