"""How a node enrols over the network: what ``kubelet enroll`` does.

Before the node sends anything it verifies the relay: one of its roots of nodes must be the one that the join
token names, and endorse the roots of servers. Its request is then proven by the token's key, and the
response is accepted because it is proven by that key too.
Must not be imported by the running daemon: it needs the X.509 library.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from ssl import CERT_NONE, SSLCertVerificationError
from typing import Any

from kubelet.config import NodeConfig
from kubelet.identity.http_exchange import HttpRequest, HttpResponse, exchange
from kubelet.identity.provisioning import Enrolled, Issued, create_identity, install_enrolled, roots_in
from kubelet.process import hold_alone
from schemas.addresses import AddressError, check_one_fleet, check_private_url, normal_url, parse_broker
from schemas.canonical import jcs
from schemas.certificates import (
    IdentityError,
    IdentityReason,
    are_endorsed,
    is_server_root,
    make_csr,
    verify_leaf,
)
from schemas.enrolment import (
    ENROL_PATH,
    MAX_RESPONSE_BYTES,
    NODE,
    RELAY,
    RESPONSE_REF,
    EnrolResponse,
    JoinToken,
    is_proven,
    proven,
    shown_endorsements,
)
from schemas.error_roots import PeerError, StateError
from schemas.files import PRIVATE, make_private_directory, read_private, read_state, write_atomic
from schemas.identity import CertificateFormatError, certificates_in, to_pem
from schemas.identity_files import IdentityFiles, IdentityFilesError
from schemas.keys import base64url
from schemas.registry import SchemaRegistry, Validator
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable
from schemas.tls import client_context

_NONCE_BYTES = 32
# As much as a leaf is dated back.
_MAX_CLOCK_SKEW_MS = 5 * 60_000
# OpenSSL's codes for a certificate of an issuer that it does not trust, whatever else may be wrong with it.
_UNKNOWN_ISSUER = frozenset({2, 18, 19, 20, 21})
_CLOCK_OR_AGE = frozenset({9, 10})

_NOT_ADMITTED = 403
_REFUSALS = {
    400: "did not understand: its version is another",
    403: "refuses: the join token is used up, expired or withdrawn, or this node's id is another's",
    404: "is no relay, or one that is too old for this",
    421: "has another name: use the relay's public URL",
    429: "is busy: run it again",
    503: "has no CA key: enrol this node with `edge-kubelet init` and `relay ca issue`",
}


_LATER = {429: "is busy", 503: "does not reach the relay with the CA's key at present"}


class EnrolmentError(PeerError):
    """The node is not enrolled; the text is why."""


class NotAdmittedError(EnrolmentError):
    """The relay refuses the token, or the node's id; nothing of the token is spent."""


class ClockError(StateError):
    """This machine's clock is wrong."""


