"""``python -m kubelet``: the same as the command ``kubelet``."""

from kubelet.cli.commands import main

main()
