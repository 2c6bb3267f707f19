"""Orders of samples and blends, token files and splits equal megatron-core's, element by element.

Its answers to some cases are stored in megatron_core.json; if megatron-core can be imported, many
more are compared.
"""

import json
import sys
import warnings

import megatron_core_cases as cases
import numpy as np
import pytest
from foreign import HAS_CORE

from meshwright.config.grammar import Split
from meshwright.data import samples
from meshwright.data.files.indexed import Indexed
from meshwright.data.files.writer import Writer
from meshwright.data.loader import Samples
from meshwright.data.samples import split_bounds

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


@beside
def test_the_tokens_of_each_sample(tmp_path):
    for n, case in enumerate(cases.index_cases(range(200, 206))):
        (tmp_path / str(n)).mkdir()
        theirs = cases.megatron_dataset(case, tmp_path / str(n))
        mine = Indexed(tmp_path / str(n) / "x")
        ours = Samples(
            mine, range(*case["documents"]), case["samples"], case["length"], case["seed"]
        )
        assert len(ours) == len(theirs)
        for k in range(min(len(ours), 50)):
            text, _ = theirs._query_document_sample_shuffle_indices(k)
            assert ours[k].tolist() == text.tolist()


@beside
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_bytes_of_token_files(tmp_path, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    rng = np.random.default_rng(np.dtype(dtype).itemsize)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    with Writer(tmp_path / "ours", dtype) as writer:
        for _ in range(200):
            for _ in range(int(rng.integers(0, 3))):  # sentences; a document may have none
                ids = rng.integers(0, 200, int(rng.integers(1, 40)))
                writer.add(ids)
                builder.add_item(torch.from_numpy(ids))
            writer.end_document()
            builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for end in (".bin", ".idx"):
        assert (tmp_path / f"ours{end}").read_bytes() == (tmp_path / f"theirs{end}").read_bytes()


@beside
def test_splits_by_its_arithmetic():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import blended_megatron_dataset_config as config
    for split in ("949,50,1", "969,30,1", "7,2,1", "1,1,1", "98,2", "1"):
        vector = config.parse_and_normalize_split(split)
        matrix = config.convert_split_vector_to_split_matrix(vector)
        for size in (1, 2, 5, 50, 99, 500, 1001, 79_000):
            bounds = split_bounds(Split.read(split), size, "cumulative")
            for part, first, stop in zip(matrix, bounds, bounds[1:], strict=False):
                theirs = (
                    None
                    if part is None
                    else tuple(int(round(share * float(size))) for share in part)
                )
                assert theirs == (first, stop) if part else first == stop, (split, size)
