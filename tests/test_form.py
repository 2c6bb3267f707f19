"""Form of the source: short functions, few parameters, little nesting, no formatting exemption."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "meshwright"
FILES = sorted(SOURCE.rglob("*.py"))
LINES, PARAMETERS, DEPTH = 60, 8, 5
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.Match)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def is_kernel(f: ast.FunctionDef) -> bool:
    """Whether Triton compiles it: a kernel takes pointers and sizes one by one, a line each."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in f.decorator_list)


def parameters(f: ast.FunctionDef) -> int:
    """Parameters that a caller must know, without self and cls."""
    named = [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
    return len(named) - (named[:1] in (["self"], ["cls"]))


def depth(node: ast.AST, is_elif: bool = False) -> int:
    """Nested blocks below and including this node; an elif is not deeper than its if."""
    inside = 0
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                chained = isinstance(node, ast.If) and field == "orelse" and isinstance(child, ast.If)
                inside = max(inside, depth(child, chained and len(value) == 1))
    return inside + (isinstance(node, BLOCKS) and not is_elif)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_form(path: Path) -> None:
    text = path.read_text()
    assert "fmt: skip" not in text and "fmt: off" not in text
    for f in functions(ast.parse(text)):
        first = f.body[0].lineno if is_kernel(f) else f.lineno
        lines = (f.end_lineno or 0) - first + 1
        assert lines <= LINES, f"{f.name}: {lines} lines"
        assert parameters(f) <= PARAMETERS or is_kernel(f), f"{f.name}: {parameters(f)} parameters"
        inside = max((depth(child) for child in f.body), default=0)
        assert inside <= DEPTH, f"{f.name}: nested {inside} deep"


def test_the_measures_see_what_they_measure() -> None:
    source = "def f(self, a, *, b):\n if a:\n  for x in b:\n   pass\n elif b:\n  pass"
    [f] = functions(ast.parse(source))
    assert parameters(f) == 2 and max(map(depth, f.body)) == 2
