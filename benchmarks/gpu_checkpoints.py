"""The cost of saves and loads, beside torch.save and torch.distributed.checkpoint.

All run in one process, on the same tensors.

usage: python benchmarks/gpu_checkpoints.py FOLDER [--size 1.3B] [--rounds 3] [--device cuda]

A model is trained for a few steps with AdamW in bfloat16; its fp32 masters and moments are what is
saved (12 bytes a parameter). "stall": how long the training step that saves is longer than it is
without. Each file is removed before the next is written. "to disk": with fsync, as ours always is;
torch.save by itself returns before the bytes are on the disk. "copy": the same bytes from the
device into pinned memory, the least that a save in the background can take.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import SIZES, VOCAB, describe_machine, new_parser, print_head, print_row


def build(size: str, device: str, folder: Path, *more: str) -> Any:
    from meshwright.base import console
    from meshwright.config import flags
    from meshwright.config.schema import TrainConfig
    from meshwright.parallel.layout import Layout
    from meshwright.runtime.ranks.team import ALONE
    from meshwright.training.log.timers import Startup
    from meshwright.training.network import Spec
    from meshwright.training.setup import build_state

    console.set_stream(None)
    layers, hidden, heads = SIZES[size]
    vocab = VOCAB if size != "tiny" else 256
    line = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length 1024 "
        f"--micro-batch-size 1 "
        f"--lr 1e-4 --train-iters 100 --mock-data --vocab-size {vocab} --bf16 --attention-dropout 0 --hidden-dropout 0 "
        f"--device {device} --save {folder} --num-workers 0 {' '.join(more)}"
    )
    config = flags.parse_settings(TrainConfig, line.split(), "benchmark").config
    device_ = torch.device(device, 0) if device != "cpu" else torch.device("cpu")
    spec = Spec(config, Layout(), device_, vocab, -(-vocab // 128) * 128)
    return build_state(spec, ALONE, Startup())


def timed(act: Callable[[], Any]) -> float:
    synchronize()
    began = time.perf_counter()
    act()
    synchronize()
    return time.perf_counter() - began


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def synced(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def cold(folder: Path) -> None:
    """Out of the page cache, so that reading is from the disk."""
    synced(folder)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", default="1.3B", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    import torch.distributed.checkpoint as dcp

    from meshwright.checkpoint import loading, steps

    state = build(args.size, args.device, args.folder / "ours", "--async-save")
    named = state.tensors()
    size = sum(t.numel() * t.element_size() for _, _, t in named.values())
    plain = {name: tensor for name, (_, _, tensor) in named.items()}
    rows: list[tuple[str, list[float], str]] = []

    def print_times(what: str, seconds: list[float], more: str = "") -> None:
        rows.append((what, seconds, more))
        rate = size / statistics.median(seconds) / 1e9
        span = f"{min(seconds):.3f}-{max(seconds):.3f}"
        print_row(what, f"{statistics.median(seconds):.3f}", span, f"{rate:.2f}", more)

    print(
        f"{args.size}: {size / 1e9:.2f} GB, {describe_machine('torch')}, {os.cpu_count()} CPU cores\n"
    )
    print_head("what", "s (median)", "range", "GB/s", "")

    # The least a copy can take.
    from meshwright.base import device as devices

    pinned = [devices.allocate_pinned(size, state.net.device)]
    flat = [t.reshape(-1).view(torch.uint8) for t in plain.values()]

    def copy() -> None:
        at = 0
        for one in flat:
            pinned[0][at : at + one.numel()].copy_(one, non_blocking=True)
            at += one.numel()

    copy()
    print_times("copy to pinned memory", [timed(copy) for _ in range(args.rounds)])
    pinned.clear()

    # In the background: how long training waits, while the one before has been written.
    stalls, writes = [], []
    for n in range(args.rounds + 1):
        state.progress.iteration = 100 + n
        stalls.append(timed(state.save))
        began = time.perf_counter()
        state.saver.wait()
        writes.append(time.perf_counter() - began + stalls[-1])
        shutil.rmtree(steps.step_folder(args.folder / "ours", 100 + n - 1), ignore_errors=True)
    print_times("ours in the background: stall", stalls[1:], f"the first {stalls[0]:.3f} s")
    print_times("ours in the background: until saved", writes[1:])

    # At once.
    state.saver.background, kept = None, state.saver.background
    sync = []
    for n in range(args.rounds):
        emptied(args.folder / "ours")
        state.progress.iteration = 200 + n
        sync.append(timed(state.save))
    print_times("ours at once, to disk, hashed", sync)
    last = args.folder / "ours"
    for verify in ("warm", "cold"):
        reads = []
        for _ in range(args.rounds):
            if verify == "cold":
                cold(last)
            reads.append(
                timed(lambda: loading.load_checkpoint(last, state.net.store.named_state()))
            )
        print_times(f"ours read and verified, {verify}", reads)
    shutil.rmtree(last)
    state.saver.background = kept

    theirs = args.folder / "theirs"

    def load_mapped() -> None:
        tensors = torch.load(theirs / "all.pt", mmap=True, weights_only=True, map_location="cpu")
        for name, tensor in tensors.items():
            plain[name].copy_(tensor)

    for name, loaded, write, read in (
        (
            "torch.save",
            "torch.load (mapped),",
            lambda: torch.save(plain, theirs / "all.pt"),
            load_mapped,
        ),
        (
            "torch.distributed.checkpoint",
            "torch.distributed.checkpoint read,",
            lambda: dcp.save(plain, checkpoint_id=theirs, no_dist=True),
            lambda: dcp.load(plain, checkpoint_id=theirs, no_dist=True),
        ),
    ):
        saves, disks, warm, colds = [], [], [], []
        for _ in range(args.rounds):
            emptied(theirs)
            began = time.perf_counter()
            saves.append(timed(write))
            synced(theirs)
            disks.append(time.perf_counter() - began)
            warm.append(timed(read))
            cold(theirs)
            colds.append(timed(read))
        print_times(name, saves)
        print_times(f"{name}, to disk", disks)
        print_times(f"{loaded} warm", warm)
        print_times(f"{loaded} cold", colds)
    shutil.rmtree(theirs)

    by = {what: statistics.median(seconds) for what, seconds, _ in rows}
    stall, copying = by["ours in the background: stall"], by["copy to pinned memory"]
    ours, theirs_, on_disk = (
        by[n] for n in ("ours at once, to disk, hashed", "torch.save", "torch.save, to disk")
    )
    print(f"\nstall in the background: {stall / copying:.2f} x the copy (target 1.3)")
    print(
        f"at once: {theirs_ / ours:.2f} x torch.save's speed, {on_disk / ours:.2f} x with its bytes on "
        f"the disk (target 1.5)"
    )
    state.saver.close()


if __name__ == "__main__":
    main()
