"""torchtitan from PyPI and `meshwright train` on the same Llama 3: tokens a second of each.

usage: python benchmarks/peer_torchtitan.py OUT [--models 1B 8B] [--rows ROW ...] [--fp8]

torchtitan 0.2.2 is the last version for torch 2.11; its trainer runs as `torchtitan.train` starts
it, with its defaults for Llama 3 8B and with `--compile.enable`: float32 weights sharded by FSDP2
and computed in bfloat16 (on one GPU autocast), fused AdamW, a micro-batch of 1, and selective
activation checkpointing of operations. A second row has no checkpointing, since ours recomputes
nothing. It has no 1B of its own: the shape is Llama 3.2's, with an output layer of its own in both
programs. Its data are not in its wheel, so random tokens come through the data loader that it lets
a model register, and its package `datasets`, which then reads nothing, is stood in for.

Ours has the same shape by a preset, the same batch and micro-batch, and `--bf16`. Rows run one
after the other, those that matter most first, until --seconds are over. A time is the median of
the last half of the steps, a peak the allocated memory of rank 0, and a ratio that to torchtitan's
first row of the model. OUT, a new folder, holds all logs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import describe_machine, new_parser, print_head, print_row

VOCAB = 128256


@dataclasses.dataclass(frozen=True)
class Model:
    gpus: int
    batch: int  # samples of a step
    length: int
    ours: str
    theirs: dict[str, Any] | None = None  # the shape, where torchtitan has no flavor of this name


MODELS = {
    "1B": Model(
        1,
        8,
        8192,
        "--preset llama3.2-1b --untie-embeddings-and-output-weights",
        dict(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5)
        | dict(multiple_of=1024, rope_theta=500000),
    ),
    "8B": Model(2, 8, 8192, "--preset llama3-8b"),
    "tiny": Model(  # for a machine without a GPU
        2,
        8,
        128,
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256 --swiglu"
        " --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --lr 1e-4"
        " --untie-embeddings-and-output-weights --train-iters 1000",
        dict(dim=64, n_layers=4, n_heads=4, multiple_of=256),
    ),
}
CHECKPOINTED = (
    "--activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option op"
)
ROWS = {  # whose, what it is called, flags, on how many GPUs
    "selective": ("torchtitan", "selective checkpointing", CHECKPOINTED, (1, 2)),
    "plain": ("ours", "", "", (1,)),
    "zero3": ("ours", "ZeRO 3", "--zero-stage 3", (2,)),
    "pp2": ("ours", "PP2", "--pipeline-model-parallel-size 2", (2,)),
    "none": ("torchtitan", "no checkpointing", "--activation_checkpoint.mode none", (1, 2)),
    "pieces": (
        "ours",
        "PP2, pieces of 2 layers",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
        (2,),
    ),
}


class Failure(Exception):
    """A row that did not end, or ended with an error."""


class RandomTokens(torch.utils.data.IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = torch.randint(VOCAB, (self.length + 1,))
            yield {"input": tokens[:-1]}, tokens[1:]


def run_torchtitan() -> None:
    """Start torchtitan's trainer with its own flags, which this process was given."""
    sys.modules["datasets"] = datasets = types.ModuleType("datasets")
    sys.modules["datasets.distributed"] = distributed = types.ModuleType("datasets.distributed")
    datasets.Dataset = datasets.load_dataset = distributed.split_dataset_by_node = object

    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.metrics import BaseLogger, build_metrics_processor
    from torchtitan.models import llama3
    from torchtitan.protocols import train_spec
    from torchtitan.train import Trainer, main

    class Recorder(BaseLogger):
        def log(self, metrics: dict[str, Any], step: int) -> None:
            row = {
                "ms": metrics["time_metrics/end_to_end(s)"] * 1e3,
                "data_ms": metrics["time_metrics/data_loading(s)"] * 1e3,
                "memory": torch.cuda.max_memory_allocated(),
                "loss": metrics["loss_metrics/global_avg_loss"],
                "parameters": self.count(),
            }
            with Path(os.environ["PEER_METRICS"]).open("a") as file:
                file.write(json.dumps(row) + "\n")

    def build_metrics(job: Any, dims: Any, *rest: Any) -> Any:
        processor = build_metrics_processor(job, dims, *rest)
        if torch.distributed.get_rank() == 0:
            processor.logger = Recorder()
            processor.logger.count = lambda: sum(
                p.numel() for part in processor.model_parts for p in part.parameters()
            )
        return processor

    def build_loader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> Any:
        settings = job_config.training
        return ParallelAwareDataloader(
            RandomTokens(settings.seq_len),
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=settings.local_batch_size,
        )

    shapes = {
        name: llama3.TransformerModelArgs(**model.theirs, vocab_size=VOCAB)
        for name, model in MODELS.items()
        if model.theirs
    }
    spec = dataclasses.replace(
        llama3.get_train_spec(),
        model_args=llama3.llama3_args | shapes,
        build_dataloader_fn=build_loader,
        build_tokenizer_fn=None,
        build_metrics_processor_fn=build_metrics,
        state_dict_adapter=None,
    )
    train_spec.register_train_spec("llama3_random", spec)
    main(Trainer)


