"""Which source addresses count as one where a limit is per address.

Must not know what is limited.
"""

from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network, ip_address

_SUBSCRIBERS_BITS = 64
_CACHE_SIZE = 4096


@lru_cache(maxsize=_CACHE_SIZE)
def address_group(address: str) -> str | None:
    """Return the group that ``address`` counts towards: itself; of IPv6 its /64, which one subscriber has.

    None for loopback, where a proxy forwards all its clients, and for what is no address.
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
