"""Places what ``service install`` writes in the tree of a Debian package, where a package has it.

Must not decide what a service consists of: that is ``schemas.process.service_host``.
"""

import sys
from importlib import import_module
from pathlib import Path

from schemas.process.service_host import PACKAGED_UNITS, UNITS, Write, install_steps
from schemas.settings import CONFIG_DIRECTORY

_OF_PACKAGES = {
    UNITS: PACKAGED_UNITS,
    Path("/etc/sysusers.d"): Path("/usr/lib/sysusers.d"),
    Path("/etc/tmpfiles.d"): Path("/usr/lib/tmpfiles.d"),
}


def main(program: str, scripts: Path, root: Path) -> None:
    """Write the files of the service of ``program``, which will be in ``scripts``, below ``root``."""
    # Of the two programs a package has the modules of its own dependencies alone.
    service = import_module(f"{program}.cli.service").SERVICE
    # A sample, and no conffile: it names every setting, and dpkg would ask at every upgrade that brings one.
    directories = _OF_PACKAGES | {CONFIG_DIRECTORY: Path(f"/usr/share/doc/{service.name}/examples")}
    for step in install_steps(service, scripts):
        if isinstance(step, Write):
            file = root / directories[step.path.parent].relative_to("/") / step.path.name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(step.text, "utf-8")
            file.chmod(step.mode)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
