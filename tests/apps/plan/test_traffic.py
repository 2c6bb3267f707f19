"""Bytes sent: by hand in a ring, and counted in real runs of CPU ranks."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch.distributed as dist
from plans import SMALL, planned

import layouts
from meshwright.apps.plan import traffic
from meshwright.apps.plan.timing import StepTerms
from meshwright.apps.plan.traffic import bytes_sent
from meshwright.base.device_profiles import load_profile
from meshwright.config.matrices import MATRICES
from meshwright.parallel import comm
from meshwright.training.parameters import parameters_of_ranks
from meshwright.training.sizes import fp8_parameters

BATCH = "--micro-batch-size 2 --global-batch-size {}"
STREAM = 2 * 32 * 64 * 2  # bytes of a micro-batch's activations at one place


def sent(words: str, batch: int, world: int = 4) -> dict[str, int]:
    return bytes_sent(planned(f"{SMALL} {BATCH.format(batch)} {words}", world), 128)


def test_data_parallel_bytes_match_a_ring_counted_by_hand():
    """In a ring of four ranks a buffer takes 3 rounds of a quarter to reduce, and 3 to gather."""
    parameters = parameters_of_ranks(planned(SMALL), 128)[0]
    reduced, gathered = 3 * parameters * 4 // 4, 3 * parameters * 2 // 4
    for stage, wanted in {
        0: 2 * reduced,
        1: reduced + gathered,
        2: 5 * reduced + gathered,
        3: 5 * (reduced + 2 * gathered),
    }.items():
        assert sent(f"--zero-stage {stage}", 40) == {"data": pytest.approx(wanted, abs=1)}


def test_replicas_of_shards_add_their_own_sum():
    both = sent("--zero-stage 1 --num-distributed-optimizer-instances 2", 8)
    parameters = parameters_of_ranks(planned(SMALL), 128)[0]
    assert both == {
        "data": pytest.approx(parameters * 6 / 2, abs=1),
        "replicas": pytest.approx(parameters * 2, abs=1),
    }


def test_the_other_dimensions_by_hand():
    layers, count = 4, 3
    loss = 2 * 3 * 64 * 3 * 4 // 4  # three numbers for each of 64 tokens
    tensor = count * (2 * (4 * layers + 2) * 3 * STREAM // 4 + loss)
    assert sent("--tensor-model-parallel-size 4", 6) == {"tensor": tensor}
    again = count * 3 * STREAM // 4 * (2 * layers + 1)
    assert sent("--tensor-model-parallel-size 4 --sequence-parallel", 6) == {
        "tensor": tensor + again
    }
    # To each of the three others: its heads for this rank's tokens
    context = sent("--context-parallel-size 4", 6)
    assert context["context"] == count * 2 * 4 * layers * 3 * (STREAM // 16)
    pipeline = sent("--pipeline-model-parallel-size 4", 6)
    assert pipeline == {"pipeline": 2 * count * STREAM, "embedding": 128 * 64 * 4}
    assert sent("", 2, world=1) == {}


HOMES = object()  # in the place of the group whose ranks exchange Muon's matrices


class Counted:
    """Bytes that this rank's collectives and messages send in a ring, by name of the group."""

    def __init__(self, layout) -> None:
        self.names = {id(group): name for name, group in layout.groups.items()} | {
            id(HOMES): "muon"
        }
        self.bytes: dict[str, float] = {}

    def add(self, group, share: float, x) -> None:
        name = self.names.get(id(group), "world")
        part = (group.size() - 1) / group.size() if group is not None and share else 0
        self.bytes[name] = (
            self.bytes.get(name, 0) + (share * part if share else 1) * x.numel() * x.element_size()
        )


