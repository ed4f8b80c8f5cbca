"""Health, readiness and the manifest over HTTP, on the loopback address."""
