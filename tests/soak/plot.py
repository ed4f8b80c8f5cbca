"""Draws what processes used as SVG: a panel for each quantity, from zero, with a line for each process.

Must not judge.
"""

from collections.abc import Iterator, Sequence
from html import escape

from tests.soak.slopes import LIMITS, MIB, Sample

_WIDTH, _HEIGHT = 720, 150
_LEFT, _TOP, _RIGHT, _BETWEEN = 70, 30, 90, 50
_UNITS = {"memory": ("private memory, MiB", MIB)}
_COLOURS = ("#1f5fa8", "#b5491f", "#2f7d32", "#7b3fa0", "#8a6d00", "#00757f", "#a8325f", "#555555")


def drawn(samples: Sequence[Sample]) -> str:
    """Return the document."""
    height = _TOP + len(LIMITS) * (_HEIGHT + _BETWEEN)
    width = _LEFT + _WIDTH + _RIGHT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="12"'
    lines = [f'{head} font-family="sans-serif">', '<rect width="100%" height="100%" fill="#fff"/>']
    for number, what in enumerate(LIMITS):
        lines += _panel(samples, what, _TOP + number * (_HEIGHT + _BETWEEN))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(samples: Sequence[Sample], what: str, top: int) -> Iterator[str]:
    title, unit = _UNITS.get(what, (what, 1))
    most = max(getattr(sample, what) for sample in samples) / unit or 1
    longest_s = max(sample.at_s for sample in samples) or 1.0
    bottom = top + _HEIGHT

    def place(sample: Sample) -> tuple[float, float]:
        value = getattr(sample, what) / unit
        return _LEFT + _WIDTH * sample.at_s / longest_s, bottom - _HEIGHT * value / most

    yield f'<text x="{_LEFT}" y="{top - 8}" font-weight="bold">{escape(title)}</text>'
    yield f'<path d="M{_LEFT} {top}V{bottom}H{_LEFT + _WIDTH}" fill="none" stroke="#999"/>'
    yield f'<text x="{_LEFT - 6}" y="{top + 10}" text-anchor="end">{most:.0f}</text>'
    yield f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>'
    yield f'<text x="{_LEFT + _WIDTH}" y="{bottom + 15}" text-anchor="end">{longest_s / 60:.1f} min</text>'
    for number, process in enumerate(sorted({sample.process for sample in samples})):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [place(sample) for sample in samples if sample.process == process]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}"/>'
        label_y = top + 12 + 14 * number
        yield f'<text x="{_LEFT + _WIDTH + 8}" y="{label_y}" fill="{colour}">{escape(process)}</text>'
