"""35. An operator types docs/sign-in.md: a hub behind Caddy, which gets its certificate by ACME.

Steps: an ACME server, in place of Let's Encrypt · the hub starts · Caddy asks for a certificate, and is
validated at the hub's name · an agent that trusts the server's root alone lists tools.
"""

from pathlib import Path

import pytest

from tests.end_to_end.test_21_a_reader_types_the_readme import typing_on, wheels
from tests.fakes.proxied import installed
from tests.fakes.story import Block, blocks_of

__all__ = ["wheels"]

pytestmark = pytest.mark.long

PAGE = (Path(__file__).parents[2] / "docs" / "sign-in.md").read_text("utf-8")
ROOT = ".local/share/caddy/pki/authorities/local/root.crt"
# Caddy is its own ACME server, on a port of its own: 80 and 443 are those of the hub.
SERVER = """cat > Caddyfile <<'END'
{
	admin off
	skip_install_trust
	auto_https disable_redirects
	http_port 14001
}
https://localhost:14000 {
	tls internal
	acme_server
}
END
caddy run
"""
# Without the last, its stop waits a minute for connections that are idle.
OPTIONS = """{{
	admin off
	acme_ca https://localhost:14000/acme/local/directory
	acme_ca_root {root}
	grace_period 1s
}}
"""


@pytest.mark.timeout(300)  # the environment begins with an installation of pip
def test_an_agent_lists_tools_by_a_certificate_that_caddy_has_got(tmp_path: Path, wheels: Path) -> None:
    installed("caddy")
    hub, caddy, agent = blocks_of(PAGE.split("\n### Caddy with Let's Encrypt\n")[1].split("\n### ")[0])
    root = tmp_path / "acme" / ROOT
    head, first, rest = caddy.lines.partition("<<'END'\n")
    with typing_on(tmp_path, wheels) as typing:
        typing.type(Block("acme", "serving initial configuration", SERVER))
        typing.type(hub)
        typing.type(Block(caddy.machine, caddy.until, head + first + OPTIONS.format(root=root) + rest))
        printed = typing.type(Block(agent.machine, None, f"export SSL_CERT_FILE={root}\n{agent.lines}"))
    assert "find_nodes" in printed
