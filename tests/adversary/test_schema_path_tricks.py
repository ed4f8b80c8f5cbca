"""Attacker: any client that can reach the relay's port. Tried: to read files through ``/schemas/``: with
dots, encoded, doubly encoded and mixed, slashes and backslashes, null bytes, absolute paths, another case,
trailing dots and spaces, and very long names.

What must happen: 404 (400 where it is no HTTP), and never a byte of a file. An encoded character is that
character, so that a schema has as many names as it can be encoded in, and each gives the same public bytes. A
path that is not there is no line in the audit: it may be a typing error.
"""

import pytest

from schemas.registry import SchemaRegistry
from tests.fakes.served_relay import ServedRelay

pytestmark = pytest.mark.asyncio(loop_scope="module")

REF = "system.echo.invoke.input@1.0.0"

TRICKS = [
    "/schemas/..",
    "/schemas/../../etc/passwd",
    "/schemas/../schemas/" + REF,
    "/schemas/./" + REF,
    "/schemas/x/../" + REF,
    "/schemas/" + "../" * 40 + "etc/passwd",
    "/schemas/%2e%2e/%2e%2e/etc/passwd",
    "/schemas/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "/schemas/..%2f..%2fetc%2fpasswd",
    "/schemas/.%2e/" + REF,
    "/schemas/%252e%252e%252fetc%252fpasswd",
    "/schemas/%c0%ae%c0%ae/etc/passwd",
    "/schemas/%ff%fe",
    "/schemas//" + REF,
    "//schemas/" + REF,
    "/schemas///etc/passwd",
    "/schemas//etc/passwd",
    "/schemas/%2fetc%2fpasswd",
    "/schemas/file:///etc/passwd",
    "/schemas/..\\..\\etc\\passwd",
    "/schemas/..%5c..%5cetc%5cpasswd",
    "/schemas\\" + REF,
    "/schemas/%00",
    "/schemas/" + REF + "%00",
    "/schemas/" + REF + "%00.json",
    "/schemas/" + REF + ".json",
    "/schemas/" + REF + "%20",
    "/schemas/" + REF + ".",
    "/schemas/" + REF + "%0a",
    "/schemas/" + REF + ";x",
    "/schemas/" + REF + "%3fx",
    "/schemas/" + REF.upper(),
    "/SCHEMAS/" + REF,
    "/Schemas/",
    "/schemas/documents/" + REF + ".json",
    "/schemas/" + REF.replace("@", "%2540"),
    "/schemas/*",
    "/schemas/~root/.ssh/id_ed25519",
    "/schemas/$HOME",
    "/schemas/" + "x" * 15_000,
    "/schemas/" + "../" * 5_000,
    "/.well-known/../schemas/" + REF,
    "/ca/root.pem",
    "/token.key",
    "/audit.jsonl",
]
NO_HTTP = [
    "/schemas/a b",
    "/schemas/\x00",
    "/schemas/\x7f",
    "schemas/" + REF,
    "",
]


@pytest.mark.parametrize("path", TRICKS, ids=lambda path: path[:60].replace("\\", "backslash"))
async def test_a_path_that_is_no_schema_is_not_found(
    relay: ServedRelay, registry: SchemaRegistry, path: str
) -> None:
    reply = await relay.ask(f"GET {path}")
    assert reply.status == 404
    assert b"root:" not in reply.body
    assert len(reply.body) < 200
    assert reply.body not in registry.documents.values()
    assert relay.refusals() == []


@pytest.mark.parametrize("path", NO_HTTP, ids=["a space", "a null byte", "a delete", "no slash", "nothing"])
async def test_a_path_that_is_no_http_is_refused(relay: ServedRelay, path: str) -> None:
    assert (await relay.ask(f"GET {path}")).status == 400
    assert relay.requests == []


@pytest.mark.parametrize("path", [f"/schemas/{REF}/", "/schemas/../", "/schemas", "/healthz/"])
async def test_a_path_with_a_slash_too_many_is_not_found(relay: ServedRelay, path: str) -> None:
    assert (await relay.ask(f"GET {path}")).status == 404


@pytest.mark.parametrize(
    "path",
    ["/schemas/" + REF.replace("@", "%40").replace(".", "%2e"), "/schemas%2f" + REF, "/%73chemas/" + REF],
)
async def test_an_encoded_name_is_the_same_schema(
    relay: ServedRelay, registry: SchemaRegistry, path: str
) -> None:
    reply = await relay.ask(f"GET {path}")
    assert (reply.status, reply.body) == (200, registry.documents[REF])


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH"])
async def test_no_client_writes_a_schema(relay: ServedRelay, method: str) -> None:
    assert (await relay.ask(f"{method} /schemas/{REF}", body=b"{}")).status == 405
