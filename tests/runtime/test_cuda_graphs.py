"""Captures of CUDA graphs, on a GPU."""

import pytest
import torch

from meshwright.base import device as devices
from meshwright.runtime.cuda_graphs import CudaGraphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_failed_capture_leaves_the_next_one_possible():
    device = torch.device("cuda:0")
    x = torch.ones(4, device=device)
    graphs = CudaGraphs(device)
    with devices.on_stream(devices.new_stream(device)):
        replay = graphs.capture(lambda: x.add_(1))
        with pytest.raises(RuntimeError):
            # reads from the device
            graphs.capture(lambda: x.add_(torch.rand(4, device=device)).sum().item())
        again = graphs.capture(lambda: x.add_(torch.rand(4, device=device).mul_(0).add_(2)))
    replay()
    again()
    assert x.tolist() == [4.0] * 4
