"""Two builds of one image are one file; what an image has and does is as buildah has saved it."""

import json
import runpy
import tarfile
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

from tests.fakes.guide import ROOT

LAYERS = {"base.tar": b"the base", "ours.tar": b"what is ours"}
DOES = {"User": "8700:8700", "Healthcheck": {"Test": ["CMD", "edge-relay", "status"]}}


def saved(file: Path, chance: str) -> Path:
    """Write an image as buildah does, with names by ``chance``."""
    config = {
        "container": chance,
        "container_config": {"Hostname": chance},
        "parent": f"sha256:{chance}",
        "config": {**DOES, "Hostname": chance},
        "history": [{"created_by": "RUN", "comment": f"FROM {chance}"}],
    }
    manifest = [{"Config": f"{chance}.json", "RepoTags": ["edge:1"], "Layers": list(LAYERS)}]
    contents = {
        f"{chance}/VERSION": b"1.0",
        f"{chance}.json": json.dumps(config).encode(),
        "manifest.json": json.dumps(manifest).encode(),
    }
    with tarfile.open(file, "w") as out:
        for name, content in {**LAYERS, **contents}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            out.addfile(member, BytesIO(content))
    return file


def packed(directory: Path, chance: str) -> Path:
    file = directory / f"{chance}.image.tar"
    pack = runpy.run_path(str(ROOT / "packaging" / "image" / "pack.py"))["main"]
    pack(saved(directory / f"{chance}.tar", chance), file)
    return file


def test_two_builds_are_one_file(tmp_path: Path) -> None:
    assert packed(tmp_path, "one").read_bytes() == packed(tmp_path, "two").read_bytes()


def test_an_image_keeps_its_layers_and_what_it_does(tmp_path: Path) -> None:
    with tarfile.open(packed(tmp_path, "one")) as image:
        contents = {member.name: image.extractfile(member) for member in image}
        read = {name: file.read() for name, file in contents.items() if file is not None}
    manifest: list[dict[str, Any]] = json.loads(read["manifest.json"])
    config = read[manifest[0]["Config"]]
    assert manifest[0]["Config"] == f"{sha256(config).hexdigest()}.json"
    assert (manifest[0]["RepoTags"], manifest[0]["Layers"]) == (["edge:1"], list(LAYERS))
    assert json.loads(config)["config"] == DOES
    assert {name: read[name] for name in LAYERS} == LAYERS
