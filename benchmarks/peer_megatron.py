"""megatron-core from PyPI beside ours, with its local layers or those of Transformer Engine (TE).

usage: python benchmarks/peer_megatron.py OUT [--rows REGEX] [--layers te te-fp8 ...]
       CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 4 benchmarks/peer_megatron.py OUT
           [--model 1.3B] [--steps 10 20] [--layers local]

The first runs rows of `meshwright bench` on one GPU, ours and theirs in turn, each in a process of
its own that has --limit seconds, and prints a table with the ratio of the speeds; a row that fails
prints its last error line. OUT, a new folder, holds all logs. Beside te-fp8 ours has the flags of
bench's fp8 rows. The second runs layouts on several GPUs that `meshwright bench layouts` has too;
if OUT is the folder of such a bench, the ratio to its rows is printed.

GPTModel, bfloat16, the rows' dropout (none in layouts); its distributed optimizer with gradients
reduced in float32 and, on several GPUs, both overlaps (gradients, parameters), its own schedules,
its fused activation, bias-dropout-add and cross entropy. Of three micro-batches, tried for a few
steps each, the fastest is measured. Tokens are random and already on the device. A step's time is
that of its slowest rank.

`local` layers need neither TE nor apex, so what they would do is done as well as torch does:
attention is scaled_dot_product_attention (cuDNN's), AdamW is torch's fused one, norm and scaling of
gradients are torch's foreach kernels; LayerNorm is torch's, and accumulation of gradients is not
fused into their matrix product.

`te` is NVIDIA's own way: TE's layers, the attention that TE chooses, its FusedAdam, rope and cross
entropy, gradients accumulated within their products. The head's product is apex's in NVIDIA's
containers; here TE computes it, and torch scales gradients where TE is older than 2.14. `te-fp8` is
Megatron-LM's train_llama3_8b_h100_fp8.sh: delayed scaling, hybrid, the maximum of 1024 steps;
`te-fp8-params` has its --fp8-param-gather too. transformer_engine.sh packs TE for a machine without
internet.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import gc
import itertools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import SIZES, VOCAB, describe_machine, new_parser, print_head, print_row
from torch import Tensor

from meshwright.apps.bench import programs, rows
from meshwright.apps.bench.runs import BenchPlan, find_reason, measure_row

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
LAYERS = ("local", "te", "te-fp8", "te-fp8-params")
ROWS = r"^(345M dropout 0.1|1.3B Llama|2.7B dropout 0.1)$"
RANK = int(os.environ.get("RANK", "0"))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="1.3B", help="of layouts (default 1.3B)")
    parser.add_argument("--rows", default=ROWS, help=f"of bench, on one GPU (default {ROWS})")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, help="(default te te-fp8, or local)")
    parser.add_argument("--ours", default="", help="further flags of ours")
    parser.add_argument(
        "--steps",
        type=int,
        nargs=2,
        default=(10, 20),
        help="not counted, and counted (default 10 20)",
    )
    parser.add_argument(
        "--limit", type=float, default=200, help="seconds of a row, or of all layouts (default 200)"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if "WORLD_SIZE" in os.environ:
        run_cells(given)
    else:
        compare_rows(given)


def compare_rows(given: argparse.Namespace) -> None:
    """Run rows of the bench on one GPU, ours and theirs, and print their table."""
    kinds = given.layers or ("te", "te-fp8")
    engine = ["transformer-engine"] if set(kinds) - {"local"} else []
    print(describe_machine("torch", "triton", "megatron-core", *engine))
    print_head(
        "row", "program", "tokens/s", "ms", "micro-batch (tried: ms)", "GiB", "ours / theirs"
    )
    plan = BenchPlan(
        given.out, steps=sum(given.steps), seconds=given.limit, extra=tuple(given.ours.split())
    )
    for row in rows.chosen(["345m", "sizes"], given.rows, 1):
        fastest: dict[bool, float] = {}  # ours, with and without fp8
        for layers in kinds:
            fp8 = "fp8" in layers
            if fp8 not in fastest:
                flags = f"{row.flags} {rows.FP8}" if fp8 else row.flags
                name = f"{row.name} fp8" if fp8 else row.name
                us = measure_row(dataclasses.replace(row, name=name, flags=flags), plan)
                fastest[fp8] = show(given.out, row.name, "ours fp8" if fp8 else "ours", us)
            them = run_alone(row.name, layers, given)
            show(given.out, row.name, f"megatron-core {layers}", them, fastest[fp8])


def show(
    out: Path, row: str, program: str, result: dict[str, Any], ours: float | None = None
) -> float:
    """Print a line of the table, keep the result, and return its tokens/s, 0 if it failed."""
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps({"row": row, "program": program, **result}) + "\n")
    if result["failed"]:
        print_row(row, program, f"FAILED: {result['failed']}", "", "", "", "")
        return 0
    speed = float(result["tokens_per_second"])
    tried = ", ".join(f"{micro}: {ms:.1f}" for micro, ms in result.get("tried_ms", {}).items())
    print_row(
        row,
        f"{program}, {result['parameters'] / 1e6:,.1f}M",
        f"{speed:,.0f}",
        f"{result['ms']:.1f}",
        f"{result['micro']} ({tried})" if tried else "",
        f"{(result['peak_bytes'] or 0) / 2**30:.1f}",
        f"{ours / speed:.3f}" if ours else "",
    )
    return speed


def run_alone(row: str, layers: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run one row of theirs in a process of its own."""
    folder = given.out / f"{row} {layers}".replace(" ", "-")
    folder.mkdir()
    console = folder / "console.txt"
    words = [sys.executable, __file__, str(folder), "--model", row, "--layers", layers]
    words += ["--steps", *map(str, given.steps), "--limit", str(given.limit)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment |= os.environ
    environment |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    environment["MASTER_PORT"] = str(port)
    seconds = given.limit + 10  # it ends itself before, and says where it was
    begin = time.monotonic()
    with console.open("w") as log, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            words, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=seconds
        )
    path = folder / f"peer-{row}.jsonl"
    if not path.exists():
        is_late = time.monotonic() - begin >= given.limit
        late = f"stopped after {given.limit:g} s (--limit)"
        return {"failed": late if is_late else find_reason(console) or "ended without a result"}
    result: dict[str, Any] = json.loads(path.read_text())
    error = result.get("error")
    return result | {"failed": error and error.strip().splitlines()[-1]}


