"""Predicted memory against torch's accounting of real training steps, and torch's allocator."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from accounting import (  # noqa: E402
    META,
    PADDED,
    Account,
    account,
    account_steps,
    config_of,
    connected,
    pretended_gpu,
)
from meshwright.apps.plan.allocator import MIB, CachingAllocator
from shards import account_any, pretended_shards  # noqa: E402

from meshwright.apps.plan import blocks, memory, tensors, updates
from meshwright.apps.plan.tensors import Memory
from meshwright.base.errors import UserError
from meshwright.config.schema import Optimizer, TrainConfig
from meshwright.kernels import grid, moments
from meshwright.kernels.moments import Place, Rounding
from meshwright.optim.rule_table import STATE
from meshwright.optim.rules import make_optimizer, state_dtype
from meshwright.parallel import pipeline_schedule, shard
from meshwright.parallel.layout import Layout
from meshwright.training import parameters, sizes
from meshwright.training.before import memory as require
from meshwright.training.network import Spec, build_network

SMALL = """--num-layers 3 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --micro-batch-size 4
--global-batch-size 8""".split()


class Gpu:
    kind, context_bytes, mapped_ranks = "cuda", 10**9, 1


def error_of(*words: str, pipeline_rank: int = 0) -> tuple[float, float]:
    """Return the relative errors of what is predicted: held throughout, and at the peak."""
    config = config_of(*words)
    held, peak = account(config, pipeline_rank)
    predicted = memory.memory_of_rank(config, PADDED, pipeline_rank, Gpu()).allocated - sum(memory.WORKSPACES)
    kept = sum(sizes.held_bytes(config, PADDED, pipeline_rank, "cuda").values())
    kept -= 2 * sizes.fp8_parameters(config, pipeline_rank)  # cast in the first step
    return kept / held - 1, predicted / peak - 1


LLAMA = """--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16"""
PIPELINE = "--bf16 --pipeline-model-parallel-size 3 --world-size 3"
ONE_HEAD = "--tensor-model-parallel-size 2 --context-parallel-size 2 --world-size 4"  # of each rank
SHARED = "--num-layers 8 --pipeline-model-parallel-size 2 --world-size 2 --hidden-dropout 0 --attention-dropout 0"
ZERO_2 = "--zero-stage 2 --num-layers 4 --pipeline-model-parallel-size 2 --world-size 8 --global-batch-size 64"
WIDE = "--num-layers 6 --hidden-size 2560 --num-attention-heads 32 --seq-length 512"
MUP = "--mup-base-hidden-size 128 --mup-base-num-layers 2 --tensor-model-parallel-size 2 --world-size 2"
TP = "--tensor-model-parallel-size 2 --sequence-parallel --world-size 2 --num-layers 8 --global-batch-size 256"
NARROW = f"""--bf16 {ZERO_2} --hidden-size 384 --num-attention-heads 6 --seq-length 128 --micro-batch-size 1
--swiglu --num-distributed-optimizer-instances 2"""
ONE_SAMPLE = "--micro-batch-size 1 --seq-length 512 --num-layers 1 --hidden-dropout 0 --attention-dropout 0"
TWO_ROUNDS = "--world-size 2 --num-layers 8 --hidden-size 2048 --micro-batch-size 1 --seq-length 64"
VIRTUAL = f"--bf16 {ZERO_2} --pipeline-schedule zero-bubble --num-layers-per-virtual-pipeline-stage 1"
ZERO_3 = "--bf16", "--zero-stage", "3"
PLAIN = "--fused-kernels off --compile off"


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("--bf16", 0),
        ("", 0),
        (LLAMA, 0),
        ("--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2", 0),
        ("--fp16 --recompute-granularity full --recompute-method block --recompute-num-layers 2", 0),
        ("--bf16 --recompute-granularity selective --fp32-residual-connection --final-logit-softcapping 30", 0),
        ("--bf16 --fp8-format hybrid --optimizer muon", 0),
        (f"--bf16 --qk-layernorm {PLAIN}", 0),
        ("--bf16 --optimizer lion --squared-relu --apply-residual-connection-post-layernorm --ema 0.9", 0),
        ("--bf16 --tensor-model-parallel-size 2 --sequence-parallel --world-size 2", 0),
        ("--bf16 --context-parallel-size 2 --zero-stage 1 --world-size 2 --attention-dropout 0 --ema 0.9", 0),
        (f"{PIPELINE} --global-batch-size 16", 0),
        (f"{PIPELINE} --global-batch-size 16", 2),
        (f"{PIPELINE} --pipeline-schedule gpipe --global-batch-size 12", 1),
        (f"{PIPELINE} --pipeline-schedule zero-bubble --global-batch-size 24", 2),
        ("--num-query-groups 2 --attention-dropout 0.1", 0),
        ("--bf16 --tensor-model-parallel-size 2 --world-size 2 --recompute-granularity full --num-layers 1", 0),
        (f"--bf16 {PLAIN} --squared-relu --normalization RMSNorm --recompute-granularity full", 0),
        ("--bf16 --optimizer-state-dtype float8", 0),
        ("--bf16 --optimizer muon --optimizer-state-dtype bfloat16", 0),
        ("--bf16 --optimizer lion --optimizer-state-dtype float8", 0),
        ("--optimizer sgd --optimizer-state-dtype bfloat16", 0),
        ("--optimizer lion --num-layers 1 --optimizer-state-dtype float8 --micro-batch-size 1", 0),
        ("--bf16 --optimizer muon --world-size 4 --micro-batch-size 1 --num-layers 2", 0),
        (f"{SHARED} {PLAIN} --pipeline-schedule zero-bubble --global-batch-size 16", 1),
        (f"{VIRTUAL} {PLAIN} --hidden-size 512 --num-layers 8 --seq-length 128 --recompute-granularity full", 1),
        (f"--bf16 {ZERO_2} --pipeline-schedule zbv --tensor-model-parallel-size 2 --sequence-parallel", 1),
        (f"--bf16 {ZERO_2} --pipeline-schedule zbv {WIDE}", 1),
        (f"--bf16 {ZERO_2} --untie-embeddings-and-output-weights --micro-batch-size 1", 1),
        (f"{NARROW} --fp32-residual-connection --disable-bias-linear --recompute-granularity full", 0),
        (f"--bf16 --optimizer muon {MUP} --hidden-size 512 --micro-batch-size 1 --seq-length 64", 0),
        ("--bf16 --fp8-format hybrid --swiglu --recompute-granularity full --num-layers 1", 0),
        (f"{ONE_SAMPLE} --num-query-groups 1 --squared-relu", 0),
        (f"--bf16 --optimizer muon --zero-stage 2 {TWO_ROUNDS}", 0),
        (f"--bf16 {TP} --recompute-granularity full --hidden-size 64 --micro-batch-size 32", 0),
        (
            f"--bf16 {ONE_HEAD} --recompute-granularity full --attention-dropout 0 --micro-batch-size 8 --num-layers 2",
            0,
        ),
    ],
)
def test_agrees_with_what_training_allocates(line, rank):
    given = line.split()
    held, peak = error_of(*(SMALL if "--global-batch-size" not in given else SMALL[:-2]), *given, pipeline_rank=rank)
    assert abs(held) < 0.002 and abs(peak) < 0.002, f"held {held:+.2%}, peak {peak:+.2%}"


@pytest.mark.parametrize(
    "line",
    [
        "--bf16 --pipeline-model-parallel-size 3 --world-size 3 --global-batch-size 16",  # no logits on the first rank
        "--bf16 --context-parallel-size 2 --zero-stage 1 --world-size 2 --attention-dropout 0",  # half the logits
        "--bf16 --optimizer muon --final-logit-softcapping 30",
    ],
)
def test_a_run_that_fits_is_not_refused(line, monkeypatch):
    """What a start requires is at least the state, and at most what training allocates."""
    config, padded = config_of(*SMALL, "--micro-batch-size", "8", *line.split()), 1 << 15
    held, peak = account(config, 0, padded)
    for have, fits in ((peak, True), (int(0.99 * held), False)):
        monkeypatch.setattr(require.devices, "total_memory", lambda _, have=have: have)
        with contextlib.nullcontext() if fits else pytest.raises(UserError, match="needs at least"):
            require.require_memory(config, padded, 0, torch.device("cuda"))


@pytest.mark.parametrize(
    ("rule", "is_cautious", "state"),  # all but what torch has
    [
        ("adamw", True, "float32"),
        ("adamw", True, "float8"),
        ("adamw", False, "float8"),
        ("lion", True, "float32"),
        ("lion", True, "float8"),
        ("lion", False, "float32"),
        ("lion", False, "float8"),
        ("sgd", False, "float8"),
    ],
)
def test_an_elementwise_update_allocates_as_predicted(rule, is_cautious, state, monkeypatch):
    """Cautious AdamW takes no more where another layout than ZeRO 3 updates in one kernel."""
    o, size = Optimizer(optimizer=rule, cautious_weight_decay=is_cautious, optimizer_state_dtype=state), 1 << 16
    weight, counter = torch.nn.Parameter(torch.empty(size, device=META)), torch.empty((), device=META)
    weight.grad = torch.empty(size, device=META)
    update = make_optimizer(o, rule, [weight], counter)
    monkeypatch.setattr(moments, "store", lambda *_: None)  # a kernel on a GPU
    kept = {key: torch.empty(size, dtype=state_dtype(o, key, torch.float32), device=META) for key in STATE[rule]}
    update.state[weight] |= kept
    update.found_inf = torch.empty((), device=META)
    if state == "float8":
        update.rounding = Rounding({weight: Place(0, 0, 0, size, 0)}, counter)
    predicted = Memory()
    updates.update_elementwise(predicted, rule, size, o)
    with Account() as account:
        for x in (weight, weight.grad, *kept.values()):
            account.note(x)
        held = account.now
        update.step()
    assert account.peak - held == pytest.approx(predicted.peak, abs=20 * 512)
    words = *SMALL, "--bf16", "--world-size", "2", "--cautious-weight-decay"
    for stage in (1, 3):
        config = config_of(*words, "--zero-stage", str(stage))
        assert (updates.update_events(config, PADDED, 0).peak > 0) == (stage == 3)


@pytest.mark.parametrize(
    "more",
    [
        "--optimizer-state-dtype float8",
        "--optimizer-state-dtype bfloat16 --cautious-weight-decay --swiglu --ffn-hidden-size 1152",
        "--optimizer-state-dtype float8 --swiglu --ffn-hidden-size 1022 --seq-length 64",  # a rank has half of the gate
        "--cautious-weight-decay",
        "--optimizer lion --optimizer-state-dtype float8",
        "--optimizer muon --optimizer-state-dtype float8",
        "--optimizer muon --swiglu",
    ],
)
def test_an_update_of_shards_allocates_as_predicted(more):
    """The first of four ranks updates its rows of each parameter, as fully_shard cuts them."""
    config = config_of(*SMALL[:-2], "--global-batch-size", "16", "--world-size", "4", *ZERO_3, *more.split())
    counter = Account()
    with pretended_shards(config, 0, counter) as layout:
        store = build_network(Spec(config, layout, META, 1000, PADDED)).store
        with counter:
            for part in store.update_ranges:
                part.master.grad = torch.empty_like(part.master)
                for x in (part.master, part.master.grad, *part.state.values()):
                    counter.note(x)
            held = counter.peak = counter.now
            for update in store.updates.values():
                update.found_inf = torch.zeros((), device=META)
                update.step()
    assert counter.peak - held == pytest.approx(updates.update_events(config, PADDED, 0).peak, abs=20 * 512)


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("", 0),
        ("--swiglu --disable-bias-linear --ffn-hidden-size 1152 --hidden-size 512 --world-size 4", 0),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 --num-layers 6", 0),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4 --world-size 4", 1),
        ("--tensor-model-parallel-size 2 --sequence-parallel --world-size 4 --ema 0.9", 0),
        ("--untie-embeddings-and-output-weights --micro-batch-size 1 --seq-length 64 --num-layers 1", 0),
        ("--optimizer muon --optimizer-state-dtype float8 --context-parallel-size 2 --attention-dropout 0", 0),
    ],
)
def test_agrees_with_what_fully_shard_allocates(line, rank):
    config = config_of(*SMALL[:-2], "--global-batch-size", "16", "--world-size", "2", *ZERO_3, *line.split())
    predicted = memory.memory_of_rank(config, PADDED, rank, Gpu()).allocated - sum(memory.WORKSPACES)
    assert predicted == pytest.approx(account_any(config, rank)[1], rel=0.002)


class Node(Gpu):
    mapped_ranks = 8


def test_rows_of_tensor_ranks_are_mapped(monkeypatch):
    """A part for each rank's rows and two for sums, where memory can be mapped."""
    words = *SMALL, "--world-size", "4", "--tensor-model-parallel-size", "4", "--sequence-parallel"
    for more, device, worthwhile, parts in (
        ("--tp-overlap on", Node(), 16 << 20, 6),
        ("--tp-overlap on", Gpu(), 16 << 20, 0),
        ("--tp-overlap auto", Node(), 16 << 20, 0),
        ("--tp-overlap auto", Node(), 1, 6),
        ("--tp-overlap auto --compile on", Node(), 1, 0),
    ):
        monkeypatch.setattr(memory.traffic, "WORTHWHILE_BYTES", worthwhile)
        kinds = memory.memory_of_rank(config_of(*words, *more.split()), PADDED, 0, device).kinds
        assert kinds["buffers"] == sum(memory.WORKSPACES) + parts * (4 * 256 // 4) * 256 * 4  # of float32


def test_shards_in_host_memory_free_no_sums_of_the_device():
    config = config_of(*SMALL, "--world-size", "2", *ZERO_3, "--cpu-optimizer")
    assert min(memory.memory_of_rank(config, PADDED, 0, Gpu()).kinds.values()) >= 0


def test_shards_keep_no_gradients_of_the_step_before():
    """The second step takes no more than the first."""
    config = config_of(*SMALL, "--world-size", "2", *ZERO_3)
    peaks = []
    for steps in (1, 2):
        counter = Account()
        with pretended_shards(config, 0, counter) as layout, counter:
            peaks.append(account_steps(config, layout, counter, PADDED, steps)[1])
    assert peaks[1] <= 1.001 * peaks[0], peaks


@pytest.mark.parametrize(
    "more", ["--bf16", "", "--bf16 --optimizer lion --ema 0.9", "--bf16 --optimizer-state-dtype float8"]
)
def test_offloaded_state_is_on_the_host(more):
    config = config_of(*SMALL, "--cpu-optimizer", *more.split())
    store = build_network(Spec(config, Layout(), torch.device("cpu"), 1000, PADDED)).store
    state = [values for part in store.update_ranges for values in part.state.values()]
    state += store.average.values if store.average else []
    on_host = sum(x.nbytes for x in (store.master, store.host_share, store.outgoing, *state))
    assert sizes.host_bytes(config, PADDED, 0) == on_host
    on_device = sum(x.nbytes for x in (store.weights, store.gradients))
    assert sum(sizes.held_bytes(config, PADDED, 0, "cuda").values()) == on_device
    assert sizes.state_bytes(config, PADDED, 0, "cpu") == on_device + on_host


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Forget what was predicted before and within a test that changes a table."""

    def forget() -> None:
        parameters.COUNTED.clear()
        for cache in (parameters.shapes_of_layer, memory.measure_step, memory.measure_passes):
            cache.cache_clear()

    forget()
    yield
    forget()


def test_reads_the_rule_of_the_flat_buffers(monkeypatch):
    """Wider gaps between parameters need more memory, in the prediction as in training."""
    words = *SMALL, "--bf16", "--zero-stage", "1", "--world-size", "2"
    before = account(config_of(*words))[0]
    monkeypatch.setattr(shard, "ALIGN", 1 << 14)
    assert account(config_of(*words))[0] > 1.02 * before
    assert abs(error_of(*words)[0]) < 0.002


def counted(config: TrainConfig) -> list[tuple[int, int]]:
    """Return the parameters of each pipeline rank, predicted and as training cuts them."""
    parameters.COUNTED.clear()
    parameters.shapes_of_layer.cache_clear()
    built = list[int]()
    with pretended_gpu():
        for rank in range(config.parallel.pipeline_model_parallel_size):
            build_network(Spec(config, connected(config, rank), META, 1000, PADDED), built.append)
    return list(zip(parameters.parameters_of_ranks(config, PADDED), built, strict=True))


@pytest.mark.parametrize("name", [r"h\.\d+\.mlp\.fc\.weight", r"(wte|lm_head)\.weight"])
def test_reads_the_table_of_cuts(name, monkeypatch, forgetful):
    """Matrices that tensor ranks do not cut are whole in the prediction, as in training."""
    config = config_of(*SMALL, "--tensor-model-parallel-size", "2", "--world-size", "2")
    before = counted(config)
    monkeypatch.setitem(shard.CUTS, name, shard.CutRule(None))
    after = counted(config)
    assert all(planned == built for planned, built in before + after) and after[0] > before[0]


def test_reads_where_a_schedule_puts_stages(monkeypatch, forgetful):
    """A V-shaped schedule has both ends of the model on its first rank, planned and built."""
    words = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --untie-embeddings-and-output-weights"
    config = config_of(*SMALL, *words.split(), "--pipeline-model-parallel-size", "2", "--world-size", "2")
    before = counted(config)
    monkeypatch.setattr(pipeline_schedule, "V_SHAPED", ("1f1b",))
    after = counted(config)
    assert all(planned == built for planned, built in before + after)
    assert after[0] > before[0] and after[1] < before[1]


def test_reads_the_kernels_tables(monkeypatch, forgetful):
    """More programs of a kernel need more memory, in the prediction as in training."""
    words = *SMALL, "--bf16", "--micro-batch-size", "8"
    before = error_of(*words)[1], account(config_of(*words))[1]
    launch = grid.BackwardLaunch(4, 64, 3, rows=1)
    monkeypatch.setitem(grid.BACKWARD, 1024, launch)
    memory.measure_step.cache_clear()
    after = error_of(*words)[1], account(config_of(*words))[1]
    assert after[1] > before[1] and abs(after[0]) < 0.005


def test_extends_to_many_layers():
    """The memory of a step grows by the same bytes with each layer."""
    peaks = []
    for layers in (4, 5, 6, 12):
        passes = blocks.sizes_of(config_of(*SMALL, "--bf16", "--num-layers", str(layers)), 1 << 14, 132)
        peaks.append(sum(memory.measure_step(passes, blocks.Stage(layers)).values()))
    dropout = peaks[1] - peaks[0]
    assert peaks[2] - peaks[1] == dropout and peaks[3] - peaks[2] == 6 * dropout


def test_allocator_takes_segments_as_torch_does():
    allocator = CachingAllocator()
    allocator.allocate(1, 512)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(2, 3 * MIB)
    assert allocator.reserved == 22 * MIB  # 20 for all below 10
    allocator.allocate(3, 11 * MIB + 512)
    assert allocator.reserved == 22 * MIB  # the rest of the 20
    allocator.allocate(4, 11 * MIB + 512)
    assert allocator.reserved == 34 * MIB
    for key in (2, 3, 4):
        allocator.release(key)
    allocator.allocate(5, 12 * MIB)  # the smallest that fits
    allocator.allocate(6, 20 * MIB)
    assert allocator.reserved == 34 * MIB
    allocator.release(6)
    allocator.empty_cache()
    assert allocator.reserved == 14 * MIB and allocator.most == 34 * MIB


def test_streams_share_no_block():
    allocator = CachingAllocator()
    allocator.allocate(1, 12 * MIB)
    allocator.release(1)
    allocator.allocate(2, 12 * MIB, stream=1)
    assert allocator.reserved == 24 * MIB
    allocator.release(2)
    allocator.allocate(3, 12 * MIB)
    assert allocator.reserved == 24 * MIB


def test_shards_are_gathered_and_summed_in_streams_of_their_own():
    config = config_of(*SMALL, "--world-size", "2", *ZERO_3)
    sums = [event for event in memory.step_events(config, PADDED, 0) if event[3] == tensors.SUMMING and event[1] > 0]
    gathered = [event for event in memory.step_events(config, PADDED, 0) if event[3] == tensors.GATHERING]
    held = sizes.held_bytes(config, PADDED, 0, "cuda")
    assert sum(size for _, size, _, _ in sums) == pytest.approx(held["gradients"], rel=0.01)
    assert {kind for _, _, kind, _ in gathered} == {"weights"} and sum(size for _, size, _, _ in gathered) == 0


@pytest.mark.parametrize(
    ("schedule", "zero_stage"),
    [*itertools.product(["1f1b", "zero-bubble", "zbv"], [0, 1, 2]), ("1f1b", 3), ("gpipe", 3)],
)
def test_every_rank_of_a_pipeline_frees_what_it_takes(schedule, zero_stage):
    line = f"--pipeline-model-parallel-size 2 --world-size 4 --pipeline-schedule {schedule} --zero-stage {zero_stage}"
    shape = "--bf16 --num-layers 8 --micro-batch-size 2 --global-batch-size 16 --hidden-dropout 0 --attention-dropout 0"
    config = config_of(*SMALL, *shape.split(), *line.split())
    for rank in range(2):
        found = memory.memory_of_rank(config, PADDED, rank, Gpu())
        assert found.reserved >= found.allocated


def test_graphs_take_a_pool_of_their_own():
    config = config_of(*SMALL, "--bf16")
    graphs, plain = (
        memory.memory_of_rank(c, PADDED, 0, Gpu()).reserved
        for c in (config, config_of(*SMALL, "--bf16", "--cuda-graphs", "off"))
    )
    assert graphs >= plain > memory.memory_of_rank(config, PADDED, 0, Gpu()).allocated
