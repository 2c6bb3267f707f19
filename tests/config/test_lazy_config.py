"""Lazy configs are read as data, and whatever else they hold is refused with its line."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import pytest

from meshwright.base.errors import UserError
from meshwright.compat.flags.lazy_config import read_lazy_config
from meshwright.config import flags
from meshwright.config.expressions import read_expression
from meshwright.config.schema import TrainConfig

BASE = """
'''A table that another file changes.'''
import libai.optim as optim_of
from omegaconf import DictConfig, OmegaConf
from libai.config import LazyCall as L
from libai.models import GPTForPreTraining
train = dict(dist={"tensor": 1, "pipeline": 1}, sizes=[8, 16], lr=1e-4)
train = DictConfig(train)
model = L(GPTForPreTraining)(cfg=dict(layers=2, width=-4 * 2 ** 3 + 96))
optim = L(optim_of.AdamW)(betas=(0.9, 0.999))
data = OmegaConf.create()
data.sets = [L(optim_of.Set)(length=1), dict(length=2)]
"""


def write(folder: Path, text: str, name: str = "c.py") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_what_a_config_may_hold(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "configs"):
        write(folder, BASE, "common/base.py")
    text = """
from .common.base import model, optim, train
from libai.config import get_config
data = get_config("common/base.py").data
train.dist.tensor = model.cfg.layers
train["sizes"][-1] = 15 % 8 + 1
train.update(dict(lr=3 / 2, half=7 // 2), seed=1)
train.stages = [0] * 2 + 2 * [1]
for one in data.sets:
    one.length = train.dist.tensor + 7
    pass
del optim["betas"]
helper = alias = "a" + "b"
alias = None
"""
    read = read_lazy_config(write(tmp_path, text), ["libai", "omegaconf"])
    assert read["train"] == {
        "dist": {"tensor": 2, "pipeline": 1},
        "sizes": [8, 8],
        "lr": 1.5,
        "half": 3,
        "seed": 1,
        "stages": [0, 0, 1, 1],
    }
    assert read["model"] == {
        "cfg": {"layers": 2, "width": 64},
        "_target_": "libai.models.GPTForPreTraining",
    }
    assert read["optim"] == {"_target_": "libai.optim.AdamW"}
    assert read["data"]["sets"] == [{"length": 9, "_target_": "libai.optim.Set"}, {"length": 9}]
    assert (read["helper"], read["alias"]) == ("ab", None)


def test_tables_are_copied_where_omegaconf_copies(tmp_path: Path) -> None:
    text = "from libai import LazyCall, X\nc = dict(n=1)\na = LazyCall(X)(cfg=c)\nb = dict()\nb.c = c\nc.n = 2"
    read = read_lazy_config(write(tmp_path, text), ["libai"])
    assert (read["a"]["cfg"]["n"], read["b"]["c"]["n"], read["c"]["n"]) == (1, 1, 2)


HOSTILE = {
    "import os\nos.system('touch x')": "1: module os is not read; names of libai are known\n    import os",
    "x = 1\nfrom os import system as s": "2: module os is not read",
    "__import__('os').system('x')": "1: no name __import__",
    "().__class__.__bases__[0].__subclasses__()": "1: only tables have settings, such as __class__",
    "x = open('/etc/passwd')": "1: no name open",
    "from libai import run\nx = run('a')": "2: nothing is run: run(...)",
    "from libai.config import LazyCall\nx = LazyCall(len)(1)": "2: no name len",
    "from libai.config import LazyCall\nx = LazyCall(LazyCall)(1)": "2: LazyCall(...) takes named values only",
    "x = [y for y in [1]]": "1: a value is a literal, a name, arithmetic or a table, not ListComp",
    "x = [0 for a in range(10**9) for b in range(10**9)]": "not ListComp",
    "x = lambda: 1": "not Lambda",
    "x = f'{1:>1000000000}'": "not JoinedStr",
    "x = '%1000000000d' % 1": "1: arithmetic is for numbers, lists and texts",
    "x = b'a'": "not Constant",
    "def f(): pass": "1: a config holds assignments, loops over lists and imports, not FunctionDef",
    "while True: pass": "not While",
    "if 1: pass": "not If",
    "x = 10 ** 10 ** 10": "1: an exponent is above 64",
    "x = 9 ** 64": "1: the number is above 9223372036854775808",
    "a = 2 ** 62\nb = a ** 64": "2: the number is above 9223372036854775808",
    "x = [0] * 10 ** 9": "1: a list has more than 10000 items",
    "x = 'a' * 10 ** 9": "1: arithmetic is for numbers",
    "x = 1 << 10 ** 9": "not LShift",
    "x = (-8) ** 0.5": "1: arithmetic is for numbers",
    "x = 1 / 0": "1: division by zero",
    "x = 1e999": "the number is above",
    "x = " + "9" * 5000: "line 1: Exceeds the limit",
    "x = " + "[" * 150 + "]" * 150: "1: nested more than 60 deep",
    "x = " + "(" * 30000: "c.py: line 1: too many nested parentheses",
    "x = " + "-" * 60000 + "1": "",
    "x = dict()\ny = x" + ".a" * 30000: "",
    "x = 1" + "+1" * 30000: "",
    "x = [0, 0]\n" + "x = [x, x]\n" * 30: "more than 100000 steps",
    "a = [0] * 5000\nfor x in a:\n for y in a:\n  z = 1": "more than 100000 steps",
    "".join(f"a{i} = [0] * 9999\n" for i in range(3500)): "more than 100000 steps",
    "a = 'x'\n" + "a = a + a\n" * 40: "a list or text has more than 10000 items",
    "x = 1\n" * 20000: "has more than 65536 bytes",
    "a = 1\0": "null bytes",
    "from .c import x": "imports itself",
    "from ..outside.d import x": "is outside of",
    "from ......no.such import x": "1: no file for ......no.such",
    "from libai.config import get_config\nx = get_config('../outside/d.py')": "is outside of",
    "from .fine import missing": "1: .fine has no missing",
    "from .fine import *": "1: name what is imported, in place of *",
    "from .fine import table\ntable.b = table.ab": "2: the table has no ab; did you mean abc?",
    "from .fine import table\nx = dict(**table)": "2: give values by their names, in place of **",
    "x = [1]\nx[3] = 1": "2: no item 3 in a list of 1",
    "x = dict()\nx.a.b = 1": "2: the table has no a",
    "x = 1\nx.a = 1": "2: only tables have settings: x.a",
    "x, y = 1, 2": "1: a value is given to a name, an attribute or an item, not to a Tuple",
    "for a in 5: pass": "1: a loop goes over a list only",
}


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:30])
@pytest.mark.fault("F29")
@pytest.mark.promise("Python files of settings, as LiBai has them, are read and not run")
def test_anything_else_is_refused_soon(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "x = 1", "outside/d.py")
    write(tmp_path, "table = dict(abc=1)", "in/fine.py")
    path = write(tmp_path, text, "in/c.py")
    monkeypatch.chdir(path.parent)
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as refusal:
        read_lazy_config(path, ["libai"])
    assert HOSTILE[text] in str(refusal.value) and "c.py" in str(refusal.value)
    assert time.monotonic() - start < 5
    unit = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < 100 << 20


@pytest.mark.promise("Python files of settings, as LiBai has them, are read and not run")
def test_imports_that_double_are_refused(tmp_path: Path) -> None:
    for n in range(30):
        write(tmp_path, f"from .f{n + 1} import x\nfrom .f{n + 1} import x as y\n", f"f{n}.py")
    write(tmp_path, "x = 1", "f30.py")
    with pytest.raises(UserError, match="more than 50 files are imported"):
        read_lazy_config(tmp_path / "f0.py")


@pytest.mark.parametrize("data", [None, b"\xff\xfe", b"x = (1"])
def test_files_that_are_none(tmp_path: Path, data: bytes | None) -> None:
    if data is not None:
        (tmp_path / "c.py").write_bytes(data)
    with pytest.raises(UserError, match="no file|not UTF-8|line 1: '\\(' was never closed"):
        read_lazy_config(tmp_path / "c.py")


def test_values_of_the_command_line() -> None:
    texts = {"[0]*2+[1]*2": [0, 0, 1, 1], "1e-3": 0.001, "'a b'": "a b", "True": True, "-4": -4}
    assert {text: read_expression(text) for text in texts} == texts
    for text in ("./output/a", "gpt2", "1 2", "", "[" * 100 + "]" * 100, "1" + " " * 65_536):
        with pytest.raises(ValueError):
            read_expression(text)


def test_settings_of_ours_in_a_python_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "layers = 2\nmodel = dict(num_layers=layers, hidden_size=16 * layers)\nlr = 3e-4\n",
        "s.py",
    )
    with pytest.raises(UserError, match="unknown setting 'layers' in .*s.py"):
        flags.parse_settings(
            TrainConfig, ["--config", str(path), "--dry-run"], "meshwright train", check=False
        )
    path.write_text(path.read_text().replace("layers = 2\n", "").replace("layers", "2"))
    path.write_text(path.read_text().replace("num_2", "num_layers"))
    config = flags.parse_settings(
        TrainConfig, ["--config", str(path), "--dry-run"], "meshwright train", check=False
    ).config
    assert (config.model.num_layers, config.model.hidden_size, config.optimizer.lr) == (2, 32, 3e-4)
