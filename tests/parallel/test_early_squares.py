"""The norm of the gradients that are summed first is computed while others are still summed."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from layouts import FLAGS, rows_of, trained
from meshwright import device as devices
from meshwright.parallel import flat
from meshwright.parallel.layout import connect
from meshwright.settings import flags
from meshwright.settings.schema import TrainConfig
from on_ranks import run_ranks


def training(line):
    words = [*FLAGS.split(), "--params-dtype", "float32", "--world-size", "2", "--train-iters", "3", *line.split()]
    config = flags.parse_settings(TrainConfig, words, "test").config
    with_kernels = SimpleNamespace(**vars(devices) | {"has_kernels": lambda device: True})
    plain, finished = flat.FlatStore.finish_sums, []

    def finish(store):
        plain(store)
        early = store.early_squares
        finished.append(early is not None)
        if early is not None:  # and nothing of it changed later
            torch.testing.assert_close(early, store.flat.squares(0), rtol=0, atol=0)

    with mock.patch.object(flat, "devices", with_kernels):
        with mock.patch.object(flat.FlatStore, "_last_sums", lambda store: store.sum_order):
            want = rows_of(trained(config, 2, connect=connect))
        with mock.patch.object(flat.FlatStore, "finish_sums", finish):
            got = rows_of(trained(config, 2, connect=connect))
    assert finished and all(finished)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-6, atol=0)


@pytest.mark.parametrize("line", ["", "--zero-stage 1", "--tensor-model-parallel-size 1 --optimizer muon"])
def test_norm(line):
    run_ranks(training, 2, line)
