"""What the relay counts."""
