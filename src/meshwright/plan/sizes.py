"""Parameters per pipeline rank and bytes per parameter, by formula, for memory checks."""

from __future__ import annotations

from meshwright import device, host
from meshwright.plan.devices import load_profile
from meshwright.plan.parameters import parameters_of_ranks
from meshwright.settings.schema import TrainConfig


def bytes_per_parameter(config: TrainConfig) -> tuple[float, float]:
    """Return the bytes per parameter on the device and on the host.

    They count the weight, gradient, master copy and moments.
    """
    low, full = config.precision.dtype in ("float16", "bfloat16"), 8 if config.precision.dtype == "float64" else 4
    moments = 2 if config.optimizer.optimizer in ("adam", "adamw") else 1  # at least: Muon's embeddings have two
    p, weight = config.parallel, float(2 if low else full)
    parts = config.dp * p.context_parallel_size // p.num_distributed_optimizer_instances if p.zero_stage else 1
    gradient = full if p.zero_stage < 2 else full / parts
    weight = weight / parts if p.zero_stage == 3 else weight
    optimizer_state = full * (moments + (low or parts > 1 or p.offloads)) / parts  # moments and master copy
    share = full / parts if 0 < p.zero_stage < 2 and parts > 1 else 0  # of the summed gradients
    if p.offloads:
        leaving = (2 if low else full) / parts if p.zero_stage < 3 else 0  # new weights being copied to the device
        return weight + gradient + share, optimizer_state + full / parts + leaving
    return weight + gradient + share + optimizer_state, 0


def describe_layout(config: TrainConfig) -> str:
    """Return how many ranks there are, and what they divide."""
    p = config.parallel
    sizes = {"context": p.context_parallel_size, "tensor": p.tensor_model_parallel_size}
    sizes |= {"pipeline": p.pipeline_model_parallel_size}
    ranks = "".join(f" x {k} {name}" for name, k in sizes.items() if k > 1)
    return f"{config.world} ranks = {config.dp} data{ranks}" if config.world > 1 else "1 rank"


def describe_memory(config: TrainConfig, padded: int) -> str:
    """Return the memory of the rank with the most weights, gradients and optimizer state."""
    each = parameters_of_ranks(config, padded)
    on_device, on_host = bytes_per_parameter(config)
    beside = f" and {_bytes(max(each) * on_host)} in host memory" if on_host else ""
    return f"{_bytes(max(each) * on_device)}{describe_place(each) if config.world > 1 else ''}{beside}"


def describe_lack(config: TrainConfig, padded: int) -> str:
    """Return why the run cannot fit this device; nothing if it may, or if that is unknown."""
    have, on_cpu = device.memory_without_torch(config.parallel.device)
    share = max(parameters_of_ranks(config, padded))
    needed = sum(least_bytes(config, share, padded // config.parallel.tensor_model_parallel_size, on_cpu))
    if not have or needed <= have:
        return ""
    return (
        f"it does not fit this device ({have / 2**30:,.1f} GiB), where the run would be refused; on another machine it "
        f"needs at least {needed / 2**30:,.1f} GiB"
    )


def describe_place(parameters: list[int]) -> str:
    """Return which rank has the most parameters, given those of the pipeline ranks."""
    return f" on pipeline rank {parameters.index(max(parameters))}" if len(parameters) > 1 else " on each rank"


def _bytes(x: float) -> str:
    return f"{x / 2**30:,.2f} GiB" if x >= 2**30 else f"{x / 2**20:,.1f} MiB"


def least_bytes(config: TrainConfig, parameters: int, padded: int, on_cpu: bool) -> tuple[float, int]:
    """Return the bytes of a rank's state, and of the logits of one micro-batch."""
    on_device, on_host = bytes_per_parameter(config)
    return parameters * (on_device + on_host if on_cpu else on_device), logits_bytes(config, padded)


def logits_bytes(config: TrainConfig, padded: int) -> int:
    """Return the bytes of the logits of one micro-batch; if they are capped, before and after."""
    width = 2 if config.precision.dtype in ("float16", "bfloat16") else 4
    copies = 2 if config.model.final_logit_softcapping else 1
    return config.micro_batch * (config.data.seq_length or 0) * padded * width * copies


def describe_long_step(flops: float) -> str | None:
    """Return a sentence about a step that takes minutes on this machine's CPU cores."""
    minutes = flops / load_profile("cpu").flops("float32") / 60
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
