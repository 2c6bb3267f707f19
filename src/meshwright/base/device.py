"""The device that a process computes on. Besides this file, only those that use what
CUDA alone has name a kind of accelerator: cuda_graphs.py, parallel/barrier.py and
kernels/triton/decode.py; kernels/ ask for ROCm.

torch.accelerator serves every kind, except for memory: not every backend implements its functions,
and they are ten times as slow. Memory is asked of torch.cuda, torch.npu or torch.xpu itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from meshwright.base import host
from meshwright.base.errors import UNAVAILABLE, UserError, first_line
from meshwright.base.version import RANGE, TESTED, numbers_of

if TYPE_CHECKING:
    import torch
    from torch.profiler import ProfilerActivity

NVIDIA = "cuda"
_visible: dict[str, str] = {}  # the variables of HIDES as they were at first
TRY_SECONDS = 60  # in which a device must answer
_symmetric_bytes = 0  # bytes, see `count_symmetric_memory`
# A command that shows the devices of the driver, and the variable that may hide them from torch.
TOOLS = {NVIDIA: "nvidia-smi", "npu": "npu-smi info", "xpu": "xpu-smi discovery"}
SMI_SECONDS = 20  # until nvidia-smi must have answered; a hung driver never lets it
# Apple's GPUs lack float64, in which losses are summed, and torch says little of their memory.
UNFIT = {"mps": "Apple's GPU"}
HIDES = {
    NVIDIA: "CUDA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
}
# Triton 3.9 warns without it, and 3.10 would round products before they are added.
FUSED_MULTIPLY_ADD = "TRITON_DEFAULT_FP_FUSION", "1"


def open_device(wanted: str, local_rank: int = 0) -> torch.device:
    """Return the device of --device, and let this process use it."""
    device = find_device(wanted, local_rank)
    if device.type == "cpu":
        host.keep_freed_memory()
    else:
        set_current(device)
        os.environ.setdefault(*FUSED_MULTIPLY_ADD)
    return device


def find_device(wanted: str, local_rank: int = 0) -> torch.device:
    """Return the device of --device; `auto` is an accelerator if accelerator is one."""
    host.require_address_space()
    import torch

    # Images of containers that older guides name have such versions.
    if numbers_of(torch.__version__) < TESTED[0]:
        raise UserError(
            f"torch {torch.__version__} is too old: {RANGE} is needed; pip install -U {RANGE!r}, or make an environment "
            "for Meshwright beside it: python3 -m venv DIR",
            UNAVAILABLE,
        )
    kind, _, index = wanted.partition(":")
    if kind in UNFIT:
        raise UserError(f"device {wanted}: Meshwright does not compute on {UNFIT[kind]}; give cpu")
    if kind == "npu":
        _load_torch_npu()
    accelerator = _current() if kind != "cpu" else None
    if kind == "cpu" or (kind == "auto" and accelerator is None):
        return torch.device("cpu")
    # What was asked for is not there: say what is.
    if accelerator is None or kind not in ("auto", accelerator.type):
        missing = "no GPU" if kind == NVIDIA else "no such device"
        seen = f"{accelerator.type} devices" if accelerator is not None else missing
        hint = f" ({TOOLS[kind]} shows whether the driver does)" if kind in TOOLS else ""
        raise UserError(f"device {wanted}: torch sees {seen}{hint}")
    if index and local_rank:
        raise UserError(
            f"device {wanted} names one device, but this is process {local_rank} of several on this machine; give "
            f"{kind}, and each takes its own"
        )
    number = int(index or local_rank)
    count = torch.accelerator.device_count()
    if count == 1 and not index and os.environ.get(HIDES.get(accelerator.type, "")):
        # srun shows each process only its own device; join_ranks checks that none is shared.
        number = 0
    if number >= count:
        hides = ""
        if accelerator.type in HIDES:
            hides = f", or check whether {HIDES[accelerator.type]} hides some"
        raise UserError(
            f"process {local_rank} of this machine wants {accelerator.type}:{number}, but torch sees {count} of them; "
            f"start at most {count} here (--nproc-per-node {count}){hides}"
        )
    return torch.device(accelerator.type, number)


def missing_here(wanted: str, ranks: int) -> str:
    """Say what this machine lacks for these ranks on --device, or return an empty text.

    torch is imported only for an accelerator that is named; for `auto`, nvidia-smi counts.
    """
    kind = wanted.partition(":")[0]
    count = 0
    try:
        if kind != "auto":
            if find_device(wanted).type != "cpu":
                count = count_accelerators()
        elif HIDES[NVIDIA] not in os.environ:  # nvidia-smi does not know what is hidden
            count = len(ask_nvidia_smi("index", "csv,noheader").split())
    except UserError as error:
        return str(error)
    except RuntimeError:  # no such GPUs: then it runs on the CPU
        return ""
    lack = f"it has {count} device{'s' * (count > 1)} for {ranks} ranks; start some on other machines, or take fewer"
    return lack if 0 < count < ranks else ""


def _load_torch_npu() -> None:
    """Import torch_npu, which torch does not if TORCH_DEVICE_BACKEND_AUTOLOAD forbids it."""
    if importlib.util.find_spec("torch_npu") is None:
        import torch

        version = ".".join(torch.__version__.split(".")[:2])
        raise UserError(
            f"device npu: torch_npu is not installed; with Ascend's driver and CANN in place (npu-smi info shows the "
            f"devices), pip install 'torch_npu=={version}.*', as torch is {version}, or give cpu"
        )
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # a driver library is missing, or torch has another version
        reason = first_line(error)
        raise UserError(f"device npu: torch_npu does not load: {reason}") from error


def count_accelerators() -> int:
    import torch

    return torch.accelerator.device_count() if _current() is not None else 0


def hiding_variable() -> str | None:
    """Return the variable of the environment that shows a process some of the accelerators."""
    accelerator = _current()
    return HIDES.get(accelerator.type) if accelerator is not None else None


def _current() -> torch.device | None:
    """Return the accelerator of this machine, if Meshwright computes on its kind."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None and accelerator.type not in UNFIT else None


