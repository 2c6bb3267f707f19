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


def test_few_words_are_our_own():
    """Check that the table has at most 20 words, each one that the code uses."""
    page = (architecture.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w[\w ]*) \|", page.partition("\n## Words\n")[2], re.M)
    words = [word for word in rows if word != "word"]
    code = "".join(path.read_text(encoding="utf-8") for path in architecture.SOURCE.rglob("*.py"))
    assert 10 < len(words) <= 20
    assert all(re.search(rf"\b{word}s?\b", code) for word in words)
