"""Imports go one way, the model knows no ranks, and what must start fast imports no torch."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from meshwright import __main__ as program
from meshwright.base.errors import UNAVAILABLE

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "meshwright"

# Imported where used: these must start without torch.
NO_TORCH = [
    "__main__",
    "base.errors",
    "base.console",
    "base.files",
    "base.progress",
    "base.host",
    "base.device",
    "base.hub",
    "base.origin",
    "data.tokenizers",
    "config.schema",
    "config.flags",
    "config.checks",
    "config.notices",
    "compat.flags.deepspeed_json",
    "config.data_paths",
    "config.command",
    "runtime.ranks.world",
    "runtime.launch.engines",
    "runtime.launch.launcher",
    "runtime.ranks.compare",
    "runtime.ranks.connect",
    "runtime.ranks.lost",
    "runtime.ranks.team",
    "apps.bench.rows",
    "apps.bench.runs",
    "apps.bench.table",
    "apps.bench.bench",
    "apps.bench.peers",
    "apps.bench.command",
    "cli.train",
    "apps.evaluate.command",
    "cli.generate",
    "apps.serve.command",
    "cli.chat",
    "generation.prompts",
    "generation.templates",
    "generation.terminal",
    "cli.data",
    "cli.inspect",
    "cli.convert",
    "cli.preprocess",
    "apps.plan.command",
    "cli.presets",
    "cli.launch",
    "apps.report.command",
    "cli.train_tokenizer",
    "apps.tune.sweep_command",
    "apps.tune.coordinates_command",
    "optim.mup",
    "apps.watch.command",
    "apps.quickstart.demo",
    "apps.doctor.command",
    "apps.verify.command",
    "cli.completion",
    "apps.doctor.facts",
    "config.completion",
    "apps.quickstart.command",
    "data.history",
    "data.sets",
    "data.blend",
    "data.samples",
    "data.files.indexed",
    "data.text.preprocess",
    "data.text.detect",
    "data.text.pieces",
    "data.text.reading",
    "data.text.workers",
    "apps.datasets.forecast",
    "apps.datasets.dedup",
    "data.statistics",
    "apps.datasets.merge_json",
    "data.files.merge",
    "data.files.verify",
    "model.counts",
    "optim.schedule",
    "apps.report.page",
    "apps.report.compare",
    "apps.report.logs",
    "checkpoint.convert",
    "checkpoint.inspect",
    "checkpoint.publish",
    "checkpoint.native",
    "checkpoint.steps",
    "checkpoint.loading",
    "checkpoint.manifests",
    "checkpoint.saved_model",
    "checkpoint.sources",
    "apps.watch.curves",
    "apps.watch.overview",
    "base.runs.follow",
    "base.runs.rows",
    "base.runs.history",
    "training.log.columns",
    "training.run",
    "training.state.resume",
    "training.state.folder",
    "training.before.preflight",
    "base.device_profiles",
    "apps.plan.memory",
    "training.parameters",
    "training.sizes",
    "apps.plan.timing",
    "training.state.saver",
]


def test_imports_go_one_way() -> None:
    """The contracts of `[tool.importlinter]`: floors, and no circle between files or folders."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_package_files_are_empty() -> None:
    """Except the package's own, which hands names on when they are first used."""
    assert all(not p.read_text().strip() for p in SOURCE.glob("*/**/__init__.py"))


def test_the_model_knows_no_ranks() -> None:
    for path in [*(SOURCE / "model").glob("*.py"), *(SOURCE / "kernels").rglob("*.py")]:
        code = re.sub(r'"""(.|\n)*?"""|#.*', "", path.read_text())
        found = re.findall(
            r"\b(rank|ranks|world_size|process_group|mesh|distributed|dist|DTensor)\b", code
        )
        assert not found, f"{path.name}: {found}"


@pytest.mark.whole
def test_no_torch_where_it_must_start_fast() -> None:
    code = f"import sys, importlib\nfor m in {NO_TORCH}:\n    importlib.import_module('meshwright.' + m)\n"
    code += "bad = {'torch', 'asyncio', 'matplotlib', 'tiktoken', 'transformers'} & set(sys.modules)\nassert not bad, bad"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.whole
def test_training_imports_torch_numpy_and_rich_only(tmp_path: Path) -> None:
    """What else is installed, and torch's compiler, is imported where it is used."""
    from meshwright.data.tokenizers import train_bpe

    train_bpe(["some words to learn from"], 270, tmp_path)
    flags = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 "
        "--lr 1 --train-iters 1 --device cpu"
    )
    flags += f" --mock-data --eval-iters 0 --vocab-file {tmp_path}/vocab.json --merge-file {tmp_path}/merges.txt"
    code = (
        "import sys; from meshwright.__main__ import main; assert main(['train', *sys.argv[1:]]) == 0; "
        "print(set(sys.modules) & "
        "{'tiktoken', 'tokenizers', 'orjson', 'yaml', 'matplotlib', 'regex', 'sympy', 'torch._dynamo'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *flags.split()], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.endswith("set()\n"), (
        done.stdout[-500:] + done.stderr
    )


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A clone that runs without an install may lack them; any other module is our own defect."""

    def fail(name: str, argv: list[str]) -> int:
        raise ModuleNotFoundError(f"No module named {argv[0]!r}", name=argv[0])

    monkeypatch.setattr(program, "_run", fail)
    assert program.main(["train", "torch"]) == UNAVAILABLE
    root = Path(program.__file__).parents[2]
    assert capsys.readouterr().err.endswith(f" has no package torch; pip install {root}\n")
    with pytest.raises(ModuleNotFoundError):
        program.main(["train", "meshwright.bogus"])


def skips() -> set[str]:
    """Return the packages without which some test is skipped."""
    found = set[str]()
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        # By name, or by a loop over names.
        found.update(re.findall(r'importorskip\(\s*"([\w.]+)"', text))
        for names in re.findall(r"for package in \((.*)\):\s+pytest\.importorskip", text):
            found.update(re.findall(r'"([\w.]+)"', names))
    return {name.partition(".")[0] for name in found}


def test_what_tests_are_skipped_without_can_be_installed() -> None:
    """A package that no extra installs any more would skip its tests everywhere, unnoticed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    installed = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in wanted}
    # Modules of other names than their packages, what these bring along, and peers of the servers.
    installed |= {"meshwright", "sky", "jsonschema", "playwright", "openai"}
    assert {"starlette", "transformers"} <= skips()
    assert not skips() - installed
