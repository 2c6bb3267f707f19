"""What tests of foreign checkpoints share: reading every tensor of a source, and comparing it."""

import importlib.util
from collections.abc import Mapping

import torch

from meshwright.checkpoint import native
from meshwright.checkpoint.sources import Source

try:
    HAS_CORE = importlib.util.find_spec("megatron.core") is not None
except ModuleNotFoundError:
    HAS_CORE = False


def read_tensors(source: Source, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Return every tensor of the source, in its own dtype or this one."""
    known = source.tensors.items()
    out = {name: torch.empty(of.shape, dtype=dtype or getattr(torch, of.dtype)) for name, of in known}
    source.fill({name: native.undivided(tensor) for name, tensor in out.items()})
    return out


def assert_reads(source: Source, expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that the source holds exactly these tensors, to the last bit and in these dtypes."""
    read = read_tensors(source)
    assert sorted(read) == sorted(expected)
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
