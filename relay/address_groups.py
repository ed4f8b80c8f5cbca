"""Which source addresses count as one, wherever something is bounded for each address.

Must not know what is bounded.
"""

from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network, ip_address

_SUBSCRIBERS_BITS = 64
_REMEMBERED = 4096


@lru_cache(maxsize=_REMEMBERED)
def address_group(address: str) -> str | None:
    """Return the group that ``address`` counts towards: itself; of IPv6 its /64, which one subscriber holds.

    None for this machine, where a proxy stands for all its clients, and for what is no address.
    """
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    ip = (ip.ipv4_mapped or ip) if isinstance(ip, IPv6Address) else ip
    if ip.is_loopback:
        return None
    if isinstance(ip, IPv6Address):
        return str(IPv6Network((int(ip), _SUBSCRIBERS_BITS), strict=False))
    return str(ip)
