"""The certificate authority, enrolment, and the relay's own TLS.

authority = CertificateAuthority(directory, now_ms, random_bytes)
leaf_pem = authority.issue(csr_pem, "acme")  # raises AuthorityError
routes += EnrolmentEndpoint(environment, enrolments, registry).routes()
await tls.run()  # keeps the served certificate fresh
"""
