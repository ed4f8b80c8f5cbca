"""``python -m relay``: the same as the command ``relay``."""

from relay.cli.entry import main

main()
