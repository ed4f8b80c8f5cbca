"""The certificate authority, enrolment, and the relay's own TLS."""
