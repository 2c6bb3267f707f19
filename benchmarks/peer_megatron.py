"""megatron-core from PyPI on several GPUs, in layouts that `meshwright bench layouts` has too.

usage: CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 4 benchmarks/peer_megatron.py OUT
           [--model 1.3B] [--steps 10 20]

GPTModel of megatron-core's local layers, bfloat16, no dropout; its distributed optimizer with
gradients reduced in float32 and both overlaps (gradients, parameters), its own pipeline schedule,
its fused GELU, bias-dropout-add and cross entropy. Neither Transformer Engine nor apex is there
(too large to carry to this machine), so what they would do is done as well as torch does:
attention is scaled_dot_product_attention (cuDNN's), AdamW is torch's fused one, norm and scaling
of gradients are torch's foreach kernels; LayerNorm is torch's, and accumulation of gradients is
not fused into their matrix product. Of three micro-batches, tried for a few steps each, the
fastest is measured. Tokens are random and already on the device. A step's time is that of its
slowest rank. If OUT is the folder of a bench of the layouts, the ratio to its rows is printed.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import SIZES, VOCAB, describe_machine, new_parser
from torch import Tensor

from meshwright.apps.bench import programs

PEAK = 989e12  # dense bfloat16 operations a second of an H100 or H200, without sparsity


@dataclasses.dataclass(frozen=True)
class PeerLayout:
    name: str
    ours: str  # the row of `meshwright bench layouts`
    tp: int
    pp: int
    micros: tuple[int, ...]
    stages: tuple[int, int] | None = None  # layers of the first and the last, as ours has them


CELLS = {  # of a model and a number of GPUs: samples of a step, and the cells
    ("1.3B", 4): (
        64,
        [
            PeerLayout("DP4 distributed optimizer", "1.3B DP4 ZeRO-1", 1, 1, (16, 8, 4)),
            PeerLayout("PP2xDP2", "1.3B PP2", 1, 2, (4, 2, 8), (13, 11)),
            PeerLayout("TP2xDP2", "1.3B TP2", 2, 1, (16, 8, 32)),
        ],
    ),
    ("1.3B", 2): (
        32,
        [
            PeerLayout("DP2 distributed optimizer", "1.3B DP2 ZeRO-1", 1, 1, (16, 8, 4)),
            PeerLayout("PP2", "1.3B PP2", 1, 2, (4, 2, 8), (13, 11)),
            PeerLayout("TP2", "1.3B TP2", 2, 1, (16, 8, 32)),
        ],
    ),
}
RANK = int(os.environ.get("RANK", "0"))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=sorted({model for model, _ in CELLS}), default="1.3B")
    parser.add_argument(
        "--steps",
        type=int,
        nargs=2,
        default=(10, 20),
        help="not counted, and counted (default 10 20)",
    )
    parser.add_argument(
        "--limit", type=float, default=200, help="seconds in all, then it ends (default 200)"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    faulthandler.dump_traceback_later(given.limit, exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    # its small fusions: each micro-batch its own, fast, kernels
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 64
    model, (batch, cells) = of_flags(given.model), CELLS[given.model, int(os.environ["WORLD_SIZE"])]
    path = given.out / f"peer-{given.model}.jsonl"
    if RANK == 0:
        path.unlink(missing_ok=True)
    for cell in cells:
        begin, row, error = time.perf_counter(), None, None
        try:
            row = measure(cell, model, batch, given.steps, device)
        except Exception as e:
            import traceback

            traceback.print_exc()
            error = f"{type(e).__name__}: {e}"[:1000]
        bad = anyone(error is not None)
        gc.collect()
        torch.cuda.empty_cache()
        if RANK:
            continue
        about = {
            "model": given.model,
            "cell": cell.name,
            "ours": cell.ours,
            "seconds": time.perf_counter() - begin,
            "command": " ".join([f"torchrun --nproc-per-node {dist.get_world_size()}", *sys.argv]),
            "megatron_core": version("megatron-core"),
            "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
            "gpus": dist.get_world_size(),
            "machine": describe_machine("torch"),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
        row = (
            {"event": "failed", **about, "error": error or "another rank failed"}
            if bad
            else {**about, **(row or {})}
        )
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = (
            f"{row['tokens_per_second']:,.0f} tokens/s"
            if row["event"] == "done"
            else f"FAILED: {row['error']}"
        )
        print(f"megatron-core {given.model} {cell.name}: {shown}", flush=True)
    if RANK == 0:
        write_ratios(given.out, given.model)
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    dist.destroy_process_group()


def of_flags(model: str) -> Any:
    from meshwright.config.flags import parse_settings
    from meshwright.config.schema import TrainConfig

    layers, hidden, heads = SIZES[model]
    shape = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads}"
    words = f"{shape} --seq-length 1024 --bf16 --mock-data --lr 1e-4 --train-iters 1 --micro-batch-size 1"
    return parse_settings(TrainConfig, words.split(), "peer").config


def anyone(flag: bool) -> bool:
    """Whether it is so on any rank."""
    reduced = torch.tensor(float(flag))  # over gloo: a GPU may have had an error
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return bool(reduced)


def measure(
    cell: PeerLayout, config: Any, batch: int, steps: tuple[int, int], device: torch.device
) -> dict[str, Any]:
    from megatron.core import parallel_state as mpu

    from meshwright.model.counts import flops_per_token

    start = time.perf_counter()
    m, seq = config.model, config.data.seq_length
    peer = Peer(cell, m, seq, batch, device)
    built = time.perf_counter() - start
    tried: dict[int, float] = {}
    for micro in cell.micros:
        if batch % (micro * mpu.get_data_parallel_world_size()):
            continue
        error = None
        try:
            ms = [peer.step(micro)[0] for _ in range(5)]
        except torch.OutOfMemoryError as e:
            error = str(e)[:200]
        if anyone(error is not None):
            print(f"megatron-core {cell.name}: micro-batch {micro} does not fit", flush=True)
            peer.clear()
            continue
        tried[micro] = statistics.median(slowest(ms)[2:])
    best = min(tried, key=lambda micro: tried[micro])
    torch.cuda.reset_peak_memory_stats()
    done = [peer.step(best) for _ in range(sum(steps))]
    ms = slowest([x[0] for x in done])
    kept = statistics.median(ms[steps[0] :])
    peak = torch.tensor(float(torch.cuda.max_memory_allocated()))
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    losses = torch.tensor([x[1] for x in done])  # the last stage knows them
    dist.all_reduce(losses, op=dist.ReduceOp.MAX)
    speed = batch * seq / kept * 1e3
    flops = flops_per_token(m, padded(1), seq)
    settings = peer.settings
    return {
        "event": "done",
        "micro": best,
        "batch": batch,
        "steps": list(steps),
        "ms": kept,
        "tokens_per_second": speed,
        "flops_per_token": flops,
        "mfu": speed * flops / (PEAK * dist.get_world_size()),
        "peak_bytes": float(peak),
        "times": {"build": built},
        "tried_ms": tried,
        "losses": losses.tolist(),
        "settings": settings,
        "all_ms": [round(x, 2) for x in ms],
    }


def slowest(ms: list[float]) -> list[float]:
    """Return the slowest rank's time of each step."""
    reduced = torch.tensor(ms, dtype=torch.float64)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return reduced.tolist()


