from xml.etree import ElementTree as ET

from tests.soak.plot import drawn
from tests.soak.slopes import LIMITS, MIB, Sample

SVG = "{http://www.w3.org/2000/svg}"


def test_each_quantity_has_a_panel_with_a_line_for_each_process_from_zero() -> None:
    samples = [
        Sample(at_s, process, 40 * MIB, 20, 0, 10) for at_s in (0.0, 60.0) for process in ("relay", "node-0")
    ]
    document = ET.fromstring(drawn(samples))  # noqa: S314 - our own
    lines = [line.attrib["points"].split() for line in document.iter(f"{SVG}polyline")]
    assert len(lines) == 2 * len(LIMITS)
    assert all(len(points) == 2 for points in lines)
    texts = [text.text for text in document.iter(f"{SVG}text")]
    assert texts.count("relay") == texts.count("node-0") == texts.count("0") >= len(LIMITS)
    assert "40" in texts  # MiB, at the top of the axis
