"""Draws what a fleet costs against its size, as SVG: a panel for each quantity, from zero. Must not judge."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 560, 130
_LEFT, _TOP, _RIGHT, _BETWEEN = 70, 30, 130, 50
_COLOURS = ("#1f5fa8", "#b5491f")
_PANELS: Mapping[str, Mapping[str, str]] = {
    "memory of a relay, MiB": {"rss_mib": "RSS"},
    "one more relay verifies all manifests, s": {"verify_s": "from the subscription"},
    "CPU time of a second without calls, ms": {"idle_cpu_ms": "a relay", "servers_cpu_ms": "NATS and MQTT"},
    "shut out at every relay after a revocation, ms": {"shut_out_ms": "the longest"},
    "median of a call, ms": {"own_p50_ms": "own node", "other_p50_ms": "another relay's"},
}


def drawn(sizes: Sequence[Mapping[str, float]]) -> str:
    """Return the document; each of ``sizes`` has ``nodes`` and the figures of the panels."""
    height = _TOP + len(_PANELS) * (_HEIGHT + _BETWEEN)
    width = _LEFT + _WIDTH + _RIGHT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="12"'
    lines = [f'{head} font-family="sans-serif">', '<rect width="100%" height="100%" fill="#fff"/>']
    for number, (title, names) in enumerate(_PANELS.items()):
        lines += _panel(sizes, title, names, _TOP + number * (_HEIGHT + _BETWEEN))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(
    sizes: Sequence[Mapping[str, float]], title: str, names: Mapping[str, str], top: int
) -> Iterator[str]:
    most = max(size[name] for size in sizes for name in names) or 1.0
    largest = max(size["nodes"] for size in sizes)
    bottom = top + _HEIGHT
    yield f'<text x="{_LEFT}" y="{top - 8}" font-weight="bold">{escape(title)}</text>'
    yield f'<path d="M{_LEFT} {top}V{bottom}H{_LEFT + _WIDTH}" fill="none" stroke="#999"/>'
    yield f'<text x="{_LEFT - 6}" y="{top + 10}" text-anchor="end">{most:,.1f}</text>'
    yield f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>'
    yield f'<text x="{_LEFT + _WIDTH}" y="{bottom + 15}" text-anchor="end">{largest:,.0f} nodes</text>'
    for number, (name, label) in enumerate(names.items()):
        colour = _COLOURS[number]
        places = [
            (_LEFT + _WIDTH * size["nodes"] / largest, bottom - _HEIGHT * size[name] / most) for size in sizes
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places)
        label_y = top + 12 + 14 * number
        yield f'<text x="{_LEFT + _WIDTH + 8}" y="{label_y}" fill="{colour}">{escape(label)}</text>'
