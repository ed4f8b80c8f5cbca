"""Why the certificate authority did not do what it was asked, by whose fault it is.

    AuthorityError
    ├── AuthorityStateError (StateError)      a file of the CA is missing or damaged, or its key is elsewhere
    ├── AuthorityOptionError (OperatorError)  what the operator wants issued, revoked or rotated is refused
    │   ├── UnknownTargetError
    │   └── MalformedNameError (CommandLineError)   the name of a tenant or a host is not of its form
    └── CertificateRefusedError (PeerError)   a node's request proves too little
        └── IdTakenError

Only the last branch is answered to a node as its own fault. Must not hold errors of other packages.
"""

from schemas.error_roots import CommandLineError, EdgeError, OperatorError, PeerError, StateError


class AuthorityError(EdgeError):
    """The CA cannot, or will not, do it; the text says what to do."""


class AuthorityStateError(AuthorityError, StateError):
    """The CA's own files, or this machine's clock, do not allow it."""


class AuthorityOptionError(AuthorityError, OperatorError):
    """What the operator asked for is refused."""


class UnknownTargetError(AuthorityOptionError):
    """Nothing was ever issued under that name."""


class MalformedNameError(AuthorityOptionError, CommandLineError):
    """A tenant or a host cannot have that name."""


class CertificateRefusedError(AuthorityError, PeerError):
    """The certificate request, or the node that sent it, does not qualify for a certificate."""


class IdTakenError(CertificateRefusedError):
    """The node id belongs to another key, or to another enrolment."""
