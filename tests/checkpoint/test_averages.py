"""Averaged weights are read like a step's own: those of --ema, and the mean of the last steps."""

from __future__ import annotations

import pytest
import torch
from ranks.test_team import on_threads

from helpers import TINY_FLAGS, box_elements, flip_bit, open_step, read_rows
from meshwright.__main__ import main
from meshwright.base.errors import BAD_DATA, UserError
from meshwright.checkpoint import averages, loading, native, steps
from meshwright.checkpoint.loading import OpenOptions
from meshwright.checkpoint.native import BoxedTensor, undivided

SHAPES = {"wte.weight": (13, 7), "h.0.mlp.fc.weight": (2, 5, 3), "ln_f.weight": (7,)}
NUMBERS = (2, 4, 6, 9)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Steps of random weights, with averages beside them."""
    folder, random = tmp_path_factory.mktemp("averages"), torch.Generator().manual_seed(1)
    for step in NUMBERS:
        names = [name + end for name in SHAPES for end in ("", "/exp_avg", "/ema")]
        named = {
            n: undivided(torch.randn(SHAPES[n.partition("/")[0]], generator=random)) for n in names
        }
        state = {"iteration": step, "true_vocab_size": 13, "positions": 16}
        native.save_step(folder, step, named, state, {"num_layers": 1})
    return folder


def stored(root, step, name):
    out = torch.empty(SHAPES[name.partition("/")[0]])
    open_step(root, step).fill({name: undivided(out)})
    return out


def boxes_of(name, rank, ranks):
    """Return a rank's rows, those of the second dimension of a gated weight."""
    shape = SHAPES[name]
    d = 1 if len(shape) == 3 else 0
    low, high = shape[d] * rank // ranks, shape[d] * (rank + 1) // ranks
    offset, size = [0] * len(shape), list(shape)
    offset[d], size[d] = low, high - low
    return [(tuple(offset), tuple(size))]


def read_on(root, team, options, dtype=torch.float32):
    """Read a rank's boxes; return each with what it should be compared with."""

    def want(source):
        assert (
            set(source.tensors) == SHAPES.keys() and not source.state and not source.has_optimizer
        )
        for name, shape in SHAPES.items():
            boxes = boxes_of(name, team.rank, team.size)
            wanted[name] = BoxedTensor(
                shape, boxes, torch.empty(boxes[0][1], dtype=dtype).flatten()
            )
        return wanted

    wanted = {}
    loaded = loading.load_checkpoint(root, want, options=options, team=team)
    assert loaded.step == 9 or loaded.step == 6
    return wanted


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_the_mean_of_the_last_steps(root, monkeypatch, ranks, number):
    """It is the float64 mean, whatever the ranks read of it and however large the pieces are."""
    monkeypatch.setattr(averages, "PIECE", 4)
    results, _ = on_threads(
        ranks, lambda team: read_on(root, team, OpenOptions(average_last=number))
    )
    for wanted in results:
        assert not isinstance(wanted, Exception), wanted
        for name, (_, boxes, x) in wanted.items():
            mean = torch.stack(
                [stored(root, step, name).double() for step in NUMBERS[-number:]]
            ).mean(0)
            assert torch.equal(x, box_elements(mean.float(), boxes).flatten()), name


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_average_of_ema(root, ranks):
    results, _ = on_threads(ranks, lambda team: read_on(root, team, OpenOptions(weights="ema")))
    for wanted in results:
        assert not isinstance(wanted, Exception), wanted
        for name, (_, boxes, x) in wanted.items():
            assert torch.equal(x, box_elements(stored(root, 9, f"{name}/ema"), boxes).flatten()), (
                name
            )


def test_the_step_that_a_path_names_is_the_last(root):
    source = loading.require_checkpoint(steps.step_folder(root, 6), OpenOptions(average_last=2))
    assert source.step == 6 and [each.step for each in source.inner] == [6, 4]


def refusal(path, **options):
    with pytest.raises(UserError) as caught:
        source = loading.require_checkpoint(path, OpenOptions(**options))
        source.fill(
            {name: undivided(torch.empty(info.shape)) for name, info in source.tensors.items()}
        )
    assert caught.value.status == BAD_DATA
    return str(caught.value)


