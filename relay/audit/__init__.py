"""The audit: a hash chain of decisions and outcomes, and what reads and verifies it.

log = AuditLog(path, now_ms)  # log.py
log.write(event="revoked", kid=kid)  # before it is acted upon; raises AuditUnavailableError
for line in AuditLines(path).read(): ...  # files.py
assert verify(path, expect=log.head).intact  # verify.py
"""
