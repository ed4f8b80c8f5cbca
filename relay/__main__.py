"""``python -m relay``: the same as the command ``relay``."""

from relay.cli import main

main()
