"""The layout, memory and length of a step in words, for a start and its checks."""

from __future__ import annotations

from meshwright.apps.plan.memory import held_bytes, host_bytes, logits_bytes, state_bytes
from meshwright.base import device, host
from meshwright.base.device_profiles import load_profile, this_cpu
from meshwright.config.schema import TrainConfig


def describe_layout(config: TrainConfig) -> str:
    """Return how many ranks there are, and what they divide."""
    p = config.parallel
    sizes = {"context": p.context_parallel_size, "tensor": p.tensor_model_parallel_size}
    sizes |= {"pipeline": p.pipeline_model_parallel_size}
    ranks = "".join(f" x {k} {name}" for name, k in sizes.items() if k > 1)
    return f"{config.world} ranks = {config.dp} data{ranks}" if config.world > 1 else "1 rank"


def describe_memory(config: TrainConfig, padded: int) -> str:
    """Return the memory of the rank with the most weights, gradients and optimizer state."""
    kind = "cpu" if config.parallel.device == "cpu" else device.NVIDIA
    ranks = range(config.parallel.pipeline_model_parallel_size)
    on_device = [sum(held_bytes(config, padded, rank, kind).values()) for rank in ranks]
    on_host = max(host_bytes(config, padded, rank) for rank in ranks)
    beside = f" and {_bytes(on_host)} in host memory" if on_host else ""
    return f"{_bytes(max(on_device))}{describe_place(on_device) if config.world > 1 else ''}{beside}"


def describe_lack(config: TrainConfig, padded: int) -> str:
    """Return why the run cannot fit this device; nothing if it may, or if that is unknown."""
    have, on_cpu = device.memory_without_torch(config.parallel.device)
    needed = max(
        state_bytes(config, padded, rank, "cpu" if on_cpu else device.NVIDIA) + logits_bytes(config, padded, rank)
        for rank in range(config.parallel.pipeline_model_parallel_size)
    )
    if not have or needed <= have:
        return ""
    return (
        f"it does not fit this device ({have / 2**30:,.1f} GiB), where the run would be refused; on another machine it "
        f"needs at least {needed / 2**30:,.1f} GiB"
    )


def describe_place(each: list[int]) -> str:
    """Return which pipeline rank has the most, given parameters or bytes of each."""
    return f" on pipeline rank {each.index(max(each))}" if len(each) > 1 else " on each rank"


def _bytes(x: float) -> str:
    return f"{x / 2**30:,.2f} GiB" if x >= 2**30 else f"{x / 2**20:,.1f} MiB"


def describe_long_step(flops: float) -> str | None:
    """Return a sentence about a step that takes minutes on this machine's CPU cores."""
    guess = load_profile("cpu")
    if flops < 6 * guess.flops("float32"):  # far below a minute: the cores need not be measured
        return None
    minutes = flops / this_cpu().flops("float32") / 60
    if minutes < 1:
        return None
    return (
        f"a step is {flops / 1e12:,.0f} TFLOP, about {minutes:,.0f} minutes on these {host.cores()} CPU cores, and "
        "nothing is logged or saved within it; take a smaller model or batch, or an accelerator"
    )


def smaller_sizes(config: TrainConfig) -> str:
    """Return the flags that make a run need less memory."""
    t = config.training
    recompute = "" if t.recompute_granularity == "full" else ", or --recompute-granularity full"
    micro = f"a smaller --micro-batch-size (now {t.micro_batch_size or config.micro_batch})"
    return f"{micro} or --seq-length (now {config.data.seq_length}){recompute}"
