"""Copies of weights that differ between ranks stop the run before anything is saved."""

import functools
import re

import pytest
import torch

from helpers import TINY_FLAGS, read_rows
from meshwright.base.errors import UNEXPECTED
from meshwright.checkpoint import steps
from meshwright.runtime.ranks.team import Team
from meshwright.training import loop
from meshwright.training.health.replicas import ROWS, WIDTH, Copies, Replicas, digest, name_ranks
from on_ranks import train_on_ranks

pytestmark = pytest.mark.whole

FLAGS = [f for f in TINY_FLAGS if not f.startswith(("--global", "--micro", "--train-iters"))]
FLAGS += ["--micro-batch-size=1", "--train-iters=8", "--save-interval=100"]


def flip(wrong, at, name, rank):
    """Have one rank flip a bit of one weight after a step; updates may round a lower bit away."""
    taken, real = [], loop.train_step

    def train_step(net, *more):
        out = real(net, *more)
        taken.append(1)
        if rank == wrong and len(taken) == at:
            net.store.wait_for_weights()  # what is not yet gathered would spread
            weight = net.store.weights_by_name()[name].view(-1)[-1:]
            integer, bit = (torch.int16, 4) if weight.element_size() == 2 else (torch.int32, 20)
            weight.view(integer).bitwise_xor_(1 << bit)
        return out

    loop.train_step = train_step


def train(tmp_path, world, flags, wrong, at=2, name="h.1.mlp.fc.weight"):
    """Return the exit statuses, the first rank's output, and the steps that were logged."""
    argv = [*FLAGS, f"--global-batch-size={world}", f"--save={tmp_path / 'run'}", *flags]
    statuses = train_on_ranks(world, argv, tmp_path, functools.partial(flip, wrong, at, name))
    return (
        statuses,
        (tmp_path / "log-0").read_text(),
        [row["iteration"] for row in read_rows(tmp_path / "run")],
    )


@pytest.mark.flag("check_replicas_interval")
@pytest.mark.fault("F21")
def test_the_rank_that_differs_is_named_within_the_interval(tmp_path):
    statuses, out, logged = train(tmp_path, 3, ["--check-replicas-interval=4"], wrong=1)
    assert statuses == [UNEXPECTED] * 3
    assert re.search(
        r"iteration 4: rank 1 \(\S+\) holds weights that differ from the other 2 copies, first in h\.1\.ml",
        out,
    )
    assert (
        "Traceback" not in out
        and logged == [1, 2, 3, 4]
        and list(steps.list_steps(tmp_path / "run")) == []
    )
    assert read_rows(tmp_path / "run", "end")[0]["status"] == UNEXPECTED


@pytest.mark.parametrize(
    ("world", "flags", "name", "what"),
    [
        pytest.param(
            2,
            ["--tensor-model-parallel-size=2"],
            "ln_f.weight",
            "different weights",
            marks=pytest.mark.long,
        ),
        pytest.param(
            2,
            ["--pipeline-model-parallel-size=2"],
            "wte.weight",
            "different token tables",
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda value: value[-1].strip("-") if isinstance(value, list) else None,
)
@pytest.mark.fault("F21")
def test_a_save_compares(tmp_path, world, flags, name, what):
    """The interval is long, so the save at the end is the first to look."""
    statuses, out, _ = train(tmp_path, world, flags, wrong=world - 1, at=8, name=name)
    assert statuses == [UNEXPECTED] * world and re.search(
        rf"iteration 8: .*{what}.*first in {name}", out
    )
    assert list(steps.list_steps(tmp_path / "run")) == []


def test_copies_that_are_equal_again_are_no_riddle():
    """The hashes differed, and the tensors no longer do when they are named."""
    everyone = Team()
    replicas = object.__new__(Replicas)
    replicas.team, replicas.saves_to = everyone, "run"
    error = replicas.explain(7, Copies("weights", [[0]], {"w": torch.zeros(3)}))
    text = "the copies of the weights differed and are equal again: suspect the memory of a GPU; nothing was saved since"
    assert str(error).startswith(f"iteration 7: {text}") and error.everywhere
    assert name_ranks([1], ["a", "b"]) == "rank 1 (b) holds"
    assert name_ranks([1, 2], ["a", "b", "c"]) == "ranks 1 (b) and 2 (c) hold"
    assert (
        name_ranks(list(range(6)), ["a"] * 6) == "ranks 0 (a), 1 (a), 2 (a), 3 (a) and 2 more hold"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.fault("F21")
def test_every_bit_counts(dtype):
    """Each changed bit, and a swap of neighbours, changes the hash."""
    size = WIDTH + 37
    flat = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    integers = flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[flat.element_size()])
    before, seen = int(digest([flat], flat.device)), set()
    for place in (0, 1, WIDTH - 1, WIDTH, size - 1):
        for bit in range(8 * flat.element_size() - 1):
            integers[place] ^= 1 << bit
            seen.add(int(digest([flat], flat.device)))
            integers[place] ^= 1 << bit
    assert before not in seen and len(seen) > 4 * (8 * flat.element_size() - 1)
    flat[[0, 1]] = flat[[1, 0]]
    assert int(digest([flat], flat.device)) != before


def test_pieces_hash_as_a_whole_buffer():
    parts = [torch.randn(n) for n in (3, WIDTH, 5, 2 * WIDTH * ROWS // 1024)]
    assert int(digest(parts, parts[0].device)) == int(digest([torch.cat(parts)], parts[0].device))
