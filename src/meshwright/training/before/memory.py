"""`--micro-batch-size auto`: find the largest micro-batch that fits beside weights and optimizer.

A size must divide each rank's batch. On a GPU the largest divisor that fits by the plan is tried
first, and kept if it does fit and its measured bytes leave no room for the next. Otherwise, and
without a plan, trial passes with one and two samples give the slope, since activation memory grows
linearly with the micro-batch size, and the divisors that should fit are tried, largest first. On a
CPU, where running out of memory ends the process and torch keeps no peak, the bytes of live tensors
are counted instead, and no size is tried.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
import math
import socket
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.base import device as devices
from meshwright.checkpoint.native import add_up
from meshwright.config.problem import SettingsError
from meshwright.config.schema import TrainConfig
from meshwright.data.loader import Batch
from meshwright.model.gpt import GPT
from meshwright.runtime.cuda_graphs import MEMORY_SHARE
from meshwright.runtime.ranks.team import Team
from meshwright.training.forecast import find_forecast
from meshwright.training.micro_step import Network, forward_part, sum_terms
from meshwright.training.parameters import parameters_of_ranks
from meshwright.training.sizes import logits_bytes, state_bytes


def require_memory(
    config: TrainConfig, padded: int, pipeline_rank: int, device: torch.device, team: Team
) -> None:
    """Refuse, before anything is allocated, a run whose state and logits alone cannot fit.

    On a CPU the ranks of a machine share its memory; all ranks come here.
    """
    have = devices.total_memory(device)
    micro, seq = config.micro_batch, config.data.seq_length
    assert seq
    # Both are certain and large; other activations depend on recomputation and kernels.
    state = state_bytes(config, padded, pipeline_rank, device.type)
    logits = logits_bytes(config, padded, pipeline_rank)
    ranks = needed = 0
    if device.type == "cpu":
        ranks = on_this_machine(team, 1)
        needed = on_this_machine(team, state + logits)
    if max(state + logits, needed) > have:
        shared = f", {needed / 2**30:,.1f} for the {ranks} ranks here" if ranks > 1 else ""
        parameters = parameters_of_ranks(config, padded)[pipeline_rank]
        raise SettingsError(
            f"this run needs at least {(state + logits) / 2**30:,.1f} GiB ({state / 2**30:,.1f} for {parameters:,} "
            f"parameters with their optimizer, {logits / 2**30:,.1f} for the logits of {micro} x {seq} tokens){shared}, "
            f"but the device has {have / 2**30:,.1f} GiB; reduce the model, {{micro_batch_size}} or {{seq_length}}"
        )


def on_this_machine(team: Team, number: int) -> int:
    """Return the sum of a number over the ranks of this machine, which its name tells."""
    name = socket.gethostname()
    return team.merge({name: number}, add_up)[name]


def fit_micro_batch(
    net: Network, config: TrainConfig, vocab: tuple[int, int], preferred: int | None, team: Team
) -> tuple[int, str]:
    """Run the network on random ids to find the micro-batch size; return it and a log message.

    `vocab` is the true and the padded size of the vocabulary.
    """
    t, d, length = config.training, config.data, config.data.seq_length
    assert length
    masks_loss, resets_positions, resets_attention = d.document_effects
    # The size must divide the batches of a ramp-up too, so that it can stay the same.
    sizes = [size // config.dp for size in config.batches]

    def attempt(size: int) -> None:
        """Run a forward and a backward pass over random ids, with the masks that the run has."""
        ids = torch.randint(
            vocab[0], (size, length + 1), generator=torch.Generator().manual_seed(0)
        )
        places = torch.arange(length).expand(size, length)
        batch = Batch(
            ids[:, :-1].contiguous(),
            ids[:, 1:].contiguous(),
            torch.arange(size),
            torch.ones(size, length) if masks_loss else None,
            places if resets_positions else None,
            places.int() // 64 if resets_attention else None,
        )
        net.store.begin_backward(False)  # send nothing: another rank may have run out of memory
        # Nothing is updated, so the loss needs neither divisor nor scale.
        with devices.on_stream(net.stream):
            b = batch.to(net.device)
            terms = sum_terms(net, b, forward_part(net, net.parts[0], b, t.seed))
            torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]

    for part in net.parts:
        part.train()
    is_planned = net.device.type == devices.NVIDIA and isinstance(net.parts[0], GPT)
    forecast = find_forecast() if is_planned else None
    # With a plan most attempts are saved: the size that it predicts is tried first.
    planned = (
        functools.partial(forecast.planned_bytes, config, vocab[1])
        if forecast is not None
        else None
    )
    # Random ids would leave their mark on fp8's scales; a trial puts the scales back.
    scales = net.store.scales
    with contextlib.nullcontext() if scales is None else scales.trial():
        sharers = on_this_machine(team, 1) if net.device.type == "cpu" else 1
        size, message = find_largest(attempt, sizes, net.device, preferred, planned, sharers)
    return team.merge(size, min), message


def choose_on_cpu(
    divisors: list[int], each: float, have: float, preferred: int | None, sharers: int
) -> tuple[int, str]:
    """Return the largest size whose samples of `each` bytes fit into what a rank has, and why.

    No attempt may fail on a CPU, so that the bytes decide alone.
    """
    fitting = [n for n in divisors if n * each <= MEMORY_SHARE * have]
    size = preferred if preferred in fitting else max(fitting, default=1)
    free = f"{have / 2**30:,.1f} GiB are free"
    if sharers > 1:
        free += f" for each of {sharers} ranks"
    return size, f"one sample takes {each / 2**20:,.1f} MiB, {free}"


def find_largest(
    attempt: Callable[[int], None],
    batches: list[int],
    device: torch.device,
    preferred: int | None,
    planned: Callable[[int], int] | None = None,
    sharers: int = 1,
) -> tuple[int, str]:
    """Return the largest micro-batch that fits and a log message.

    `attempt(n)` runs a forward and backward pass over n samples. `batches` are the run's batch
    sizes per data-parallel rank, which the micro-batch must divide. `preferred`, the size used
    before the run was resumed, is kept if it fits. `planned(n)` predicts the bytes of n samples.
    So many `sharers` use the memory of a CPU, this rank among them.
    """
    # All divisors come in pairs, of which one is at most the root.
    common = math.gcd(*batches)
    small = [n for n in range(1, math.isqrt(common) + 1) if common % n == 0]
    divisors = sorted({*small, *(common // n for n in small)})

    if device.type == "cpu":
        each = (peak_bytes(attempt, 3) - peak_bytes(attempt, 1)) / 2
        have = devices.free_memory(device) / sharers
        return choose_on_cpu(divisors, each, have, preferred, sharers)

    # On a GPU, try the size of the resumed run, then the planned one, then what the slope promises.
    have = devices.free_memory(device)
    if preferred in divisors and try_size(attempt, preferred, device) is not None:
        return preferred, "as before"
    if planned is not None and (largest := try_planned(attempt, divisors, device, planned)):
        return largest, f"as planned, {planned(largest) / 2**30:,.2f} GiB of {have / 2**30:,.1f}"
    one, two = try_size(attempt, 1, device), try_size(attempt, 2, device)
    if one is None or two is None:
        return 1, "two samples do not fit"
    each, rest = (two - one) / 2**30, (2 * one - two) / 2**30
    message = f"one sample takes {each:,.2f} GiB beside {rest:,.2f}, of {have / 2**30:,.1f}"
    for n in reversed(divisors):
        expected = one + (n - 1) * (two - one)
        if expected > MEMORY_SHARE * have:
            continue
        if try_size(attempt, n, device) is not None:
            return n, message
    return 1, message


def try_planned(
    attempt: Callable[[int], None],
    divisors: list[int],
    device: torch.device,
    planned: Callable[[int], int],
) -> int | None:
    """Return the largest size that fits by the plan, if it does fit and no larger one can."""
    most = MEMORY_SHARE * devices.free_memory(device)
    place = bisect.bisect_right(divisors, most, key=planned)
    if not place:
        return None
    size, larger = divisors[place - 1], divisors[place : place + 1]
    used = try_size(attempt, size, device)
    if used is None or used > most:
        return None
    # The plan is taken to be wrong by the same factor for the next size.
    fits_more = any(used / planned(size) * planned(n) <= most for n in larger)
    return None if fits_more else size


def try_size(attempt: Callable[[int], None], size: int, device: torch.device) -> int | None:
    """Return the peak bytes of an attempt, or None if it ran out of memory."""
    devices.reset_memory(device)
    try:
        attempt(size)
        devices.synchronize(device)
        return devices.peak_memory(device) or 0
    except RuntimeError as error:
        if not devices.is_out_of_memory(error):
            raise
    finally:
        gc.collect()  # the frames of the exception hold its tensors
        devices.reset_memory(device)
    return None


class Peak(TorchDispatchMode):
    """The most bytes held at once by tensors made in the block, each storage counted once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.counted: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._note, out)
        return out

    def _note(self, x: Tensor) -> None:
        # Views share their base's storage, which counts once, until the last of them is freed.
        storage = x.untyped_storage()
        if storage not in self.counted:
            self.counted[storage] = size = storage.nbytes()
            self._count(size)
            weakref.finalize(storage, self._count, -size)

    def _count(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def peak_bytes(attempt: Callable[[int], None], size: int) -> int:
    """Return the peak bytes of an attempt; they include the weights, the same for every size."""
    counter = Peak()
    with counter:
        attempt(size)
    return counter.peak
