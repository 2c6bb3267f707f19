"""Profiles of devices and their links, from data files with sources. No torch.

A profile has the figures of a data sheet (memory, peaks, bandwidth) and the shares of them that
training reaches. Files in profiles/ have the devices that people ask for; `meshwright bench
--calibrate` writes one of the machine at hand.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from meshwright.base import host
from meshwright.base.errors import UserError
from meshwright.base.files import parse_toml, read_table
from meshwright.base.hints import did_you_mean

FOLDER = "base/profiles"
# Formats whose products run at another format's speed where a device has none of their own.
SAME_SPEED = {"float16": "bfloat16", "bfloat16": "float16"}


@dataclass(frozen=True)
class LinkSpeed:
    """One direction of a device's connection to others."""

    bandwidth: float  # bytes per second and device
    latency: float  # seconds of a message
    collectives: float = 0.7  # share of the bandwidth that collectives reach
    copies: float = 0.8  # share that copy engines reach; 0: the devices map no memory of each other


@dataclass(frozen=True)
class Links:
    """The connections of a machine's devices with each other, and with those of other machines."""

    gpus_per_node: int
    within: LinkSpeed
    between: LinkSpeed

    def with_network(self, bandwidth: float) -> Links:
        """Return the same machine with so many bytes per second and device between machines."""
        return replace(self, between=replace(self.between, bandwidth=bandwidth))


@dataclass(frozen=True, eq=False)
class DeviceProfile:
    """A device: figures of its data sheet, and what a training reaches of them."""

    name: str
    title: str
    kind: str  # cuda, npu or cpu, as in --device
    memory_bytes: int  # that torch can give to tensors and that its context takes
    context_bytes: int  # that the driver and its libraries keep
    peaks: Mapping[str, float]  # dtype -> dense FLOP/s
    bandwidth: float  # bytes per second of its memory
    reached: Mapping[str, float]  # shares of peaks and bandwidth, see REACHED
    seconds: Mapping[str, float]  # fixed times, see SECONDS
    measured: frozenset[str]  # which of these are from measurements; the others are assumed
    links: Links
    storage: Mapping[str, float]  # bytes per second of saves: to the disk, and to the host's memory
    names: tuple[str, ...]  # parts of the product's name as torch reports it
    sources: tuple[str, ...]

    @property
    def symmetric_ranks(self) -> int:
        """How many devices map each other's memory: those of a machine, or 1."""
        return self.links.gpus_per_node if self.links.within.copies else 1

    def flops(self, dtype: str) -> float:
        """Return the FLOP/s of large matrix products of a format."""
        at = dtype if dtype in self.peaks else SAME_SPEED.get(dtype, dtype)
        if at not in self.peaks:
            raise UserError(
                f"the {self.title} has no products of {dtype}; choose one of {' '.join(sorted(self.peaks))}"
            )
        return self.peaks[at] * self.reached.get(f"products_{at}", self.reached["products"])

    def attention(self, width: int, dtype: str) -> tuple[float, float]:
        """Return the FLOP/s of attention forward and backward for heads of a width and a format."""
        if dtype in ("float32", "float64"):  # other kernels, near the same shares of their own peak
            share = self.reached.get(f"products_{dtype}", self.reached["products"])
            peak = self.flops(dtype) / share
        else:
            peak = self.peaks.get("bfloat16") or self.peaks.get("float16") or self.peaks["float32"]
        size = "64" if width <= 64 else "128"
        forward = self.reached[f"attention_{size}"]
        backward = self.reached[f"attention_{size}_backward"]
        return peak * forward, peak * backward


# What a profile says of how much is reached, with what is assumed where a file is silent.
REACHED = {
    # of the peak, by large matrix products; products_fp8 and so on for one format
    "products": 0.65,
    # of the half-precision peak, by the attention kernel with heads of this width
    "attention_64": 0.4,
    "attention_64_backward": 0.35,
    "attention_128": 0.55,
    "attention_128_backward": 0.45,
    "attention_dropout": 0.36,  # of its speed without dropout
    "attention_dropout_backward": 0.73,
    "passes": 0.68,  # of the memory's bandwidth, by norms, activations and the loss
    "passes_fp8": 0.51,  # of it, by those of them that round to fp8
    "update": 0.85,  # of it, by the optimizer
    "muon": 0.78,  # of the half-precision peak, by Muon's products of large matrices
    "beside_copies": 0.3,  # of the time of copies that run beside products, lost by the products
    "beside_collectives": 0.85,
    "slowest": 0.99,  # speed of the slowest of several devices
}
SECONDS = {
    "product": 8e-6,  # of a product that is too small to fill the device
    "attention": 2e-5,
    "pass": 2e-6,
    # Of the host where no CUDA graph runs, by what it launches, see LAUNCHES. Hosts differ by one
    # factor, which "launch" tells.
    "launch": 6e-5,
    "launch_torch": 1.5e-5,
    "launch_view": 3e-6,
    "launch_node": 2.5e-5,
    "launch_collective": 1.2e-4,
    "prepare": 8e-4,  # of the host for a step beside its launches: its batch, its numbers, the log
    "step": 1e-3,  # between two steps
}

