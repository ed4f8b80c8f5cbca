"""Verifies what nodes have signed of their tools, so that the relay between need not be trusted.

The client reads the signed manifest and the leaf certificate itself, and judges them by the operator's root:
the same rules by which a relay accepts a manifest. Revocations are known to the relay alone: what is verified
here is that the node signed it, that the leaf is within its validity, and that the manifest is not replayed
within this process. Must not use anything of a manifest that was not accepted.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcp.client.session import ClientSession
from mcp_types import TextResourceContents, Tool

from relay.remote_tools.contracts import Verified
from schemas.certificates import IdentityError, verify_leaf
from schemas.contract import read_contract
from schemas.error_roots import PeerError
from schemas.listed_schemas import listed_schema
from schemas.payloads import Capability
from schemas.projection import ToolName, parse
from schemas.trust import TrustRules
from schemas.verdicts import Known, Mark, Outcome, Verdict

Marks = dict[str, Mark]
"""The newest manifest of each node that was accepted."""


class UnverifiedToolError(PeerError):
    """Nothing signed supports a tool; the text states what is missing."""


@dataclass(frozen=True, slots=True)
class _Manifest:
    """A manifest that was accepted."""

    capabilities: Sequence[Capability]
    good_until_ms: int


class ManifestVerifier:
    """Verifies the tools of one server by the root in the file ``root``, at the time of ``now_ms``.

    Nodes may have the ``kinds`` of installed packages besides those that ship.

    Raises:
        OSError: the file cannot be read.
        ConfigError: one of the kinds cannot be used.
    """

    def __init__(self, root: Path, now_ms: Callable[[], int], kinds: tuple[str, ...] = ()) -> None:
        self._root = root.read_text("utf-8", "replace")
        self._now_ms = now_ms
        contract = read_contract(kinds)
        self._registry, self._kinds = contract.registry, contract.kinds
        self._rules = TrustRules(self._registry, self._kinds)
        self._manifests: dict[str, _Manifest] = {}
        self._marks = Marks()

    async def verified(self, tool: Tool, session: ClientSession) -> Verified:
        """Return what its node has signed of ``tool``.

        Raises:
            UnverifiedToolError: nothing, or something else.
            MCPError: the server does not hand out manifest or identity.
        """
        name = parse(tool.name)
        if name is None:
            raise UnverifiedToolError("the name is not that of a node's tool")
        manifest = self._manifests.get(name.node_id)
        if manifest is not None and self._now_ms() < manifest.good_until_ms:
            with suppress(UnverifiedToolError):
                return self._supported(tool, name, manifest)
        # None is known, it has ended, or it does not support the tool, which a newer one may.
        manifest = self._manifests[name.node_id] = await self._read(name.node_id, session)
        return self._supported(tool, name, manifest)

    async def _read(self, node_id: str, session: ClientSession) -> _Manifest:
        wire = (await _resource(session, f"node://{node_id}/manifest")).encode()
        pem = await _resource(session, f"node://{node_id}/identity")
        now_ms = self._now_ms()
        try:
            identity = verify_leaf(pem, [self._root], now_ms)
        except IdentityError as error:
            raise UnverifiedToolError(f"the leaf certificate is not valid: {error}") from None
        known = Known({identity.kid: identity}, mark=self._marks.get(node_id))
        verdict = self._rules.accept(wire, node_id, now_ms, known)
        if verdict.outcome is not Outcome.ACCEPTED or verdict.manifest is None:
            raise UnverifiedToolError(f"the manifest is not accepted: {_why(verdict)}")
        self._marks[node_id] = verdict.manifest.mark
        return _Manifest(verdict.capabilities, verdict.manifest.good_until_ms)

    def _supported(self, tool: Tool, name: ToolName, manifest: _Manifest) -> Verified:
        kind = self._kinds.by_short(name.kind_short)
        verb = kind.verbs.get(name.verb) if kind is not None else None
        if kind is None or verb is None:
            raise UnverifiedToolError("the kind or verb is not known here")
        capability = next((item for item in manifest.capabilities if item["cap_id"] == name.cap_id), None)
        if capability is None or capability["kind"] != kind.name or name.verb not in capability["verbs"]:
            raise UnverifiedToolError("the node has signed no such capability and verb")
        documents = (tool.input_schema, verb.input_ref), (tool.output_schema, verb.output_ref)
        if any(listed != listed_schema(self._registry, ref) for listed, ref in documents):
            raise UnverifiedToolError("the listed schemas are not those of the kind")
        return Verified(
            safety_class=capability["safety_class"],
            idempotent=verb.idempotent,
            good_until_ms=manifest.good_until_ms,
        )


async def _resource(session: ClientSession, uri: str) -> str:
    contents = (await session.read_resource(uri)).contents
    return "".join(item.text for item in contents if isinstance(item, TextResourceContents))


def _why(verdict: Verdict) -> str:
    if verdict.outcome is Outcome.PENDING:
        return "it was signed with another leaf"
    return str(verdict.reason or verdict.outcome)