def show_answering(wanted: int) -> int:
    """Show new processes at most `wanted` accelerators, which do compute; return their number.

    Each is tried by a process of its own, because a broken one may hang whoever touches it.
    """
    accelerator = _current()
    variable = hiding_variable()
    if accelerator is None or variable is None:
        return wanted
    # Those that were visible at first: an earlier call may have hidden some, which now answer.
    if variable not in _visible:
        every = ",".join(map(str, range(count_accelerators())))
        _visible[variable] = os.environ.get(variable) or every

    # One process for each, all at once.
    test = f"import torch; torch.ones(1, device={accelerator.type!r}).sum().item()"
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    tries = {
        name: subprocess.Popen(
            [sys.executable, "-c", test], env=os.environ | {variable: name}, **silent
        )
        for name in _visible[variable].split(",")
    }
    # Those that have computed in time; a process that hangs is killed.
    until = time.monotonic() + TRY_SECONDS
    working = []
    for name, process in tries.items():
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.wait(max(until - time.monotonic(), 0.1)) == 0:
                working.append(name)
        process.kill()
    os.environ[variable] = ",".join(working[:wanted])
    return len(working[:wanted])


def is_accelerator(device: torch.device) -> bool:
    """Return whether torch has this accelerator, which copies from pinned memory asynchronously."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def is_asynchronous(device: torch.device) -> bool:
    """Return whether the device computes while the host goes on."""
    return device.type != "cpu"


def has_kernels(device: torch.device) -> bool:
    """Return whether our Triton kernels and compiled blocks run there (NVIDIA and AMD)."""
    return device.type == NVIDIA


def nvidia_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU; (0, 0) for any other device."""
    import torch

    # A torch for AMD's GPUs calls them by NVIDIA's name.
    if device.type != NVIDIA or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def has_fp8(device: torch.device) -> bool:
    """Return whether its matrix units multiply fp8 (NVIDIA from compute capability 8.9)."""
    return nvidia_capability(device) >= (8, 9)


