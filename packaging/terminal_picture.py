"""``make picture``: runs ``relay demo``, and draws what it prints: ``docs/demo.svg``, which the README shows.

The picture has a background of its own, so that it is readable on a light and on a dark page, and refers to
no font and no address. Must not change what the demo prints.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

OPTIONS = ("--once", "--nodes", "0")
MAX_COLUMNS = 100

_BOUND_S = 90
_SIZE, _ADVANCE, _LINE, _MARGIN = 14, 8.43, 19, 20
"""In pixels: the size of the font, how wide its characters commonly are, the height of a line, the margin."""

_DESCRIPTION = (
    "The command starts a broker, a CA, the relay and this machine's kubelet, verifies each tool's manifest, "
    "calls tools, and prints the answers: the worst finding, CPU, memory, load, disks, and an echo. Then it "
    "tries a manifest of another CA, a revoked token, a changed audit, a killed node and a line of a log."
)
_STYLE = (
    f"text{{font:{_SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
    "fill:#d8dee9;white-space:pre}.command{fill:#fff;font-weight:bold}.tool{fill:#8fd0ff}.dim{fill:#9aa5b4}"
)
_CLASSES = (
    (re.compile(r"\$ "), "command"),
    (re.compile(r"  [a-z]+-[a-z]+ \{.*$"), "tool"),
    (re.compile(r" +\d+\.\d s  |    this machine, "), "dim"),
)


def main(file: Path) -> None:
    """Run the demo and write the picture of it to ``file``.

    Raises:
        SystemExit: the demo failed, or a usual port was in use, which it also prints.
    """
    command = [sys.executable, "-P", "-m", "relay", "demo", *OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BOUND_S, check=False)  # noqa: S603 - our own program
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    if " is in use on " in done.stdout:
        raise SystemExit("a usual port of the demo is in use: stop what has it, and run this again")
    file.write_text(picture([f"$ relay demo {' '.join(OPTIONS)}", *done.stdout.splitlines()]), "utf-8")


def picture(lines: Sequence[str]) -> str:
    """Return the SVG document that shows ``lines``.

    Raises:
        ValueError: a line has more than ``MAX_COLUMNS`` characters.
    """
    columns = max(map(len, lines))
    if columns > MAX_COLUMNS:
        raise ValueError(f"a line has {columns} characters, more than {MAX_COLUMNS}")
    return "\n".join(_document(lines, columns)) + "\n"


def _document(lines: Sequence[str], columns: int) -> Iterator[str]:
    width, height = round(columns * _ADVANCE) + 2 * _MARGIN, len(lines) * _LINE + 2 * _MARGIN
    size = f'width="{width}" height="{height}"'
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" '
        'role="img" aria-labelledby="title description">'
    )
    yield f'<title id="title">{escape(lines[0].removeprefix("$ "))}, in a terminal</title>'
    yield f'<desc id="description">{escape(_DESCRIPTION)}</desc>'
    yield f"<style>{_STYLE}</style>"
    yield f'<rect {size} rx="8" fill="#171c26"/>'
    for number, line in enumerate(lines):
        kind = next((f' class="{name}"' for form, name in _CLASSES if form.match(line)), "")
        baseline = _MARGIN + number * _LINE + _SIZE
        yield f'<text x="{_MARGIN}" y="{baseline}"{kind} xml:space="preserve">{escape(line)}</text>'
    yield "</svg>"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