def run_cells(given: argparse.Namespace) -> None:
    faulthandler.dump_traceback_later(given.limit, exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    # its small fusions: each micro-batch its own, fast, kernels
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 64
    if any(layers != "local" for layers in given.layers or ()):
        clip_by_engine()
    model, batch, cells = cells_of(given.model, int(os.environ["WORLD_SIZE"]))
    path = given.out / f"peer-{given.model}.jsonl"
    if RANK == 0:
        path.unlink(missing_ok=True)
    for cell, layers in itertools.product(cells, given.layers or ("local",)):
        begin, row, error = time.perf_counter(), None, None
        try:
            row = measure(cell, layers, model, batch, given.steps, device)
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
            "layers": layers,
            "ours": cell.ours,
            "seconds": time.perf_counter() - begin,
            "command": " ".join([f"torchrun --nproc-per-node {dist.get_world_size()}", *sys.argv]),
            "megatron_core": version("megatron-core"),
            "transformer_engine": version("transformer-engine") if layers != "local" else None,
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
        print(f"megatron-core {layers} {given.model} {cell.name}: {shown}", flush=True)
    if RANK == 0 and dist.get_world_size() > 1:
        write_ratios(given.out, given.model)
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    dist.destroy_process_group()


def cells_of(model: str, gpus: int) -> tuple[Any, int, list[PeerLayout]]:
    """Return a model as ours has it, the samples of a step, and the cells."""
    from meshwright.config.flags import parse_settings
    from meshwright.config.schema import TrainConfig

    if gpus > 1:
        if (model, gpus) not in CELLS:
            known = ", ".join(f"{name} on {count}" for name, count in CELLS)
            sys.exit(f"no layouts of {model} on {gpus} GPUs; choose {known}")
        layers, hidden, heads = SIZES[model]
        shape = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads}"
        flags = f"{shape} {rows.DRY} --seq-length 1024 --bf16 --lr 1e-4 --micro-batch-size 1"
    else:
        (row,) = rows.chosen(["345m", "sizes"], f"^{re.escape(model)}$", 1)
        flags = row.flags
    words = f"{flags} --mock-data --train-iters 1000 --vocab-size {VOCAB}"
    config = parse_settings(TrainConfig, words.split(), "peer").config
    if gpus > 1:
        return config, *CELLS[model, gpus]
    batch = config.global_batch
    return config, batch, [PeerLayout(model, model, 1, 1, (batch, batch // 2, batch // 4))]


def anyone(flag: bool) -> bool:
    """Whether it is so on any rank."""
    reduced = torch.tensor(float(flag))  # over gloo: a GPU may have had an error
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return bool(reduced)


def measure(
    cell: PeerLayout,
    layers: str,
    config: Any,
    batch: int,
    steps: tuple[int, int],
    device: torch.device,
) -> dict[str, Any]:
    from megatron.core import parallel_state as mpu

    from meshwright.model.counts import flops_per_token

    start = time.perf_counter()
    m, seq = config.model, config.data.seq_length
    peer = Peer(cell, layers, m, seq, batch, device)
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
    if layers != "local":
        settings["attention"] = chosen_attention()
    return {
        "event": "done",
        "micro": best,
        "batch": batch,
        "steps": list(steps),
        "ms": kept,
        "tokens_per_second": speed,
        "flops_per_token": flops,
        "parameters": peer.parameters,  # of this rank
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


def network_settings(m: Any) -> dict[str, Any]:
    """Return what TransformerConfig calls the network of GPT-2 or Llama."""
    is_llama = (m.position, m.normalization, m.activation) == ("rope", "RMSNorm", "swiglu")
    return dict(
        normalization=m.normalization,
        activation_func=F.silu if is_llama else F.gelu,
        gated_linear_unit=is_llama,
        add_bias_linear=m.add_bias_linear,
        num_query_groups=m.groups,
    )


def engine_settings(layers: str, m: Any) -> dict[str, Any]:
    """Return the settings that TE has beside those of the local layers."""
    settings: dict[str, Any] = dict(
        gradient_accumulation_fusion=True,
        apply_rope_fusion=m.position == "rope",
        cross_entropy_fusion_impl="te",
    )
    if "fp8" in layers:
        settings |= dict(
            fp8="hybrid",
            fp8_recipe="delayed",
            fp8_amax_history_len=1024,
            fp8_amax_compute_algo="max",
            fp8_param="params" in layers,
        )
    return settings


def clip_by_engine() -> None:
    """Let megatron-core find all that it clips gradients by, or it takes none of it from TE.

    To be called before it is imported.
    """
    from transformer_engine.pytorch import optimizers

    def scale(chunk: int, flag: Tensor, lists: list[list[Tensor]], factor: Tensor) -> None:
        torch._foreach_mul_(lists[1], factor.view(()))  # the same tensors as lists[0]

    if not hasattr(optimizers, "multi_tensor_scale_tensor"):  # from TE 2.14 on
        optimizers.multi_tensor_scale_tensor = scale


def accumulate_by_engine() -> None:
    """Let TE multiply and add the head's gradient, where apex's extension is not installed."""
    from megatron.core.tensor_parallel import layers
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    def add(inputs: Tensor, grads: Tensor, total: Tensor) -> None:
        general_gemm(
            inputs,
            grads,
            out_dtype=total.dtype,
            layout="NT",
            out=total,
            accumulate=True,
            grad=True,
        )

    if not layers._grad_accum_fusion_available:
        extension = types.SimpleNamespace(wgrad_gemm_accum_fp32=add)
        layers.fused_weight_gradient_mlp_cuda = extension
        layers._grad_accum_fusion_available = True


def chosen_attention() -> dict[str, str]:
    """Return which kernels of attention TE has chosen."""
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    found = dot_product_attention._attention_backends
    return {name: str(found[name]) for name in found if name.startswith(("use_", "fused_"))}


class Peer:
    """Set up as Megatron-LM's training.py does."""

    def __init__(
        self, cell: PeerLayout, layers: str, m: Any, seq: int, batch: int, device: torch.device
    ) -> None:
        from megatron.core import parallel_state as mpu
        from megatron.core import tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_with_transformer_engine_spec,
        )
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
        has_engine = layers != "local"
        config = programs.megatron_settings(m, bf16) | network_settings(m)
        if has_engine:
            config |= engine_settings(layers, m)
            accumulate_by_engine()
        config |= dict(
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
            position_embedding_type="rope" if m.position == "rope" else "learned_absolute",
            rotary_base=m.rotary_base,
            share_embeddings_and_output_weights=not m.untie_embeddings_and_output_weights,
            pre_process=first,
            post_process=last,
            parallel_output=True,
        )
        overlaps = dist.get_world_size() > 1
        of_data = dict(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=overlaps,
            use_distributed_optimizer=True,
            check_for_nan_in_grad=False,
            fp8_param_gather=bool(config.get("fp8_param")),
        )
        of_optimizer = programs.megatron_optimizer_settings(bf16)
        of_optimizer |= dict(overlap_param_gather=overlaps, fp8_recipe=config.get("fp8_recipe"))
        self.settings = {
            name: {k: str(v) for k, v in values.items()}
            for name, values in (
                ("TransformerConfig", config),
                ("GPTModel", of_model),
                ("DistributedDataParallelConfig", of_data),
                ("OptimizerConfig", of_optimizer),
            )
        }
        self.settings["beside"] = (
            {
                "layers": "get_gpt_layer_with_transformer_engine_spec",
                "accumulation of the head's gradient": "TE's general_gemm",
                "scaling of gradients": "torch._foreach_mul_, before TE 2.14",
            }
            if has_engine
            else {
                "layers": "get_gpt_layer_local_spec, core_attention by scaled_dot_product_attention(is_causal=True)",
                "AdamW": "torch's fused",
                "norm and scaling of gradients": "torch._foreach_norm, torch._foreach_mul_",
            }
        )
        transformer = TransformerConfig(**config)
        spec = (
            get_gpt_layer_with_transformer_engine_spec()
            if has_engine
            else programs.megatron_layers()
        )
        network = Float16Module(transformer, GPTModel(transformer, spec, **of_model).to(device))
        network.train()
        self.parameters = sum(p.numel() for p in network.parameters())
        self.model = DistributedDataParallel(
            transformer, DistributedDataParallelConfig(**of_data), network
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(**of_optimizer), [self.model], use_gloo_process_groups=False
        )
        if not has_engine:
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
        for part in self.tokens[self.number % len(self.tokens)].split(micro):
            yield (
                part[:, :-1].contiguous(),
                part[:, 1:].contiguous(),
                self.positions.expand(len(part), -1),
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
        cell = f"{r['cell']}, {r['layers']}"
        if r["event"] != "done":
            lines.append(f"| {cell} | failed: {r['error'][:100]} | | | | |")
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
            f"| {cell} | {r['tokens_per_second']:,.0f} | {r['micro']} ({tried}) | {r['peak_bytes'] / 2**30:.1f} | "
            f"{mine[0]} | {mine[1]} |"
        )
    text = "\n".join(lines) + "\n"
    (out / "peer.md").write_text(text)
    print("\n" + text, flush=True)


if __name__ == "__main__":
    main()
