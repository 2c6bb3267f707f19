"""Read lazy configs, the Python files of settings of detectron2 and LiBai, as data.

Nothing in them is run or imported. A file may assign literals, names, arithmetic and tables to
names, attributes and items, loop over a list, and import other such files. Names of the modules
that the caller lists are references, such as "libai.models.GPTForPreTraining". LazyCall(X)(...) is
a table with the reference X under "_target_". All else is refused with its line, and so is a file
whose reading would take long or much memory.
"""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

from meshwright.base.errors import UserError
from meshwright.base.hints import did_you_mean
from meshwright.config.expressions import (
    BYTES,
    Evaluator,
    ReadingLimits,
    RefusedExpression,
    kind,
    parse,
)

FILES = 50  # of one reading, with all that they import; its other limits are those of expressions


class Reference(str):
    """The dotted name of something that is not read."""


@dataclasses.dataclass(frozen=True)
class _Lazy:
    """LazyCall(X), before its call."""

    target: Any


@dataclasses.dataclass
class _Reading(ReadingLimits):
    """Limits and roots that all files of one reading share."""

    modules: Collection[str] = ()
    roots: list[Path] = dataclasses.field(default_factory=list)
    files: int = FILES
    importing: list[Path] = dataclasses.field(default_factory=list)


def read_lazy_config(
    path: Path, modules: Collection[str] = (), roots: Collection[Path] = ()
) -> dict[str, Any]:
    """Return the names of a file with their values: numbers, texts, lists and tables.

    Args:
        modules: Names in these are references; other modules are files.
        roots: Folders in which imported files may lie, beside those of `path` and of the program.
    """
    reading = _Reading(
        modules=modules, roots=[folder.resolve() for folder in (path.parent, Path.cwd(), *roots)]
    )
    try:
        return _File(path, reading).run()
    except RefusedExpression as why:
        raise UserError(f"{path}: {why}") from None


