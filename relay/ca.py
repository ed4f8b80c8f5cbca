"""The certificate authority: one root, and a ledger that binds each node id to its tenant and key.

An id once issued is issued again only when the operator says so, and then the old leaf is revoked: nobody
becomes a node that exists. Must not hold the root's key in memory longer than an issue takes.
"""

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nacl.signing import SigningKey

from schemas.certificates import IdentityError, read_csr
from schemas.files import PRIVATE, make_private_directory, read_private, write_atomic
from schemas.identity import certificates_in, kid_of
from schemas.identity_files import IdentityFiles
from schemas.issuing import issue_leaf, make_root
from schemas.keys import private_key_from_pem, private_key_to_pem
from schemas.ulids import UlidSource

_ROOT_DAYS = 3650
_LEAF_DAYS = 90
_SERIAL_BYTES = 16
_SEED_BYTES = 32


class AuthorityError(Exception):
    """The CA cannot, or will not, do it; the text says what to do."""


class CertificateAuthority:
    """The CA in ``directory``. Time and randomness come in from outside."""

    def __init__(
        self, directory: Path, now_ms: Callable[[], int], random_bytes: Callable[[int], bytes]
    ) -> None:
        self._directory = directory
        self._now_ms = now_ms
        self._random_bytes = random_bytes
        self._key_file = directory / "root.key"
        self._ledger_file = directory / "ledger.jsonl"
        self.root_file = directory / "root.pem"

    def create(self) -> None:
        """Make the root.

        Raises:
            AuthorityError: there is one already. It is never overwritten.
        """
        if self._key_file.exists() or self.root_file.exists():
            raise AuthorityError(f"{self._directory} holds a CA already")
        make_private_directory(self._directory)
        key = SigningKey(self._random_bytes(_SEED_BYTES))
        root = make_root(key, "edge-kubelet root", self._now_ms(), _ROOT_DAYS, self._serial())
        write_atomic(self._key_file, private_key_to_pem(key), PRIVATE)
        write_atomic(self.root_file, root)

    def root_pem(self) -> str:
        """Return the root's certificate.

        Raises:
            AuthorityError: there is no CA here, or its certificate is damaged.
        """
        try:
            root = self.root_file.read_text("utf-8", "replace")
            certificates = certificates_in(root)
        except FileNotFoundError:
            raise AuthorityError(f"{self._directory} holds no CA: run `relay ca init`") from None
        except ValueError:
            certificates = []
        if not certificates:
            # Nobody would be believed, without a word.
            raise AuthorityError(f"{self.root_file} is damaged: it holds no certificate")
        return root

    def issue(self, csr_pem: str, tenant: str, *, replace: bool = False) -> str:
        """Return a leaf for the node that the request names, in PEM.

        Raises:
            AuthorityError: the request proves nothing, or the node id is taken and ``replace`` is not said.
        """
        try:
            node_id, public_key = read_csr(csr_pem)
        except IdentityError as error:
            raise AuthorityError(f"the certificate request is not accepted: {error.reason}") from None
        with self._ledger() as entries:
            held = _in_force(entries).get(node_id)
            if held is not None and not replace:
                raise AuthorityError(f"{node_id} has a certificate: say --replace to revoke it")
            leaf = self._sign(node_id, tenant, public_key)
            if held is not None:
                self._append({"action": "revoke", "node_id": node_id, "kid": held["kid"]})
            self._append_issue(node_id, tenant, public_key, leaf)
        return leaf

    def issue_mock(self, count: int, out: Path, tenant: str) -> list[str]:
        """Make ``count`` whole identities below ``out`` for ``kubelet fleet``; return their node ids."""
        ulids = UlidSource(self._now_ms, self._random_bytes)
        root = self.root_pem()
        node_ids = []
        with self._ledger():
            for _ in range(count):
                node_id = ulids.new_node_id()
                key = SigningKey(self._random_bytes(_SEED_BYTES))
                public_key = bytes(key.verify_key)
                leaf = self._sign(node_id, tenant, public_key)
                self._append_issue(node_id, tenant, public_key, leaf)
                files = IdentityFiles(out / node_id)
                files.write(node_id, key, leaf)
                files.install(leaf, root)
                node_ids.append(node_id)
        return node_ids

    def revoked_kids(self) -> frozenset[str]:
        """Return the kid of every revoked leaf."""
        return frozenset(entry["kid"] for entry in self._entries() if entry["action"] == "revoke")

    def _sign(self, node_id: str, tenant: str, public_key: bytes) -> str:
        root = self.root_pem()
        try:
            return issue_leaf(
                root,
                private_key_from_pem(read_private(self._key_file)),
                node_id=node_id,
                tenant=tenant,
                public_key=public_key,
                now_ms=self._now_ms(),
                valid_days=_LEAF_DAYS,
                serial=self._serial(),
            )
        except IdentityError as error:
            raise AuthorityError(f"not issued for tenant {tenant!r}: {error.reason}") from None
        except ValueError:
            # Without the error's own text, which can show a byte of the key.
            raise AuthorityError(f"{self._key_file} or {self.root_file} is damaged") from None

    def _serial(self) -> int:
        # RFC 5280 wants a positive integer of at most 20 octets.
        return int.from_bytes(self._random_bytes(_SERIAL_BYTES), "big") | 1

    @contextmanager
    def _ledger(self) -> Iterator[list[dict[str, Any]]]:
        """Hold the ledger alone: two issues at once must not both find an id free."""
        self.root_pem()
        with self._ledger_file.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield self._entries()

    def _entries(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in self._ledger_file.read_text("utf-8").splitlines()]
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise AuthorityError(f"{self._ledger_file} is damaged: {error}") from None

    def _append(self, entry: dict[str, Any]) -> None:
        with self._ledger_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"ts_ms": self._now_ms(), **entry}) + "\n")

    def _append_issue(self, node_id: str, tenant: str, public_key: bytes, leaf: str) -> None:
        self._append(
            {
                "action": "issue",
                "node_id": node_id,
                "tenant": tenant,
                "public_key": public_key.hex(),
                "kid": kid_of(certificates_in(leaf)[0]),
            }
        )


def _in_force(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    held: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if entry["action"] == "issue":
            held[entry["node_id"]] = entry
        elif held.get(entry["node_id"], {}).get("kid") == entry["kid"]:
            del held[entry["node_id"]]
    return held
