"""The signed manifest, and its way to the broker."""