def padded(tp: int) -> int:
    """Megatron's: a multiple of 128 for each tensor rank."""
    return -(-VOCAB // (128 * tp)) * 128 * tp


class Peer:
    """Set up as Megatron-LM's training.py does."""

    def __init__(
        self, cell: PeerLayout, m: Any, seq: int, batch: int, device: torch.device
    ) -> None:
        from megatron.core import parallel_state as mpu
        from megatron.core import tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.models.gpt import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.seq, self.batch, self.device = seq, batch, device
        mpu.destroy_model_parallel()
        mpu.initialize_model_parallel(cell.tp, cell.pp, create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(123)
        first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
        self.last, self.dp = last, mpu.get_data_parallel_world_size()
        bf16 = torch.bfloat16
        config = programs.megatron_settings(m, bf16) | dict(
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=cell.tp,
            pipeline_model_parallel_size=cell.pp,
            deallocate_pipeline_outputs=True,
            batch_p2p_comm=True,
            overlap_p2p_comm=False,
            sequence_parallel=False,
            use_cpu_initialization=False,
        )
        if cell.stages:
            names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
            config |= dict(zip(names, cell.stages, strict=True))
        of_model = dict(
            vocab_size=padded(cell.tp),
            max_sequence_length=seq,
            position_embedding_type="learned_absolute",
            share_embeddings_and_output_weights=True,
            pre_process=first,
            post_process=last,
            parallel_output=True,
        )
        of_data = dict(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
            check_for_nan_in_grad=False,
        )
        of_optimizer = programs.megatron_optimizer_settings(bf16) | {"overlap_param_gather": True}
        self.settings = {
            name: {k: str(v) for k, v in values.items()}
            for name, values in (
                ("TransformerConfig", config),
                ("GPTModel", of_model),
                ("DistributedDataParallelConfig", of_data),
                ("OptimizerConfig", of_optimizer),
            )
        }
        self.settings["beside"] = {
            "layers": "get_gpt_layer_local_spec, core_attention by scaled_dot_product_attention(is_causal=True)",
            "AdamW": "torch's fused",
            "norm and scaling of gradients": "torch._foreach_norm, torch._foreach_mul_",
        }
        transformer = TransformerConfig(**config)
        spec = programs.megatron_layers()
        network = Float16Module(transformer, GPTModel(transformer, spec, **of_model).to(device))
        network.train()
        self.model = DistributedDataParallel(
            transformer, DistributedDataParallelConfig(**of_data), network
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(**of_optimizer), [self.model], use_gloo_process_groups=False
        )
        programs.use_torch_in_megatron(self.optimizer)
        transformer.no_sync_func = self.model.no_sync
        transformer.finalize_model_grads_func = finalize_model_grads
        transformer.grad_scale_func = self.optimizer.scale_loss
        self.run = get_forward_backward_func()
        self.tokens = torch.randint(VOCAB, (4, batch // self.dp, seq + 1), device=device)
        self.positions = torch.arange(seq, device=device)
        self.number = 0

    def clear(self) -> None:
        """Free what a step that ran out of memory left."""
        for p in self.model.parameters():
            p.grad = None
        gc.collect()
        torch.cuda.empty_cache()

    def step(self, micro: int) -> tuple[float, float]:
        """Milliseconds and the loss, which only the last stage knows."""
        self.number += 1
        start = time.perf_counter()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        count = self.batch // self.dp // micro
        reduced = self.run(
            forward_step_func=self.forward,
            data_iterator=self.batches(micro),
            model=[self.model],
            num_microbatches=count,
            seq_length=self.seq,
            micro_batch_size=micro,
            forward_only=False,
        )
        self.optimizer.step()
        loss = float(torch.stack([x["loss"] for x in reduced]).mean()) if self.last else 0.0
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3, loss

    def batches(self, micro: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for rows in self.tokens[self.number % len(self.tokens)].split(micro):
            yield (
                rows[:, :-1].contiguous(),
                rows[:, 1:].contiguous(),
                self.positions.expand(len(rows), -1),
            )

    def forward(self, batches: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        tokens, labels, positions = next(batches)
        out = model(tokens, positions, None, labels=labels)

        def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}  # the schedule divides it in place

        return out, mean


def write_ratios(out: Path, model: str) -> None:
    results = out / "results.json"
    rows = json.loads(results.read_text())["rows"] if results.exists() else []
    ours = {r["name"]: r for r in rows if not r["failed"]}
    lines = [
        "| cell | megatron-core, tokens/s | micro-batch (tried: ms a step) | GiB a GPU | ours, tokens/s "
        "| ours / theirs |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for r in map(json.loads, (out / f"peer-{model}.jsonl").read_text().splitlines()):
        if r["event"] != "done":
            lines.append(f"| {r['cell']} | failed: {r['error'][:100]} | | | | |")
            continue
        tried = ", ".join(f"{micro}: {ms:.1f}" for micro, ms in r["tried_ms"].items())
        us = ours.get(r["ours"])
        mine = (
            (
                f"{us['tokens_per_second']:,.0f}",
                f"{us['tokens_per_second'] / r['tokens_per_second']:.3f}",
            )
            if us
            else ("", "")
        )
        lines.append(
            f"| {r['cell']} | {r['tokens_per_second']:,.0f} | {r['micro']} ({tried}) | {r['peak_bytes'] / 2**30:.1f} | "
            f"{mine[0]} | {mine[1]} |"
        )
    text = "\n".join(lines) + "\n"
    (out / "peer.md").write_text(text)
    print("\n" + text, flush=True)


if __name__ == "__main__":
    main()
