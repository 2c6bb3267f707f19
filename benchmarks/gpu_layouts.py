"""Layouts of one model on the GPUs of one machine, all in one start of the processes: speed,
memory, communication, losses.

usage: torchrun --nproc-per-node 2|4 --max-restarts 8 benchmarks/gpu_layouts.py OUT MODEL ...
[--steps 10 20] [--data PREFIX]
       torchrun --nproc-per-node 2 --max-restarts 8 benchmarks/gpu_layouts.py OUT --goal
       the cells that have a goal on two GPUs, then the same losses in every layout, with CUDA
       graphs and without
       python benchmarks/gpu_layouts.py OUT MODEL --overhead [--data PREFIX]      one GPU: our step
       against a plain loop python benchmarks/gpu_layouts.py OUT --table
       table and pictures of what OUT holds

A cell is a line of the product's own flags. Each is parsed, its groups are made, the network is
built by build_network and trained by train_step on batches of the real loader, with one wait for
the device a step, as train.py does. A step's time is that of its slowest rank; speed is the median
over the last steps. Efficiency is against the cell of one GPU of the same run, beside which the
other GPUs idle. Weights are drawn on the device (seconds instead of minutes for nine cells), by
name and whole, so every layout begins with the same.

A cell that fails in words (out of memory, say) is told and the next one follows. One whose ranks
lose one another, or that takes longer than --limit, ends the processes; torchrun starts them again
(hence --max-restarts) and they go on behind it.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PEAK = 989e12  # dense bfloat16 operations a second of an H100 or H200, without sparsity
TRAINING = (
    "--hidden-dropout 0 --attention-dropout 0 --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine "
    "--lr-decay-iters 100000 "
    "--lr-warmup-iters 3000 "  # a fast one makes the first steps chaotic, in which rounding grows to tenths of the loss
    "--weight-decay 0.1 --clip-grad 1.0 --seed 1234 --eval-iters 0 --vocab-size 50257 --no-tensorboard"
)
MODELS = {
    "345M": "--bf16 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024",
    "1.3B": "--bf16 --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024",
    "2.7B": "--bf16 --num-layers 32 --hidden-size 2560 --num-attention-heads 32 --seq-length 2048",
    "same": "--bf16 --num-layers 6 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024",
    # Every kind of layout in float32: whether they all do the same on these devices. Tries this
    # file on a CPU too.
    "tiny": "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32",
}
TP2, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
SP, ZERO1, ZERO3 = "--sequence-parallel", "--use-distributed-optimizer", "--zero-stage 3"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage"
# The head of the 345M model computes as much as 4 layers.
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
BALANCED = f"{PP2} {VIRTUAL} 6 --pipeline-layout 7,7,7,3"
WITHOUT = "--cuda-graphs off"


@dataclass(frozen=True)
class Cell:
    name: str
    flags: str
    micro: int  # samples of a forward pass
    batch: int  # samples of a step, over all ranks
    ranks: int = 4
    steps: tuple[int, int] | None = None  # where they take longer than others'
    extra: bool = False  # only if --cells or --goal names it
    beside: str = "one GPU"  # the cell with which its speed is compared

    def runs(self, world: int) -> bool:
        """On one GPU, as the measure, or on all that there are."""
        return self.ranks in (1, world)


# What must be known comes first. Behind a cell of tensor parallelism compiled code is dropped,
# for it knows groups that are
# gone; what is on disk is read again in some seconds.
CELLS = {
    "345M": [
        Cell("one GPU", "", 32, 32, 1),
        Cell("DP4 ZeRO-1", ZERO1, 32, 128),
        Cell("DP4", "", 32, 128, extra=True),
        Cell("DP2 ZeRO-1", ZERO1, 32, 64, 2),
        Cell("DP2", "", 32, 64, 2, extra=True),
        Cell("PP2", BALANCED, 8, 64, 2, extra=True),
        Cell("PP2 even", f"{PP2} {VIRTUAL} 6", 8, 64, 2, extra=True),
        Cell("TP2 SP", f"{TP2} {SP}", 32, 32, 2, extra=True),
        Cell("one GPU, micro-batch 4", DROPOUT, 4, 4, 1, extra=True),
        Cell("DP2, micro-batch 4", DROPOUT, 4, 8, 2, extra=True, beside="one GPU, micro-batch 4"),
    ],
    "1.3B": [
        Cell("one GPU", "", 16, 16, 1),
        Cell("DP4", "", 16, 64),
        Cell("DP4 ZeRO-1", ZERO1, 16, 64),
        Cell("DP4 ZeRO-3", ZERO3, 16, 64),
        Cell("PP2xDP2", f"{PP2} {ZERO1} --pipeline-layout 13,11", 4, 64),  # for the peer
        Cell("TP2xDP2", f"{TP2} {ZERO1}", 16, 64),
        Cell("TP2xDP2 SP", f"{TP2} {SP} {ZERO1}", 16, 64, extra=True),
        Cell("DP2", "", 16, 32, 2),
        Cell("DP2 ZeRO-1", ZERO1, 16, 32, 2),
        Cell("DP2 ZeRO-3", ZERO3, 16, 32, 2),
        Cell("PP2", f"{PP2} --pipeline-layout 13,11", 4, 32, 2),  # for the peer
        Cell("TP2", TP2, 16, 32, 2),
        Cell("TP2 SP", f"{TP2} {SP}", 16, 32, 2, extra=True),
    ],
    "2.7B": [
        Cell("one GPU", "", 8, 32, 1, (2, 6)),
        Cell("DP4 ZeRO-3", ZERO3, 16, 64),
        Cell("DP4 ZeRO-1", ZERO1, 8, 64),
        Cell("PP2xDP2", f"{PP2} {ZERO1} {VIRTUAL} 8", 4, 64),
        Cell("TP2xDP2", f"{TP2} {SP} {ZERO1}", 8, 64),
        Cell("PP4", f"{PP4} {VIRTUAL} 4", 4, 64),
        Cell("TP2xPP2", f"{TP2} {SP} {PP2} {VIRTUAL} 8", 4, 64),
        Cell("TP4", f"{TP4} {SP}", 8, 64),
        Cell("DP4 ZeRO-3 micro-batch 8", ZERO3, 8, 64, extra=True),
        Cell("PP2xDP2 not interleaved", f"{PP2} {ZERO1}", 2, 64, extra=True),
        Cell("TP2xDP2 without SP", f"{TP2} {ZERO1}", 8, 64, extra=True),
        Cell("PP4 not interleaved", PP4, 2, 64, extra=True),
        Cell("DP2 ZeRO-3", ZERO3, 16, 32, 2),
        Cell("DP2 ZeRO-1", ZERO1, 8, 32, 2),
        Cell("PP2", f"{PP2} {VIRTUAL} 8", 4, 32, 2),
        Cell("PP2 micro-batch 2", f"{PP2} {VIRTUAL} 8", 2, 32, 2, extra=True),
        Cell("PP2 not interleaved", PP2, 2, 32, 2),
        Cell("TP2", f"{TP2} {SP}", 8, 32, 2),
        Cell("TP2 without SP", TP2, 8, 32, 2, extra=True),
        Cell("one GPU, batch 8", "", 8, 8, 1, extra=True),
        Cell("TP2 SP, batch 8", f"{TP2} {SP}", 8, 8, 2, extra=True, beside="one GPU, batch 8"),
        Cell(
            "TP2 SP, batch 8, no overlap",
            f"{TP2} {SP} --tp-overlap off",
            8,
            8,
            2,
            extra=True,
            beside="one GPU, batch 8",
        ),
        Cell("ZeRO-3, batch 16", ZERO3, 8, 16, 2, extra=True, beside="one GPU, batch 8"),
    ],
    # One batch for all, so their losses differ by rounding only. ZeRO 3 and pipelines: no graphs.
    "same": [
        Cell("one GPU", "", 8, 16, 1),
        Cell("one GPU, no graphs", WITHOUT, 8, 16, 1),
        Cell("DP2", "", 8, 16, 2),
        Cell("DP2, no graphs", WITHOUT, 8, 16, 2),
        Cell("DP2 ZeRO-1", f"{ZERO1} --cuda-graphs on", 8, 16, 2),
        Cell("DP2 ZeRO-1, no graphs", f"{ZERO1} {WITHOUT}", 8, 16, 2),
        Cell("DP2 ZeRO-3", ZERO3, 8, 16, 2),
        Cell("TP2 SP", f"{TP2} {SP} --tp-overlap on", 8, 16, 2),
        Cell("TP2 SP, no graphs", f"{TP2} {SP} --tp-overlap on {WITHOUT}", 8, 16, 2),
        Cell("TP2 SP, no overlap", f"{TP2} {SP} --tp-overlap off", 8, 16, 2),
        Cell("TP2", TP2, 8, 16, 2),
        Cell("PP2", f"{PP2} {VIRTUAL} 1 --pipeline-layout 1,1,1,1,1,1", 2, 16, 2),
    ],
    "tiny": [
        Cell("one GPU", "", 2, 16, 1),
        Cell("DP4", "", 4, 16),
        Cell("DP4 ZeRO-1", ZERO1, 2, 16),
        Cell("DP4 ZeRO-3", ZERO3, 2, 16),
        Cell("PP2xDP2", f"{PP2} {ZERO1} --pipeline-layout 5,3", 2, 16),
        Cell("PP2xDP2 interleaved", f"{PP2} {ZERO1} {VIRTUAL} 2 --pipeline-layout 3,2,2,1", 2, 16),
        Cell("PP4", PP4, 1, 16),
        Cell("PP4 interleaved", f"{PP4} {VIRTUAL} 1", 2, 16),
        Cell("TP2xDP2", f"{TP2} {ZERO1}", 4, 16),
        Cell("TP2xDP2 SP", f"{TP2} {SP} {ZERO1}", 4, 16),
        Cell("TP4", f"{TP4} {SP}", 4, 16),
        Cell("TP2xPP2", f"{TP2} {SP} {PP2}", 2, 16),
        Cell("DP2 ZeRO-1", ZERO1, 2, 16, 2),
        Cell("DP2 ZeRO-1 offload", f"{ZERO1} --cpu-optimizer", 2, 16, 2),
        Cell("DP2 ZeRO-2", "--zero-stage 2", 2, 16, 2),
        Cell("DP2 ZeRO-3", ZERO3, 2, 16, 2),
        Cell("DP2 ZeRO-3 offload", f"{ZERO3} --remote-device cpu", 2, 16, 2),
        Cell("DP2 full recompute", "--zero-stage 3 --recompute-granularity full", 2, 16, 2),
        Cell("DP2 selective recompute", "--recompute-activations", 2, 16, 2),
        Cell("CP2", "--context-parallel-size 2", 2, 16, 2),
        Cell("PP2", PP2, 2, 16, 2),
        Cell("PP2 gpipe", f"{PP2} --pipeline-schedule gpipe", 2, 16, 2),
        Cell("PP2 zero-bubble", f"{PP2} --pipeline-schedule zero-bubble --compile off", 2, 16, 2, extra=True),
        Cell("PP2 zbv", f"{PP2} --pipeline-schedule zbv --compile off", 2, 16, 2, extra=True),
        Cell("PP2 interleaved", f"{PP2} {VIRTUAL} 2 --pipeline-layout 3,2,2,1", 2, 16, 2),
        Cell("TP2", TP2, 4, 16, 2),
        Cell("TP2 SP", f"{TP2} {SP}", 4, 16, 2),
    ],
}


# Model -> cells, and steps before and while their time is taken.
GOAL = {
    "2.7B": (("one GPU, batch 8", "TP2 SP, batch 8", "TP2 SP, batch 8, no overlap", "ZeRO-3, batch 16"), (4, 8)),
    "345M": (("one GPU", "DP2", "PP2", "one GPU, micro-batch 4", "DP2, micro-batch 4"), (6, 14)),
    "same": (tuple(cell.name for cell in CELLS["same"]), (3, 5)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="*", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--steps", type=int, nargs=2, default=(10, 20), help="not counted, and counted (default 10 20)")
    parser.add_argument("--goal", action="store_true", help="the cells with a goal, and the same losses")
    parser.add_argument("--cells", nargs="+", help="only these (default: all that are not extra)")
    parser.add_argument("--data", help="prefix of .bin/.idx in GPT-2's vocabulary (default: random tokens)")
    parser.add_argument("--flags", default="", help="more flags for every cell")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a cell (default 120)")
    parser.add_argument("--until", type=float, default=math.inf, help="time (date +%%s) behind which no cell is begun")
    parser.add_argument("--overhead", action="store_true", help="one GPU: our step against a loop without parallel/")
    parser.add_argument("--pairs", type=int, default=12, help="of --overhead (default 12)")
    parser.add_argument("--table", action="store_true", help="only write table.md and the pictures")
    given = parser.parse_args()
    given.models = given.models or (list(GOAL) if given.goal else [])
    given.out.mkdir(parents=True, exist_ok=True)
    if given.overhead:
        overhead(given)
    elif given.table:
        write_table(given.out)
    else:
        try:
            measure_all(given)
        finally:
            from meshwright.ranks.lost import leave_ranks

            leave_ranks()


def is_wanted(cell: Cell, model: str, world: int, given: argparse.Namespace) -> bool:
    named = GOAL[model][0] if given.goal else given.cells
    return cell.runs(world) and (cell.name in named if named else not cell.extra)


def steps_of(model: str, cell: Cell, given: argparse.Namespace) -> tuple[int, int]:
    return GOAL[model][1] if given.goal else cell.steps or tuple(given.steps)


def line_of(model: str, cell: Cell, given: argparse.Namespace) -> str:
    """Return flags of `meshwright train`. All cells have one length and so one schedule."""
    steps = max(40, sum(given.steps) + 8)
    data = f"--data-path {given.data} --split 100,0,0" if given.data else "--mock-data"
    sizes = f"--micro-batch-size {cell.micro} --global-batch-size {cell.batch} --train-iters {steps}"
    return " ".join(f"{MODELS[model]} {TRAINING} {sizes} {data} {cell.flags} {given.flags}".split())


# The run


def measure_all(given: argparse.Namespace) -> None:
    """Every cell, on every rank, one after the other."""
    from meshwright import device as devices
    from meshwright.data.datasets import build_datasets
    from meshwright.parallel.layout import connect, layout_of
    from meshwright.ranks.connect import join_ranks
    from meshwright.ranks.world import find_world
    from meshwright.settings.flags import parse_settings
    from meshwright.settings.schema import TrainConfig
    from meshwright.training.before.preflight import pick_backend

    began = time.perf_counter()
    world = find_world(os.environ)
    any_cell = parse_settings(
        TrainConfig, line_of(given.models[0], CELLS[given.models[0]][0], given).split(), "train"
    ).config
    device = devices.open_device(any_cell.parallel.device, world.local_rank)
    team = join_ranks(world, pick_backend(any_cell, device), 5, device, seconds=120)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if team.is_lead:
        tell(f"{world.size} ranks joined in {time.perf_counter() - began:.1f} s" + " again" * restarted)
    watch = Watch(given.limit)

    for model in given.models:
        path = given.out / f"layouts-{model}.jsonl"
        if team.is_lead and not restarted:
            path.unlink(missing_ok=True)
            watch.forget()
        team.wait()
        tried = {(row["cell"], row["event"]) for row in read(path)}
        team.wait()  # before rank 0 writes more
        for cell in CELLS[model]:
            if not is_wanted(cell, model, world.size, given):
                continue
            if (cell.name, "begin") in tried:
                if team.is_lead and not {(cell.name, "done"), (cell.name, "failed")} & tried:
                    error = watch.told(model, cell) or "the processes ended"
                    note(path, {"event": "failed", "model": model, "cell": cell.name, "error": error})
                continue
            if team.gather(time.time() > given.until)[0]:
                if team.is_lead:
                    tell(f"{model} {cell.name}: no time is left for it")
                continue
            if team.is_lead:
                note(path, {"event": "begin", "model": model, "cell": cell.name})
            line = line_of(model, cell, given)
            watch.begin(model, cell)
            begin, row, error, layout = time.perf_counter(), None, None, None
            try:
                config = parse_settings(TrainConfig, [*line.split(), f"--world-size={cell.ranks}"], "train").config
                team.run_on_lead(
                    lambda config=config: build_datasets(config, vocabulary_of(config)[0]) and None
                )  # then it is kept
                layout = connect(layout_of(config, team.rank % cell.ranks))
                if team.rank < cell.ranks:
                    row = measure(config, layout, device, steps_of(model, cell, given))
            except Exception as e:
                error = f"{type(e).__name__}: {e}"[:2000]
                watch.failed(error)
                if not devices.is_out_of_memory(e):
                    import traceback

                    traceback.print_exc()
                    if "CUDA" in error or "NCCL" in error:  # nothing more can be computed in this process
                        os._exit(75)
            rows = team.gather({"row": row, "error": error})  # those of one GPU's cell wait here, for a socket
            watch.settled = True
            if layout is not None:
                let_go(layout, device)
            left = team.gather(free(device, tensors=layout is not None and layout.tp > 1))
            watch.end()
            if not team.is_lead:
                continue
            errors = [f"rank {i}: {r['error']}" for i, r in enumerate(rows) if r["error"]]
            about = {
                "model": model,
                "cell": cell.name,
                "command": f"torchrun --nproc-per-node {cell.ranks} meshwright train {line}",
                "gpus": cell.ranks,
                "seconds": time.perf_counter() - begin,
                "left_bytes": max(x["bytes"] for x in left),
                "still_held": sorted({n for x in left for n in x["held"]}),
                **versions(device),
            }
            if errors:
                row = {"event": "failed", **about, "error": "; ".join(errors)}
            else:
                row = {
                    "event": "done",
                    **about,
                    **summary(config, cell, [r["row"] for r in rows if r["row"]], steps_of(model, cell, given)),
                }
            note(path, row)
            tell(in_words(row))
        forget_compiled()
    if team.is_lead:
        print(flush=True)
        write_table(given.out)
    team.wait()


def measure(config: Any, layout: Any, device: Any, steps: tuple[int, int]) -> dict[str, Any]:
    """One rank's way through one cell."""
    import torch

    from meshwright import device as devices
    from meshwright.data.datasets import build_datasets
    from meshwright.optim.schedule import build_schedule
    from meshwright.training import network
    from meshwright.training.step import StepSettings, train_step

    times = {"build": -time.perf_counter()}
    vocab, padded = vocabulary_of(config)
    net = network.build_network(network.Spec(config, layout, device, vocab, padded))
    HELD["store"] = weakref.ref(net.store)
    with device:
        net.store.initialise(drawing(config, vocab))
    net.store.publish_weights()
    data = build_datasets(config, vocab)["train"]
    batches = loader(config, layout, data, device, vocab)
    schedule = build_schedule(config)
    devices.synchronize(device)
    if device.type != "cpu":
        devices.reset_memory(device)
    times["build"] += time.perf_counter()

    losses, norms, ms = [], [], []
    batch = config.global_batch

    def step(number: int) -> None:
        lr, wd = schedule.lr(number * batch), schedule.wd(number * batch)
        loss, norm, _ = train_step(net, next(batches), StepSettings(config.training.seed, lr, wd))
        told = torch.stack([loss.double(), norm.double()]).tolist()  # the one wait for the device
        losses.append(told[0])
        norms.append(told[1])

    gc.collect()
    gc.freeze()
    try:
        last = time.perf_counter()
        for number in range(sum(steps)):
            step(number)
            now = time.perf_counter()
            ms.append((now - last) * 1e3)
            last = now
        peak = devices.peak_memory(device)
        times["first step"], times["steps"] = ms[0] / 1e3, sum(ms) / 1e3
        shares, begin = None, time.perf_counter()
        if device.type != "cpu" and layout.world > 1:
            with traced(layout.rank in (0, layout.world - 1), device) as trace:
                for number in range(sum(steps), sum(steps) + 2):
                    step(number)
            shares = trace.shares
        times["profile"] = time.perf_counter() - begin
    finally:
        gc.unfreeze()
        batches.close()
    return {
        "losses": losses[: sum(steps)],
        "norms": norms[: sum(steps)],
        "ms": ms,
        "peak": peak,
        "shares": shares,
        "times": times,
        "block": net.execution,
        "graphs": net.without_graphs or ("off" if net.graphs is None or net.graphs.is_off else "on"),
        "parameters": sum(p.numel() for part in net.parts for p in part.parameters()),
    }


