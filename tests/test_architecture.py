"""docs/architecture.md names every folder, and its picture shows them on their layers."""

from __future__ import annotations

import re

import architecture  # docs/architecture.py

ROOMS = {
    path.stem
    for path in architecture.SOURCE.iterdir()
    if (path.is_dir() or path.suffix == ".py") and not path.name.startswith("__")
}


def test_every_room_has_a_floor_and_a_line() -> None:
    page = (architecture.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms, _, ways = page.partition("## The way of a command")
    assert {room for floor in architecture.floors() for room in floor} - {"__main__"} <= ROOMS
    for room in ROOMS:
        name = f"{room}/" if (architecture.SOURCE / room).is_dir() else f"{room}.py"
        assert re.search(rf"^\|[^|]*`{name}`", rooms, re.M), name
        shown = name in architecture.PICTURE.read_text(encoding="utf-8")
        assert shown, f"draw {name}: python docs/architecture.py"
    for path in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", ways):
        assert (architecture.SOURCE / path).exists(), path