# What `bench --calibrate` divides measurements by, and `plan` multiplies a profile's figures by.
# rows of a block of the attention kernel, which computes blocks on the diagonal in full
ATTENTION_ROWS = 128
ATTENTION_PASSES = 7  # over the heads, of its backward pass: sums in float32, and their casts
ATTENTION_STARTS = 3  # blocks of keys that the begin and the end of a block of rows cost
# Which time of the host each launch takes: of a Triton kernel, an operation of torch with a kernel,
# one without, a node of the backward pass, a collective.
LAUNCHES = {
    "triton": "launch",
    "torch": "launch_torch",
    "view": "launch_view",
    "node": "launch_node",
    "collective": "launch_collective",
}
# How many of each a layer is, forward and backward, by the kind of block; a test counts them.
LAYER_LAUNCHES = {
    "fused": (
        {"triton": 3, "torch": 5, "view": 50},
        {"triton": 9, "torch": 9, "view": 80, "node": 14},
    ),
    "plain": ({"torch": 10, "view": 28}, {"triton": 8, "torch": 19, "view": 70, "node": 22}),
}

STORAGE = {"disk": 2e9, "host": 25e9}
TRIAL_SECONDS = 0.05  # in which a CPU shows its speed


@functools.cache
def this_cpu() -> DeviceProfile:
    """Return the profile of this machine's CPU, each core as fast as one is measured to be."""
    guessed = load_profile("cpu")
    cores = host.cores()
    speed = product_speed()
    faster = cores * speed / guessed.peaks["float32"]
    title = (
        f"this CPU of {cores} core{'s' * (cores > 1)}, {speed / 1e9:.0f} GFLOP/s measured of one"
    )
    peaks = {dtype: faster * peak for dtype, peak in guessed.peaks.items()}
    return replace(guessed, title=title, peaks=peaks)


def product_speed() -> float:
    """Return the FLOP/s of one core, by the fastest of many products of small float32 matrices.

    They are too small for several threads, and too short for other programs to delay each of them.
    """
    import numpy as np

    size = 64
    shortest = math.inf
    x, y = (np.ones((size, size), np.float32) for _ in range(2))
    begun = time.perf_counter()
    # At least once, however long a busy machine has kept this process from running.
    while (now := time.perf_counter()) - begun < TRIAL_SECONDS or shortest == math.inf:
        np.matmul(x, x, out=y)
        shortest = min(shortest, time.perf_counter() - now)
    return 2 * size**3 / shortest


def profile_names() -> list[str]:
    folder = resources.files("meshwright").joinpath(FOLDER)
    return sorted(
        f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")
    )


@functools.cache
def load_profile(name_or_path: str) -> DeviceProfile:
    """Return the profile of a device by name, or that of a file."""
    name = name_or_path.lower()
    if name in profile_names():
        return read_profile(name, read_table(f"{FOLDER}/{name}.toml"))
    path = Path(name_or_path)
    if path.suffix != ".toml":
        known = profile_names()
        hint = did_you_mean(name, known) or f"; there are {' '.join(known)}"
        raise UserError(
            f"no profile of a device, and no file of `bench --calibrate`, is named {name_or_path}{hint}"
        )
    try:
        return read_profile(path.stem, parse_toml(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(
            f"the profile {path} cannot be read: {error.strerror}; give another file"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is no profile of a device: {error}; `bench --calibrate` writes one"
        ) from error


def profile_of(product: str) -> DeviceProfile | None:
    """Return the profile with the longest name that is in a product's, as whole words, if any.

    A laptop's GPU is another one than the card that it is named after.
    """
    found = None
    longest = 0
    for profile in map(load_profile, profile_names()):
        for part in profile.names:
            words = rf"\b{re.escape(part)}\b(?! Laptop)"
            if len(part) > longest and re.search(words, product, re.IGNORECASE):
                found = profile
                longest = len(part)
    return found


def launch_times(given: Mapping[str, float]) -> dict[str, float]:
    """Return the fixed times; the host's others are as much slower as its time of a launch."""
    usual = SECONDS["launch"]
    scale = given.get("launch", usual) / usual
    scaled = {key: scale * SECONDS[key] for key in (*LAUNCHES.values(), "prepare")}
    return SECONDS | scaled | dict(given)


def read_profile(name: str, table: Mapping[str, Any]) -> DeviceProfile:
    """Return a profile from the contents of its file, whose figures may be per CPU core."""
    cores = host.cores() if table.get("per_core") else 1
    measured = table.get("measured", {})
    assumed = table.get("assumed", {})
    given = assumed | measured
    shares = {}
    seconds = {}
    for key, value in given.items():
        if key in SECONDS:
            seconds[key] = value
        elif key in REACHED or key.startswith("products_"):
            shares[key] = value
        else:
            raise ValueError(f"unknown {key}{did_you_mean(key, REACHED | SECONDS)}")
    links = table["links"]
    return DeviceProfile(
        name=name,
        title=table["title"],
        kind=table["kind"],
        memory_bytes=int(table.get("memory_bytes") or host.physical_memory()),
        context_bytes=int(table.get("context_bytes", 0)),
        peaks={dtype: cores * float(peak) for dtype, peak in table["peaks"].items()},
        bandwidth=float(table["bandwidth"]),
        reached=REACHED | shares,
        seconds=launch_times(seconds),
        measured=frozenset(measured),
        links=Links(
            int(links["gpus_per_node"]), LinkSpeed(**links["within"]), LinkSpeed(**links["between"])
        ),
        storage=STORAGE | table.get("storage", {}),
        names=tuple(table.get("names", ())),
        sources=tuple(table.get("sources", ())),
    )
