"""Backs up a relay's state into one encrypted file, and restores it."""
