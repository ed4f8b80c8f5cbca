"""The listener, the protocols on it, and the checks in front of every route."""
