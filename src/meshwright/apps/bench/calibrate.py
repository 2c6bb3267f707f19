"""`meshwright bench --calibrate`: measure this machine for the plan, and write its profile.

Each figure is the median of runs that take a fraction of a second together: matrix products at the
shapes of known sizes, attention, passes over memory, the host's launches, the links between the
devices, and the disk. What a GPU's data sheet says comes from the profile that its name matches.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.apps.bench import links
from meshwright.base import device as devices
from meshwright.base import host
from meshwright.base.console import show
from meshwright.base.device_profiles import (
    ATTENTION_PASSES,
    ATTENTION_ROWS,
    ATTENTION_STARTS,
    LAUNCHES,
    LAYER_LAUNCHES,
    SECONDS,
    DeviceProfile,
    LinkSpeed,
    load_profile,
    profile_of,
)
from meshwright.config.flags import parse_settings
from meshwright.config.schema import TrainConfig
from meshwright.data.loader import Batch
from meshwright.kernels.activation import activate
from meshwright.kernels.fp8 import multiply
from meshwright.model.attention import fused
from meshwright.parallel.layout import Layout
from meshwright.runtime.cuda_graphs import CudaGraphs
from meshwright.training.network import Spec, build_network
from meshwright.training.step import StepSettings, train_step

FIGURE_SECONDS = 0.4  # seconds for which a figure is measured, beside the first call
HOST_ROUNDS = 5  # rounds in which the host is measured
# Passes of a step read and write a tenth more than the model counts, see docs/plan.md.
COUNTED = 0.87
# A step whose operations take a device less time than the host takes to launch them.
TRAINED = "--mock-data --train-iters 1 --lr 1e-3 --vocab-size 128 --hidden-size 64 --num-attention-heads 1 "
TRAINED += "--seq-length 16 --micro-batch-size 1 --global-batch-size 1 --hidden-dropout 0 --attention-dropout 0 "
TRAINED += "--cuda-graphs off --compile off"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DISK_BYTES = 1 << 28
LINK_SECONDS = 60


class Sizes(NamedTuple):
    """What is measured on a device of this speed."""

    rows: int
    hidden: tuple[int, ...]
    tokens: int  # of attention
    elements: int  # of passes over memory


SMALL = Sizes(512, (512, 768), 512, 1 << 22)
LARGE = Sizes(16384, (1024, 2048, 4096), 2048, 1 << 27)


def calibrate(wanted: str, folder: Path) -> Path:
    """Measure this machine, and return the file of its profile."""
    device = devices.open_device(wanted)
    is_cpu = device.type == "cpu"
    sizes = SMALL if is_cpu else LARGE
    title = devices.device_name(device)

    # A GPU whose name matches a profile has its data sheet's peaks, a CPU those that are measured.
    known = profile_of(title) or load_profile("cpu")
    copied = copied_per_second(device, sizes)
    rates = products(device, sizes, copied)
    if known.name == "cpu":
        peaks = rates
        bandwidth = copied
    else:
        # The data sheet's peaks, and a bandwidth that no measurement exceeds.
        peaks = dict(known.peaks)
        bandwidth = max(known.bandwidth, copied)

    # The shares of these that are reached.
    main = "float32" if is_cpu else "bfloat16"
    reached = {"products": rates[main] / peaks[main], "update": copied / bandwidth}
    for dtype, rate in rates.items():
        if dtype in peaks:
            reached[f"products_{dtype}"] = rate / peaks[dtype]
    streamed = COUNTED * passes_per_second(device, sizes)
    reached |= attention(device, sizes, peaks[main], streamed)
    reached["passes"] = streamed / bandwidth

    seconds = small_times(device, rates[main]) | host_seconds(device)
    link = LinkSpeed(**within(known.links.within, measure_links(device)))
    count = known.links.gpus_per_node if is_cpu else devices.count_accelerators()
    today = time.strftime("%Y-%m-%d")
    profile = replace(
        known,
        title=title,
        memory_bytes=devices.total_memory(device),
        peaks=peaks,
        bandwidth=bandwidth,
        reached={**known.reached, **reached},
        seconds={**known.seconds, **seconds},
        measured=frozenset({**reached, **seconds}),
        storage={"disk": disk_per_second(folder), "host": host_per_second(device)},
        links=replace(known.links, gpus_per_node=count, within=link),
        sources=(f"meshwright bench --calibrate, torch {torch.__version__}, {today}",),
    )
    name = "-".join(title.lower().replace(",", "").split())
    path = folder / f"{name}.toml"
    path.write_text(as_toml(profile), encoding="utf-8")
    return path


def seconds_of(run: Callable[[], object], device: torch.device, share: float = 1.0) -> float:
    """Return the seconds of a call, of which many are submitted before the device is waited for."""
    run()
    devices.synchronize(device)

    # About five rounds fit into the time of a figure.
    limit = share * FIGURE_SECONDS
    begun = time.perf_counter()
    run()
    devices.synchronize(device)
    one = max(time.perf_counter() - begun, 1e-7)
    calls = max(1, min(1000, int(limit / 5 / one)))

    times: list[float] = []
    end = time.perf_counter() + limit
    while not times or time.perf_counter() < end:
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        devices.synchronize(device)
        times.append((time.perf_counter() - begun) / calls)
    return statistics.median(times)


# Products and attention


def shapes(sizes: Sizes) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of the products of layers of these sizes."""
    return [shape for h in sizes.hidden for shape in ((3 * h, h), (4 * h, h), (h, 4 * h))]