@functools.cache
def is_hopper_or_later(device: torch.device) -> bool:
    """Return whether it is an NVIDIA GPU of this generation or a later one.

    There a kernel can start before the one before it ends, and hardware loads tiles of tensors.
    """
    return nvidia_capability(device) >= (9, 0)


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 2 on a CPU, which runs kernels in tests only."""
    if device.type == "cpu":
        return 2
    return int(_module(device).get_device_properties(device).multi_processor_count)


def set_current(device: torch.device | None) -> None:
    """Make it the current device of this thread; a new thread starts on device 0."""
    import torch

    if device is not None and device.index is not None and is_accelerator(device):
        torch.accelerator.set_device_index(device)


def device_name(device: torch.device) -> str:
    """Return the device's product name, or the number of threads on a CPU."""
    import torch

    if device.type == "cpu":
        number = torch.get_num_threads()
        return f"cpu, {number} thread{'s' if number > 1 else ''}"
    return str(_module(device).get_device_name(device))


def device_identity(device: torch.device) -> str:
    """Return an identifier of the physical device."""
    properties = _module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", None) or device.index)


def seed_generator(device: torch.device, number: int, offset: int | None = None) -> None:
    """Seed the device's generator; with an offset, skip that many of its draws (see `drawn`)."""
    import torch

    module = torch.random if device.type == "cpu" else _module(device)
    module.manual_seed(number)
    if offset is not None:
        _generator(device).set_offset(offset)


def counts_draws(device: torch.device) -> bool:
    """Return whether the device's generator counts its draws by an offset, as CUDA's does."""
    return device.type == NVIDIA


def count_drawn(device: torch.device) -> int:
    """Return how far the generator has come since it was seeded."""
    return int(_generator(device).get_offset())


def _generator(device: torch.device) -> torch.Generator:
    import torch

    # torch keeps a generator for each device of a kind.
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    generator = _module(device).default_generators[index]
    assert isinstance(generator, torch.Generator)
    return generator


def is_capturing(device: torch.device) -> bool:
    """Return whether work submitted by this thread is recorded in a CUDA graph, and not run."""
    return device.type == NVIDIA and bool(_module(device).is_current_stream_capturing())


def reserve_workspaces(device: torch.device, dtype: torch.dtype) -> None:
    """Let the library of products take its memory now, for the threads of both passes.

    Taken in the first backward pass it would lie within a large block that was free just then, such
    as the logits', which no later step could use again.
    """
    import torch
    import torch.nn.functional as F

    if is_accelerator(device):
        x = torch.ones(16, 16, dtype=dtype, device=device, requires_grad=True)
        F.linear(x, x, x[0]).sum().backward()  # type: ignore[no-untyped-call]


def synchronize(device: torch.device | None) -> None:
    """Wait until the device has finished all submitted work."""
    import torch

    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)


