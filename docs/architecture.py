"""Draw the folders of the package by layer; run `python docs/architecture.py`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "meshwright"
PICTURE = Path(__file__).with_suffix(".svg")
WIDTH, HEIGHT, GAP, TOP, LEFT = 920, 34, 6, 8, 34
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#24292f}.n{fill:#57606a;font-size:10px}"
    "rect{fill:#ddf4ff;stroke:#54aeff;stroke-width:.8}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.n{fill:#8b949e}rect{fill:#12283e;stroke:#388bfd}}"
)


def floors() -> list[list[str]]:
    """Return the folders and files of each layer, from the top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    [layers] = [
        c["layers"]
        for c in contracts
        if c["type"] == "layers" and c["containers"] == ["meshwright"]
    ]
    return [[room.strip() for room in re.split("[:|]", layer)] for layer in layers]


def count_lines(room: str) -> int:
    """Return the lines of a room's Python files."""
    files = (SOURCE / room).rglob("*.py") if (SOURCE / room).is_dir() else [SOURCE / f"{room}.py"]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def draw() -> str:
    """Return the picture: a row per layer, each folder as wide as the root of its lines."""
    rows = [[(room, round(count_lines(room), -2)) for room in floor] for floor in floors()]
    unit = (WIDTH - LEFT) / max(
        sum(max(lines, 100) ** 0.5 + 34 for _, lines in row) for row in rows
    )
    height = TOP * 2 + len(rows) * (HEIGHT + GAP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="folders by layer"><style>{STYLE}</style>'
    ]
    for number, row in enumerate(rows):
        x, y = float(LEFT), TOP + number * (HEIGHT + GAP)
        out.append(f'<text class="n" x="4" y="{y + 21}">{len(rows) - number}</text>')
        for room, lines in row:
            width = unit * (max(lines, 100) ** 0.5 + 34) - GAP
            name = f"{room}/" if (SOURCE / room).is_dir() else f"{room}.py"
            out.append(f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="4"/>')
            out.append(f'<text x="{x + 6:.0f}" y="{y + 15}">{name}</text>')
            out.append(f'<text class="n" x="{x + 6:.0f}" y="{y + 28}">{lines:,} lines</text>')
            x += width + GAP
    return "\n".join([*out, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
