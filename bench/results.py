"""What a benchmark found, as a table for people and as JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One value beside its reference. ``ratio`` is value by reference."""

    name: str
    value: float
    unit: str
    reference: str
    reference_value: float
    wanted: str

    @property
    def ratio(self) -> float:
        """Value by reference."""
        return self.value / self.reference_value


def write_json(figures: Sequence[Figure], path: Path) -> None:
    """Write the figures as a list of objects."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(figure), "ratio": figure.ratio} for figure in figures]
    path.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as an aligned table."""
    header = ("name", "value", "unit", "reference", "", "ratio", "wanted")
    rows = [
        (
            figure.name,
            f"{figure.value:,.2f}",
            figure.unit,
            figure.reference,
            f"{figure.reference_value:,.2f}",
            f"{figure.ratio:.2f}",
            figure.wanted,
        )
        for figure in figures
    ]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (header, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)
