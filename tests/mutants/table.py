"""The table of seeded defects, and how one is put into a copy of the tree."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("table.toml")
PACKAGE = Path("src/meshwright")
TIERS = ("check", "test", "fuzz", "verify")
NOT_COPIED = {
    ".git",
    ".venv",
    "build",
    "shared",
    "__pycache__",
}  # where git does not say which files belong to the tree


@dataclass(frozen=True)
class Mutant:
    """A defect: in one file of the package, a text becomes another."""

    name: str
    room: str
    about: str  # what is wrong with it
    file: str  # below src/meshwright
    old: str  # occurs once
    new: str
    tiers: tuple[str, ...]  # of TIERS, those that find it
    tests: tuple[str, ...]  # the quickest of `make test` that find it


def read_table() -> list[Mutant]:
    rows = tomllib.loads(TABLE.read_text())["mutant"]
    return [
        Mutant(**row | {name: tuple(row[name].split()) for name in ("tiers", "tests")})
        for row in rows
    ]


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """Return the text of the mutant's file with its change; raise ValueError if it does not fit."""
    text = (root / PACKAGE / mutant.file).read_text()
    if (count := text.count(mutant.old)) != 1:
        where = f"{mutant.name}: its old text occurs {count} times in {mutant.file}, not once"
        raise ValueError(f"{where}; follow the change of the code in {TABLE.name}")
    return text.replace(mutant.old, mutant.new)


def copy_tree(target: Path) -> None:
    """Copy the files of this tree, those that git does not know yet too."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode:  # not a checkout
        shutil.copytree(ROOT, target, ignore=NOT_COPIED, symlinks=True)
        return
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
