"""By whose fault the certificate authority does not do what it is asked."""

import pytest

from relay.pki.errors import (
    AuthorityError,
    AuthorityOptionError,
    AuthorityStateError,
    CertificateRefusedError,
    IdTakenError,
    UnknownTargetError,
)
from relay.state.ledger import LedgerError
from schemas.error_roots import OperatorError, PeerError, StateError

ROOTS = (OperatorError, PeerError, StateError)


@pytest.mark.parametrize(
    ("error", "root"),
    [
        (AuthorityStateError, StateError),
        (AuthorityOptionError, OperatorError),
        (UnknownTargetError, OperatorError),
        (CertificateRefusedError, PeerError),
        (IdTakenError, PeerError),
        (LedgerError, StateError),
    ],
)
def test_each_error_is_the_fault_of_one(error: type[Exception], root: type[Exception]) -> None:
    assert [each for each in ROOTS if issubclass(error, each)] == [root]
    assert error is LedgerError or issubclass(error, AuthorityError)
