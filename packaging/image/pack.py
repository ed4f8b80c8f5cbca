"""Writes an image, as buildah has saved it, so that two builds of the same files are the same file.

buildah names containers of the build, by chance, in the image's configuration. Must not change what an image
has and does, nor compress it: podman 4 loads no such file.
"""

import json
import sys
import tarfile
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import IO

_BY_CHANCE = ("container", "container_config", "parent")


def main(saved: Path, packed: Path) -> None:
    """Write the image in ``saved`` to ``packed``, for ``docker load`` and ``podman load``."""
    with (
        tarfile.open(saved) as given,
        tarfile.open(packed, "w", format=tarfile.GNU_FORMAT) as out,
    ):

        def read(name: str) -> IO[bytes]:
            opened = given.extractfile(name)
            if opened is None:
                raise ValueError(name)
            return opened

        def write(name: str, size: int, content: IO[bytes]) -> None:
            member = tarfile.TarInfo(name)
            member.size = size
            out.addfile(member, content)

        [manifest] = json.load(read("manifest.json"))
        config = json.load(read(manifest["Config"]))
        for name in _BY_CHANCE:
            config.pop(name, None)
        config["config"].pop("Hostname", None)
        for step in config["history"]:
            step.pop("comment", None)
        written = json.dumps(config, sort_keys=True).encode()
        manifest["Config"] = f"{sha256(written).hexdigest()}.json"
        for layer in manifest["Layers"]:
            write(layer, given.getmember(layer).size, read(layer))
        listed = json.dumps([manifest], sort_keys=True).encode()
        for name, content in ((manifest["Config"], written), ("manifest.json", listed)):
            write(name, len(content), BytesIO(content))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
