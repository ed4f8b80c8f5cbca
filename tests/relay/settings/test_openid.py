"""The table ``people.oidc``: each mistake is one line, and claims give what a rule names."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relay.settings.config import RelayConfig, StateFiles
from relay.settings.openid import MAX_RULES, ClaimRule, openid_config
from relay.settings.table import RELAY
from relay.state.people import PersonRole
from schemas.addresses import AddressError, HostPort
from schemas.error_roots import ConfigError, OperatorError
from schemas.settings import read_sources

GOOD: dict[str, Any] = {
    "issuer": "https://id.example/realms/one",
    "client_id": "edge-relay",
    "secret_file": "/etc/edge-kubelet/oidc.secret",
    "allow": ["groups=urn:hub:operators:operator:*", "groups=kitchen:member:kitchen"],
}


def test_what_is_read() -> None:
    more = {"scopes": ["groups", "email"], "name_claim": "nickname", "max_lifetime": "7d"}
    found = openid_config(json.dumps(GOOD | more))
    assert found is not None
    assert found.max_lifetime_ms == 7 * 86_400_000
    assert (found.issuer, found.client_id, found.name_claim) == (GOOD["issuer"], "edge-relay", "nickname")
    assert found.secret_file == Path("/etc/edge-kubelet/oidc.secret")
    assert found.scopes == ("openid", "profile", "email", "groups")
    assert found.rules[0] == ClaimRule("groups", "urn:hub:operators", PersonRole.OPERATOR, "*")
    assert openid_config("{}") is None


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"isuer": "x"}, "isuer"),
        ({"issuer": None}, "has no issuer"),
        ({"allow": None}, "has no allow"),
        ({"issuer": 7}, "is not 1 to 256 printable characters"),
        ({"issuer": "http://id.example"}, "is no https URL"),
        ({"issuer": "https://a:b@id.example"}, "is no https URL"),
        ({"issuer": "https://id.example/?a"}, "is no https URL"),
        ({"issuer": "https://id.example/\n"}, "printable"),
        ({"client_id": ""}, "has a client_id that is not 1 to 256"),
        ({"client_id": "x" * 257}, "has a client_id"),
        ({"client_id": ["a"]}, "has a client_id"),
        ({"secret_file": True}, "has a secret_file"),
        ({"max_lifetime": 7}, "has a max_lifetime that is not 1 to 256"),
        ({"max_lifetime": "soon"}, "max_lifetime: 'soon' is not a duration"),
        ({"max_lifetime": "59m"}, "max_lifetime: 59m is not from 1h to 90d"),
        ({"max_lifetime": "91d"}, "max_lifetime: 91d is not from 1h to 90d"),
        ({"max_lifetime": "1d\x1b"}, "max_lifetime"),
        ({"allow": []}, "allow is an array of 1 to 64 texts"),
        ({"allow": "groups=a:member:b"}, "allow is an array"),
        ({"allow": [7]}, "printable characters in quotes"),
        ({"allow": ["a"]}, "is not CLAIM=VALUE:ROLE:TENANT"),
        ({"allow": ["=a:member:b"]}, "is not CLAIM=VALUE:ROLE:TENANT"),
        ({"allow": ["groups=:member:b"]}, "is not CLAIM=VALUE:ROLE:TENANT"),
        ({"allow": ["groups=a:king:b"]}, "king"),
        ({"allow": ["groups=a:member:*"]}, "is no tenant"),
        ({"allow": ["groups=a:member:B C"]}, "is no tenant"),
        ({"allow": ["groups=a:member:b", "groups=a:operator:b"]}, "two rules for one value"),
        ({"allow": [f"groups={n}:member:b" for n in range(MAX_RULES + 1)]}, "allow is an array of 1 to 64"),
        ({"scopes": ["a b"]}, "which is no scope"),
        ({"scopes": []}, "scopes is an array"),
        ({"name_claim": {}}, "has a name_claim"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(members: dict[str, Any], says: str) -> None:
    table = {name: value for name, value in (GOOD | members).items() if value is not None}
    with pytest.raises(OperatorError) as refused:
        openid_config(json.dumps(table))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("claims", "allowed"),
    [
        ({"groups": ["kitchen", "urn:hub:operators"]}, (PersonRole.OPERATOR, "*")),
        ({"groups": "kitchen"}, (PersonRole.MEMBER, "kitchen")),
        ({"groups": []}, None),
        ({"groups": "kitchen cellar"}, None),
        ({"groups": {"kitchen": 1}}, None),
        ({"role": "kitchen"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_the_first_rule_that_is_met_decides(
    claims: dict[str, Any], allowed: tuple[PersonRole, str] | None
) -> None:
    found = openid_config(json.dumps(GOOD))
    assert found is not None
    assert found.allowed(claims) == allowed


@pytest.mark.parametrize("verified", [True, False, "true", 1, None])
def test_an_address_counts_if_the_provider_has_verified_it(verified: object) -> None:
    rule = ClaimRule("email", "ada@example.com", PersonRole.MEMBER, "default")
    assert rule.is_met({"email": "ada@example.com", "email_verified": verified}) is (verified is True)


def test_the_file_names_the_line_of_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text('["people.oidc"]\nissuer = "http://id.example"\n')
    with pytest.raises(ConfigError, match=r"relay\.toml, line 1: people\.oidc has no client_id"):
        read_sources(RELAY, {}, file, {}).settings()
    file.write_text('[people.oidc]\nissuer = "http://id.example"\n')
    with pytest.raises(ConfigError, match=r'write \["people\.oidc"\], with quotes'):
        read_sources(RELAY, {}, file, {}).settings()


@pytest.mark.parametrize(
    ("url", "says"),
    [("http://hub.example", "https"), ("https://id.example/realms/one", "this relay itself")],
)
def test_where_the_relay_can_have_no_provider(tmp_path: Path, url: str, says: str) -> None:
    listen, oidc = HostPort("127.0.0.1", 8700), openid_config(json.dumps(GOOD))
    with pytest.raises(AddressError, match=says):
        RelayConfig(None, url, listen, StateFiles(tmp_path), plain_allowed=True, oidc=oidc)


_MODULES = """
import sys
import relay.sign_in.composition, relay.server.app, relay.settings.table
RELAY = relay.settings.table.RELAY
from schemas.settings import read_sources
read_sources(RELAY, {}, None, {"RELAY_CONFIG": ""}).settings()
print(*sorted(name for name in sys.modules if "openid" in name or name == "relay.sign_in.provider"))
"""


@pytest.mark.integration
def test_a_relay_without_a_provider_loads_none_of_it() -> None:
    command = [sys.executable, "-P", "-c", _MODULES]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=60, cwd=root)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
