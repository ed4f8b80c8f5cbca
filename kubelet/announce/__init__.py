"""The signed manifest, and how it is published."""
