"""The audit: a hash chain of decisions and outcomes, and what reads and verifies it."""