class _File(Evaluator):
    def __init__(self, path: Path, reading: _Reading) -> None:
        super().__init__(reading)
        self.path = path
        self.reading = reading
        self.names: dict[str, Any] = {}
        self.lines: list[str] = []

    def run(self) -> dict[str, Any]:
        """Read the file and return copies of its names."""
        reading = self.reading
        real = Path(os.path.realpath(self.path))
        # Refuse what is not to be read, before it is opened.
        if not any(real.is_relative_to(root) for root in reading.roots):
            raise RefusedExpression(
                f"{self.path} is outside of {', '.join(map(str, reading.roots))}"
            )
        if real in reading.importing:
            raise RefusedExpression(f"{self.path} imports itself")
        reading.files -= 1
        if reading.files < 0:
            raise RefusedExpression(f"more than {FILES} files are imported")
        try:
            if not real.is_file():
                raise RefusedExpression(f"no file {self.path}")
            with real.open("rb") as file:
                data = file.read(BYTES + 1)
            if len(data) > BYTES:
                raise RefusedExpression(f"{self.path} has more than {BYTES} bytes")
            source = data.decode()
        except OSError as error:
            raise RefusedExpression(f"{self.path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise RefusedExpression(f"{self.path} is not UTF-8 text") from None

        # Run its statements.
        self.lines = source.splitlines()
        reading.importing.append(real)
        try:
            for statement in parse(source, "exec").body:
                self.statement(statement)
            plain = {n: v for n, v in self.names.items() if not isinstance(v, _Lazy)}
            return dict(reading.copied(plain))
        except RecursionError:
            raise RefusedExpression(f"{self.path} is nested too deep") from None
        finally:
            reading.importing.pop()

    def refuse(self, node: ast.AST, why: object) -> NoReturn:
        line = getattr(node, "lineno", 1)
        text = ""
        if line <= len(self.lines):
            text = self.lines[line - 1].strip()
        raise UserError(f"{self.path}:{line}: {why}\n    {text[:200]}")

    # Statements

    def statement(self, s: ast.stmt) -> None:
        self.reading.deeper(1)
        try:
            self.reading.spend()
            self.do(s)
        except RefusedExpression as why:
            self.refuse(s, why)
        self.reading.deeper(-1)

    def do(self, s: ast.stmt) -> None:
        match s:
            case ast.Pass() | ast.Expr(ast.Constant(str())):
                pass
            case ast.Expr(ast.Call() as call):
                self.expression(call)
            case ast.Assign():
                new = self.expression(s.value)
                for target in s.targets:
                    self.assign(target, new)
            case ast.Delete():
                for target in s.targets:
                    table, key = self.table_and_key(target)
                    self.item(table, key)
                    del table[key]
            case ast.For(target=ast.Name(id=name), orelse=[]):
                items = self.expression(s.iter)
                if not isinstance(items, list):
                    raise RefusedExpression("a loop goes over a list only")
                for item in list(items):
                    self.names[name] = item
                    for inner in s.body:
                        self.statement(inner)
            case ast.Import():
                for alias in s.names:
                    if not self.is_reference(alias.name):
                        raise RefusedExpression(
                            f"module {alias.name} is not read{self.known_modules()}"
                        )
                    bound = alias.asname or alias.name.split(".")[0]
                    self.names[bound] = Reference(alias.name if alias.asname else bound)
            case ast.ImportFrom():
                self.import_from(s)
            case _:
                raise RefusedExpression(
                    f"a config holds assignments, loops over lists and imports, not {kind(s)}"
                )

    def is_reference(self, module: str) -> bool:
        return module.split(".")[0] in self.reading.modules

    def known_modules(self) -> str:
        modules = self.reading.modules
        return f"; names of {', '.join(modules)} are known" if modules else ""

    def import_from(self, s: ast.ImportFrom) -> None:
        module = s.module or ""
        file_name = f"{module.replace('.', '/')}.py"
        # The names to import from: of a module that is not read, anything is one.
        if not s.level and self.is_reference(module):
            names = None
        elif s.level:
            parents = self.path.absolute().parents
            folder = parents[min(s.level, len(parents)) - 1]
            names = self.another([folder / file_name], "." * s.level + module)
        else:
            files = [root / file_name for root in self.reading.roots]
            if not any(file.is_file() for file in files):
                raise RefusedExpression(
                    f"module {module} is not read: it is no file here{self.known_modules()}"
                )
            names = self.another(files, module)
        for alias in s.names:
            if alias.name == "*":
                raise RefusedExpression("name what is imported, in place of *")
            if names is not None and alias.name not in names:
                raise RefusedExpression(
                    f"{'.' * s.level}{module} has no {alias.name}{did_you_mean(alias.name, names)}"
                )
            new = Reference(f"{module}.{alias.name}") if names is None else names[alias.name]
            self.names[alias.asname or alias.name] = new

    def another(self, files: list[Path], name: str) -> dict[str, Any]:
        """Return the names of the first of these files that exists."""
        path = next((file for file in files if file.is_file()), None)
        if path is None:
            raise RefusedExpression(f"no file for {name} ({files[0]})")
        return _File(path, self.reading).run()

    def assign(self, target: ast.expr, new: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = new
            return
        table, key = self.table_and_key(target)
        if isinstance(table, list):
            self.item(table, key)  # an item that is there
        table[key] = self.reading.copied(new)

    def table_and_key(self, target: ast.expr) -> tuple[Any, Any]:
        """Return the table or list of a target, and the key in it."""
        match target:
            case ast.Attribute():
                table = self.expression(target.value)
                key = target.attr
            case ast.Subscript():
                table = self.expression(target.value)
                key = self.expression(target.slice)
            case ast.Name():
                return self.names, target.id
            case _:
                raise RefusedExpression(
                    f"a value is given to a name, an attribute or an item, not to a {kind(target)}"
                )
        # A list has items and no attributes.
        allowed = (dict,) if isinstance(target, ast.Attribute) else (dict, list)
        if not isinstance(table, allowed):
            raise RefusedExpression(f"only tables have settings: {ast.unparse(target)[:100]}")
        if not isinstance(key, str | int):
            raise RefusedExpression("a key is a text or a number")
        return table, key

    # Expressions

    def evaluate(self, e: ast.expr) -> Any:
        match e:
            case ast.Name(id=name):
                if name not in self.names and name == "dict":
                    return Reference("dict")
                if name not in self.names:
                    raise RefusedExpression(f"no name {name}{did_you_mean(name, self.names)}")
                return self.names[name]
            case ast.Attribute():
                return self.item(self.expression(e.value), e.attr)
            case ast.Subscript():
                return self.item(self.expression(e.value), self.expression(e.slice))
            case ast.Call():
                return self.call(e)
        return super().evaluate(e)

    def item(self, table: Any, key: Any) -> Any:
        """Return an item of a table or a list, or a name of a module."""
        shown = str(key)[:100]
        if isinstance(table, Reference):
            return Reference(f"{table}.{shown}")
        if isinstance(table, list) and type(key) is int:
            if not -len(table) <= key < len(table):
                raise RefusedExpression(f"no item {key} in a list of {len(table)}")
            return table[key]
        if not isinstance(table, dict):
            raise RefusedExpression(f"only tables have settings, such as {shown}")
        if not isinstance(key, str | int) or key not in table:
            near = did_you_mean(shown, map(str, table))
            raise RefusedExpression(f"the table has no {shown}{near}")
        return table[key]

    def call(self, e: ast.Call) -> Any:
        # A method of a table.
        if isinstance(e.func, ast.Attribute) and e.func.attr == "update":
            table = self.expression(e.func.value)
            if isinstance(table, dict):
                table.update(self.table(e))
                return None

        # LazyCall(target)(...): the second call, which makes a table.
        function = self.expression(e.func)
        if isinstance(function, _Lazy):
            if e.args:
                raise RefusedExpression("LazyCall(...) takes named values only")
            return self.table(e) | {"_target_": function.target}

        # The few functions that make tables, by their last names.
        name = ".".join(function.split(".")[-2:]) if isinstance(function, Reference) else ""
        last = name.rpartition(".")[2]
        if last in ("dict", "DictConfig") or name == "OmegaConf.create":
            return self.table(e)
        if last in ("LazyCall", "get_config") and len(e.args) == 1 and not e.keywords:
            argument = self.expression(e.args[0])
            if last == "LazyCall":
                return _Lazy(argument)
            if isinstance(argument, str) and argument.endswith(".py"):
                files = [
                    folder / argument
                    for root in self.reading.roots
                    for folder in (root / "configs", root)
                ]
                return self.another(files, argument)
        raise RefusedExpression(
            f"nothing is run: {ast.unparse(e.func)[:100]}(...) is none of the tables that are known"
        )

    def table(self, e: ast.Call) -> dict[Any, Any]:
        """Return a copy of a call's arguments: tables without a name, then named values."""
        out: dict[Any, Any] = {}
        for argument in e.args:
            table = self.expression(argument)
            if not isinstance(table, dict):
                raise RefusedExpression("a value without a name must be a table")
            out.update(table)
        for keyword in e.keywords:
            if keyword.arg is None:
                raise RefusedExpression("give values by their names, in place of **")
            out[keyword.arg] = self.expression(keyword.value)
        copied: dict[Any, Any] = self.reading.copied(out)
        return copied
