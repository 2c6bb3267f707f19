"""Check that ranks, model and batches can be divided as asked."""

from __future__ import annotations

import re

from meshwright.base.hints import find_address
from meshwright.config.check_steps import batch_problems
from meshwright.config.check_values import out_of_bounds
from meshwright.config.fields import spelling
from meshwright.config.grammar import split_layers
from meshwright.config.schema import Parallel, TrainConfig


def parallel_problems(c: TrainConfig) -> list[str]:
    p, m = c.parallel, c.model
    out = naming_problems(p)
    if p.deepspeed_config and not find_address(p.deepspeed_config):
        try:
            with open(p.deepspeed_config, "rb"):
                pass
        except (OSError, ValueError) as error:
            out.append(f"--deepspeed_config {p.deepspeed_config}: {getattr(error, 'strerror', error)}")
    for name, least, most in (("distributed_timeout_minutes", 0.01, 10**5), ("start_timeout_seconds", 1, 10**5)):
        if not least <= getattr(p, name) <= most:
            out.append(f"{spelling(name)} {getattr(p, name):g} is not between {least} and {most}")
    if out_of_bounds(p) or out_of_bounds(m) or out_of_bounds(c.data):
        return out  # reported already
    tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
    by_tp, by_cp = f"--tensor-model-parallel-size {tp}", f"--context-parallel-size {cp}"
    out += ranks_problems(p, c.world)
    heads, groups, seq = m.num_attention_heads or 0, m.groups, c.data.seq_length or 0
    by_both = f"{by_tp} x {by_cp}" if tp > 1 and cp > 1 else by_cp if cp > 1 else by_tp
    divided = [
        ("--num-attention-heads", heads, tp * cp, by_both),
        ("--num-query-groups", 0 if heads % (tp * cp) else groups, tp * cp, by_both),
        ("--ffn-hidden-size", m.ffn, tp, by_tp),
        ("--pad-vocab-size-to", m.pad_vocab_size_to or 0, tp, by_tp),
        ("--seq-length", seq, cp, by_cp),
        ("--sequence-parallel: --seq-length", 0 if seq % cp or not p.sequence_parallel else seq, tp * cp, by_both),
    ]
    out += [f"{flag} {n} is not a multiple of {by}" for flag, n, size, by in divided if n % size]
    if cp > 1 and m.attention_dropout > 0:
        dropout = f"--attention-dropout {m.attention_dropout}"
        out.append(f"{by_cp} with {dropout}: its mask would depend on the layout; give --attention-dropout 0")
    return out + pipeline_problems(c) + zero_problems(c) + fp8_problems(c)


def naming_problems(p: Parallel) -> list[str]:
    """Check the form of names that torch will read; torch itself checks their meaning."""
    out = []
    if not re.fullmatch(r"auto|(?!auto|gpu)[a-z]+(:[0-9]{1,4})?", p.device):
        out.append(f"--device {p.device!r} is not auto, cpu, cuda, npu ..., or one device as cuda:1")
    if p.distributed_backend is not None and not re.fullmatch(r"[A-Za-z0-9_:,]+", p.distributed_backend):
        out.append(f"--distributed-backend {p.distributed_backend!r} is not a name such as nccl, gloo or hccl")
    return out