def test_refusals(root, tmp_path):
    assert "reads the newest 5 saved steps, and" in refusal(root, average_last=5)
    for step in (1, 2, 3):
        named = (
            {"x": undivided(torch.full((9,), float(step)))}
            if step > 1
            else {"y": undivided(torch.ones(3))}
        )
        native.save_step(tmp_path, step, named, {"iteration": step}, {})
    assert "holds no average of --ema" in refusal(tmp_path, weights="ema")
    assert "hold different networks" in refusal(tmp_path, average_last=3)
    flip_bit(steps.step_folder(tmp_path, 2) / "rank_00000.safetensors", -1)
    assert "a step of --average-last is damaged" in refusal(tmp_path, average_last=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    flags = "--train-iters 6 --save-interval 2 --ema 0.9 --average-last 3 --tokenizer-type ByteTokenizer".split()
    more = ["--save", str(folder), "--vocab-size", "none", "--eval-interval", "10"]
    assert main(["train", *TINY_FLAGS, *flags, *more]) == 0
    return folder


def evaluated(folder, tmp_path, capsys, *more):
    text = tmp_path / "text.txt"
    text.write_text("a text of some words to score")
    capsys.readouterr()
    assert (
        main(["evaluate", str(folder), "--input", str(text), "--device", "cpu", "--json", *more])
        == 0
    )
    return capsys.readouterr().out


@pytest.mark.flag("average_last weights")
def test_a_run_ends_with_the_mean_and_both_averages_are_converted(trained, tmp_path, capsys):
    """What is converted scores as what is read in place; a second run begins from it."""
    [row] = read_rows(trained, "average")
    last = read_rows(trained, "validation")[-2]
    assert row["steps"] == [2, 4, 6] and last["end"] and 0 < abs(row["loss"] - last["loss"]) < 1
    plain = evaluated(trained, tmp_path, capsys)
    for n, how in enumerate((["--weights", "ema"], ["--average-last", "3"])):
        out = tmp_path / str(n)
        assert main(["convert", str(trained), str(out), "--to", "native", *how]) == 0
        converted = open_step(out, 6)
        assert not converted.state and not any("/" in name for name in converted.tensors)
        scored = [evaluated(trained, tmp_path, capsys, *how), evaluated(out, tmp_path, capsys)]
        losses = [line.partition('"loss": ')[2].partition(",")[0] for line in (*scored, plain)]
        assert losses[0] == losses[1] != losses[2]
    flags = [*TINY_FLAGS, "--tokenizer-type=ByteTokenizer", "--vocab-size=none", "--train-iters=1"]
    begun = [
        f"--load={trained}",
        "--finetune",
        "--weights=ema",
        f"--save={tmp_path / 'new'}",
        "--save-at-start",
    ]
    assert main(["train", *flags, *begun]) == 0
    got, want = open_step(tmp_path / "new", 0), open_step(trained, 6)
    for name, info in got.tensors.items():
        if "/" not in name:
            values = [torch.empty(info.shape) for _ in range(2)]
            got.fill({name: undivided(values[0])})
            want.fill({f"{name}/ema": undivided(values[1])})
            assert torch.equal(*values), name


def test_a_mean_in_the_network_is_that_of_the_files(trained, tmp_path, capsys):
    """The loss at the end of a run is that of the converted mean on the same samples."""
    [row] = read_rows(trained, "average")
    out = tmp_path / "mean"
    assert main(["convert", str(trained), str(out), "--to", "native", "--average-last", "3"]) == 0
    flags = [
        *TINY_FLAGS,
        "--tokenizer-type=ByteTokenizer",
        "--vocab-size=none",
        "--skip-train",
        f"--load={out}",
    ]
    assert main(["train", *flags, f"--run-dir={tmp_path / 'run'}"]) == 0
    [first, *_] = read_rows(tmp_path / "run", "validation")
    assert first["loss"] == row["loss"]


def test_a_run_with_too_few_steps_says_so(tmp_path, capsys):
    flags = [f"--save={tmp_path}", "--save-interval=3", "--average-last=4"]
    assert main(["train", *TINY_FLAGS, *flags]) == 0
    assert "has 2 saved steps, so there is no mean to validate" in capsys.readouterr().out
    assert not read_rows(tmp_path, "average")
