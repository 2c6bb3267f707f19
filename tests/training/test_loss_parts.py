"""Losses of a validation by data set and by position, against sums over single tokens."""

import json
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from meshwright.data.blend import Blend, Chain
from meshwright.data.loader import Batch, Cyclic
from meshwright.data.samples import OrderedSamples
from meshwright.model.loss import first_positions, range_names
from meshwright.parallel.layout import Layout
from meshwright.training.loss_parts import LossParts

LENGTH = 11


class Numbered(OrderedSamples):
    def __init__(self, prefix):
        self.prefix = prefix

    def __len__(self):
        return 20


def parts_of(dataset, layout=None):
    net = SimpleNamespace(device=torch.device("cpu"), layout=layout or Layout())
    return LossParts(dataset, LENGTH, net)


def test_ranges_cover_all_positions_once():
    assert range_names(1) == ["0"] and range_names(9) == ["0", "1", "2-3", "4-7", "8"]
    for length in range(1, 70):
        covered = []
        for name, first in zip(range_names(length), first_positions(length), strict=True):
            a, _, b = name.partition("-")
            assert int(a) == first
            covered += range(int(a), int(b or a) + 1)
        assert covered == list(range(length))


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_means_are_those_of_single_tokens(masked, restarts):
    torch.manual_seed(0)
    blend = Blend([Numbered("a"), Numbered("b"), Numbered("never")], [0.6, 0.4, 0.0], 10)
    parts, by_position, by_data = parts_of(blend), defaultdict(list), defaultdict(list)
    for first in range(0, 12, 3):  # beyond the end, where a validation begins anew
        samples = [first, first + 1, first + 2]
        losses = torch.rand(3, LENGTH, dtype=torch.float64)
        mask = (torch.rand(3, LENGTH) < 0.6).float() if masked else None
        places = torch.arange(LENGTH).expand(3, -1) % 4 if restarts else None
        ids = torch.zeros(3, LENGTH, dtype=torch.int64)
        parts.add(samples, Batch(ids, ids, torch.tensor(samples), mask, places), losses)
        for (b, t), loss in (
            (at, float(losses[at])) for at in ((b, t) for b in range(3) for t in range(LENGTH))
        ):
            if mask is None or mask[b, t]:
                by_position[int(places[b, t]) if restarts else t].append(loss)
                by_data["ab"[blend.resolve(samples[b] % 10)[0].prefix == "b"]].append(loss)
    want = {}
    for name in range_names(LENGTH):
        a, _, b = name.partition("-")
        if each := [x for p in range(int(a), int(b or a) + 1) for x in by_position[p]]:
            want[name] = sum(each) / len(each)
    assert parts.by_position == pytest.approx(want, rel=1e-12)
    assert parts.by_data == pytest.approx(
        {n: sum(x) / len(x) for n, x in by_data.items()}, rel=1e-12
    )


def test_context_ranks_have_columns_of_their_own():
    losses, ids = torch.rand(2, LENGTH - 1), torch.zeros(2, LENGTH - 1, dtype=torch.int64)
    whole = parts_of(Numbered("a"))
    whole.add([0, 1], Batch(ids, ids, torch.tensor([0, 1])), losses)
    sums = []
    for rank in range(2):
        part = parts_of(Numbered("a"), SimpleNamespace(at=lambda *names, rank=rank: rank, world=1))
        columns = slice(5 * rank, 5 * rank + 5)
        part.add(
            [0, 1],
            Batch(ids[:, columns], ids[:, columns], torch.tensor([0, 1])),
            losses[:, columns],
        )
        sums.append(part.sums)
    torch.testing.assert_close(sum(sums), whole.sums)
    assert whole.by_data == {} and list(whole.by_position) == ["0", "1", "2-3", "4-7", "8-10"]


def test_sources_of_composed_sets():
    a, b = Numbered("a"), Numbered("b")
    chain = Chain([a, Chain([b, a])])
    assert chain.list_sources() == ["a", "b"]
    assert [chain.source_of(k) for k in (0, 19, 20, 40, 59)] == ["a", "a", "b", "a", "a"]
    cyclic = Cyclic(chain)
    assert cyclic.list_sources() == ["a", "b"] and {cyclic.source_of(k) for k in range(60)} == {
        "a",
        "b",
    }
    assert OrderedSamples().list_sources() == [""]  # random tokens


def test_a_run_records_them(run):
    got = run()
    rows = [json.loads(line) for line in (got.folder / "metrics.jsonl").read_text().splitlines()]
    checks = [row for row in rows if row["event"] == "validation"]
    assert checks and all("by_data" not in row for row in checks)
    for row in checks:
        names = list(row["by_position"])
        assert names == range_names(int(names[-1].rpartition("-")[2]) + 1)
        sizes = [int(n.rpartition("-")[2]) - int(n.partition("-")[0]) + 1 for n in names]
        mean = sum(n * x for n, x in zip(sizes, row["by_position"].values(), strict=True)) / sum(
            sizes
        )
        assert mean == pytest.approx(row["loss"], rel=1e-6)