def vocabulary_of(config: Any) -> tuple[int, int]:
    """True and padded size."""
    from meshwright.tokenizers import padded_size

    vocab, m = config.tokenizer.vocab_size, config.model
    tp = config.parallel.tensor_model_parallel_size
    return vocab, padded_size(vocab, m.make_vocab_size_divisible_by, tp, m.pad_vocab_size_to)


def loader(config: Any, layout: Any, data: Any, device: Any, vocab: int) -> Iterator[list[Any]]:
    """As the Trainer makes it."""
    from meshwright.data.loader import Loader, LoaderSpec

    length, at = config.data.seq_length, layout.at("cp")
    columns = length // layout.cp
    mine = None if layout.cp == 1 else slice(at * columns, (at + 1) * columns)
    spec = LoaderSpec(
        config.micro_batch,
        config.batch,
        vocab,
        workers=config.data.num_workers,
        rank=layout.at("replicas", "shard"),
        ranks=layout.dp,
        columns=mine,
        length=length + 1,
        device=device,
        at_end="wrap",
    )
    return iter(Loader(data, spec))


def drawing(config: Any, vocab: int) -> Callable[[Iterable[tuple[str, Any]]], None]:
    """The rule of model/gpt.py's initialise, from generators of the device."""
    import torch

    m = config.model

    @torch.no_grad()
    def draw(masters: Iterable[tuple[str, Any]]) -> None:
        for name, p in masters:
            kind = name.removesuffix(".weight").split(".")[-1]
            if name.endswith("bias"):
                p.zero_()
            elif p.ndim == 1:
                p.fill_(1.0)
            else:
                rows = vocab if kind in ("wte", "lm_head") else p.shape[0]
                std = m.init_method_std / (2 * m.num_layers) ** 0.5 if kind == "proj" else m.init_method_std
                random = torch.Generator(p.device).manual_seed(zlib.crc32(f"{config.training.seed}/{name}".encode()))
                p[:rows] = torch.empty(rows, *p.shape[1:], device=p.device).normal_(0, std, generator=random)
                p[rows:] = 0

    return draw