def products(device: torch.device, sizes: Sizes, copied: float) -> dict[str, float]:
    """Return FLOP/s by format."""
    dtypes = dict(DTYPES)
    if device.type == "cpu":
        dtypes["float64"] = torch.float64
    if devices.has_fp8(device):
        dtypes["fp8"] = torch.float8_e4m3fn
    out = {}
    for name, dtype in dtypes.items():
        rows = sizes.rows
        if dtype is torch.float32 and device.type != "cpu":  # many times as slow as with 16 bits
            rows //= 4
        out[name] = rate_of_products(device, sizes._replace(rows=rows), dtype, copied)
    return out


def rate_of_products(
    device: torch.device, sizes: Sizes, dtype: torch.dtype, copied: float
) -> float:
    """Return FLOP/s at all shapes."""
    flops = spent = 0.0
    for outputs, inputs in shapes(sizes):
        x, w = (torch.randn(n, inputs, device=device).to(dtype) for n in (sizes.rows, outputs))
        flops += 2.0 * sizes.rows * outputs * inputs
        spent += seconds_of_product(x, w, copied)
    return flops / spent


def seconds_of_product(x: Tensor, w: Tensor, copied: float) -> float:
    """Return the seconds of x w^T, beside passes over memory that take half as long, as in a step.

    A GPU that only multiplies is slowed by its limit of power.
    """
    device = x.device
    one = torch.ones((), device=device)

    def run() -> object:
        if x.dtype is torch.float8_e4m3fn:
            return multiply(x, w, (one, one), torch.bfloat16)
        return torch.mm(x, w.t())

    elements = max(1, int(seconds_of(run, device, 0.1) * copied / 16))
    a, b = (torch.ones(elements, device=device) for _ in range(2))

    def add() -> object:
        return torch.add(a, a, out=b)

    def both() -> None:
        run()
        add()

    return seconds_of(both, device, 0.5) - seconds_of(add, device, 0.1)


def attention(device: torch.device, sizes: Sizes, peak: float, streamed: float) -> dict[str, float]:
    """Return the shares of the peak that attention reaches by width, forward and backward."""
    is_cpu = device.type == "cpu"
    dtype = torch.float32 if is_cpu else torch.bfloat16
    samples, heads = (1, 4) if is_cpu else (4, 16)
    # The blocks on the diagonal of a causal square are computed whole, and each row of blocks
    # starts slowly. The plan's timing.py has the same rule.
    blocks = sizes.tokens / ATTENTION_ROWS
    computed = (blocks + 1 + ATTENTION_STARTS) / (2 * blocks)
    out: dict[str, float] = {}
    for width in (64, 128):
        shape = samples, sizes.tokens, heads, width
        q, k, v = (
            torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)
        )
        grad = torch.randn(shape, device=device, dtype=dtype)
        forward = functools.partial(fused, q, k, v, None, None, 0.0)

        def both(
            forward: Callable[[], Tensor] = forward,
            inputs: tuple[Tensor, ...] = (q, k, v),
            grad: Tensor = grad,
        ) -> object:
            return torch.autograd.grad(forward(), inputs, grad)

        # FLOPs of what is computed: two products forward, five backward.
        flops = 4.0 * samples * heads * width * sizes.tokens**2 * computed
        first = seconds_of(forward, device)
        # The plan counts the backward kernel's passes over the heads on their own.
        passes = ATTENTION_PASSES * q.numel() * q.element_size() / streamed
        second = max(seconds_of(both, device) - first - passes, first)
        out[f"attention_{width}"] = flops / first / peak
        out[f"attention_{width}_backward"] = 2.5 * flops / second / peak
    return out


