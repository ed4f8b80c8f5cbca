"""Whose fault each error of the node is: every type has exactly one root."""

import kubelet
from kubelet.announce.signer import ClockNotSetError
from kubelet.caller_tools.json_rpc import RpcError
from kubelet.caller_tools.requests import CallerFailedError
from kubelet.caller_tools.sessions import CallerNamesError, SessionRefusedError
from kubelet.caller_tools.socket_file import SocketFileError
from kubelet.ceiling import OutsideCeilingError
from kubelet.cli.retire import RetiredBeforeError, RetirementError
from kubelet.config import StoredConfigError
from kubelet.handlers.base import ToolFault
from kubelet.handlers.beneath import OutsideError
from kubelet.identity.enrolment import ClockError, EnrolmentError, NotAdmittedError
from kubelet.identity.http_exchange import NoAnswerError
from kubelet.local_agent.daemon_client import DaemonMessageError, ResponseError
from kubelet.local_agent.toolbox import LentSchemaError
from kubelet.loopback import BadRequestError
from kubelet.session.link import AudienceError
from schemas.error_roots import OperatorError, PeerError, StateError
from schemas.errors import ToolError
from tests.fakes.error_types import errors_of

ROOTS: dict[type[Exception], type[Exception]] = {
    # The relay's or, for a request to the loopback server, the client's.
    AudienceError: PeerError,
    BadRequestError: PeerError,
    EnrolmentError: PeerError,
    NotAdmittedError: EnrolmentError,
    NoAnswerError: PeerError,
    RetiredBeforeError: PeerError,
    RetirementError: PeerError,
    RpcError: PeerError,
    SessionRefusedError: PeerError,
    # This machine's: its clock and its state directory.
    CallerNamesError: StateError,
    ClockError: StateError,
    ClockNotSetError: StateError,
    StoredConfigError: StateError,
    # The operator's options, and the fleet that they start.
    SocketFileError: OperatorError,
    # The daemon's, of another version.
    DaemonMessageError: PeerError,
    # A caller's, who wrote the schema.
    LentSchemaError: PeerError,
    # A call that failed.
    CallerFailedError: ToolError,
    ResponseError: ToolError,
    # What a handler states, for the dispatcher alone.
    ToolFault: Exception,
    OutsideCeilingError: Exception,
    OutsideError: Exception,
}


def test_every_error_of_the_node_has_its_root() -> None:
    # By the bases themselves: an error that is also a ValueError or an OSError could be caught as one.
    assert {error: error.__bases__ for error in errors_of(kubelet)} == {
        error: (root,) for error, root in ROOTS.items()
    }
