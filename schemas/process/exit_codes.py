"""The exit codes that the commands of both programs share.

Must not change what one means: scripts and units of systemd rely on them.
"""

EXIT_NO = 1
EXIT_USAGE = 2
EXIT_CANNOT_RUN = 3
EXIT_FAULT = 70
EXIT_CONFIG = 78
"""EX_CONFIG of sysexits.h: a restart does not help."""