def send(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host to the device, without waiting for it."""
    # Only from pinned memory does the copy not wait.
    pinned = is_accelerator(device)
    if pinned:
        x = x.pin_memory()
    return x.to(device, non_blocking=pinned)


def start_read(x: torch.Tensor) -> Callable[[], list[float]]:
    """Begin to copy a tensor of numbers to the host; return how to wait for them."""
    import torch

    if not is_accelerator(x.device):
        numbers = x.tolist()
        return lambda: numbers
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    event = _module(x.device).Event()
    event.record()

    def wait() -> list[float]:
        event.synchronize()
        return host.tolist()

    return wait


def mark(device: torch.device) -> Any:
    """Mark the moment at which the device has done all work that was submitted so far."""
    if not is_accelerator(device):
        return time.perf_counter()
    event = _module(device).Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Any, last: Any) -> float:
    """Return the time between two marks, both of which the device has passed."""
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1e3  # type: ignore[no-any-return]


def new_stream(device: torch.device) -> Any:
    """Return a stream of its own for the work of `on_stream`."""
    return _module(device).Stream(device)


def current_stream(device: torch.device) -> Any:
    """Return the stream to which this thread submits work.

    It is of the kind of `new_stream`: torch's general kind does not wait for this kind's events.
    """
    return _module(device).current_stream(device)


def use_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Submit work to this stream, in no order to other work."""
    return _module(stream.device).stream(stream)  # type: ignore[no-any-return]


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Submit work to this stream: after all earlier work, before all later. None: as it is."""
    if stream is None:
        yield
        return
    before = current_stream(stream.device)
    stream.wait_stream(before)
    try:
        with use_stream(stream):
            yield
    finally:
        before.wait_stream(stream)


def profiler_activities(device: torch.device) -> list[ProfilerActivity]:
    from torch.profiler import ProfilerActivity

    if device.type == "cpu":
        return [ProfilerActivity.CPU]
    # Devices of other makers' plug-ins, such as torch_npu, are PrivateUse1.
    own = getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.PrivateUse1)
    return [ProfilerActivity.CPU, own]


def use_deterministic_algorithms() -> None:
    """Let torch use deterministic algorithms only, cuBLAS included."""
    import torch

    # cuBLAS repeats its results only with workspaces of fixed sizes, and torch insists on that.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


# The facts that `meshwright doctor` shows


def torch_build() -> str:
    """Return the kind of accelerator that this torch was built for."""
    import torch

    kinds = {
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "XPU": getattr(torch.version, "xpu", None),
    }
    return next((f"{kind} {version}" for kind, version in kinds.items() if version), "CPU only")


def list_accelerators() -> list[torch.device]:
    """Return the accelerators that this process sees."""
    import torch

    accelerator = _current()
    if accelerator is None:
        return []
    return [torch.device(accelerator.type, n) for n in range(torch.accelerator.device_count())]


def why_no_device() -> str:
    """Return why torch sees no device, such as an old driver, as far as CUDA and ROCm say."""
    import torch

    if not (torch.version.cuda or torch.version.hip):
        return "it finds none"
    if (shown := os.environ.get(HIDES[NVIDIA])) in ("", "-1"):
        return f"{HIDES[NVIDIA]}={shown} hides all"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:
        return first_line(error).split(". ")[0]
    return "it finds none"


def unfit_accelerator() -> str | None:
    """Return the name of an accelerator of this machine that is not used, or None."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return UNFIT.get(accelerator.type) if accelerator is not None else None


def nvidia_driver() -> str | None:
    """Return the version of the NVIDIA driver, or None without one, whatever torch sees."""
    try:
        return next(iter(ask_nvidia_smi("driver_version", "csv,noheader").split()), None)
    except RuntimeError:
        return None


def ask_nvidia_smi(fields: str, form: str = "csv") -> str:
    """Return what nvidia-smi says of this machine's GPUs; RuntimeError says why it does not."""
    tool = TOOLS[NVIDIA]
    words = [tool, f"--query-gpu={fields}", f"--format={form}"]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=SMI_SECONDS
        )
    except FileNotFoundError:
        raise RuntimeError(f"there is no {tool} here") from None
    except OSError as error:
        raise RuntimeError(f"{tool}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{tool} gave no answer in {SMI_SECONDS} s") from None
    if done.returncode:
        # nvidia-smi writes most of its errors to standard output.
        said = next(iter((done.stdout + done.stderr).strip().splitlines()), "")
        raise RuntimeError(f"{tool} ended with status {done.returncode}{said and f': {said}'}")
    return done.stdout