# Memory and the host


def copied_per_second(device: torch.device, sizes: Sizes) -> float:
    """Return the bytes per second that a sum of two tensors reads and writes."""
    # Two tensors are read and one is written, 4 bytes an element each.
    a, b, c = (torch.ones(sizes.elements, device=device) for _ in range(3))
    return 12 * sizes.elements / seconds_of(lambda: torch.add(a, b, out=c), device)


def passes_per_second(device: torch.device, sizes: Sizes) -> float:
    """Return the bytes per second of an activation, forward, as the layers compute it."""
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    shape = sizes.elements // 4096, 4096
    x = torch.randn(shape, device=device, dtype=dtype)
    with torch.no_grad():
        seconds = seconds_of(lambda: activate("gelu-tanh", x, None), device)
    return 2 * x.numel() * x.element_size() / seconds


def small_times(device: torch.device, flops: float) -> dict[str, float]:
    """Return the seconds of small kernels, on a GPU without the host's part.

    A product of 1,024 rows takes longer than its FLOPs at the speed of large ones, by the rule of
    the plan's timing.py.
    """
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    side = 1024 if device.type != "cpu" else 128
    x, small = (torch.randn(n, n, device=device, dtype=dtype) for n in (side, 256))
    y = torch.empty_like(x)
    out_of_small = torch.empty_like(small)
    calls = 100

    def repeat(run: Callable[[], object]) -> None:
        for _ in range(calls):
            run()

    out: dict[str, float] = {}
    kernels: dict[str, Callable[[], object]]
    kernels = {
        "product": lambda: torch.mm(x, x, out=y),
        "pass": lambda: torch.add(small, small, out=out_of_small),
    }
    for name, run in kernels.items():
        repeated = functools.partial(repeat, run)
        # A graph launches all kernels at once, which leaves the host's part out.
        if device.type == devices.NVIDIA:
            stream = devices.new_stream(device)
            with devices.on_stream(stream):
                run()
                graphs = CudaGraphs(device)
                graphs.prepare()
                replay = graphs.capture(repeated)
                out[name] = seconds_of(replay, device, 0.5) / calls
        else:
            out[name] = seconds_of(repeated, device, 0.5) / calls
    # `timing` takes the hypotenuse of the FLOPs' time and a fixed one; this is the fixed one.
    out["product"] = max(out["product"] ** 2 - (2 * side**3 / flops) ** 2, 1e-14) ** 0.5
    return out


def host_seconds(device: torch.device) -> dict[str, float]:
    """Return the host's seconds to launch a kernel, which its other times are in proportion to.

    The seconds of a layer in a training step are compared with those of its launches by SECONDS. A
    host that others share is half as fast again in one second as in the next, so the median of some
    rounds counts.
    """
    blocks = ("fused", "plain") if devices.has_kernels(device) else ("plain",)
    factors = []
    for _ in range(HOST_ROUNDS):
        for block in blocks:
            factors.append(layer_seconds(device, block) / counted_seconds(block))
    return {"launch": statistics.median(factors) * SECONDS["launch"]}


def counted_seconds(block: str) -> float:
    """Return what a layer's launches take by SECONDS."""
    total = 0.0
    for way in LAYER_LAUNCHES[block]:  # forward and backward
        for kind, count in way.items():
            total += count * SECONDS[LAUNCHES[kind]]
    return total


def layer_seconds(device: torch.device, block: str) -> float:
    """Return the host's seconds for a layer in a training step without CUDA graphs."""
    few, many = 2, 8
    flags = "--fused-kernels off" if block == "plain" else ""
    difference = step_seconds(device, many, flags) - step_seconds(device, few, flags)
    return max(difference, 1e-9) / (many - few)


