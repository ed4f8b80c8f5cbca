"""The audit: a hash chain of decisions and outcomes, and what reads and verifies it.

writer = AuditWriter(AuditLog(path, now_ms), now_ms, log)  # writer.py, log.py
writer.write(event="revoked", kid=kid)  # before it is acted upon; raises AuditUnavailableError
for line in AuditLines(path).read(): ...  # files.py
assert verify(path, expect=writer.head).intact  # verify.py
"""
