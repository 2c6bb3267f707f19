"""Products overlapped with copies of rows compute what they do with collectives around them.

torch's pipelines copy between GPUs; stand-ins here send the same rows through gloo, and leave
everything else as they do: memory that nobody wrote holds NaN.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from layouts import FLAGS, rows_of, trained
from meshwright.errors import UserError
from meshwright.parallel import agree, comm, overlap
from meshwright.parallel.layout import connect
from meshwright.settings import flags
from meshwright.settings.schema import TrainConfig
from on_ranks import run_ranks

CPU = torch.device("cpu")
SIZE = 2 * overlap.WORTHWHILE_BYTES


class Pipelines:
    """Stand-ins for torch's pipelines over gloo, which count their calls."""

    def __init__(self):
        self.gathers = self.scatters = self.reserved = 0

    def workspace(self, name, min_size):
        self.reserved = max(self.reserved, min_size)

    def gather(self, shard, consume, rows, name, keeps_rows=True):
        self.gathers += 1
        assert shard.is_contiguous() and shard.numel() * shard.element_size() <= self.reserved
        rank, world = dist.get_rank(), dist.get_world_size()
        parts, found = rows.fill_(torch.nan).chunk(world), [torch.empty_like(shard) for _ in range(world)]
        dist.all_gather(found, shard)
        consume(shard, rank)
        for step in range(1, world):
            other = (rank + step) % world
            parts[other].copy_(found[other])
            consume(parts[other], other)
        if keeps_rows:
            parts[rank].copy_(shard)

    def scatter(self, produce, out, name):
        self.scatters += 1
        rank, parts = dist.get_rank(), out.fill_(torch.nan).chunk(dist.get_world_size())
        assert 2 * parts[0].numel() * out.element_size() <= self.reserved
        for to in range(len(parts)):
            buffer = torch.full_like(parts[to], torch.nan)
            produce(to, buffer)
            found = [torch.empty_like(buffer) for _ in parts] if to == rank else None
            dist.gather(buffer, found, dst=to)
            for part, x in zip(parts, found or (), strict=False):
                part.copy_(x)

    @contextlib.contextmanager
    def installed(self):
        with (
            mock.patch.object(symmetric, "get_symm_mem_workspace", self.workspace),
            mock.patch.object(symmetric, "_pipelined_all_gather_and_consume", self.gather),
            mock.patch.object(symmetric, "_pipelined_produce_and_all2all", self.scatter),
            mock.patch.object(agree, "devices", SimpleNamespace(NVIDIA="cpu")),
        ):
            yield


def products():
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(rank)
    x, weight, bias, wide = (
        torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((6, 5), (7, 5), (7,), (6 * world, 7))
    )
    pipelines = Pipelines()
    with pipelines.installed():
        by = overlap.OverlappedProducts(group, 6 * 7 * 8 * 2)
        plain = overlap.PlainProducts(group)
        for b in (bias, None):
            y, rows = by.gather_multiply(x, weight, b, keeps_rows=True)
            want, want_rows = plain.gather_multiply(x, weight, b)
            torch.testing.assert_close(y, want)
            assert torch.equal(rows, want_rows)
        torch.testing.assert_close(by.back_gather_multiply(x, weight.t()), plain.back_gather_multiply(x, weight.t()))
        for name, matrix in (("multiply_scatter", weight.t()), ("back_multiply_scatter", weight)):
            got, want = (comm.wait_for(getattr(each, name)(wide, matrix)) for each in (by, plain))
            torch.testing.assert_close(got, want)
        assert (pipelines.gathers, pipelines.scatters) == (3, 2)
        # What is too large for the memory that is mapped takes the collectives.
        more = torch.randn(18, 5, generator=draw, dtype=torch.float64)
        torch.testing.assert_close(by.gather_multiply(more, weight, None), plain.gather_multiply(more, weight, None))
        large = torch.randn(18 * world, 7, generator=draw, dtype=torch.float64)
        got, want = (comm.wait_for(each.back_multiply_scatter(large, weight)) for each in (by, plain))
        torch.testing.assert_close(got, want)
        assert (pipelines.gathers, pipelines.scatters) == (3, 2)


@pytest.mark.parametrize("world", [2, 3])
def test_products(world):
    run_ranks(products, world)


def choice():
    group = dist.group.WORLD
    for wanted, reason in (("off", "of --tp-overlap off"), ("auto", "the device is not an NVIDIA GPU")):
        by, why = overlap.choose_products(wanted, group, CPU, SIZE)
        assert (type(by), why) == (overlap.PlainProducts, reason)
    with pytest.raises(UserError, match="--tp-overlap on: the device is not an NVIDIA GPU; give --tp-overlap auto"):
        overlap.choose_products("on", group, CPU, SIZE)
    with Pipelines().installed():
        by, why = overlap.choose_products("on", group, CPU, SIZE)
        assert (type(by), why) == (overlap.OverlappedProducts, "")
        few = "the rows of a micro-batch are few: 15 MiB on a rank, of 16"
        assert overlap.choose_products("auto", group, CPU, SIZE - 1)[1] == few
        assert type(overlap.choose_products("on", group, CPU, SIZE - 1)[0]) is overlap.OverlappedProducts
        # A rank that cannot map memory, or computes something else, takes the others with it.
        compare, refused = overlap.largest_difference, mock.Mock(side_effect=RuntimeError("no rights\nto map"))
        for own_reason, owner, name, broken in (
            ("it failed: RuntimeError: no rights", symmetric, "get_symm_mem_workspace", refused),
            ("its result is 50.0% from", overlap, "largest_difference", lambda *given: compare(*given) + 0.5),
        ):
            with mock.patch.object(owner, name, broken) if dist.get_rank() == 1 else contextlib.nullcontext():
                by, why = overlap.choose_products("auto", group, CPU, SIZE)
            assert type(by) is overlap.PlainProducts
            assert why.startswith(own_reason if dist.get_rank() == 1 else "it failed on another rank")
        with mock.patch.object(agree.socket, "gethostname", lambda: f"host-{dist.get_rank()}"):
            assert overlap.choose_products("auto", group, CPU, SIZE)[1] == "tensor ranks are on several machines"


@pytest.mark.flag("tp_overlap")
def test_choice():
    run_ranks(choice, 2)


LINE = "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel --train-iters 2"
MORE = "--recompute-granularity full --disable-bias-linear --swiglu --untie-embeddings-and-output-weights"
LINES = [LINE, f"{LINE} --fused-kernels on {MORE}"]


def training(line):
    words = [*FLAGS.split(), *line.split()]
    config, overlapped = (
        flags.parse_settings(TrainConfig, [*words, f"--tp-overlap={how}"], "test").config for how in ("auto", "on")
    )
    want, pipelines = rows_of(trained(config, 2, connect=connect)), Pipelines()
    with pipelines.installed():
        got = rows_of(trained(overlapped, 2, connect=connect))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-9, atol=0)
    # A layer gathers for qkv and fc, and in backward for both proj; it scatters as often.
    layers, again = config.model.num_layers, "full" in line
    in_training, in_validation = 2 * config.global_batch, config.training.eval_iters * config.global_batch
    in_layers = in_training * layers * (6 if again else 4) + in_validation * layers * 2
    probes, of_head = 2, in_training
    wanted = in_layers + of_head + probes
    counted = pipelines.scatters, pipelines.gathers
    assert counted == (wanted, wanted + in_validation), (counted, wanted, in_validation)


@pytest.mark.parametrize("line", LINES, ids=["plain", "recomputed"])
def test_training(line):
    run_ranks(training, 2, line)
