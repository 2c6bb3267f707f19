"""--ckpt-format torch and --save-hf: a run resumes exactly from Megatron's tree, in any layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers import TINY_FLAGS, flip_bit, read_rows
from meshwright.__main__ import main
from meshwright.checkpoint import steps

pytestmark = pytest.mark.whole

# Switches of Megatron's that are settings of ours under other names, or have no effect. Converters
# read some of them, as transformers' reads openai_gelu.
SWITCHES = """
    checkpoint_activations deepspeed deepspeed_activation_checkpointing openai_gelu partition_activations
    recompute_activations universal_checkpoint use_distributed_optimizer use_rotary_position_embeddings
""".split()
TREE = ["latest_checkpointed_iteration.txt", "iter_0000003/mp_rank_00/model_optim_rng.pt"]


def losses(folder: Path) -> list[str]:
    return [
        f"{r['iteration']} {float(r['loss']).hex()} {float(r['grad_norm']).hex()}"
        for r in read_rows(folder)
    ]


OTHERS = [
    pytest.param(more, marks=pytest.mark.long)
    for more in (["--fp16"], ["--params-dtype", "float64"], [])
]


@pytest.mark.flag("ckpt_format")
@pytest.mark.parametrize("more", [["--bf16", "--async-save"], *OTHERS], ids=str)
def test_a_run_in_megatrons_tree(tmp_path: Path, more: list[str]) -> None:
    """A run stopped and resumed has the losses of an uninterrupted one, with dropout."""
    flags = [*TINY_FLAGS, "--ckpt-format", "torch", *more]
    assert main(["train", *flags, "--run-dir", str(tmp_path / "whole")]) == 0
    parts = [*flags, "--save", str(tmp_path / "parts"), "--load", str(tmp_path / "parts")]
    assert main(["train", *parts, "--exit-interval", "3"]) == 0
    assert all((tmp_path / "parts" / name).is_file() for name in TREE)
    assert (tmp_path / "parts" / TREE[0]).read_text() == "3"
    kept = torch.load(tmp_path / "parts" / TREE[1], weights_only=False)
    assert (
        kept["checkpoint_version"] == 3.0
        and kept["iteration"] == 3
        and kept["args"].num_layers == 2
    )
    assert [getattr(kept["args"], name) for name in SWITCHES] == [False] * len(SWITCHES)
    assert "encoder" in kept["model"]["language_model"]
    assert ("fp32_from_fp16_params" in kept["optimizer"]) == (more[:1] in (["--bf16"], ["--fp16"]))
    assert main(["train", *parts, "--load", str(tmp_path / "parts")]) == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert steps.latest(tmp_path / "parts")[0] == 6 and not (tmp_path / "parts/.parts").exists()


def test_switches_that_were_given_are_saved(tmp_path: Path) -> None:
    """A conversion of our own format keeps them too; a later flag wins over a file's switch."""
    (tmp_path / "run.toml").write_text("checkpoint_activations = true\n")
    run = [*TINY_FLAGS, "--config", str(tmp_path / "run.toml"), "--no-checkpoint-activations"]
    run += ["--recompute-activations", "--openai-gelu", "--train-iters", "1"]
    given = {"openai_gelu", "recompute_activations"}
    for form in ("torch", "native"):
        more = ["--use-distributed-optimizer"] * (form == "native")
        assert (
            main(["train", *run, *more, "--save", str(tmp_path / form), "--ckpt-format", form]) == 0
        )
        folder = tmp_path / "converted"
        if form == "native":
            assert main(["convert", str(tmp_path / form), str(folder), "--to", "torch"]) == 0
        tree = next(
            (tmp_path / form if form == "torch" else folder).glob("iter_0000001/mp_rank_00/*.pt")
        )
        args = vars(torch.load(tree, weights_only=False)["args"])
        on = given | ({"use_distributed_optimizer"} if more else set())
        assert {name for name in SWITCHES if args[name]} == on


@pytest.mark.fault("F9")
def test_a_damaged_step_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = [*TINY_FLAGS, "--ckpt-format", "torch", "--save", str(tmp_path), "--save-interval", "3"]
    assert main(["train", *run]) == 0
    path = tmp_path / "iter_0000006/mp_rank_00/model_optim_rng.pt"
    flip_bit(path, path.stat().st_size // 2 * 8)
    capsys.readouterr()
    assert main(["train", *run, "--load", str(tmp_path), "--dry-run"]) == 0
    assert main(["train", *run, "--load", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "skipping iter_0000006, it is damaged" in out and "at iteration 3" in out


def test_a_finished_run_in_megatrons_own_folder(tmp_path: Path) -> None:
    """Megatron's own last step keeps its folder, and the run can continue after it."""
    run = [*TINY_FLAGS, "--save", str(tmp_path), "--load", str(tmp_path), "--lr-decay-iters", "6"]
    assert main(["train", *run, "--ckpt-format", "torch"]) == 0
    (tmp_path / "iter_0000006/.manifest.json").unlink()
    tree = (tmp_path / "iter_0000006/mp_rank_00/model_optim_rng.pt").read_bytes()
    assert main(["train", *run]) == 0
    assert main(["train", *run, "--train-iters", "7"]) == 0
    assert steps.latest(tmp_path)[0] == 7
    assert (tmp_path / "iter_0000006/mp_rank_00/model_optim_rng.pt").read_bytes() == tree


@pytest.mark.flag("save_hf")
def test_save_hf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = [*TINY_FLAGS, "--save", str(tmp_path / "run"), "--save-hf", str(tmp_path / "hf")]
    assert main(["train", *run]) == 0
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "gpt2"
    early = [
        *TINY_FLAGS,
        "--save",
        str(tmp_path / "e"),
        "--save-hf",
        str(tmp_path / "f"),
        "--exit-interval",
        "3",
    ]
    assert main(["train", *early]) == 0 and "meshwright convert" in capsys.readouterr().out
    # it exists: refused before the first step
    assert main(["train", *run, "--save-overwrite"]) == 73
    assert "hf" in capsys.readouterr().err
    # A run that goes on takes its own export's place, but not if somebody has changed that.
    load, longer = (
        ["--load", str(tmp_path / "run")],
        ["--train-iters", "7", "--override-opt_param-scheduler"],
    )
    before = (tmp_path / "hf/model.safetensors").read_bytes()
    assert (
        main(["train", *run, *load]) == 0
        and (tmp_path / "hf/model.safetensors").read_bytes() == before
    )
    assert (
        main(["train", *run, *load, *longer]) == 0
        and (tmp_path / "hf/model.safetensors").read_bytes() != before
    )
    assert not list(tmp_path.glob(".hf*"))
    (tmp_path / "hf/README.md").write_text("mine")
    assert (
        main(["train", *run, *load, *longer]) == 73
        and "was changed since" in capsys.readouterr().err
    )
