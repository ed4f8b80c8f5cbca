"""The certificate authority, enrolment, and the relay's own TLS.

authority = open_authority(environment)
pki = assemble(environment, authority, audit, name_node, own_broker)
leaf_pem = pki.authority.issue(csr_pem, "acme")  # raises AuthorityError
routes += pki.enrolment.routes()
await pki.run()  # keeps the served certificate fresh
"""
