"""35. An operator types docs/sign-in.md: a hub behind Caddy, which gets its certificate by ACME.

Steps: pebble, Let's Encrypt's ACME server for tests, in its place · the hub starts · Caddy asks for a
certificate, and is validated at the hub's name · an agent that trusts the root of that alone lists tools.
"""

import json
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.end_to_end.test_21_a_reader_types_the_readme import typing_on, wheels
from tests.fakes.proxied import installed
from tests.fakes.server_ca import SimulatedServerCa, server_key_named
from tests.fakes.story import Block, blocks_of

__all__ = ["wheels"]

pytestmark = pytest.mark.long

PAGE = (Path(__file__).parents[2] / "docs" / "sign-in.md").read_text("utf-8")
CONFIG = {
    "listenAddress": "127.0.0.1:14000",
    "managementListenAddress": "127.0.0.1:15000",
    "certificate": "acme.pem",
    "privateKey": "acme.key",
    "httpPort": 80,
    "tlsPort": 443,
}
# It waits before it validates, and refuses some requests at random, unless it is told not to.
SERVER = "PEBBLE_VA_NOSLEEP=1 PEBBLE_WFE_NONCEREJECT=0 pebble -config pebble.json"
# Without the last, its stop waits a minute for connections that are idle.
OPTIONS = """{{
	admin off
	acme_ca https://localhost:14000/dir
	acme_ca_root {root}
	grace_period 1s
}}
"""
# The root is made anew at each start.
ROOT = """umask 077
curl --silent --show-error --fail --cacert {root} https://localhost:15000/roots/0 >root.pem
export SSL_CERT_FILE=$PWD/root.pem
"""


def write_server(directory: Path) -> Path:
    """Write what pebble serves with, and return the root to trust it by."""
    directory.mkdir()
    ca, key = SimulatedServerCa("acme", time.time_ns() // 1_000_000), server_key_named("localhost")
    (directory / "acme.pem").write_text(ca.issue("localhost", ["localhost"], key.public_key()), "ascii")
    (directory / "acme.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (directory / "pebble.json").write_text(json.dumps({"pebble": CONFIG}), "utf-8")
    root = directory / "server-root.pem"
    root.write_text(ca.root_pem, "ascii")
    return root


@pytest.mark.timeout(300)  # the environment begins with an installation of pip
def test_an_agent_lists_tools_by_a_certificate_that_caddy_has_got(tmp_path: Path, wheels: Path) -> None:
    installed("caddy")
    installed("pebble")
    hub, caddy, agent = blocks_of(PAGE.split("\n### Caddy with Let's Encrypt\n")[1].split("\n### ")[0])
    root = write_server(tmp_path / "acme")
    head, first, rest = caddy.lines.partition("<<'END'\n")
    with typing_on(tmp_path, wheels) as typing:
        typing.type(Block("acme", "ACME directory available", SERVER))
        typing.type(hub)
        typing.type(Block(caddy.machine, caddy.until, head + first + OPTIONS.format(root=root) + rest))
        printed = typing.type(Block(agent.machine, None, ROOT.format(root=root) + agent.lines))
    assert "find_nodes" in printed
