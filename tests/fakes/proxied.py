"""Proxies in front of a relay: real ones, as processes; and the PROXY protocol, version 2, as bytes."""

import asyncio
import os
import shutil
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, ip_address

import pytest

from kubelet.session.channel import open_channel
from kubelet.session.link import answer_to
from kubelet.session.relay_addresses import RelayAddress
from schemas.frames import FrameReader
from schemas.ulids import UlidSource
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.hub import Hub
from tests.fakes.node import identity_of
from tests.fakes.signer import NOW_MS

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


async def welcomed(hub: Hub, port: int, tls: ssl.SSLContext) -> None:
    """Have a node's own code begin a session through the proxy at ``port``."""
    identity, ulids = identity_of(hub.ca.issue()), UlidSource(lambda: NOW_MS, os.urandom)
    address, reader = RelayAddress(f"https://127.0.0.1:{port}"), FrameReader(hub.registry)
    async with open_channel(PUBLIC_URL, address, tls, reader, ulids, _BOUND_S) as channel:
        challenge = await channel.receive()
        assert challenge is not None
        auth = answer_to(challenge.payload, identity, PUBLIC_URL, ulids.new(), ulids.new())
        await channel.send("auth", auth, challenge.msg_id)
        welcome = await channel.receive()
        assert welcome is not None
        assert welcome.type == "welcome"


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
