"""The hardware ids that a manifest's ``hw_fingerprint`` is taken over (RFC-0001 section 2).

Must not disclose a value: only their common hash leaves the node (``schemas.manifest.fingerprint``).
Must not fail on odd hardware: a source that cannot be read, or identifies nothing, is left out.
"""

import re
from contextlib import suppress
from pathlib import Path

_MAX_BYTES = 1 << 20

_CPUINFO_SERIAL = re.compile(r"^Serial[ \t]*:(.*)$", re.MULTILINE)
_SERIAL = re.compile(r"[0-9A-Za-z._:-]{4,128}")
_MACHINE_ID = re.compile(r"[0-9a-f]{32}")
_MAC = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}")
_PERMANENT = "0"


def read_hardware_ids(root: Path) -> dict[str, str]:
    """Return ``{source: value}`` of the ids that could be read below ``root``, which is ``/`` but in tests.

    There is no ``tpm_ek_pub``: Linux shows a TPM 2.0's endorsement key in no file, it takes TPM commands
    and a tool that speaks them.
    """
    readings = {
        "cpu_serial": _cpu_serial(root),
        # Not soc_id, which lies beside it: that is the model, the same on every board of a kind.
        "soc_uid": _identifying(_SERIAL, _text(root / "sys/devices/soc0/serial_number")),
        # The pattern rejects "uninitialized", which an image contains before its first boot.
        "machine_id": _identifying(_MACHINE_ID, _text(root / "etc/machine-id")),
        "mac_primary": _mac_primary(root),
    }
    return {source: value for source, value in readings.items() if value is not None}


def _cpu_serial(root: Path) -> str | None:
    match = _CPUINFO_SERIAL.search(_text(root / "proc/cpuinfo"))
    serial = _identifying(_SERIAL, match.group(1)) if match else None
    # 64-bit kernels may have it in the device tree alone.
    return serial or _identifying(_SERIAL, _text(root / "sys/firmware/devicetree/base/serial-number"))


def _mac_primary(root: Path) -> str | None:
    interfaces: list[Path] = []
    with suppress(OSError):
        interfaces = sorted((root / "sys/class/net").iterdir())
    for interface in interfaces:
        # Only hardware has a device behind it; bridges, tunnels and containers' ends have none.
        if not (interface / "device").is_symlink():
            continue
        # An address that was made up at boot or set by hand identifies nothing, and would change.
        if _text(interface / "addr_assign_type").strip() not in ("", _PERMANENT):
            continue
        if mac := _identifying(_MAC, _text(interface / "address")):
            return mac
    return None


def _identifying(form: re.Pattern[str], text: str) -> str | None:
    # Strings of the device tree end with a NUL.
    value = text.strip("\0 \t\r\n")
    return value if form.fullmatch(value) and set(value) - set("0:.-_") else None


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
