"""A relay's state as one encrypted file, and back."""
