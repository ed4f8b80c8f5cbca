"""The HTTP proxy by which the relay's clients reach a relay elsewhere: the one that the environment names.

A relay on this machine is never reached by a proxy: the proxy would get the token, and its loopback is
another. Must not put a proxy's address into an error: it can hold a password.
"""

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from schemas.addresses import is_loopback
from schemas.error_roots import OperatorError


class ProxyError(OperatorError):
    """The environment names a proxy that cannot be used."""


def proxy_of(url: str) -> str | None:
    """Return the URL of the proxy for connections to ``url``; None: they are direct.

    Raises:
        ProxyError: it is not an HTTP proxy.
    """
    target = urlsplit(url)
    host = target.hostname or ""
    if is_loopback(host) or proxy_bypass(host):
        return None
    proxies = getproxies()
    proxy = proxies.get(target.scheme) or proxies.get("all")
    if proxy is None:
        return None
    if urlsplit(proxy).scheme not in {"http", "https"}:
        raise ProxyError(f"{target.scheme}_proxy or all_proxy does not name an HTTP proxy: http://HOST:PORT")
    return proxy