@contextlib.contextmanager
def counting(name, trainer, step):
    """Count what a step sends, by replacing torch's functions where the package calls them."""
    counted = trainer.counted = Counted(trainer.net.layout)

    def patched(target, attribute, read):
        """`read` takes the call's arguments to (tensor, group, share of the tensor's bytes)."""
        original = getattr(target, attribute)

        def call(*args, **named):
            x, group, share = read(*args, **named)
            counted.add(group, share, x)
            return original(*args, **named)

        return mock.patch.object(target, attribute, call)

    with contextlib.ExitStack() as stack:
        for target, attribute, read in [
            (comm, "gather_into", lambda full, own, group, async_op: (full, group, 1)),
            (comm, "scatter_into", lambda part, full, group, async_op: (full, group, 1)),
            (
                dist,
                "all_to_all_single",
                lambda out, x, *sizes, group=None: (x, group, 1) if group else (x[:0], None, 0),
            ),
            (
                comm,
                "exchange",
                lambda x, sent, _, group: (x[: sum(sent) - sent[group.rank()]], HOMES, 0),
            ),
            (dist, "all_reduce", lambda x, op=None, group=None, async_op=False: (x, group, 2)),
            (dist, "isend", lambda x, to, group: (x, group, 0)),
        ]:
            stack.enter_context(patched(target, attribute, read))
        yield


def counted_bytes(trainer):
    return trainer.counted.bytes


LAYOUTS = {
    "--world-size=2 --global-batch-size=4 --zero-stage=2": {"shard": "data"},
    "--world-size=2 --tensor-model-parallel-size=2 --sequence-parallel": {"tp": "tensor"},
    "--world-size=2 --context-parallel-size=2": {"cp": "context"},
    "--world-size=2 --pipeline-model-parallel-size=2": {
        "forward": "pipeline",
        "embedding": "embedding",
    },
}


def test_predicted_bytes_are_those_of_real_runs():
    """Padding of parameters and small sums of a step are left out: up to 4 % of this network."""
    configs = {line: layouts.parse(f"{line} --hidden-size=128") for line in LAYOUTS}
    counted = layouts.run_all(configs, 2, steps=1, around=counting, read=counted_bytes)
    for line, groups in LAYOUTS.items():
        predicted = bytes_sent(configs[line], 40)
        for group, dimension in groups.items():
            most = max(rank.get(group, 0) for rank in counted[line])
            # In a pipeline of two no rank sends in both directions.
            wanted = predicted[dimension] / (2 if group == "forward" else 1)
            assert most == pytest.approx(wanted, rel=0.04), (line, dimension)


def test_predicted_bytes_of_muon_are_those_of_real_runs():
    """The mean of the ranks: which of them is the home of more depends on the matrices.

    Without ZeRO, where the first part of a layer may be at home more often than the others.
    """
    line = "--world-size=2 --global-batch-size=4 --hidden-size=128 --optimizer=muon"
    config = layouts.parse(line)
    counted = layouts.run_all({line: config}, 2, steps=1, around=counting, read=counted_bytes)
    sent = sum(rank.get("muon", 0) for rank in counted[line]) / 2
    assert sent == pytest.approx(bytes_sent(config, 40)["muon"], rel=0.001)


FP8 = (
    "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --vocab-size 100"
    " --bf16 --fp8-format e4m3"
)


@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_that_stays_out_of_fp8_is_planned_so(name, monkeypatch):
    """The row of a matrix alone says whether fp8 multiplies it: casts and seconds follow."""
    config, profile = planned(FP8), load_profile("h100")
    terms = StepTerms(config, 128, profile, profile.links)
    casts, seconds = fp8_parameters(config, 0), terms.products_of_layer(True)
    outputs, inputs = MATRICES[name].shape(config.model)
    monkeypatch.setitem(MATRICES, name, MATRICES[name]._replace(fp8=False))
    assert casts - fp8_parameters(config, 0) == 4 * outputs * inputs
    assert seconds < terms.products_of_layer(True) < terms.products_of_layer(False)


def test_each_matrix_has_its_collectives(monkeypatch):
    """One more first matrix gathers rows once more, and adds up their gradient once more."""
    plain = planned(f"{SMALL} --tensor-model-parallel-size 2", 2)
    sequence = planned(f"{SMALL} --tensor-model-parallel-size 2 --sequence-parallel", 2)
    assert [traffic.tensor_messages(c) for c in (plain, sequence)] == [(2, 2), (4, 6)]
    monkeypatch.setitem(MATRICES, "attn.gate", MATRICES["attn.qkv"])
    assert [traffic.tensor_messages(c) for c in (plain, sequence)] == [(2, 3), (5, 8)]
