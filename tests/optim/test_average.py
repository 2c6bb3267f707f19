"""The average of --ema: its numbers, the steps that it does not follow, and its place in a run."""

import math

import pytest
import torch

from helpers import SMALL_FLAGS, TINY_FLAGS, open_step, read_losses, read_rows
from meshwright.__main__ import main
from meshwright.checkpoint import native
from meshwright.config.schema import Logging, Optimizer
from meshwright.optim import average
from meshwright.optim.average import MovingAverage
from meshwright.training.log.lines import Check
from meshwright.training.log.trackers import validation_tags
from stores import GATED, is_equal, make, snapshot, take_step, tokens

OVERFLOW = torch.tensor(math.inf)


def named(store):
    return {name: x.clone() for name, (_, _, x) in store.named_state().items()}


def of_weights(state):
    return {name.removesuffix("/ema"): x for name, x in state.items() if name.endswith("/ema")}


@pytest.mark.parametrize("rule", ["adam", "muon"])
@pytest.mark.parametrize("decay", [0.3, 0.999])
def test_it_is_the_plain_recurrence(rule, decay):
    """A skipped step is no step of the average; the decay grows from 2/11 to the given one."""
    model, store = make(GATED, Optimizer(optimizer=rule, ema=decay), torch.float64)
    want = {name: x.clone() for name, x in named(store).items() if "/" not in name}
    assert is_equal(of_weights(named(store)), want)
    t = 0
    for step in range(6):
        is_bad = step in (0, 3)
        take_step(model, store, [(tokens() + step) % 61], loss=OVERFLOW.clone() if is_bad else None)
        t += not is_bad
        d = min(decay, (1 + t) / (10 + t))
        now = named(store)
        for name in want if not is_bad else ():
            want[name] = d * want[name] + (1 - d) * now[name]
        for name, x in of_weights(now).items():
            torch.testing.assert_close(x, want[name], rtol=1e-13, atol=1e-16, msg=name)
    assert int(store.average.count) == t == 4
    moved = max(float((want[name] - now[name]).abs().max()) for name in want)
    assert moved > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
def test_it_changes_no_step_and_a_swap_no_bit(dtype, offload, monkeypatch):
    monkeypatch.setattr(average, "SWAP_CHUNK", 100)
    plain, averaged = (
        make(GATED, Optimizer(ema=ema), dtype, offload=offload) for ema in (0.0, 0.9)
    )
    for step in range(3):
        for model, store in (plain, averaged):
            take_step(model, store, [(tokens() + step) % 61])
        model, store = averaged
        before, weights = snapshot(store), store.weights.clone()
        with store.averaged():
            inside = named(store)
            assert is_equal({n: x for n, x in inside.items() if "/" not in n}, of_weights(before))
            for name, p in model.named_parameters():
                assert torch.equal(p.detach()[: len(inside[name])], inside[name].to(dtype)), name
        assert is_equal(snapshot(store), before) and torch.equal(store.weights, weights)
    assert is_equal({n: x for n, x in before.items() if "/ema" not in n}, snapshot(plain[1]))
    gaps = torch.ones(store.size, dtype=torch.bool)
    for bucket in store.buckets.values():
        for offset, shape in bucket.spans.values():
            gaps[bucket.begin + offset : bucket.begin + offset + shape.numel()] = False
    assert gaps.any() and not store.average.values[0][gaps].any()


def test_a_tensor_decides_about_an_update():
    """Nothing is read from the device: the check and the number of updates are tensors."""
    average = MovingAverage(0.5, [torch.ones(3, dtype=torch.float64)])
    average.restart()
    average.masters[0].mul_(3)
    average.update(torch.tensor(False))
    assert average.values[0].tolist() == [1.0] * 3 and average.count == 0
    average.update(torch.tensor(True))
    assert (
        average.values[0].tolist() == pytest.approx([2 / 11 + 9 / 11 * 3] * 3)
        and average.count == 1
    )


@pytest.mark.flag("ema")
@pytest.mark.parametrize("more", [["--optimizer", "sgd"], ["--bf16", "--cpu-optimizer"]])
def test_a_run_validates_it_beside_its_weights(run, more):
    """Losses and validations of the weights are those of a run without it, to the bit."""
    bare, got = (run(*more, *flags) for flags in ([], ["--ema", "0.9"]))
    assert got.losses == bare.losses
    rows, plain = (read_rows(x.folder, "validation") for x in (got, bare))
    assert [r["loss"] for r in rows] == [r["loss"] for r in plain] and all(
        "ema_loss" not in r for r in plain
    )
    assert all(0 < abs(r["ema_loss"] - r["loss"]) < 0.2 for r in rows)


def losses(folder):
    return read_losses(folder) + [r["ema_loss"] for r in read_rows(folder, "validation")]


def test_a_resumed_run_has_the_same_average(tmp_path):
    """Also one that saves no state of its optimizer."""
    flags = [*SMALL_FLAGS, *"--ema 0.9 --no-save-optim --optimizer sgd --sgd-momentum 0".split()]
    for name, stops in {"whole": [6], "parts": [2, 6]}.items():
        for stop in stops:
            stopping = ["--exit-interval", str(stop)] if stop < 6 else []
            where = [f"--save={tmp_path / name}", f"--load={tmp_path / name}"]
            loading_weights = ["--no-load-optim"] if stops[0] < stop else []
            assert main(["train", *flags, *where, *stopping, *loading_weights]) == 0
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    whole, parts = (open_step(tmp_path / name, 6) for name in ("whole", "parts"))
    assert whole.state["ema_steps"] == parts.state["ema_steps"] == 6
    for name, info in whole.tensors.items():
        values = [torch.empty(info.shape) for _ in range(2)]
        for source, value in zip((whole, parts), values, strict=True):
            source.fill({name: native.undivided(value)})
        assert torch.equal(*values), name


def test_a_run_without_it_leaves_it_and_one_with_it_begins_it(tmp_path, capsys):
    save = [f"--save={tmp_path}", f"--load={tmp_path}"]
    assert main(["train", *TINY_FLAGS, *save, "--ema", "0.9", "--exit-interval", "2"]) == 0
    assert main(["train", *TINY_FLAGS, *save, "--exit-interval", "4"]) == 0
    assert "note: ema is 0.0, the checkpoint was trained with 0.9" in capsys.readouterr().out
    assert not any(name.endswith("/ema") for name in open_step(tmp_path, 4).tensors)
    assert main(["train", *TINY_FLAGS, *save, "--ema", "0.9"]) == 0
    assert "--ema: the average begins with the loaded weights" in capsys.readouterr().out
    assert open_step(tmp_path, 6).state["ema_steps"] == 2


def test_its_loss_has_a_name_in_lines_and_trackers():
    line = Check(10, "validation", 2.0, ema_loss=1.5).in_megatrons_form()
    assert "| lm loss PPL: 7.389056E+00 | lm loss value of the average: 1.500000E+00 | " in line
    row = {"name": "validation", "loss": 2.0, "ppl": 7.4, "ema_loss": 1.5}
    assert validation_tags(Logging(), row) == {
        "lm loss validation": 2.0,
        "lm loss validation ema": 1.5,
    }
