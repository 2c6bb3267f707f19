"""What a run says about where a step began to be not finite, on one rank and on several."""

from __future__ import annotations

import contextlib
import functools
import math
import platform

import pytest
import torch

import layouts
from helpers import TINY_FLAGS, read_rows
from meshwright.base import console
from meshwright.base.errors import UserError
from meshwright.training import loop
from on_ranks import make_team, run_ranks

pytestmark = [pytest.mark.whole, pytest.mark.timeout(120)]


@pytest.fixture
def run(run):
    """run(flag, ...) trains with two layers and two micro-batches."""
    return functools.partial(run, *TINY_FLAGS)


def spoil(trainer, kind, name, sample):
    """Make a module's output, or its gradient, NaN for the micro-batch that begins with a sample.

    "weight" makes one value of a parameter infinite, "huge" all of them so large that products
    overflow; "once" is an output on its first use only.
    """
    module_name, _, leaf = name.rpartition(".")
    for part in trainer.net.parts:
        modules = dict(part.named_modules())
        if kind in ("weight", "huge") and leaf in dict(
            getattr(modules.get(module_name), "_parameters", {})
        ):
            values = trainer.net.store.named_state()[name][2]
            values.view(-1)[3:4] = math.inf
            values.copy_(values if kind == "weight" else torch.full_like(values, 3e38))
            trainer.net.store.publish_weights()
        elif kind not in ("weight", "huge") and name in modules:
            now, uses = {}, []
            part.register_forward_pre_hook(
                lambda _, args, now=now: now.update(at=args[1].first_sample)
            )

            def leave(module, args, output, now=now, uses=uses):
                if (
                    now["at"] != sample
                    or (kind == "once" and uses)
                    or (kind != "gradient" and not output.numel())
                ):
                    return None
                uses.append(1)
                if kind != "gradient":
                    return output * math.nan
                if output.requires_grad:
                    output.register_hook(lambda grad: grad * math.inf)
                return None

            modules[name].register_forward_hook(leave)


HOST = platform.node()
FIRST = {
    (
        "forward",
        "h.1.mlp.fc",
    ): "it began in the forward pass of micro-batch 2: 4,096 of 4,096 values that h.1.mlp.fc "
    "made from finite inputs;",
    (
        "gradient",
        "h.1.mlp.fc",
    ): "it began in the backward pass: the gradient of the output of h.1.mlp.fc (",
    (
        "weight",
        "h.0.attn.qkv.weight",
    ): "it began in the weights h.0.attn.qkv.weight (1 of 3,072 values);",
    (
        "once",
        "h.1.mlp.fc",
    ): f"computed again, it is finite: a transient fault, so suspect the hardware of {HOST};",
}


@pytest.mark.parametrize(("kind", "name"), FIRST, ids=lambda x: x)
@pytest.mark.fault("F20")
def test_on_one_rank(run, tmp_path, monkeypatch, kind, name):
    """The second micro-batch of step 3 fails; nothing was saved of it."""
    real = loop.Trainer.begin
    monkeypatch.setattr(loop.Trainer, "begin", lambda t: (real(t), spoil(t, kind, name, 10)))
    got = run("--save", tmp_path / "a", "--save-interval", 1, "--recompute-granularity", "full")
    assert got.status == 70 and FIRST[kind, name] in got.err, got.err
    assert len(got.column("loss")) == (1 if kind == "weight" else 3)
    advice = {"weight": "; start again", "once": "; continue from the newest checkpoint"}
    assert advice.get(kind, "; lower --lr (now 0.01)") in got.err
    [row] = read_rows(got.folder, "nonfinite")
    assert row["iteration"] == len(got.column("loss")) and row["where"] in got.err
    assert row.get("name") == (None if kind == "once" else name)


def test_layers_of_fused_kernels(run, monkeypatch):
    """They are looked at as a whole; then the same layer runs module by module."""
    real = loop.Trainer.begin
    monkeypatch.setattr(
        loop.Trainer, "begin", lambda t: (real(t), spoil(t, "huge", "h.1.mlp.fc.weight", 0))
    )
    got = run("--fused-kernels", "on", "--on-nonfinite", "skip:1")
    assert " that h.1.mlp.fc made from finite inputs" in got.err, got.err
    # the blocks are fused again after the first
    assert got.column("fused", "nonfinite") == [False] * 2