@dataclass(frozen=True, slots=True)
class Enroller:
    """Enrols the node in ``files``. Time and randomness come in from outside.

    Attributes:
        relay_url: where the node is enrolled.
        other_relays: at which it reaches relays of the same fleet later.
    """

    files: IdentityFiles
    token: JoinToken
    relay_url: str
    plain_allowed: bool
    now_ms: Callable[[], int]
    random_bytes: Callable[[int], bytes]
    other_relays: tuple[str, ...] = ()

    async def run(self) -> Enrolled:
        """Enrol, and leave behind all that ``kubelet run`` needs. May be run again after any failure.

        Raises:
            EnrolmentError: the relay is another one, refuses, or answers with something that cannot be used.
            ClockError: this machine's clock is wrong.
            AddressError: relay or broker would be spoken to in the clear.
            IdentityFilesError: this node is enrolled already, or its files cannot be used.
            NoAnswerError: the relay cannot be reached.
        """
        if self.files.exists():
            self._check_not_enrolled()
        return await self.requested()

    async def requested(self) -> Enrolled:
        """Do as ``run``, also where the identity that lies there is enrolled: the answer is the same again.

        Raises:
            EnrolmentError, ClockError, AddressError, IdentityFilesError, NoAnswerError: as there.
        """
        check_one_fleet((self.relay_url, *self.other_relays))
        for url in (self.relay_url, *self.other_relays):
            check_private_url(url, plain_allowed=self.plain_allowed)
        make_private_directory(self.files.root)
        with hold_alone(self.files.root):
            anchors, of_servers = await self._recognised_roots()
            if not self.files.exists():
                create_identity(self.files, self.now_ms(), self.random_bytes)
            return self._installed(await self._issued_by(anchors, of_servers=of_servers))

    def _check_not_enrolled(self) -> None:
        own = self.files.read()
        roots_in(own.root_pem or "")
        try:
            verify_leaf(own.leaf_pem, [own.root_pem or ""], self.now_ms())
        except IdentityError as error:
            if error.reason is not IdentityReason.VALIDITY:
                return  # the leaf is self-signed still, whatever lies beside it
        raise IdentityFilesError(
            f"{self.files.root} is enrolled already, as node {own.node_id}: `kubelet retire` takes it out of "
            "its fleet, and --again gives a revoked one a new key"
        )

    async def _recognised_roots(self) -> tuple[str, bool]:
        """Return the roots of servers that the token's root endorses, before anything else is sent.

        A relay of an older version has none, and is verified by the token's root; returns which it is too.
        """
        # Unverified: this request holds nothing, and its response is checked against the token.
        context = client_context()
        context.check_hostname = False
        context.verify_mode = CERT_NONE
        answer = await exchange(HttpRequest(self.relay_url, ENROL_PATH), context)
        self._check_status(answer)
        try:
            text = answer.body.decode("ascii")
            roots = certificates_in(text)
        except (UnicodeDecodeError, CertificateFormatError):
            text, roots = "", []
        for root in roots:
            if sha256(root).digest() == self.token.fingerprint:
                servers = [each for each in roots if is_server_root(each)]
                endorsed = are_endorsed(servers, [root], shown_endorsements(text))
                return to_pem(servers if endorsed else [root]), endorsed
        raise EnrolmentError(f"{self.relay_url} is another relay than the one that made this join token")

    async def _issued_by(self, anchors: str, *, of_servers: bool) -> EnrolResponse:
        """Request a leaf, and return the message of the relay that made the token."""
        own, registry = self.files.read(), SchemaRegistry()
        nonce = base64url(self.random_bytes(_NONCE_BYTES))
        csr = make_csr(own.key, own.node_id)
        request: dict[str, Any] = {"join_id": self.token.id, "csr": csr, "nonce": nonce}
        if of_servers:
            request["server_roots"] = True
        body = jcs(proven(request, self.token.key, NODE))
        answer, by_own_root = await self._exchange_verified(anchors, body)
        self._check_status(answer)
        message = self._genuine(answer, nonce, registry.load(RESPONSE_REF))
        now, theirs = self.now_ms(), message["server_time_ms"]
        if abs(now - theirs) > _MAX_CLOCK_SKEW_MS:
            raise ClockError(
                f"this machine's clock reads {_readable(now)} and the relay's {_readable(theirs)}: "
                "set the clock, and run it again"
            )
        if message["own_root"] and not by_own_root:
            raise EnrolmentError(
                f"the relay shows a certificate of its own root, and {self.relay_url} another: "
                "something in between answers for it"
            )
        return message

    def _installed(self, message: EnrolResponse) -> Enrolled:
        try:
            broker = None if message["broker"] is None else parse_broker(message["broker"])
            relay_url = normal_url(message["relay_url"])
        except AddressError as error:
            # Not as it is: the operator did not type this address.
            reason = printable(str(error))
            raise EnrolmentError(f"{self.relay_url} names an address that cannot be used: {reason}") from None
        config = NodeConfig(
            broker,
            relay_url,
            plain_allowed=self.plain_allowed,
            own_root=message["own_root"],
            other_relays=tuple(url for url in self.other_relays if url != relay_url),
        )
        issued = Issued(message["certificate"], message["roots"], message.get("server_roots", ""))
        return install_enrolled(self.files, issued, config, self.now_ms())

    async def _exchange_verified(self, anchors: str, body: bytes) -> tuple[HttpResponse, bool]:
        """Send to a server whose certificate is of ``anchors``, or else of a root that the machine trusts.

        Returns the response, and whether no others than the anchors were needed.
        """
        request = HttpRequest(self.relay_url, ENROL_PATH, body)
        try:
            return await exchange(request, client_context(anchors)), True
        except SSLCertVerificationError as error:
            if error.verify_code not in _UNKNOWN_ISSUER:
                raise self._certificate_error(error) from None
        try:
            return await exchange(request, client_context()), False
        except SSLCertVerificationError as error:
            raise self._certificate_error(error) from None

    def _certificate_error(self, error: SSLCertVerificationError) -> EnrolmentError | ClockError:
        text = f"the certificate of {self.relay_url} is not believed: {error.verify_message}"
        if error.verify_code in _CLOCK_OR_AGE:
            return ClockError(f"{text}; this machine's clock reads {_readable(self.now_ms())}: set the clock")
        return EnrolmentError(text)

    def _check_status(self, answer: HttpResponse) -> None:
        if answer.status != 200:  # noqa: PLR2004 - OK
            if answer.status in _LATER and answer.retry_after_s is not None:
                raise EnrolmentError(
                    f"{self.relay_url} {_LATER[answer.status]}: run it again in {answer.retry_after_s} s"
                )
            why = _REFUSALS.get(answer.status, f"answers with status {answer.status}: check its log")
            refused = NotAdmittedError if answer.status == _NOT_ADMITTED else EnrolmentError
            raise refused(f"{self.relay_url} {why}")

    def _genuine(self, answer: HttpResponse, nonce: str, form: Validator) -> EnrolResponse:
        """Return the message if the relay that made the token sent it, in reply to this request."""
        try:
            read = loads(answer.body, max_bytes=MAX_RESPONSE_BYTES)
        except StrictJsonError:
            read = None
        if not form.is_valid(read):
            raise EnrolmentError(f"{self.relay_url} answers with something else than a relay would")
        message: EnrolResponse = read
        if message["nonce"] != nonce or not is_proven(message, self.token.key, RELAY):
            raise EnrolmentError(
                f"the answer of {self.relay_url} was changed, or is not from the relay of this join token"
            )
        return message