def step_seconds(device: torch.device, layers: int, flags: str = "") -> float:
    """Return the seconds of a training step so small that they are the host's."""
    words = f"{TRAINED} --num-layers {layers} {flags}".split()
    if device.type != "cpu":
        words.append("--bf16")
    config = parse_settings(TrainConfig, words, "meshwright train").config
    net = build_network(Spec(config, Layout(), device, 128, 128))
    # Nothing has drawn the weights, which may hold any bits; zeros stay finite.
    with torch.no_grad():
        for part in net.parts:
            for parameter in part.parameters():
                parameter.zero_()
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    batch = Batch(tokens, tokens, torch.zeros(1, dtype=torch.int64))
    return seconds_of(lambda: train_step(net, [batch], StepSettings(1, 0.0, 0.0)), device)


# Links and storage


def measure_links(device: torch.device) -> dict[str, float]:
    """Return bytes per second of collectives and copies, and the latency; nothing of one device."""
    count = devices.count_accelerators() if device.type != "cpu" else min(2, host.cores())
    if count < 2:
        return {}
    words = ["launch", "--nproc-per-node", str(count), str(Path(links.__file__)), device.type]
    command = [sys.executable, "-m", "meshwright", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LINK_SECONDS)
    except subprocess.TimeoutExpired:
        errors = [f"no answer in {LINK_SECONDS} s"]
    else:
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                return {name: float(x) for name, x in json.loads(line).items()}
        errors = done.stderr.splitlines() or ["nothing was printed"]
    # A profile keeps the links of the data sheet then.
    show(f" > the links were not measured: {errors[-1]}")
    return {}


def within(known: LinkSpeed, measured: Mapping[str, float]) -> dict[str, float]:
    """Return the link between the devices here: its data sheet's speed, and what is reached."""
    if not measured:
        return asdict(known)
    most = max(known.bandwidth, measured["collectives"], measured["copies"])
    shares = {name: measured[name] / most for name in ("collectives", "copies")}
    return {"bandwidth": most, "latency": measured["latency"], **shares}


def disk_per_second(folder: Path) -> float:
    path = folder / "disk"
    data = os.urandom(1 << 20) * (DISK_BYTES >> 20)
    try:
        begun = time.perf_counter()
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - begun
    finally:  # a full disk keeps nothing of it
        path.unlink(missing_ok=True)
    return DISK_BYTES / seconds


def host_per_second(device: torch.device) -> float:
    """Return the bytes per second of copies to pinned memory of the host."""
    if device.type == "cpu":
        return copied_per_second(device, SMALL) / 1.5
    x = torch.ones(1 << 26, device=device)
    to = torch.empty(1 << 26, pin_memory=True)
    return 4 * x.numel() / seconds_of(lambda: to.copy_(x, non_blocking=True), device, 0.5)


# The file


def as_toml(profile: DeviceProfile) -> str:
    links = profile.links
    figures = {**profile.reached, **profile.seconds}
    measured = {name: x for name, x in figures.items() if name in profile.measured}
    lines = [
        f"title = {json.dumps(profile.title)}",
        f"kind = {json.dumps(profile.kind)}",
        f"memory_bytes = {profile.memory_bytes}",
        f"context_bytes = {profile.context_bytes}",
        f"bandwidth = {profile.bandwidth:.4g}",
        f"sources = {json.dumps(profile.sources)}",
        section("peaks", profile.peaks),
        section("measured", measured),
        section("storage", profile.storage),
        f"\n[links]\ngpus_per_node = {links.gpus_per_node}",
        section("links.within", speeds_of(links.within)),
        section("links.between", speeds_of(links.between)),
    ]
    return "\n".join(lines) + "\n"


def speeds_of(link: LinkSpeed) -> dict[str, float]:
    names = ("bandwidth", "latency", "collectives", "copies")
    return {name: getattr(link, name) for name in names}


def section(name: str, values: Mapping[str, float]) -> str:
    lines = [f"{key} = {value:.4g}" for key, value in values.items()]
    return "\n".join([f"\n[{name}]", *lines])
