"""Every flag, every fault and every sentence in the lists of SECURITY.md has tests.

A test names what it observes: `@pytest.mark.flag("lr min_lr")`, `@pytest.mark.fault("F7")`,
`@pytest.mark.promise("Text is data")`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

from faults import summary
from meshwright.config import fields

TESTS = Path(__file__).parent


@functools.cache
def marks(kind: str) -> list[tuple[str, Path, str]]:
    """Return each argument of the marks of one kind, with the file and the source of its test."""
    found = []
    for path in TESTS.rglob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        # Functions start in the first column, and so do their decorators.
        for test in re.findall(
            r"^(?:@.*\n(?:[ )\]}].*\n)*)*def test_(?:.*\n(?=[ )\n]))*.*", source, re.M
        ):
            for arguments in re.findall(
                rf"^@pytest\.mark\.{kind}(\((?:[^\n]*|\n.*?\n)\))$", test, re.M | re.S
            ):
                value = ast.literal_eval(arguments)
                found += [
                    (name, path, test) for name in ((value,) if isinstance(value, str) else value)
                ]
    return found


def test_every_fault_is_injected() -> None:
    assert list(summary.TITLES) == [f"F{n}" for n in range(1, 39)]
    assert {name for name, *_ in marks("fault")} == summary.TITLES.keys()


def test_every_sentence_about_security_is_tested() -> None:
    sentences: list[str] = []
    for block in (TESTS.parent / "SECURITY.md").read_text().split("\n\n"):
        if block.startswith("* "):
            for item in re.split(r"^\* ", block, flags=re.MULTILINE)[1:]:
                sentences += re.split(
                    r"(?<=\.) (?=[A-Z`])", " ".join(item.replace("**", "").split())
                )
        else:  # a sentence belongs into a list, where it needs a test
            assert block.startswith(("#", "Meshwright trusts the machine", "Please report")), block
    tested: set[str] = set()
    for words, path, _ in marks("promise"):
        meant = [sentence for sentence in sentences if words in sentence]
        assert len(meant) == 1, f"{path}: {words!r} is in {len(meant)} sentences of SECURITY.md"
        tested.update(meant)
    assert [sentence for sentence in sentences if sentence not in tested] == []


def test_every_flag_is_observed() -> None:
    """Except those that are planned. The mark has GROUP.NAME if several groups have the name."""
    every = {
        (g, n): f
        for config in fields.every_config()
        for n, (g, f, _) in fields.config_fields(config).items()
    }
    groups = Counter(name for _, name in every)
    working = [key for key, f in every.items() if not fields.is_not_yet(f)]
    named = [name for names, *_ in marks("flag") for name in names.split()]
    assert sorted(named) == sorted(
        name if groups[name] == 1 else f"{group}.{name}" for group, name in working
    )


@pytest.mark.parametrize("file", ["test_flag_effects.py", "test_train.py", "test_generate.py"])
def test_tests_that_pass_flags_mention_their_own(file: str) -> None:
    of_file = [(names.split(), test) for names, path, test in marks("flag") if path.name == file]
    assert of_file
    for names, test in of_file:
        for name in names:
            spelled = name.rpartition(".")[2].replace("_", "[-_]")
            assert re.search(rf"--(no-)?{spelled}\b", test), f"--{name} is not in {test[:200]}"
