"""The device that a process computes on. No other file names a kind of accelerator: where kinds differ, it is asked here.

torch.accelerator serves every kind. Memory alone is asked of the kind's own module, all of which have torch.cuda's names
(torch.npu and torch.xpu too): of torch.accelerator not every backend has the counterparts, and they take ten times as
long, which a step would feel.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from meshwright.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch.profiler import ProfilerActivity

# What shows whether the driver sees a device, and what may hide some from torch.
NVIDIA = "cuda"
TOOLS = {NVIDIA: "nvidia-smi", "npu": "npu-smi info", "xpu": "xpu-smi discovery"}
HIDES = {NVIDIA: "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


def pick(wanted: str, local_rank: int = 0) -> torch.device:
    """--device, or an accelerator if there is one: of several, that of this process's number on its machine."""
    import torch

    kind, _, index = wanted.partition(":")
    if kind == "npu":
        _load_torch_npu()
    there = torch.accelerator.current_accelerator(check_available=True) if kind != "cpu" else None
    if kind == "cpu" or (kind == "auto" and there is None):
        return torch.device("cpu")
    if there is None or kind not in ("auto", there.type):
        seen = f"torch sees {there.type} devices" if there is not None else "torch sees no such device"
        if there is None and kind == NVIDIA:
            seen = "torch sees no GPU"
        raise UserError(
            f"--device {wanted}: {seen}" + (f" ({TOOLS[kind]} shows whether the driver does)" if kind in TOOLS else "")
        )
    if index and local_rank:
        raise UserError(
            f"--device {wanted} names one device, but this is process {local_rank} of several on this machine, each of which "
            f"takes its own: give --device {kind}"
        )
    number, count = int(index or local_rank), torch.accelerator.device_count()
    if count == 1 and not index and os.environ.get(HIDES.get(there.type, "")):
        number = 0  # srun and others show each process its own device alone; whether it is, rendezvous.join asks
    if number >= count:
        hides = f", or see whether {HIDES[there.type]} hides some" if there.type in HIDES else ""
        raise UserError(
            f"process {local_rank} of this machine wants {there.type}:{number}, but torch sees {count} of them: start at "
            f"most {count} here (--nproc-per-node {count}){hides}"
        )
    device = torch.device(there.type, number)
    set_current(device)
    return device


def _load_torch_npu() -> None:
    """torch does so by itself where TORCH_DEVICE_BACKEND_AUTOLOAD does not forbid it."""
    if importlib.util.find_spec("torch_npu") is None:
        raise UserError("--device npu: torch_npu is not installed; its version must be that of torch")
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # a library of the driver's is missing, or torch is of another version
        raise UserError(
            f"--device npu: torch_npu does not load: {(str(error).splitlines() or [type(error).__name__])[0]}"
        ) from error


def count() -> int:
    """Accelerators of this machine."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def is_accelerator(device: torch.device) -> bool:
    """Whether it is of the kind that torch works with here: then the host copies to it from pinned memory, unawaited."""
    import torch

    there = torch.accelerator.current_accelerator()
    return there is not None and there.type == device.type


def has_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels, FlexAttention's backward pass and compiled blocks run there: NVIDIA's and AMD's."""
    return device.type == NVIDIA


def set_current(device: torch.device | None) -> None:
    """Make it the current device of this thread: a new thread begins with the first."""
    import torch

    if device is not None and device.index is not None and is_accelerator(device):
        torch.accelerator.set_device_index(device)


def name(device: torch.device) -> str:
    import torch

    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    return str(torch.get_device_module(device).get_device_name(device))


def identity(device: torch.device) -> str:
    """Which device of this machine it is, however this process numbers what it sees."""
    properties = _module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", None) or device.index)


def seed(device: torch.device, number: int) -> None:
    """Of the device's generator."""
    import torch

    (torch.random if device.type == "cpu" else torch.get_device_module(device)).manual_seed(number)


def synchronize(device: torch.device | None) -> None:
    """Wait until everything asked for is done; a CPU already has."""
    import torch

    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)


def profiler_activities(device: torch.device) -> list[ProfilerActivity]:
    """What torch's profiler is to record."""
    from torch.profiler import ProfilerActivity as Kinds

    other = [] if device.type == "cpu" else [getattr(Kinds, device.type.upper(), Kinds.PrivateUse1)]
    return [Kinds.CPU, *other]


# Memory


def total_memory(device: torch.device) -> int:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(_module(device).get_device_properties(device).total_memory)


def free_memory(device: torch.device) -> int:
    """Of an accelerator: what nobody has, and what this process holds in reserve or uses."""
    return int(_module(device).mem_get_info(device)[0] + _module(device).memory_reserved(device))


def peak_memory(device: torch.device) -> int | None:
    """The most bytes held by tensors at once; None where nobody counts them, as on a CPU."""
    stats = getattr(_module(device), "memory_stats_as_nested_dict", None)  # a tenth of max_memory_allocated()'s time
    return int(stats(device)["allocated_bytes"]["all"]["peak"]) if stats is not None else None


def memory_stats(device: torch.device) -> dict[str, int]:
    """The allocator's counts under torch's names; empty where there are none, as on a CPU."""
    stats = getattr(_module(device), "memory_stats", None)
    return dict(stats(device)) if stats is not None else {}


def allocate_pinned(size: int, device: torch.device) -> torch.Tensor:
    """So many bytes of the host's, into which the device copies at its full speed."""
    import torch

    memory = torch.empty(size, dtype=torch.uint8)
    if device.type == NVIDIA and size:
        # Pinned afterwards: the pinning allocator rounds up to a power of two. Where that
        # is not allowed copies are slower.
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostRegister(memory.data_ptr(), size, 0)
    elif is_accelerator(device):
        memory = memory.pin_memory()
    return memory


def free_host_memory() -> int:
    """What the kernel could give without paging anything out, within a container's limit; all, if it does not say."""
    try:
        with open("/proc/meminfo") as file:
            free = int(dict(line.split(":") for line in file)["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            free = min(free, _number(f"/sys/fs/cgroup/{limit}") - _number(f"/sys/fs/cgroup/{used}"))
    return free


def _number(path: str) -> int:
    with open(path) as file:
        return int(file.read())


def reset_memory(device: torch.device) -> None:
    """Give back what is held in reserve, and begin the peak anew."""
    _module(device).empty_cache()
    _module(device).reset_peak_memory_stats(device)


def is_out_of_memory(error: BaseException) -> bool:
    """torch_npu raises a mere RuntimeError in some versions."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "out of memory. Tried to allocate" in str(error)


def _module(device: torch.device) -> Any:
    import torch

    return torch.get_device_module(device)


def use_deterministic_algorithms() -> None:
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
