"""The end of a run."""

import gc
import weakref

import pytest
import torch._dynamo  # noqa: F401  its first import keeps the frames that cause it

from meshwright.__main__ import main
from meshwright.runtime.ranks import lost
from meshwright.training import loop

FLAGS = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --train-iters 3
 --lr 1e-3 --vocab-size 40 --mock-data --eval-iters 1 --eval-interval 2 --device cpu --no-tensorboard""".split()


@pytest.mark.parametrize(
    "more", [[], ["--on-nonfinite=rollback:1", "--save-error=warn", "--save-interval=2"]]
)
def test_nothing_holds_the_trainer_when_the_connections_close(more, tmp_path, monkeypatch, capsys):
    """NCCL waits at its end for CUDA graphs of its collectives, so these must be gone by then."""
    made, alive = [], []
    make = loop.Trainer.__init__

    def note(self, *arguments):
        made.append(weakref.ref(self))
        make(self, *arguments)

    monkeypatch.setattr(loop.Trainer, "__init__", note)
    monkeypatch.setattr(
        lost, "leave_ranks", lambda: alive.extend(one() is not None for one in made)
    )
    gc.disable()
    try:
        assert main(["train", *FLAGS, *more, f"--save={tmp_path / 'run'}"]) == 0
    finally:
        gc.enable()
    assert alive == [False]
