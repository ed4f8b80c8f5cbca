from pathlib import Path

import pytest

from kubelet.announce.hardware import read_hardware_ids
from schemas.manifest import fingerprint
from schemas.registry import SchemaRegistry

MACHINE_ID = "3d1219c7c4c5404aaa1f6d2a48adfda4"
CPUINFO = (
    "processor\t: 0\nmodel name\t: ARMv8\n\nHardware\t: BCM2835\nSerial\t\t: {}\nModel\t\t: Raspberry Pi 4\n"
)
TREE_SERIAL = "sys/firmware/devicetree/base/serial-number"


def put(root: Path, path: str, content: str | bytes) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)


def interface(root: Path, name: str, address: str, *, physical: bool = True, kind: str = "0") -> None:
    put(root, f"sys/class/net/{name}/address", address + "\n")
    put(root, f"sys/class/net/{name}/addr_assign_type", kind + "\n")
    if physical:
        (root / f"sys/class/net/{name}/device").symlink_to("../../../devices/platform/eth")


@pytest.mark.holds("RFC-0001/2/hw-fingerprint")
def test_every_source_that_a_board_has_is_read(tmp_path: Path) -> None:
    put(tmp_path, "proc/cpuinfo", CPUINFO.format("10000000abcdef01"))
    put(tmp_path, "sys/devices/soc0/serial_number", "0x1234abcd\n")
    put(tmp_path, "etc/machine-id", MACHINE_ID + "\n")
    interface(tmp_path, "eth0", "dc:a6:32:01:02:03")
    ids = read_hardware_ids(tmp_path)
    assert ids == {
        "cpu_serial": "10000000abcdef01",
        "soc_uid": "0x1234abcd",
        "machine_id": MACHINE_ID,
        "mac_primary": "dc:a6:32:01:02:03",
    }
    schema = SchemaRegistry().document("manifest@1.1.0")["properties"]["hw_fingerprint"]
    assert set(fingerprint(ids)["sources"]) <= set(schema["properties"]["sources"]["items"]["enum"])


def test_a_machine_without_any_source_has_no_ids(tmp_path: Path) -> None:
    assert read_hardware_ids(tmp_path) == {}
    assert read_hardware_ids(tmp_path / "absent") == {}


@pytest.mark.parametrize(
    "cpuinfo", ["processor\t: 0\n", CPUINFO.format("0000000000000000"), CPUINFO.format("")]
)
def test_the_device_tree_has_the_serial_that_cpuinfo_lacks(tmp_path: Path, cpuinfo: str) -> None:
    put(tmp_path, "proc/cpuinfo", cpuinfo)
    assert "cpu_serial" not in read_hardware_ids(tmp_path)
    put(tmp_path, TREE_SERIAL, b"10000000abcdef01\0")
    assert read_hardware_ids(tmp_path)["cpu_serial"] == "10000000abcdef01"


@pytest.mark.holds("RFC-0001/2/hw-fingerprint")
@pytest.mark.parametrize("path", ["proc/cpuinfo", "sys/devices/soc0/serial_number", "etc/machine-id"])
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\0\x01", b"0" * 32 + b"\n", b"Serial\t: a b\n", b"x" * 5000]
)
def test_odd_content_is_left_out(tmp_path: Path, path: str, content: bytes) -> None:
    put(tmp_path, path, content)
    assert read_hardware_ids(tmp_path) == {}


@pytest.mark.parametrize(
    "text", ["uninitialized", MACHINE_ID.upper(), MACHINE_ID[:-1], MACHINE_ID + "\nmore"]
)
def test_a_machine_id_in_another_form_is_none(tmp_path: Path, text: str) -> None:
    put(tmp_path, "etc/machine-id", text + "\n")
    assert read_hardware_ids(tmp_path) == {}


@pytest.mark.parametrize(
    "path", ["proc/cpuinfo", TREE_SERIAL, "etc/machine-id", "sys/class/net/eth0/address"]
)
def test_a_directory_where_a_file_should_be_is_left_out(tmp_path: Path, path: str) -> None:
    (tmp_path / path).mkdir(parents=True)
    assert read_hardware_ids(tmp_path) == {}


def test_a_file_where_a_directory_should_be_is_left_out(tmp_path: Path) -> None:
    put(tmp_path, "sys/class/net", "")
    put(tmp_path, "etc", "")
    assert read_hardware_ids(tmp_path) == {}


def test_one_source_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    put(tmp_path, "etc/machine-id", MACHINE_ID)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").symlink_to("cpuinfo")
    assert read_hardware_ids(tmp_path) == {"machine_id": MACHINE_ID}


def test_the_primary_mac_is_that_of_the_first_physical_interface_by_name(tmp_path: Path) -> None:
    # So many that a directory does not happen to list them in order.
    for number in (5, 7, 2, 9, 4, 8, 3, 6):
        interface(tmp_path, f"eth{number}", f"dc:a6:32:00:00:0{number}")
    interface(tmp_path, "br0", "dc:a6:32:00:00:01", physical=False)
    assert read_hardware_ids(tmp_path) == {"mac_primary": "dc:a6:32:00:00:02"}


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        pytest.param("00:00:00:00:00:00", "0", id="all zeros"),
        pytest.param("", "0", id="empty"),
        pytest.param("00:00:00:00", "0", id="not an Ethernet address"),
        pytest.param("dc:a6:32:00:00:01", "1", id="made up at boot"),
        pytest.param("dc:a6:32:00:00:01", "3", id="set by hand"),
    ],
)
def test_an_interface_whose_address_identifies_nothing_is_passed_over(
    tmp_path: Path, address: str, kind: str
) -> None:
    interface(tmp_path, "eth0", address, kind=kind)
    assert read_hardware_ids(tmp_path) == {}
    interface(tmp_path, "eth1", "dc:a6:32:00:00:02")
    assert read_hardware_ids(tmp_path) == {"mac_primary": "dc:a6:32:00:00:02"}


def test_an_interface_that_does_not_say_where_its_address_is_from_is_taken(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", "dc:a6:32:00:00:02")
    (tmp_path / "sys/class/net/eth0/addr_assign_type").unlink()
    assert read_hardware_ids(tmp_path) == {"mac_primary": "dc:a6:32:00:00:02"}
