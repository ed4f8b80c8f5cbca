"""Proxies in front of a relay: real ones, as processes; and the PROXY protocol, version 2, as bytes."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, ip_address

import pytest

PROXY_V2 = b"\r\n\r\n\0\r\nQUIT\n"
_LOCAL, _PROXY = b"\x20\x00", b"\x21"
_BOUND_S = 30


def proxy_header(source: str | None) -> bytes:
    """Return the header of a connection from ``source``, over TCP; None: of one of the proxy's own."""
    if source is None:
        return PROXY_V2 + _LOCAL + b"\0\0"
    address = ip_address(source)
    family = b"\x11" if isinstance(address, IPv4Address) else b"\x21"
    rest = address.packed + bytes(len(address.packed)) + b"\x12\x34\x01\xbb"
    return PROXY_V2 + _PROXY + family + len(rest).to_bytes(2) + rest


def installed(program: str) -> str:
    """Return the path of a program, which has a Debian package of its name; without it, skip the test."""
    found = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is not None:
        return found
    text = f"not installed: {program}. Run: apt-get install --no-install-recommends {program}"
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    pytest.skip(text)


@asynccontextmanager
async def running_proxy(command: Sequence[str], port: int) -> AsyncIterator[None]:
    """Run a proxy, which listens at ``port`` when it serves."""
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with asyncio.timeout(_BOUND_S):
            while True:
                assert process.returncode is None
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.01)  # it has no other sign that it listens
                else:
                    writer.close()
                    break
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
