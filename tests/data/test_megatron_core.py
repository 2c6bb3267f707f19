"""Orders of samples and blends equal megatron-core's, element by element.

Its answers to some cases are stored in megatron_core.json; if megatron-core can be imported, many
more are compared.
"""

import json
import sys

import megatron_core_cases as cases
import numpy as np
import pytest
from foreign import HAS_CORE

from meshwright.data import samples

beside = pytest.mark.skipif(
    not HAS_CORE, reason="megatron-core cannot be imported (the extra `peers`)"
)


@pytest.fixture(params=["numpy", "fast"])
def path(request, monkeypatch):
    """Both ways to build an index."""
    if request.param == "fast":
        pytest.importorskip("numba", reason="numba is not installed")
    monkeypatch.setattr(samples, "LARGE", 0 if request.param == "fast" else sys.maxsize)


def test_frozen_answers(path, tmp_path):
    frozen = json.loads(cases.FROZEN.read_text())
    indices = cases.index_cases(range(48))
    assert len(frozen["indices"]) == len(indices) > 40
    for n, (case, wanted) in enumerate(zip(indices, frozen["indices"], strict=True)):
        assert cases.digest(cases.our_index(case, tmp_path)) == wanted, (n, case)
    for case, wanted in zip(cases.blend_cases(range(20)), frozen["blends"], strict=True):
        assert cases.digest(cases.our_blend(case)) == wanted, case


@beside
def test_orders_beside_megatron_core(path, tmp_path):
    for n, case in enumerate(cases.index_cases(range(100, 140))):
        ours = cases.our_index(case, tmp_path)
        (tmp_path / str(n)).mkdir()
        theirs = cases.megatron_index(case, tmp_path / str(n))
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype and np.array_equal(a, b), case
    for case in cases.blend_cases(range(100, 200)):
        for a, b in zip(cases.our_blend(case), cases.megatron_blend(case), strict=True):
            assert a.dtype == b.dtype and np.array_equal(a, b), case
