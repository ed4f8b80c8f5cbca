"""The command line of the relay."""
