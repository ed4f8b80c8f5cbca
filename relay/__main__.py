"""``python -m relay``: the same as the command ``relay``."""

from relay.cli.main import main

main()
