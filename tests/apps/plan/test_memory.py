"""The memory that a plan measures with few layers beside that of whole steps; torch's allocator."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from plans import PADDED, Gpu, config_of  # noqa: E402
from whole_steps import account_steps  # noqa: E402

import warm
from meshwright.apps.plan import memory
from meshwright.apps.plan.measure import stages
from meshwright.apps.plan.measure.account import META, Account
from meshwright.apps.plan.measure.allocator import MIB, CachingAllocator
from meshwright.apps.plan.measure.layers import choose_units, longest_repeat
from meshwright.apps.plan.measure.pretend import connected, pretended_gpu
from meshwright.base.errors import UserError
from meshwright.config.schema import TrainConfig
from meshwright.model.gpt import GPT
from meshwright.parallel import shard
from meshwright.parallel.layout import Layout
from meshwright.runtime.ranks.team import Team
from meshwright.training import parameters, sizes
from meshwright.training.before import memory as require
from meshwright.training.network import Spec, build_network

SMALL = """--num-layers 9 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2
--global-batch-size 4""".split()
LLAMA = """--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16"""
TWO = "--bf16 --pipeline-model-parallel-size 2 --world-size 2 --num-layers 14 --global-batch-size 8"
FOUR = (
    "--bf16 --pipeline-model-parallel-size 2 --world-size 4 --num-layers 16 --global-batch-size 16"
)
TP = "--tensor-model-parallel-size 2 --sequence-parallel --world-size 2"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage 2"
FULL = "--recompute-granularity full --recompute-method"


def account(
    config: TrainConfig, pipeline_rank: int = 0, padded: int = PADDED, steps: int = 2
) -> tuple[int, int]:
    """Return the bytes that a rank holds after its set-up, and most in whole steps."""
    counter = Account()
    return account_steps(config, padded, pipeline_rank, counter, steps), counter.peak


def tensors(config: TrainConfig, pipeline_rank: int = 0, **more: Any) -> int:
    """Return the bytes of all tensors at the peak, as a plan measures them."""
    planned = memory.memory_of_rank(config, PADDED, pipeline_rank, Gpu(), **more)
    return planned.allocated - sum(memory.WORKSPACES)


def require_agreement(line: str, rank: int) -> None:
    given = line.split()
    config = config_of(*(SMALL if "--global-batch-size" not in given else SMALL[:-2]), *given)
    held, peak = account(config, rank)
    kept = sum(sizes.held_bytes(config, PADDED, rank, "cuda").values())
    if config.parallel.zero_stage == 3:
        kept = held  # fully_shard has no gradients before the first step
    kept -= 2 * sizes.fp8_parameters(config, rank)  # cast in the first step
    assert kept == pytest.approx(held, rel=0.001)
    assert tensors(config, rank) == pytest.approx(peak, rel=0.001)


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("--bf16", 0),
        (f"{LLAMA} --zero-stage 2 --world-size 2 --global-batch-size 8", 0),
        (f"{TWO} --hidden-dropout 0 --attention-dropout 0", 1),
    ],
)
def test_few_layers_tell_what_whole_steps_allocate(line: str, rank: int) -> None:
    require_agreement(line, rank)


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("", 0),
        (
            f"--bf16 {TP} --recompute-granularity selective --fp32-residual-connection --final-logit-softcapping 30",
            0,
        ),
        ("--bf16 --fp8-format hybrid --optimizer muon", 0),
        ("--bf16 --fp8-format hybrid --first-last-layers-bf16 --swiglu", 0),
        (f"--fp16 {FULL} block --recompute-num-layers 9 --num-layers 18", 0),
        ("--bf16 --window-size 32 --window-attn-skip-freq 3 --num-layers 24", 0),
        ("--bf16 --qk-layernorm --fused-kernels off --compile off --squared-relu", 0),
        ("--bf16 --optimizer lion --apply-residual-connection-post-layernorm --ema 0.9", 0),
        ("--bf16 --optimizer-state-dtype float8 --cautious-weight-decay", 0),
        ("--num-query-groups 2 --attention-dropout 0.1", 0),
        ("--optimizer sgd --optimizer-state-dtype bfloat16", 0),
        ("--bf16 --context-parallel-size 2 --zero-stage 1 --world-size 2 --attention-dropout 0", 0),
        ("--bf16 --reset-attention-mask --reset-position-ids --eod-mask-loss", 0),
        (f"{FOUR} --zero-stage 3 --num-layers 14", 1),
        # Of the second rank's stages the first and the third are alike.
        (f"{TWO} {VIRTUAL} --num-layers 16 --pipeline-layout 1,2,2,3,2,2,3,1", 1),
        (f"--bf16 {FULL} uniform --recompute-num-layers 2 --num-layers 13 --optimizer muon", 0),
        (TWO, 0),
        (f"{TWO} --pipeline-schedule gpipe", 1),
        (f"{TWO} --global-batch-size 24", 1),
        (f"{TWO} {VIRTUAL} --num-layers 16", 1),
        (f"{FOUR} --zero-stage 2", 0),
        (f"{FOUR} --zero-stage 2 {VIRTUAL}", 1),
        (f"{FOUR} --zero-stage 2 --num-layers 4", 1),
        (
            "--bf16 --fp8-format hybrid --zero-stage 2 --world-size 2 --global-batch-size 8 --optimizer lion",
            0,
        ),
        (f"{FOUR} --zero-stage 3 --optimizer lion --optimizer-state-dtype float8", 1),
        (f"--bf16 --zero-stage 3 {TP} --world-size 4 --global-batch-size 8 --ema 0.9", 0),
        (
            f"--bf16 --zero-stage 3 --world-size 2 {FULL} uniform --recompute-num-layers 2 --num-layers 18",
            0,
        ),
    ],
)
def test_all_settings_are_measured(line: str, rank: int) -> None:
    require_agreement(line, rank)


def test_own_models_are_measured() -> None:
    """A user's model may hold more than GPT does, and is measured as it is."""
    torch.manual_seed(0)

    class Wider(GPT):
        def forward(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            logits = super().forward(tokens, *args, **kwargs)
            return logits + torch.tanh(logits)

    config, counter = (
        config_of(*SMALL, "--bf16", "--num-layers", "3", "--fused-kernels", "off"),
        Account(),
    )
    account_steps(config, PADDED, 0, counter, model=Wider)
    assert tensors(config, model=Wider) == pytest.approx(counter.peak, rel=0.001)
    assert tensors(config, model=Wider) > tensors(config)


def test_layers_that_are_alike_are_measured_once() -> None:
    """Kinds of layers, groups that are recomputed as one and their rest are all there."""

    def chosen(*words: str) -> list[tuple[tuple[int, ...], int]]:
        config = config_of(*SMALL, *words)
        return [
            (unit.layers, unit.copies)
            for unit in choose_units(config, range(config.model.num_layers or 0), 3)
        ]

    assert chosen("--num-layers", "9") == [((0,), 1), ((1,), 7), ((2,), 1)]
    assert chosen("--num-layers", "3") == [((0,), 1), ((1,), 1), ((2,), 1)]
    recomputed = *f"{FULL} uniform --recompute-num-layers 2".split(), "--num-layers", "11"
    assert chosen(*recomputed) == [((0, 1), 1), ((2, 3), 3), ((4, 5), 1), ((10,), 1)]
    edges = "--bf16", "--fp8-format", "hybrid", "--first-last-layers-bf16", "--num-layers", "8"
    assert chosen(*edges) == [((0,), 1), ((1,), 1), ((2,), 4), ((3,), 1), ((7,), 1)]
    windows = "--window-size", "32", "--window-attn-skip-freq", "2", "--num-layers", "10"
    assert chosen(*windows) == [((0, 1), 1), ((2, 3), 3), ((4, 5), 1)]
    assert longest_repeat("abababc") == (2, 3) and longest_repeat("abc") == (1, 1)


def test_a_measurement_needs_no_memory_of_the_host() -> None:
    """The tables of AdamW alone would be 1 GiB."""
    config = config_of(
        *SMALL, *"--bf16 --hidden-size 12288 --num-attention-heads 96 --num-layers 96".split()
    )
    tensors(config_of(*SMALL, "--bf16"))  # imports what it needs
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert tensors(config) > 96 * 12 * 12288**2 * 18
    # KiB on Linux; more on macOS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


WITHOUT_TRITON = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "triton" else find(name, *more)
sys.modules["triton"] = None
"""


@pytest.mark.whole
@pytest.mark.parametrize("has_triton", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_child_measures_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_triton: bool
) -> None:
    """Also where triton is missing, which a process that starts warm has already."""
    if has_triton:
        monkeypatch.setattr(sys, "executable", warm.python())
    else:
        (tmp_path / "sitecustomize.py").write_text(WITHOUT_TRITON)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = "--bf16 --num-layers 2" if has_triton else "--bf16 --num-layers 3 --fp8-format hybrid"
    config = config_of(*SMALL[2:], *words.split())
    found = memory.measure_in_child(config, PADDED, Gpu(), [0], niceness=0)
    here = memory.memory_of_rank(config, PADDED, 0, Gpu())
    assert found is not None and found[0].kinds == here.kinds
    assert (found[0].reserved, found[0].context) == (here.reserved, here.context)


@pytest.mark.parametrize(
    "line",
    [
        # no logits on the first rank
        "--bf16 --pipeline-model-parallel-size 3 --world-size 3 --global-batch-size 16",
        "--bf16 --optimizer muon --final-logit-softcapping 30",
    ],
)
def test_a_run_that_fits_is_not_refused(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a start requires is at least the state, and at most what training allocates."""
    words = "--num-layers 3 --seq-length 256 --micro-batch-size 8 --global-batch-size 8".split()
    config, padded = config_of(*SMALL, *words, *line.split()), 1 << 15
    held, peak = account(config, 0, padded)
    for have, fits in ((peak, True), (int(0.99 * held), False)):
        monkeypatch.setattr(require.devices, "total_memory", lambda _, have=have: have)
        with contextlib.nullcontext() if fits else pytest.raises(UserError, match="needs at least"):
            require.require_memory(config, padded, 0, torch.device("cuda"), Team())


def test_ranks_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU three ranks need three times what one needs; on two machines, two of them do."""
    config, cpu = config_of(*SMALL), torch.device("cpu")
    need = sizes.state_bytes(config, PADDED, 0, "cpu") + sizes.logits_bytes(config, PADDED, 0)
    monkeypatch.setattr(require.devices, "total_memory", lambda _: 2 * need)

    class Ranks(Team):
        def merge(self, value: Any, combine: Any) -> Any:
            return combine([value] * self.size)

    require.require_memory(config, PADDED, 0, cpu, Ranks(0, 2))
    with pytest.raises(UserError, match=r"for the 3 ranks here, but the device has"):
        require.require_memory(config, PADDED, 0, cpu, Ranks(0, 3))
    each = [9, 1, 2, 4]  # of a rank of each stage; each stage has two ranks
    assert [sizes.most_of_a_machine(each, 8, ranks) for ranks in (1, 2, 3, 8)] == [9, 18, 19, 32]


class Node(Gpu):
    symmetric_ranks = 8


def test_rows_of_tensor_ranks_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part for each rank's rows and two for sums, where memory can be mapped."""
    layout = "--num-layers 2 --world-size 4 --tensor-model-parallel-size 4 --sequence-parallel"
    words = [*SMALL, *layout.split()]
    for more, device, worthwhile, parts in (
        ("--tp-overlap on", Node(), 16 << 20, 6),
        ("--tp-overlap on", Gpu(), 16 << 20, 0),
        ("--tp-overlap auto", Node(), 16 << 20, 0),
        ("--tp-overlap auto", Node(), 1, 6),
        ("--tp-overlap auto --compile on", Node(), 1, 0),
    ):
        monkeypatch.setattr(memory.traffic, "WORTHWHILE_BYTES", worthwhile)
        size = memory.buffer_bytes(config_of(*words, *more.split()), PADDED, 0, device)
        assert size == sum(memory.WORKSPACES) + parts * (2 * 128 // 4) * 256 * 4  # of float32


SHARDED = *SMALL, *"--num-layers 3 --world-size 2 --bf16 --zero-stage 3".split()


def test_shards_in_host_memory_take_less_of_the_device() -> None:
    here = memory.memory_of_rank(config_of(*SHARDED), PADDED, 0, Gpu()).kinds
    there = memory.memory_of_rank(config_of(*SHARDED, "--cpu-optimizer"), PADDED, 0, Gpu()).kinds
    assert min(there.values()) >= 0
    assert there["optimizer"] == 0
    assert sum(there.values()) < sum(here.values())


def test_shards_keep_no_gradients_of_the_step_before() -> None:
    """The second step takes no more than the first."""
    config = config_of(*SHARDED)
    first = account(config, steps=1)[1]
    assert account(config, steps=2)[1] <= 1.001 * first


@pytest.mark.parametrize(
    "more",
    ["--bf16", "--bf16 --optimizer lion --ema 0.9"],
)
def test_offloaded_state_is_on_the_host(more: str) -> None:
    config = config_of(*SMALL, "--num-layers", "2", "--cpu-optimizer", *more.split())
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
    """Forget what was counted before and within a test that changes a table."""

    def forget() -> None:
        parameters.COUNTED.clear()
        parameters.shapes_of_layer.cache_clear()
        stages.MEASURED_STEPS.clear()
        stages.MEASURED_PASSES.clear()

    forget()
    yield
    forget()


def test_reads_the_rule_of_the_flat_buffers(
    monkeypatch: pytest.MonkeyPatch, forgetful: None
) -> None:
    """Wider gaps between parameters need more memory, in the plan as in training."""
    config = config_of(*SMALL, *"--num-layers 3 --bf16 --zero-stage 1 --world-size 2".split())
    before = account(config, steps=1)[0]
    monkeypatch.setattr(shard, "ALIGN", 1 << 14)
    after = account(config, steps=1)[0]
    assert after > 1.02 * before
    assert sum(sizes.held_bytes(config, PADDED, 0, "cuda").values()) == pytest.approx(
        after, rel=0.002
    )


def counted(config: TrainConfig) -> list[tuple[int, int]]:
    """Return the parameters of each pipeline rank, planned and as training cuts them."""
    parameters.COUNTED.clear()
    parameters.shapes_of_layer.cache_clear()
    built = list[int]()
    with pretended_gpu(Account()):
        for rank in range(config.parallel.pipeline_model_parallel_size):
            build_network(Spec(config, connected(config, rank), META, 1000, PADDED), built.append)
    return list(zip(parameters.parameters_of_ranks(config, PADDED), built, strict=True))


@pytest.mark.parametrize("name", [r"h\.\d+\.mlp\.fc\.weight", r"(wte|lm_head)\.weight"])
def test_reads_the_table_of_cuts(
    name: str, monkeypatch: pytest.MonkeyPatch, forgetful: None
) -> None:
    """Matrices that tensor ranks do not cut are whole in the plan, as in training."""
    config = config_of(
        *SMALL, "--num-layers", "2", "--tensor-model-parallel-size", "2", "--world-size", "2"
    )
    before = counted(config)
    monkeypatch.setitem(shard.CUTS, name, shard.CutRule(None))
    after = counted(config)
    assert all(planned == built for planned, built in before + after) and after[0] > before[0]


# torch's allocator


def test_allocator_takes_segments_as_torch_does() -> None:
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


def test_streams_share_no_block() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 12 * MIB)
    allocator.release(1)
    allocator.allocate(2, 12 * MIB, stream=1)
    assert allocator.reserved == 24 * MIB
    allocator.release(2)
    allocator.allocate(3, 12 * MIB)
    assert allocator.reserved == 24 * MIB


def test_shards_are_gathered_and_summed_in_streams_of_their_own() -> None:
    config = config_of(*SHARDED)
    events = stages.memory_of_steps(config, PADDED, 0).events
    sums = [
        event for event in events if event.stream and event.kind == "gradients" and event.size > 0
    ]
    gathered = [event for event in events if event.stream and event.kind == "weights"]
    held = sizes.held_bytes(config, PADDED, 0, "cuda")
    assert sum(event.size for event in sums) == pytest.approx(held["gradients"], rel=0.01)
    assert gathered and sum(event.size for event in gathered) == 0
    assert {event.stream for event in sums}.isdisjoint(event.stream for event in gathered)


@pytest.mark.parametrize(
    ("schedule", "zero_stage"),
    [("1f1b", 0), pytest.param("gpipe", 3, marks=pytest.mark.long)],
)
def test_every_rank_of_a_pipeline_frees_what_it_takes(schedule: str, zero_stage: int) -> None:
    line = f"--pipeline-model-parallel-size 2 --world-size 4 --pipeline-schedule {schedule} --zero-stage {zero_stage}"
    shape = "--bf16 --num-layers 8 --micro-batch-size 2 --global-batch-size 16 --hidden-dropout 0 --attention-dropout 0"
    config = config_of(*SMALL, *shape.split(), *line.split())
    for rank in range(2):
        found = memory.memory_of_rank(config, PADDED, rank, Gpu())
        assert found.reserved >= found.allocated


def test_graphs_take_a_pool_of_their_own() -> None:
    words = *SMALL, "--bf16", "--num-layers", "2"
    graphs = memory.memory_of_rank(config_of(*words), PADDED, 0, Gpu())
    plain = memory.memory_of_rank(config_of(*words, "--cuda-graphs", "off"), PADDED, 0, Gpu())
    assert graphs.reserved >= plain.reserved > graphs.allocated