# Between cells

HELD: dict[str, weakref.ref[Any]] = {}  # what must be gone by then


def let_go(layout: Any, device: Any) -> None:
    import torch.distributed as dist

    from meshwright import device as devices

    gc.collect()  # CUDA graphs first, which hold NCCL's communicators
    devices.synchronize(device)
    for group in layout.groups.values():
        dist.destroy_process_group(group)
    layout.groups.clear()


def free(device: Any, tensors: bool) -> dict[str, Any]:
    """Everything of the cell; returns what is left of it. `tensors`: its compiled code talks
    through groups.
    """
    from meshwright import device as devices

    gc.collect()
    held = [name for name, ref in HELD.items() if ref() is not None]
    if tensors or held:
        forget_compiled()
        held = [name for name, ref in HELD.items() if ref() is not None]
    HELD.clear()
    if device.type != "cpu":
        devices.reset_memory(device)
    return {"bytes": devices.memory_stats(device).get("allocated_bytes.all.current", 0), "held": held}


def forget_compiled() -> None:
    """Of this process; what Inductor keeps on disk stays, and saves most of the time of compiling
    again.
    """
    import torch

    torch._dynamo.reset()
    gc.collect()


class Watch:
    """Ends this process when a cell takes too long, or another rank has failed and this one still
    waits for it.
    """

    GRACE = 10.0

    def __init__(self, limit: float) -> None:
        run = "-".join(os.environ.get(n, "0") for n in ("TORCHELASTIC_RUN_ID", "MASTER_PORT"))
        self.folder, self.limit = Path(tempfile.gettempdir()) / f"layouts-{run}", limit
        self.folder.mkdir(exist_ok=True)
        self.file: Path | None = None
        self.until, self.settled = math.inf, False
        threading.Thread(target=self._run, daemon=True).start()

    def _file(self, model: str, cell: Cell) -> Path:
        return self.folder / f"{model} {cell.name}"

    def begin(self, model: str, cell: Cell) -> None:
        self.file, self.settled, self.until = self._file(model, cell), False, time.monotonic() + self.limit

    def end(self) -> None:
        self.until, self.file = math.inf, None

    def forget(self) -> None:
        """What an earlier run left."""
        for path in self.folder.iterdir():
            path.unlink()

    def failed(self, error: str) -> None:
        assert self.file is not None
        with open(self.file, "a") as f:
            f.write(f"rank {os.environ.get('RANK', 0)}: {error}; ")

    def told(self, model: str, cell: Cell) -> str:
        path = self._file(model, cell)
        return path.read_text() if path.exists() else ""

    def _run(self) -> None:
        seen = None
        while True:
            time.sleep(0.5)
            file, now = self.file, time.monotonic()
            if file is None or self.settled or not file.exists():
                seen = None
            elif seen is None:
                seen = now
            elif now - seen > self.GRACE:
                self._leave("another rank failed and this one waits for it")
            if now > self.until:
                self._leave(f"not done after {self.limit:.0f} s")

    def _leave(self, why: str) -> None:
        print(f"rank {os.environ.get('RANK', 0)}: {why}: leaving", file=sys.stderr, flush=True)
        if self.file is not None and not self.file.exists():
            self.failed(why)
        import faulthandler

        faulthandler.dump_traceback(all_threads=True)
        os._exit(75)