def _readable(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


_BESIDE = "again"


async def enrol_again(enroller: Enroller) -> Enrolled:
    """Enrol the node of ``enroller`` with its own id if the relay gives that away again, else with a new one.

    With a new key: after a revocation, or where its key may be known to others. The key of an earlier try is
    used again: the relay may have spent the token for it, and answers it once more.

    Raises:
        EnrolmentError, ClockError, AddressError, IdentityFilesError, NoAnswerError: as ``Enroller.run``; the
            node has the identity that it had.
        OSError: a file of it cannot be used.
    """
    files = enroller.files
    own_id = files.read_node_id()
    with hold_alone(files.root):
        beside = replace(enroller, files=IdentityFiles(files.root / _BESIDE))
        enrolled = await _issued_before(beside)
        try:
            enrolled = enrolled or await _issued(beside, own_id)
        except NotAdmittedError:
            # An id is refused before the token is spent: it is still good for a new node.
            enrolled = await _issued(beside, None)
        _replace(files, beside.files)
    return enrolled


async def _issued_before(beside: Enroller) -> Enrolled | None:
    """Return what an earlier try is answered with, which has left a key; None if there is none.

    It may have left all, if it was ended before that was in its place.
    """
    try:
        return await beside.requested() if beside.files.exists() else None
    except (NotAdmittedError, IdentityFilesError):
        return None


async def _issued(beside: Enroller, node_id: str | None) -> Enrolled:
    shutil.rmtree(beside.files.root, ignore_errors=True)
    create_identity(beside.files, beside.now_ms(), beside.random_bytes, node_id)
    return await beside.run()


def _replace(files: IdentityFiles, new: IdentityFiles) -> None:
    """Put what ``new`` has, also where it is enrolled, in the place of what ``files`` has; the key last.

    ``new`` stays whole until then: where power is cut in between, the next try is answered for the same key.
    """
    files.server_roots.unlink(missing_ok=True)
    for file in sorted(new.root.iterdir(), key=lambda each: each.name == new.key.name):
        if file == new.key:
            write_atomic(files.key, read_private(file), PRIVATE)
        elif file.name != "lock" and not file.name.startswith("."):  # as what a write left that was cut short
            write_atomic(files.root / file.name, read_state(file).decode("utf-8"))
    shutil.rmtree(new.root)
