"""Verifies what nodes have signed of their tools, so that the relay between need not be trusted.

The client reads the signed manifest and the leaf certificate itself, and judges them by the operator's root:
the same rules by which a relay accepts a manifest. Revocations are known to the relay alone: what is verified
here is that the node signed it, that the leaf is within its validity, and that the manifest is not replayed
within this process. Must not use anything of a manifest that was not accepted.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from mcp.client.session import ClientSession
from mcp_types import TextResourceContents, Tool

from relay.client.remote_tools.contracts import Verified
from schemas.certificates import IdentityError, verify_leaf
from schemas.error_roots import PeerError
from schemas.files import read_given
from schemas.identity import Identity
from schemas.kind_packages import shipped_beside
from schemas.kinds import Kind, Verb
from schemas.payloads import Capability
from schemas.projection import ToolName, is_node_id, parse
from schemas.registry import contract_of, listed_schema, outlined, read_contract
from schemas.times import SystemClock
from schemas.trust import HighWaterMark, Known, Outcome, TrustRules

_AT_ONCE = 8
_FIND_NODES = "find_nodes"
_LISTED_REFS = (
    ("find_nodes.input@1.0.0", "find_nodes.input@1.1.0"),
    ("find_nodes.output@1.0.0", "find_nodes.output@1.1.0"),
)
"""What relays list of it, of all versions."""

JudgedT = TypeVar("JudgedT")


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

    def __init__(self, root: Path, now_ms: SystemClock, kinds: tuple[str, ...] = ()) -> None:
        self._root = read_given(root).decode("utf-8", "replace")
        self._now_ms = now_ms
        named = read_contract(kinds)
        contract = contract_of((*named.named, *shipped_beside(named.kinds)))
        self._registry, self._kinds = contract.registry, contract.kinds
        self._rules = TrustRules(self._registry, self._kinds)
        self._manifests: dict[str, _Manifest] = {}
        self._marks = dict[str, HighWaterMark]()  # of the newest manifest that was accepted of each node

    async def verified(self, tool: Tool, session: ClientSession) -> Verified:
        """Return what its node has signed of ``tool``.

        Raises:
            UnverifiedToolError: nothing, or something else.
            MCPError: the server does not hand out manifest or identity.
        """
        name = parse(tool.name)
        if name is None:
            return self._of_view(tool)
        return await self._supported_by(
            name.node_id, session, lambda manifest: self._supported(tool, name, manifest)
        )

    async def check_named(
        self, tool: str, verified: Verified, arguments: Mapping[str, Any], session: ClientSession
    ) -> None:
        """Return if the nodes that a call of the kinds view names have signed the kind and verb.

        A label is resolved by the server: which node it means is its claim, and that node is verified.

        Raises:
            UnverifiedToolError, MCPError: as ``verified``.
        """
        nodes = arguments.get("nodes", ())
        if not isinstance(nodes, str | list | tuple):
            raise UnverifiedToolError("nodes is neither a text nor a list")
        named = [arguments.get("node"), *([nodes] if isinstance(nodes, str) else nodes)]
        for reference in dict.fromkeys(named):
            if not isinstance(reference, str) or _is_selector(reference):
                continue
            node_id = reference
            if not is_node_id(reference):
                pem = await _resource(session, f"node://{quote(reference, safe='')}/identity")
                node_id = self._identity(pem).node_id
            await self._check_node(tool, verified, node_id, session)

    async def check_answered(
        self, tool: str, verified: Verified, content: object, session: ClientSession
    ) -> None:
        """Return if the nodes that ``content`` is the answer of have signed the kind and verb.

        Raises:
            UnverifiedToolError, MCPError: as ``verified``.
        """
        limit = asyncio.Semaphore(_AT_ONCE)

        async def check(node_id: str) -> None:
            async with limit:
                await self._check_node(tool, verified, node_id, session)

        checks = [check(node_id) for node_id in _answered_by(content)]
        for fault in await asyncio.gather(*checks, return_exceptions=True):
            if fault is not None:
                raise fault

    def _of_view(self, tool: Tool) -> Verified:
        """Return what the kind itself states of a tool that reaches any of its nodes; of ``find_nodes`` too.

        Raises:
            UnverifiedToolError: the tool is of no kind that is known here, or has other members.
        """
        if tool.name.replace("-", "_") == _FIND_NODES:
            inputs, outputs = ([listed_schema(self._registry, ref) for ref in refs] for refs in _LISTED_REFS)
            if tool.input_schema not in inputs or tool.output_schema not in outputs:
                raise UnverifiedToolError("the listed schemas are not those of find_nodes")
            # The relay answers it from its own index, and is trusted with what it answers.
            return Verified("read_only", idempotent=True, good_until_ms=sys.maxsize)
        kind, verb = self._of_any_node(tool.name)
        for listed, ref in ((tool.input_schema, verb.input_ref), (tool.output_schema, verb.output_ref)):
            shown = (listed or {}).get("properties", {})
            own = listed_schema(self._registry, ref).get("properties", {})
            # A relay of 0.3 lists answers in outline.
            if not isinstance(shown, Mapping) or any(
                shown.get(name) not in (rules, outlined(rules)) for name, rules in own.items()
            ):
                raise UnverifiedToolError("the listed schemas do not have the members of the kind")
        return Verified(kind.safety_class, verb.idempotent, sys.maxsize, kind.short)

    def _of_any_node(self, name: str) -> tuple[Kind, Verb]:
        short, _, verb = name.replace("-", ".").partition(".")
        return self._kind_and_verb(short, verb, "the name is not that of a node's tool, nor of a known kind")

    def _kind_and_verb(self, short: str, verb: str, fault: str) -> tuple[Kind, Verb]:
        kind = self._kinds.by_short(short)
        found = kind.verbs.get(verb) if kind is not None else None
        if kind is None or found is None:
            raise UnverifiedToolError(fault)
        return kind, found

    async def _check_node(self, tool: str, verified: Verified, node_id: str, session: ClientSession) -> None:
        kind, verb = self._of_any_node(tool)

        def check(manifest: _Manifest) -> None:
            signed = [
                item
                for item in manifest.capabilities
                if item["kind"] == kind.name and verb.name in item["verbs"]
            ]
            if not signed or any(item["safety_class"] != verified.safety_class for item in signed):
                raise UnverifiedToolError(f"node {node_id} has signed no such kind and verb")

        await self._supported_by(node_id, session, check)

    async def _supported_by(
        self, node_id: str, session: ClientSession, judged: Callable[[_Manifest], JudgedT]
    ) -> JudgedT:
        manifest = self._manifests.get(node_id)
        if manifest is not None and self._now_ms() < manifest.good_until_ms:
            with suppress(UnverifiedToolError):
                return judged(manifest)
        # None is known, it has ended, or it does not support the tool, which a newer one may.
        manifest = self._manifests[node_id] = await self._read(node_id, session)
        return judged(manifest)

    def _identity(self, pem: str) -> Identity:
        try:
            return verify_leaf(pem, [self._root], self._now_ms())
        except IdentityError as error:
            raise UnverifiedToolError(f"the leaf certificate is not valid: {error}") from None

    async def _read(self, node_id: str, session: ClientSession) -> _Manifest:
        wire = (await _resource(session, f"node://{node_id}/manifest")).encode()
        pem = await _resource(session, f"node://{node_id}/identity")
        now_ms, identity = self._now_ms(), self._identity(pem)
        known = Known({identity.kid: identity}, mark=self._marks.get(node_id))
        verdict = self._rules.accept(wire, node_id, now_ms, known)
        if verdict.outcome is not Outcome.ACCEPTED or verdict.manifest is None:
            is_pending = verdict.outcome is Outcome.PENDING
            why = "it was signed with another leaf" if is_pending else verdict.reason or verdict.outcome
            raise UnverifiedToolError(f"the manifest is not accepted: {why}")
        self._marks[node_id] = verdict.manifest.mark
        return _Manifest(verdict.capabilities, verdict.manifest.good_until_ms)

    def _supported(self, tool: Tool, name: ToolName, manifest: _Manifest) -> Verified:
        kind, verb = self._kind_and_verb(name.kind_short, name.verb, "the kind or verb is not known here")
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


def _is_selector(reference: str) -> bool:
    """Return whether ``reference`` is ``*`` or a tag: which nodes it means is known by who has answered."""
    return reference == "*" or "=" in reference or reference.startswith("tag:")


def _answered_by(content: object) -> list[str]:
    """Return the nodes whose results ``content`` has, in either form of an answer of the kinds view."""
    if not isinstance(content, Mapping):
        return []
    results = content.get("results")
    entries = [content] if results is None else [entry for entry in results if entry.get("ok") is True]
    return [str(entry.get("node_id")) for entry in entries]


async def _resource(session: ClientSession, uri: str) -> str:
    contents = (await session.read_resource(uri)).contents
    return "".join(item.text for item in contents if isinstance(item, TextResourceContents))
