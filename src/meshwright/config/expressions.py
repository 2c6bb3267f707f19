"""Evaluate literals and arithmetic in Python's syntax, such as [0]*6 + [1]*6, without running them.

All else is refused, and so is what would take long or much memory. Readers of settings in Python
add names and statements.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

# Limits of one reading.
BYTES = 1 << 16
STEPS = 100_000
DEPTH = 60
ITEMS, NUMBER = 10_000, 1 << 63  # of one list or text, and the largest number

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class RefusedExpression(Exception):
    """Why a text is not read; a reader of files adds the line."""


@dataclasses.dataclass
class ReadingLimits:
    """The steps and the depth that are left to a reading."""

    steps: int = STEPS
    depth: int = 0

    def spend(self, steps: int = 1) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise RefusedExpression(f"the config takes more than {STEPS} steps to read")

    def deeper(self, by: int) -> None:
        self.depth += by
        if self.depth > DEPTH:
            raise RefusedExpression(f"nested more than {DEPTH} deep")

    def copied(self, value: Any) -> Any:
        """Return a copy of tables and lists, at a step for each value, shared ones too."""
        self.spend()
        if not isinstance(value, dict | list):
            return value
        self.deeper(1)
        copy: Any
        if isinstance(value, dict):
            copy = {key: self.copied(item) for key, item in value.items()}
        else:
            copy = [self.copied(item) for item in value]
        self.deeper(-1)
        return copy


def read_expression(text: str) -> Any:
    """Return the value of one expression without names; raise ValueError for other text."""
    if len(text) > BYTES:
        raise ValueError(f"more than {BYTES} characters")
    # The value is copied at the end, so that no two parts of the value are one object.
    evaluator = Evaluator(ReadingLimits())
    try:
        return evaluator.limits.copied(evaluator.expression(parse(text, "eval").body))
    except RefusedExpression as why:
        raise ValueError(str(why)) from None


def parse(source: str, mode: str) -> Any:
    """Return the tree of a text: "eval" for an expression, "exec" for a file."""
    with warnings.catch_warnings():
        # Python warns of escapes that it does not know, with a line of the user's text.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source, mode=mode)
        except SyntaxError as error:
            raise RefusedExpression(f"line {error.lineno}: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise RefusedExpression(
                f"not a Python file that can be read ({str(error) or type(error).__name__})"
            ) from None


class Evaluator:
    """Evaluates literals, lists, tables and arithmetic, within limits."""

    def __init__(self, limits: ReadingLimits) -> None:
        self.limits = limits

    def expression(self, e: ast.expr) -> Any:
        self.limits.spend()
        self.limits.deeper(1)
        out = self.evaluate(e)
        self.limits.deeper(-1)
        # first: isfinite takes no int above a float's range
        is_huge = isinstance(out, int) and abs(out) > NUMBER
        if is_huge or (isinstance(out, float) and not math.isfinite(out)):
            raise RefusedExpression(f"the number is above {NUMBER}")
        if isinstance(out, list | str) and len(out) > ITEMS:
            raise RefusedExpression(f"a list or text has more than {ITEMS} items")
        return out

    def evaluate(self, e: ast.expr) -> Any:
        match e:
            case ast.Constant(value=None | bool() | int() | float() | str() as constant):
                return constant
            case ast.List() | ast.Tuple():
                return [self.expression(item) for item in e.elts]
            case ast.Dict():
                keys = [self.key(key) for key in e.keys]
                return dict(zip(keys, map(self.expression, e.values), strict=True))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign):
                number = self.number(self.expression(e.operand))
                return -number if isinstance(sign, ast.USub) else number
            case ast.BinOp():
                return self.arithmetic(e)
        raise RefusedExpression(
            f"a value is a literal, a name, arithmetic or a table, not {kind(e)}"
        )

    def key(self, key: ast.expr | None) -> str | int:
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str | int):
            raise RefusedExpression("a key is a text or a number")
        return key.value

    def number(self, number: Any) -> Any:
        if not isinstance(number, int | float):
            raise RefusedExpression("arithmetic is for numbers, lists and texts")
        return number

    def arithmetic(self, e: ast.BinOp) -> Any:
        # Lists are added and repeated, and texts are added; numbers have all operators.
        left = self.expression(e.left)
        right = self.expression(e.right)
        kinds = {type(left), type(right)}
        if isinstance(e.op, ast.Add) and (
            kinds == {list} or all(isinstance(value, str) for value in (left, right))
        ):
            self.limits.spend(len(left) + len(right))
            return left + right
        if isinstance(e.op, ast.Mult) and kinds == {list, int}:
            # A boolean is no int here: the comparison is of exact types.
            items, times = (left, right) if isinstance(left, list) else (right, left)
            if len(items) * times > ITEMS:
                raise RefusedExpression(f"a list has more than {ITEMS} items")
            self.limits.spend(max(0, len(items) * times))
            return items * times
        # Texts are added only: a product of text and number would need a limit of its own.
        self.number(left)
        self.number(right)
        # A power of integers may take all memory before its size can be looked at.
        if isinstance(e.op, ast.Pow) and abs(right) > 64:
            raise RefusedExpression("an exponent is above 64")
        compute = OPERATORS.get(type(e.op))
        if compute is None:
            raise RefusedExpression(f"arithmetic has + - * / // % **, not {kind(e.op)}")
        try:
            return self.number(compute(left, right))
        except ArithmeticError as error:
            raise RefusedExpression(str(error)) from None


def kind(node: ast.AST) -> str:
    """Return the name of a piece of Python, as ListComp."""
    return type(node).__name__
