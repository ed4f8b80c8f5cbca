"""A wheel, read without an installer: its files as they are in its RECORD, and what it says of itself.

A wheel comes from outside. A name that leaves the directory, a link, a file whose hash is not in RECORD, and
more than the bounds are refused. Must not write a file, and must not import anything of the wheel.
"""

import base64
import csv
import hashlib
import io
import platform
import re
import stat
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from pathlib import PurePosixPath

from schemas.error_roots import OperatorError
from schemas.text import printable

MAX_WHEEL_BYTES = 64 << 20
_MAX_BYTES = 128 << 20
_MAX_FILES = 10_000
_FILE_NAME = re.compile(
    r"(?P<name>[\w.]+)-(?P<version>[\w.+!]+)(-\d[\w.]*)?-(?P<python>[\w.]+)-(?P<abi>[\w.]+)-(?P<platform>[\w.]+)\.whl",
    re.ASCII,
)
_MEMBER = re.compile(r"[\w.@+,()~ -]+(/[\w.@+,()~ -]+)*/?", re.ASCII)
_HASHES = ("sha256", "sha384", "sha512")
_NEED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REQUIRED = ("METADATA", "RECORD", "WHEEL")


class WheelError(OperatorError):
    """A wheel cannot be used; the text names it and says why."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """What a wheel holds.

    Attributes:
        name: of the distribution, normalized.
        files: by their paths in the directory that the wheel is installed in.
        modules: the names at the top of it that can be imported.
        needs: the distributions that it needs whatever the machine.
    """

    name: str
    version: str
    files: Mapping[str, bytes]
    modules: frozenset[str]
    needs: frozenset[str]


def normal_name(name: str) -> str:
    """Return the one form of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_and_version(file_name: str) -> tuple[str, str]:
    """Return what the name of a wheel says.

    Raises:
        WheelError: it is no name of a wheel.
    """
    if (found := _FILE_NAME.fullmatch(file_name)) is None:
        raise WheelError(f"{printable(file_name)} is no name of a wheel: NAME-VERSION-TAGS.whl")
    return normal_name(found["name"]), found["version"]


def fits_here(file_name: str) -> bool:
    """Return whether the tags in a wheel's name are those of this interpreter and this machine."""
    found = _FILE_NAME.fullmatch(file_name)
    if found is None:
        return False
    minor = sys.version_info.minor
    abis = set(found["abi"].split("."))
    pythons = {"py3", f"py3{minor}", f"cp3{minor}"}
    if "abi3" in abis:  # that of an older interpreter goes on working
        pythons |= {f"cp3{older}" for older in range(2, minor)}
    ending = f"linux_{platform.machine()}", f"_{platform.machine()}"
    platforms = found["platform"].split(".")
    return (
        bool(pythons & set(found["python"].split(".")))
        and bool({"none", "abi3", f"cp3{minor}"} & abis)
        and any(
            each == "any" or (each.startswith(("linux", "manylinux")) and each.endswith(ending))
            for each in platforms
        )
    )


def read_wheel(file_name: str, data: bytes, *, runs_here: bool = True) -> Wheel:
    """Return what is in the wheel ``data``, whose file has the name ``file_name``.

    ``runs_here``: its modules are to be imported by this interpreter.

    Raises:
        WheelError: it is damaged, not for this machine, or holds what no wheel may.
    """
    try:
        name, version = name_and_version(file_name)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = _files_in(archive)
        info = _info_of(files, name, version)
        _check_record(files, f"{info}/RECORD")
    except WheelError as error:
        raise WheelError(f"{printable(file_name)}: {error}") from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise WheelError(f"{printable(file_name)} is damaged: {printable(str(error))}") from None
    if runs_here and not fits_here(file_name):
        raise WheelError(f"{file_name}: its tags are not those of this interpreter and machine")
    tops = {path.partition("/")[0] for path in files} - {info}
    return Wheel(
        name,
        version,
        files,
        modules=frozenset(top.partition(".")[0] for top in tops),
        needs=_needs(files[f"{info}/METADATA"]),
    )


def _files_in(archive: zipfile.ZipFile) -> dict[str, bytes]:
    members = archive.infolist()
    if len(members) > _MAX_FILES or sum(member.file_size for member in members) > _MAX_BYTES:
        raise WheelError(f"it holds more than {_MAX_FILES} files, or more than {_MAX_BYTES >> 20} MiB")
    files: dict[str, bytes] = {}
    for member in members:
        _check_member(member)
        if member.is_dir():
            continue
        if member.filename in files:
            raise WheelError(f"it holds {member.filename} twice")
        # Not more than the size that was counted above: zipfile reads no further, and compares the CRC.
        files[member.filename] = archive.read(member)
    return files


def _check_member(member: zipfile.ZipInfo) -> None:
    path, mode = member.filename, member.external_attr >> 16
    # orig_filename: zipfile has cut what follows a NUL.
    is_inside = _MEMBER.fullmatch(member.orig_filename) and ".." not in PurePosixPath(path).parts
    if not is_inside:
        raise WheelError(f"{printable(member.orig_filename)} is no path in the package")
    if stat.S_IFMT(mode) not in {0, stat.S_IFREG, stat.S_IFDIR}:
        raise WheelError(f"{path} is a link or no regular file")
    if ".data" in PurePosixPath(path).parts[0]:
        raise WheelError(f"{path} is for another directory, such as that of commands")


def _info_of(files: Mapping[str, bytes], name: str, version: str) -> str:
    """Return the directory of the metadata, which is the wheel's own, and the only one."""
    found = {path.partition("/")[0] for path in files if path.partition("/")[0].endswith(".dist-info")}
    if len(found) != 1 or any(f"{next(iter(found))}/{each}" not in files for each in _REQUIRED):
        raise WheelError(f"it has not one .dist-info with {', '.join(_REQUIRED)}")
    [info] = found
    stated = BytesHeaderParser().parsebytes(files[f"{info}/METADATA"])
    named = normal_name(str(stated["Name"])), str(stated["Version"])
    of_info, _, version_of_info = info.removesuffix(".dist-info").partition("-")
    if not named == (name, version) == (normal_name(of_info), version_of_info):
        raise WheelError("its file, its .dist-info and its METADATA have different names or versions")
    return info


def _check_record(files: Mapping[str, bytes], record: str) -> None:
    rows = {path: digest for path, digest, _size in csv.reader(files[record].decode("utf-8").splitlines())}
    if missing := rows.keys() ^ files.keys():
        raise WheelError(f"RECORD and the files differ: {printable(min(missing))}")
    for path, content in files.items():
        method, _, digest = rows[path].partition("=")
        if path == record:
            continue
        if method not in _HASHES:
            raise WheelError(f"RECORD has no hash of {path}")
        found = base64.urlsafe_b64encode(hashlib.new(method, content).digest()).rstrip(b"=").decode()
        if found != digest:
            raise WheelError(f"{path} is not what RECORD says")


def _needs(metadata: bytes) -> frozenset[str]:
    needs = BytesHeaderParser().parsebytes(metadata).get_all("Requires-Dist") or []
    # What only some machines need has a marker, which takes more than its name to judge.
    found = (_NEED.match(str(each)) for each in needs if ";" not in str(each))
    return frozenset(normal_name(each.group()) for each in found if each)