def ranks_problems(p: Parallel, world: int) -> list[str]:
    """Check that the ranks hold whole copies of the model."""
    if world % p.model_ranks == 0:
        return []
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    product = " x ".join(f"{spelling(n)} {getattr(p, n)}" for n in names if getattr(p, n) > 1)
    least = -(-world // p.model_ranks) * p.model_ranks
    return [
        f"{world} {'ranks are' if world > 1 else 'rank is'} not a multiple of {product} = {p.model_ranks}: "
        f"start {least} (meshwright launch --nproc-per-node {least} on one machine), or change a size"
    ]


def pipeline_problems(c: TrainConfig) -> list[str]:
    p, layers = c.parallel, c.model.num_layers
    pp, virtual = p.pipeline_model_parallel_size, p.num_layers_per_virtual_pipeline_stage
    by_pp = f"--pipeline-model-parallel-size {pp}"
    if not layers:
        return []
    if pp > layers:
        return [f"{by_pp} is above --num-layers {layers}: a stage would have no layer"]
    kind = p.pipeline_schedule
    if pp > 1 and kind in ("zero-bubble", "zbv"):
        schedule = f"--pipeline-schedule {kind}"
        if kind == "zbv" and (virtual or layers < 2 * pp):
            rule = (
                f"--num-layers {layers} must be at least 2 x {by_pp}, without --num-layers-per-virtual-pipeline-stage"
            )
            return [f"{schedule} gives each rank two stages: {rule}"]
        if p.zero_stage == 3 or c.training.compile == "on":
            other = "--zero-stage 3" if p.zero_stage == 3 else "--compile on"
            return [f"{schedule} with {other}: weight gradients are computed separately; give --pipeline-schedule 1f1b"]
    if virtual:
        by_virtual = f"--num-layers-per-virtual-pipeline-stage {virtual}"
        if pp == 1:
            return [f"{by_virtual} needs --pipeline-model-parallel-size above 1"]
        if layers % (pp * virtual):
            return [f"--num-layers {layers} is not a multiple of {by_pp} x {by_virtual} = {pp * virtual}"]
        if c.chunks > 1 and kind == "gpipe":
            return [f"--pipeline-schedule gpipe contradicts {by_virtual}, which interleaves 1f1b; leave one out"]
    out = []
    if p.pipeline_layout:
        try:
            split_layers(p.pipeline_layout, layers, pp * c.chunks)
        except ValueError as error:
            out.append(f"--pipeline-layout {p.pipeline_layout[:100]}: {error}")
    t = c.training
    if kind != "zbv" and (c.chunks > 1 or kind == "zero-bubble") and not batch_problems(c) and not out_of_bounds(t):
        for size in c.batches:
            number = c.micro_batches(size)
            if number % pp:
                growing = "--rampup-batch-size" if t.rampup_batch_size else "--step-batch-size-schedule"
                flag = growing if size != c.global_batch else "--global-batch-size"
                user = "--num-layers-per-virtual-pipeline-stage" if virtual else f"--pipeline-schedule {kind}"
                count = f"{flag} {size} makes {number} micro-batches for each rank"
                out.append(f"{count}, not a multiple of {by_pp}, as {user} needs")
    return out


def zero_problems(c: TrainConfig) -> list[str]:
    p, out = c.parallel, []
    copies = p.num_distributed_optimizer_instances
    if p.zero_stage not in (0, 1, 2, 3):
        return [f"--zero-stage {p.zero_stage:g} is none of 0, 1, 2, 3"]
    if copies > 1 and not p.zero_stage:
        out.append(f"--num-distributed-optimizer-instances {copies} needs --zero-stage 1, 2 or 3")
    elif c.dp % copies:
        out.append(f"--num-distributed-optimizer-instances {copies} does not divide the {c.dp} data-parallel ranks")
    if p.remote_device == "cpu" and p.zero_stage != 3:
        other = "--cpu-optimizer works with every stage"
        out.append(f"--remote-device cpu needs --zero-stage 3, not {p.zero_stage}; {other}")
    return out


def fp8_problems(c: TrainConfig) -> list[str]:
    p, m, fp8 = c.parallel, c.model, f"--fp8-format {c.precision.fp8_format}"
    if not c.precision.fp8_format:
        return []
    out, tp = [], p.tensor_model_parallel_size
    if p.zero_stage == 3 and c.dp * p.context_parallel_size > 1:
        out.append(f"{fp8} with ZeRO 3, which keeps no weights to be cast once a step; give --zero-stage 2 or less")
    if p.pipeline_model_parallel_size > 1 and p.pipeline_schedule not in ("1f1b", "gpipe"):
        advice = "which computes weights' gradients later, in bfloat16; give 1f1b"
        out.append(f"{fp8} with --pipeline-schedule {p.pipeline_schedule}, {advice}")
    if m.hidden_size and m.num_attention_heads:
        widths = {"--hidden-size": m.hidden_size, "--ffn-hidden-size": m.ffn // tp}
        widths["the width of the heads"] = m.num_attention_heads * m.head_dim // tp
        widths["the width of keys and values"] = 2 * m.groups * m.head_dim // tp
        on = " on each tensor rank" if tp > 1 else ""
        wrong = [f"{name} {n}{on}" for name, n in widths.items() if n % 16]
        out += [f"{fp8}: {one} is not a multiple of 16, as fp8 products need" for one in wrong]
    if (layers := m.num_layers) and not any(c.precision.multiplies_fp8(i, layers) for i in range(layers)):
        out.append(
            f"{fp8}: --first-last-layers-bf16 leaves none of {layers} layers; lower --num-layers-at-start-in-bf16"
        )
    return out
