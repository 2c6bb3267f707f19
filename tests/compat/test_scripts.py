"""What holds for all scripts in compat/."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from documents import ROOT, environment

COMPAT = ROOT / "compat"
SCRIPTS = sorted(p.relative_to(COMPAT) for p in COMPAT.rglob("*.sh") if not p.is_symlink())
PASS_IT_ON = ("megatron-lm/examples", "megatron-deepspeed/generate_text.sh", "megatron-deepspeed/interactive_text.sh")
INNER = ("ascend-gpt2/test/train_8p.sh", "ascend-gpt2/test/env_npu.sh", "oneflow-gpt/tools/prepare_distribute.sh")


@pytest.mark.parametrize("script", [s for s in SCRIPTS if not str(s).startswith((*PASS_IT_ON, *INNER))], ids=str)
def test_help_starts_nothing(script: Path, tmp_path: Path) -> None:
    bare = environment() | {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", COMPAT / script, "--help"], cwd=tmp_path, env=bare, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr and ".sh" in done.stdout
    assert not list(tmp_path.iterdir())


def test_shellcheck_finds_nothing() -> None:
    checker = shutil.which("shellcheck", path=environment()["PATH"])
    if checker is None:
        pytest.skip("shellcheck is not installed (the extra `test`)")
    found = subprocess.run([checker, "-S", "warning", *SCRIPTS], cwd=COMPAT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_a_stand_in_for_deepspeeds_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = importlib.machinery.SourceFileLoader("stand_in", str(COMPAT / "megatron-deepspeed/bin/deepspeed"))
    spec = importlib.util.spec_from_loader("stand_in", loader)
    assert spec is not None
    stand_in = importlib.util.module_from_spec(spec)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader.exec_module(stand_in)
    script = "pretrain_gpt.py --deepspeed --num-layers 2"
    launched = stand_in.words(f"--num_gpus 4 --master_port 6001 {script}".split())
    assert launched == f"launch --nproc-per-node 4 --master-port 6001 --nnodes 1 --node-rank 0 {script}".split()
    ran: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, argv: ran.append(argv[1:]))
    stand_in.words(["tools/generate_samples_gpt.py", "--num-samples", "0"])
    assert ran == [["tools/generate_samples_gpt.py", "--num-samples", "0"]]
