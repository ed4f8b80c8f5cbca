"""``python -m kubelet``: the same as the command ``kubelet``."""

from kubelet.cli.entry import main

main()