def test_a_loss_of_the_users(run, monkeypatch, tmp_path):
    from meshwright.training import micro_step

    monkeypatch.setattr(micro_step, "loss_sum", lambda losses, mask: losses.sum() / 0)
    got = run("--on-nonfinite", "skip:1")
    assert (
        got.status == 70
        and "1 of 1 values that the loss function made from finite inputs; lower" in got.err
    )
    assert (
        "WARNING: iteration 1 (samples up to 4): the loss is inf, so this step was not applied; it began"
        in got.out
    )


TP2PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
CASES = [  # flags, kind, name, sample, ranks that are spoilt, what is said
    (
        TP2PP2,
        "forward",
        "h.3.mlp.fc",
        2,
        [3],
        "micro-batch 3: 1,024 of 1,024 values that h.3.mlp.fc made from finite inputs, on rank 3 (tp 1, pp 1, dp 0, "
        f"host {HOST});",
    ),
    (
        TP2PP2,
        "gradient",
        "h.0.attn.proj",
        1,
        [0, 1],
        "gradient of the output of h.0.attn.proj (512 of 512 values), then the gradient of h.0.attn.proj.bias (32 of "
        f"32 values), on ranks 0 (tp 0, pp 0, dp 0, host {HOST}), 1 (tp 1, pp 0, dp 0, host {HOST});",
    ),
    (
        TP2PP2,
        "weight",
        "h.2.ln_1.weight",
        0,
        [2],
        "in the weights h.2.ln_1.weight (1 of 32 values), on rank 2 (tp 0",
    ),
    (
        f"{TP2PP2} --pipeline-schedule gpipe --sequence-parallel",
        "gradient",
        "h.3.ln_2",
        1,
        [2, 3],
        "the gradient of the output of h.3.ln_2 (256 of 256 values), then the gradient of h.3.ln_2.",
    ),
    (
        "--use-distributed-optimizer",
        "forward",
        "h.1.mlp",
        2,
        [2],
        "h.1.mlp made from finite inputs, on rank 2 (tp 0, pp 0, dp ",
    ),
    (
        "--zero-stage 2",
        "gradient",
        "h.2.mlp.proj",
        1,
        [1],
        "h.2.mlp.proj (512 of 512 values), then the gradient of h.2",
    ),
    ("--zero-stage 3", "gradient", "h.2.mlp.proj", 1, [1], "then the gradient of h.2.mlp.proj."),
    (
        "--zero-stage 3",
        "forward",
        "h.0.attn.qkv",
        3,
        [3],
        "h.0.attn.qkv made from finite inputs, on rank 3 (",
    ),
    (
        "--zero-stage 3",
        "weight",
        "h.1.mlp.fc.weight",
        0,
        [2],
        "h.1.mlp.fc.weight (1 of 1,024 values), on rank 2 (",
    ),
    (
        "--context-parallel-size 2",
        "once",
        "h.1.mlp.fc",
        1,
        [0, 1, 2, 3],
        f"suspect the hardware of {HOST};",
    ),
]


def spoilt_on_ranks(cases):
    console.set_stream(None)
    team, connected = make_team(), layouts.Connected()
    for line, kind, name, sample, where, said in cases:

        def around(_, trainer, step, spoilt=(kind, name, sample), where=where):
            if not step and (team.rank in where or spoilt[0] == "weight"):
                spoil(
                    trainer, *spoilt
                ) if team.rank in where else trainer.net.store.publish_weights()
            return contextlib.nullcontext()

        with pytest.raises(UserError) as caught:
            layouts.trained(layouts.parse(f"{line} --world-size 4"), 1, around, connect=connected)
        assert caught.value.status == 70 and caught.value.everywhere
        everyone = team.gather(str(caught.value))
        assert said in everyone[0] and everyone == everyone[:1] * team.size, (line, kind, everyone)


@pytest.mark.parametrize(
    "cases", [CASES[:2], pytest.param(CASES[2:], marks=pytest.mark.long)], ids=("few", "all")
)
@pytest.mark.fault("F20")
def test_on_ranks(cases):
    """Four ranks name the same module and the ranks where it began."""
    run_ranks(spoilt_on_ranks, 4, cases)