def torchtitan_words(name: str, flags: str, out: Path, args: argparse.Namespace) -> list[str]:
    model = MODELS[name]
    flags += (
        f" --model.name llama3_random --model.flavor {name} --training.seq_len {model.length}"
        f" --training.local_batch_size {args.micro} --training.global_batch_size {model.batch}"
        f" --training.steps {args.steps} --lr_scheduler.warmup_steps 2 --optimizer.lr 3e-4"
        f" --compile.enable --metrics.log_freq 1 --metrics.disable_color_printing"
        f" --job.dump_folder {out}"
    )
    if args.fp8:  # as its own configuration of Llama 3 8B has it
        flags += (
            " --model.converters quantize.linear.float8 --quantize.linear.float8.filter_fqns output"
        )
        if model.gpus > 1:
            flags += (
                " --quantize.linear.float8.enable_fsdp_float8_all_gather"
                " --quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
            )
    return [__file__, "--only-torchtitan", *flags.split()]


def our_words(name: str, flags: str, out: Path, args: argparse.Namespace) -> list[str]:
    model = MODELS[name]
    flags += (
        f" {model.ours} --seq-length {model.length} --vocab-size {VOCAB} --mock-data --bf16"
        f" --micro-batch-size {args.micro} --global-batch-size {model.batch} --eval-iters 0"
        f" --exit-interval {args.steps} --log-interval 1 --no-tensorboard --run-dir {out}"
    )
    flags += " --fp8-format hybrid" * args.fp8 + (f" {args.ours}" if args.ours else "")
    return ["-m", "meshwright", "train", *flags.split()]


def run_row(name: str, key: str, seconds: float, args: argparse.Namespace) -> dict[str, float]:
    """Run one program for some steps; return its figures."""
    program, _, flags, _ = ROWS[key]
    out = args.out / f"{name}-{key}"
    out.mkdir()
    metrics = out / "metrics.jsonl"
    words = (torchtitan_words if program == "torchtitan" else our_words)(name, flags, out, args)
    gpus = MODELS[name].gpus
    if gpus > 1 or program == "torchtitan":
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", *words]
    environment = {**os.environ, "PEER_METRICS": str(metrics)}
    environment.setdefault("OMP_NUM_THREADS", "4")
    if program == "torchtitan":  # as its run_train.sh does
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    path = args.out / f"{name}-{key}.log"
    with path.open("w") as log:
        log.write(" ".join([sys.executable, *words]) + "\n")
        log.flush()
        command = [sys.executable, *words]
        try:
            done = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=seconds
            )
            how = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            how = f"stopped after {seconds:.0f} s"
        finally:
            end_all(metrics)
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    rows = [json.loads(line) for line in lines]
    steps = [row for row in rows if row.get("ms")]
    # A program may be late to end, or fail as it does, after all its steps.
    if len(steps) < args.steps - 1:  # the first of ours has no time
        raise Failure(f"{how}, {len(steps)} steps\n{last_lines(path)}")
    kept = steps[-(args.steps // 2) :]
    return {
        "ms": statistics.median(row["ms"] for row in kept),
        "data_ms": statistics.median(row["data_ms"] for row in kept),
        "memory": max(row["memory"] or 0 for row in kept),
        "parameters": next(row["parameters"] for row in rows if "parameters" in row),
    }


def end_all(metrics: Path) -> None:
    """End what a row left: torchrun's ranks and torch's compilers have sessions of their own."""
    mark = f"PEER_METRICS={metrics}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # it has ended, or is another's
            continue


def last_lines(path: Path) -> str:
    """Return the lines of a log that say what failed."""
    lines = path.read_text(errors="replace").splitlines()
    errors = [line for line in lines if re.search(r"(?<!Child)(?<!Failed)Error: |: error: ", line)]
    return "\n".join(f"    {line[:300]}" for line in [*errors[-4:], *lines[-4:]])


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["1B", "8B"])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--micro", type=int, default=1, help="samples of a forward pass")
    parser.add_argument("--fp8", action="store_true", help="both multiply in 8 bits")
    parser.add_argument("--ours", help="further flags of ours")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a row")
    parser.add_argument("--seconds", type=float, default=600, help="seconds of all rows")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    print(describe_machine("torch", "torchtitan"))
    print_head(
        "model", "program", "tokens/s a GPU", "ms", "for data", "peak GiB", "ratio", "row, s"
    )
    first: dict[str, tuple[float, float]] = {}
    results = args.out / "results.jsonl"
    for key in args.rows:
        program, title, _, counts = ROWS[key]
        label = f"{program}, {title}" if title else program
        for name in args.models:
            model = MODELS[name]
            if model.gpus not in counts:
                continue
            begin = time.monotonic()
            left = min(args.limit, end - begin)
            try:
                if left < 20:
                    raise Failure("no time left")
                row = run_row(name, key, left, args)
            except Exception as error:  # the next row may do better
                print(f"FAILED {name}, {label}: {error}", flush=True)
                continue
            speed = model.batch * model.length / row["ms"] * 1e3 / model.gpus
            if program == "torchtitan":
                first.setdefault(name, (speed, row["parameters"]))
            base, parameters = first.get(name, (None, row["parameters"]))
            if parameters != row["parameters"]:
                print(f"{name}: {row['parameters']:,} parameters, but torchtitan's {parameters:,}")
            record = {"model": name, "row": key, "tokens/s": speed, "batch": model.batch, **row}
            with results.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print_row(
                f"{name}, {row['parameters'] / 1e9:.3f}B, {model.gpus} GPU",
                label,
                f"{speed:,.0f}",
                f"{row['ms']:,.1f}",
                f"{row['data_ms']:.1f}",
                f"{row['memory'] / 2**30:.1f}",
                f"{speed / base:.2f}" if base else "",
                f"{time.monotonic() - begin:.0f}",
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--only-torchtitan"]:
        del sys.argv[1]
        run_torchtitan()
    else:
        main()
