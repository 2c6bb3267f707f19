"""One word, one meaning: names that a search must find in one place.

`python tests/test_names.py` prints both lists.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "meshwright"
MOST_FUNCTIONS = 10  # of one bare name in more than two modules
# Kernels come in pairs of one name, and every command has a `main`.
PAIRED = SOURCE / "kernels" / "triton"


@functools.cache
def modules() -> dict[str, str]:
    return {
        str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))
    }


def repeated_classes() -> dict[str, list[str]]:
    """Return the modules of each class name that is defined more than once."""
    found = defaultdict(list)
    for module, text in modules().items():
        for name in re.findall(r"^ *class (\w+)[:(]", text, re.M):
            found[name].append(module)
    return {name: where for name, where in found.items() if len(where) > 1}


def repeated_functions() -> dict[str, list[str]]:
    """Return the modules of each function name that stands in more than two modules."""
    found = defaultdict(set)
    for module, text in modules().items():
        if (SOURCE / module).is_relative_to(PAIRED):
            continue
        for name in re.findall(r"^(?:async )?def (\w+)", text, re.M):
            found[name].add(module)
    return {name: sorted(where) for name, where in found.items() if len(where) > 2}


def test_each_class_name_is_defined_once() -> None:
    assert not repeated_classes()


def test_each_file_of_tests_has_a_name_of_its_own() -> None:
    """pytest imports them by it, and slow_tests.txt lists them by it."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_few_functions_share_a_bare_name() -> None:
    repeated = repeated_functions()
    assert len(repeated) <= MOST_FUNCTIONS, repeated


if __name__ == "__main__":
    for title, names in (("classes", repeated_classes()), ("functions", repeated_functions())):
        print(f"{title}: {len(names)}")
        for name, where in sorted(names.items(), key=lambda item: -len(item[1])):
            print(f"  {name} ({len(where)}): {', '.join(where)}")