def computes_bf16(device: torch.device) -> bool:
    """Return whether the device multiplies bfloat16 itself; unknown counts as yes."""
    if device.type == NVIDIA:
        return bool(_module(device).is_bf16_supported(including_emulation=False))
    return bool(getattr(_module(device), "is_bf16_supported", lambda: True)())


def multiplies_bf16_fast(size: int = 512) -> bool:
    """Return whether this machine's CPU multiplies bfloat16 clearly faster than float32.

    Only CPUs with instructions for it do; others convert, or take many times as long. The products
    are timed, in turns, because each system and processor reports its instructions in its own way.
    """
    import torch

    # Take the shortest of several times: another program can only lengthen them.
    shortest = dict[torch.dtype, float]()
    for _ in range(4):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.ones(size, size, dtype=dtype)
            began = time.perf_counter()
            x @ x
            shortest[dtype] = min(shortest.get(dtype, math.inf), time.perf_counter() - began)
    return shortest[torch.bfloat16] < 0.8 * shortest[torch.float32]


# Memory, in bytes


def memory_without_torch(wanted: str) -> tuple[int, bool]:
    """Return the memory of --device, 0 if it is unknown, and whether that is a CPU's.

    nvidia-smi says that of the smallest GPU.
    """
    if wanted.partition(":")[0] in ("auto", NVIDIA):
        with contextlib.suppress(RuntimeError, ValueError):  # no GPU, or one that does not say
            mebibytes = ask_nvidia_smi("memory.total", "csv,noheader,nounits").split()
            return min(map(int, mebibytes)) << 20, False
    if wanted in ("auto", "cpu"):
        return host.physical_memory(), True
    return 0, False


def total_memory(device: torch.device) -> int:
    """Return the device's memory; on a CPU, that of the machine or of its container."""
    if device.type != "cpu":
        return int(_module(device).get_device_properties(device).total_memory)
    return host.physical_memory()


def free_memory(device: torch.device) -> int:
    """Return the memory that this process could still use; on a CPU see host.py."""
    if device.type == "cpu":
        return host.free_host_memory()
    # Count what the driver has free and what torch's allocator has from it already.
    return int(_module(device).mem_get_info(device)[0] + _module(device).memory_reserved(device))


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes that tensors held at once, or None on a CPU, which does not count."""
    # Ten times as fast as max_memory_allocated().
    stats = getattr(_module(device), "memory_stats_as_nested_dict", None)
    if stats is None:
        return None
    return int(stats(device)["allocated_bytes"]["all"]["peak"]) + _symmetric_bytes


def count_symmetric_memory(size: int) -> None:
    """Count bytes that other ranks map, which torch does not allocate as other tensors."""
    global _symmetric_bytes
    _symmetric_bytes += size


def symmetric_memory() -> int:
    """Return the bytes that other ranks map."""
    return _symmetric_bytes


def memory_stats(device: torch.device) -> dict[str, int]:
    """Return the allocator's counters by torch's names; empty if there are none, as on a CPU."""
    stats = getattr(_module(device), "memory_stats", None)
    return dict(stats(device)) if stats is not None else {}


def allocate_pinned(size: int, device: torch.device) -> torch.Tensor:
    """Allocate `size` bytes of host memory that the device copies into at full speed."""
    import torch

    memory = torch.empty(size, dtype=torch.uint8)
    if device.type == NVIDIA and size:
        # The pinning allocator would round up to a power of two. If refused, copies are slower.
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostRegister(memory.data_ptr(), size, 0)
        # Else the device would go on to read these pages when the addresses have become another's.
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    elif is_accelerator(device):
        memory = memory.pin_memory()
    return memory


def reset_memory(device: torch.device) -> None:
    """Release cached memory and reset the peak."""
    _module(device).empty_cache()
    _module(device).reset_peak_memory_stats(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is torch's out-of-memory; torch_npu's may be a RuntimeError."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return "out of memory. Tried to allocate" in str(error)


def _module(device: torch.device) -> Any:
    import torch

    return torch.get_device_module(device)