# What a GPU did


class traced:  # noqa: N801
    """Around some steps, on one rank: which share of their time is computing, communication alone,
    neither.
    """

    def __init__(self, on: bool, device: Any) -> None:
        self.on, self.device, self.shares = on, device, None

    def __enter__(self) -> traced:
        if self.on:
            from torch.profiler import ProfilerActivity, profile

            self.profile = profile(activities=[ProfilerActivity.CUDA])
            self.profile.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not self.on:
            return
        from meshwright import device as devices

        devices.synchronize(self.device)
        self.profile.__exit__(kind, error, trace)
        if error is None:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "trace.json"
                    self.profile.export_chrome_trace(str(path))
                    self.shares = shares(json.loads(path.read_bytes())["traceEvents"])
            except Exception as e:
                print(f"note: the trace could not be read: {e!r}", file=sys.stderr, flush=True)


def shares(events: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return percentages of the time from the first kernel to the end of the last.

    "exposed" is a NCCL kernel and no other; with "compute" and "idle" it makes up the whole.
    """
    from meshwright.training.log.profile import length, union

    kernels = [(e["ts"], e["ts"] + e["dur"], "nccl" in e["name"].lower()) for e in events if e.get("cat") == "kernel"]
    if not kernels:
        return None
    talking = union((a, b) for a, b, is_nccl in kernels if is_nccl)
    computing = union((a, b) for a, b, is_nccl in kernels if not is_nccl)
    either = length(union([*talking, *computing]))
    whole = max(b for _, b, _ in kernels) - min(a for a, _, _ in kernels)
    return {
        "compute": 100 * length(computing) / whole,
        "exposed": 100 * (either - length(computing)) / whole,
        "idle": 100 * (1 - either / whole),
        "communication": 100 * length(talking) / whole,
        "ms": whole / 1e3,
    }


# Output


def summary(config: Any, cell: Cell, ranks: list[dict[str, Any]], steps: tuple[int, int]) -> dict[str, Any]:
    """A row of all ranks' numbers."""
    from meshwright.model.counts import flops_per_token

    ms = [max(step) for step in zip(*(r["ms"] for r in ranks), strict=True)]
    kept = statistics.median(ms[steps[0] :])
    seq = config.data.seq_length
    speed = cell.batch * seq / kept * 1e3
    # One formula and one padded vocabulary for all layouts: rows that a layout adds are no work.
    flops = flops_per_token(config.model, vocabulary_of(replace(config, parallel=type(config.parallel)()))[1], seq)
    peaks = [r["peak"] for r in ranks if r["peak"] is not None]
    return {
        "micro": cell.micro,
        "beside": cell.beside,
        "batch": cell.batch,
        "steps": list(steps),
        "ms": kept,
        "tokens_per_second": speed,
        "flops_per_token": flops,
        "mfu": speed * flops / (PEAK * cell.ranks),
        "peak_bytes": max(peaks) if peaks else None,
        "shares": ranks[0]["shares"],
        "shares_of_last": ranks[-1]["shares"],
        "block": ranks[0]["block"],
        "graphs": ranks[0]["graphs"],
        "times": ranks[0]["times"],
        "parameters_of_ranks": [r["parameters"] for r in ranks],
        "losses": ranks[0]["losses"],
        "norms": ranks[0]["norms"],
        "all_ms": [round(x, 2) for x in ms],
    }


def versions(device: Any) -> dict[str, Any]:
    import torch

    from meshwright import device as devices

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None
    return {
        "device": devices.device_name(device),
        "torch": torch.__version__,
        "nccl": nccl,
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def in_words(row: dict[str, Any]) -> str:
    left = f", {row['left_bytes'] / 2**20:.0f} MiB left" + (
        f", STILL HELD: {row['still_held']}" * bool(row["still_held"])
    )
    if row["event"] == "failed":
        return f"{row['model']} {row['cell']}: FAILED after {row['seconds']:.1f} s: {row['error'][:400]}{left}"
    times = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["times"].items())
    spent = "; ".join(
        ", ".join(f"{name} {value:.1f}" for name, value in (row[which] or {}).items())
        for which in ("shares", "shares_of_last")
    )
    return (
        f"{row['model']} {row['cell']}: {row['tokens_per_second']:,.0f} tokens/s, {row['ms']:.1f} ms, "
        f"MFU {100 * row['mfu']:.1f} %, {(row['peak_bytes'] or 0) / 2**30:.1f} GiB, "
        f"loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}, {spent}, "
        f"graphs: {row['graphs']} [{row['seconds']:.1f} s: {times}{left}]"
    )


def tell(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def note(path: Path, row: dict[str, Any]) -> None:
    with open(path, "a") as f:
        f.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


HEAD = (
    "cell",
    "GPUs",
    "micro-batch, batch",
    "ms a step",
    "tokens/s",
    "MFU %",
    "GiB a GPU",
    "efficiency %",
    "exposed comm. %",
    "idle %",
    "first loss",
    "last loss",
    "furthest from others",
)


def write_table(out: Path) -> None:
    """table.md and pictures of all models that have rows."""
    text = []
    for path in sorted(out.glob("layouts-*.jsonl")):
        rows = read(path)
        done = [r for r in rows if r["event"] == "done"]
        if not done:
            continue
        text += [
            f"## {done[0]['model']}",
            "",
            f"{done[0]['device']}, torch {done[0]['torch']}, NCCL {done[0]['nccl']}",
            "",
        ]
        text += ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
        speeds = {r["cell"]: r["tokens_per_second"] for r in done if r["gpus"] == 1}
        same = curves(done)
        for r in done:
            s, one = r["shares"] or {}, speeds.get(r.get("beside", "one GPU"))
            away = same.get(r["batch"], {}).get(r["cell"])
            values = (
                r["cell"],
                str(r["gpus"]),
                f"{r['micro']}, {r['batch']}",
                f"{r['ms']:.1f}",
                f"{r['tokens_per_second']:,.0f}",
                f"{100 * r['mfu']:.1f}",
                f"{r['peak_bytes'] / 2**30:.1f}" if r["peak_bytes"] else "",
                f"{100 * r['tokens_per_second'] / one / r['gpus']:.1f}" if one and r["gpus"] > 1 else "",
                f"{s['exposed']:.1f}" if s else "",
                f"{s['idle']:.1f}" if s else "",
                f"{r['losses'][0]:.4f}",
                f"{r['losses'][-1]:.4f}",
                f"{away:.4f}" if away is not None else "",
            )
            text.append("| " + " | ".join(values) + " |")
        text += [f"\n{r['cell']}: failed: {r['error'][:300]}" for r in rows if r["event"] == "failed"]
        text.append("")
        try:
            draw_curves(out / f"losses-{done[0]['model']}.png", done)
        except Exception as e:
            print(f"note: no picture: {e!r}", file=sys.stderr)
    (out / "table.md").write_text("\n".join(text) + "\n")
    print("\n".join(text), flush=True)


def curves(done: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """By batch size, where several cells trained on the same batches: of each, the largest
    difference from another.
    """
    out: dict[int, dict[str, float]] = {}
    for batch in {r["batch"] for r in done}:
        group = [r for r in done if r["batch"] == batch]
        if len(group) > 1:
            out[batch] = {
                a["cell"]: max(abs(x - y) for b in group for x, y in zip(a["losses"], b["losses"], strict=False))
                for a in group
            }
    return out


def draw_curves(path: Path, done: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = curves(done)
    if not groups:
        return
    figure, axes = plt.subplots(1, len(groups), figsize=(9 * len(groups), 6), squeeze=False)
    for axis, (batch, away) in zip(axes[0], sorted(groups.items()), strict=True):
        for i, r in enumerate(r for r in done if r["batch"] == batch):
            steps = range(1, len(r["losses"]) + 1)
            axis.plot(
                steps, r["losses"], label=r["cell"], linewidth=1, marker="ov^s*xD+"[i % 8], markersize=4, alpha=0.8
            )
        axis.set_title(
            f"{done[0]['model']}, {batch} samples a step, bfloat16, {len(away)} layouts\n"
            f"largest difference between two of them: {max(away.values()):.4f}"
        )
        axis.set_xlabel("step")
        axis.set_ylabel("loss")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


# Our step against a loop without parallel/


def overhead(given: argparse.Namespace) -> None:
    """One GPU, both in one process, in turns: train_step with the layout of one, and PlainLoop."""
    import torch

    from meshwright import device as devices
    from meshwright.data.datasets import build_datasets
    from meshwright.parallel.layout import Layout
    from meshwright.settings.flags import parse_settings
    from meshwright.settings.schema import TrainConfig
    from meshwright.training import network
    from meshwright.training.step import StepSettings, train_step

    for model in given.models:
        line = line_of(model, replace(CELLS[model][0], batch=CELLS[model][0].micro), given)
        config = parse_settings(TrainConfig, [*line.split(), "--world-size=1"], "train").config
        device = devices.open_device(config.parallel.device)
        vocab, padded = vocabulary_of(config)
        net = network.build_network(network.Spec(config, Layout(), device, vocab, padded))
        with device:
            net.store.initialise(drawing(config, vocab))
        net.store.publish_weights()
        plain = PlainLoop(config, device)

        def ours(micro: list[Any], net: Any = net, config: Any = config) -> list[float]:
            loss, norm, _ = train_step(net, micro, StepSettings(config.training.seed, 1.5e-4, 0.1))
            return torch.stack([loss.double(), norm.double()]).tolist()

        loops = {"ours": ours, "plain": plain.step}
        data = build_datasets(config, vocab)["train"]
        readers = {name: loader(config, Layout(), data, device, vocab) for name in loops}
        told: dict[str, list[list[float]]] = {name: [] for name in loops}
        ms: dict[str, list[float]] = {name: [] for name in loops}
        ratios = []

        def some(name: str, steps: int, readers: Any = readers, loops: Any = loops, told: Any = told) -> list[float]:
            took = []
            for _ in range(steps):
                start = time.perf_counter()
                told[name].append(loops[name](next(readers[name])))
                took.append((time.perf_counter() - start) * 1e3)
            return took

        for name in loops:
            some(name, given.steps[0])
        gc.collect()
        gc.freeze()
        for pair in range(given.pairs):
            took = {name: some(name, 5) for name in (list(loops) if pair % 2 else list(loops)[::-1])}
            for name in loops:
                ms[name] += took[name]
            ratios.append(statistics.median(took["ours"]) / statistics.median(took["plain"]))
        gc.unfreeze()
        for reader in readers.values():
            reader.close()
        medians = {name: statistics.median(x) for name, x in ms.items()}
        row = {
            "model": model,
            "flags": line,
            "plain": PlainLoop.__doc__,
            "ms": medians,
            "ratio": medians["ours"] / medians["plain"],
            "pairs": [round(x, 4) for x in ratios],
            "median_of_pairs": statistics.median(ratios),
            "losses": {name: [x[0] for x in rows] for name, rows in told.items()},
            **versions(device),
        }
        note(given.out / "overhead.jsonl", row)
        apart = max(abs(a[0] - b[0]) for a, b in zip(told["ours"], told["plain"], strict=True))
        tell(
            f"{model}: ours {medians['ours']:.2f} ms, plain loop {medians['plain']:.2f} ms, ratio of medians "
            f"{row['ratio']:.4f}, median of {given.pairs} pairs' ratios {row['median_of_pairs']:.4f} "
            f"(from {min(ratios):.4f} "
            f"to {max(ratios):.4f}); losses at most {apart:.4f} apart"
        )
        del net, plain, loops, ours, some, readers
        free(device, True)


class PlainLoop:
    """The same network, kernels, compiled blocks, precision and update without parallel/: bfloat16
    parameters, each a tensor of its own, whose gradients autograd keeps; float32 masters, each
    likewise; torch's clip_grad_norm_ and fused AdamW over them; copies between by
    torch._foreach_copy_. A loop over float32 parameters with autocast is slower (the records of
    one GPU).
    """

    def __init__(self, config: Any, device: Any) -> None:
        import torch

        from meshwright.model import pick
        from meshwright.model.gpt import GPT
        from meshwright.optim.rules import decays

        self.torch, self.config, self.device = torch, config, device
        self.vocab, padded = vocabulary_of(config)
        options = pick.options(config.training, config.model, config.precision, device)
        block, _ = pick.pick(config.model, device, options.compiled)
        with torch.device("meta"):
            self.model = GPT(config.model, self.vocab, padded, config.data.seq_length, block, options)
        self.model.to_empty(device=device)
        drawing(config, self.vocab)(self.model.named_parameters())
        self.masters = {name: p.detach().float().clone() for name, p in self.model.named_parameters()}
        self.model.to(torch.bfloat16 if config.precision.bf16 else torch.float32)
        if options.compiled:
            pick.compile_blocks(self.model)
        for p in self.masters.values():
            p.grad = torch.zeros_like(p)
        o = config.optimizer
        groups = [[p for name, p in self.masters.items() if decays(name, p) == on] for on in (True, False)]
        self.adamw = torch.optim.AdamW(
            [{"params": groups[0], "weight_decay": o.weight_decay}, {"params": groups[1], "weight_decay": 0.0}],
            lr=1.5e-4,
            betas=(o.adam_beta1, o.adam_beta2),
            eps=o.adam_eps,
            fused=True,
        )

    def step(self, micro: list[Any]) -> list[float]:
        from meshwright.model.loss import loss_sum, token_losses
        from meshwright.model.positions import Positions

        torch = self.torch
        self.model.train()
        total, tokens = 0.0, sum(b.unmasked for b in micro)
        for b in micro:
            b = b.to(self.device)
            logits = self.model(b.tokens, Positions(b.sample_ids, None, self.config.training.seed, b.first_sample))
            loss = loss_sum(token_losses(logits, b.labels, self.vocab), b.loss_mask) / tokens
            loss.backward()
            total = total + loss.detach()
        params, masters = list(self.model.parameters()), list(self.masters.values())
        with torch.no_grad():
            torch._foreach_copy_([p.grad for p in masters], [p.grad for p in params])
            norm = torch.nn.utils.clip_grad_norm_(masters, self.config.optimizer.clip_grad, foreach=True)
            self.adamw.step()
            torch._foreach_copy_(params, masters)
        for p in params:
            p.grad = None
        return torch.stack([total.double(), norm.double()]).tolist()


if __name__ == "__main__":
    main()
