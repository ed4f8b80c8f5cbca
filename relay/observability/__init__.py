"""What the relay counts and logs."""
