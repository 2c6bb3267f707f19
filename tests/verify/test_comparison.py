"""A layout equals one process in every tensor, and a seeded bug is found and named."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from layouts import parse
from meshwright.launch.team import Team
from meshwright.parallel.parts import Parts
from meshwright.verify import small_run
from meshwright.verify.compare import GRADIENTS, ORDER, compare
from meshwright.verify.small_run import Place
from ranks import run_ranks

EQUAL = [
    "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel --attention-dropout 0.1 --bf16",
    "--world-size 2 --zero-stage 3 --recompute-granularity full --untie-embeddings-and-output-weights",
    "--world-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --cpu-optimizer",
    "--world-size 2 --context-parallel-size 2 --zero-stage 2 --optimizer sgd --eod-mask-loss",
]


def compare_all(file: str) -> None:
    """Compare each layout, and one with a bug, and write what was found."""
    team, found = Team(dist.get_rank(), dist.get_world_size(), dist.group.WORLD), {}
    place = Place(connect=small_run.Connected())
    for line in [*EQUAL, "broken"]:
        wrong = mock.patch.object(Parts, "is_partial", lambda parts, name: False)
        config = parse((EQUAL[0] if line == "broken" else line).replace("--bf16", "--params-dtype float32 --bf16"))
        with wrong if line == "broken" else mock.MagicMock():
            made = compare(config, team, 1, None, place)
        first = made.differences[0] if made.differences else None
        found[line] = {
            "equal": made.is_equal,
            "what": [one.what for one in made.compared],
            "gradients": made.gradients,
            "first": first and [first.what, first.name, first.where],
            "not": made.not_compared,
        }
    if team.is_lead:
        Path(file).write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    file = tmp_path_factory.mktemp("compare") / "found.json"
    run_ranks(compare_all, 2, str(file))
    return json.loads(file.read_text())


@pytest.mark.parametrize("line", EQUAL)
def test_a_layout_equals_one_process_in_every_tensor(found, line):
    made = found[line]
    assert made["equal"] and made["what"] == ORDER and made["first"] is None
    assert len(made["gradients"]) >= 50 and max(made["gradients"].values()) > 0
    assert ("rounding in bf16: both runs are in float64" in made["not"]) == ("--bf16" in line)


def test_a_missing_sum_over_tensor_ranks_is_named(found):
    made = found["broken"]
    what, name, where = made["first"]
    assert not made["equal"] and what == GRADIENTS and where.startswith("step 1, rank ")
    assert "ln_" in name or name.endswith("proj.bias") or name == "wpe.weight", name
