"""Check that ranks, model and batches can be divided as asked."""

from __future__ import annotations

import re

from meshwright.base.hints import find_address
from meshwright.config.check_steps import batch_problems
from meshwright.config.check_values import out_of_bounds
from meshwright.config.grammar import split_layers
from meshwright.config.problem import Problem, plain, stated, with_value
from meshwright.config.schema import Model, Parallel, TrainConfig


def parallel_problems(c: TrainConfig) -> list[Problem]:
    p = c.parallel
    m = c.model
    out = naming_problems(p)
    # The file is opened only to see that it can be read.
    if p.deepspeed_config and not find_address(p.deepspeed_config):
        try:
            with open(p.deepspeed_config, "rb"):
                pass
        except (OSError, ValueError) as error:
            reason = plain(getattr(error, "strerror", error))
            out.append(Problem(("deepspeed_config",), f"{stated(p, 'deepspeed_config')}: {reason}"))
    for name, least, most in (
        ("distributed_timeout_minutes", 0.01, 10**5),
        ("start_timeout_seconds", 1, 10**5),
    ):
        if not least <= getattr(p, name) <= most:
            out.append(Problem((name,), f"{stated(p, name)} is not between {least} and {most}"))
    # What follows divides by these sizes.
    if out_of_bounds(p) or out_of_bounds(m) or out_of_bounds(c.data):
        return out  # reported already
    out += ranks_problems(p, c.world) + division_problems(c)
    if p.context_parallel_size > 1 and m.attention_dropout > 0:
        text = (
            f"{stated(p, 'context_parallel_size')} with {stated(m, 'attention_dropout')}: its mask would depend on the "
            "layout; give {attention_dropout=0}"
        )
        out.append(Problem(("context_parallel_size", "attention_dropout"), text))
    return out + pipeline_problems(c) + zero_problems(c) + fp8_problems(c)


def division_problems(c: TrainConfig) -> list[Problem]:
    """Check that tensor and context ranks divide the sizes of which each holds a part."""
    p = c.parallel
    m = c.model
    tp = p.tensor_model_parallel_size
    cp = p.context_parallel_size
    by_tp = stated(p, "tensor_model_parallel_size")
    by_cp = stated(p, "context_parallel_size")
    by_both = by_cp if cp > 1 else by_tp
    if tp > 1 and cp > 1:
        by_both = f"{by_tp} x {by_cp}"
    heads = m.num_attention_heads or 0
    seq = c.data.seq_length or 0
    # Context ranks exchange heads for parts of the sequence, so that both kinds divide the heads. A
    # size of 0 passes: it is not given, or its parts are reported already.
    divided = [
        ("num_attention_heads", heads, tp * cp, by_both),
        ("num_query_groups", 0 if heads % (tp * cp) else m.groups, tp * cp, by_both),
        ("ffn_hidden_size", m.ffn, tp, by_tp),
        ("pad_vocab_size_to", m.pad_vocab_size_to or 0, tp, by_tp),
        ("seq_length", seq, cp, by_cp),
    ]
    out = [
        Problem((name,), f"{with_value(name, size)} is not a multiple of {by}")
        for name, size, parts, by in divided
        if size % parts
    ]
    # Of a schedule of lengths each must be cut as well.
    lengths = c.sample_lengths if c.training.seq_length_schedule is not None else []
    parts = tp * cp if p.sequence_parallel else cp
    odd = [length for length in lengths if length % parts]
    if odd and not out:
        by = by_both if p.sequence_parallel else by_cp
        text = f"{stated(c.training, 'seq_length_schedule')}: its length of {odd[0]} is not a multiple of {by}"
        multiple = f"; let its lengths be multiples of {parts}"
        out.append(Problem(("seq_length_schedule",), text + multiple))
    if p.sequence_parallel and seq % cp == 0 and seq % (tp * cp):
        text = f"{with_value('seq_length', seq)} is not a multiple of {by_both}"
        out.append(Problem(("seq_length",), f"{{sequence_parallel=True}}: {text}"))
    return out


def naming_problems(p: Parallel) -> list[Problem]:
    """Check the form of names that torch will read; torch itself checks their meaning."""
    out = []
    if not re.fullmatch(r"auto|(?!auto|gpu)[a-z]+(:[0-9]{1,4})?", p.device):
        text = f"{{device}} {plain(repr(p.device))} is not auto, cpu, cuda, npu ..., or one device as cuda:1"
        out.append(Problem(("device",), text))
    if p.distributed_backend is not None and not re.fullmatch(
        r"[A-Za-z0-9_:,]+", p.distributed_backend
    ):
        text = f"{plain(repr(p.distributed_backend))} is not a name such as nccl, gloo or hccl"
        out.append(Problem(("distributed_backend",), f"{{distributed_backend}} {text}"))
    return out


def ranks_problems(p: Parallel, world: int) -> list[Problem]:
    """Check that the ranks hold whole copies of the model."""
    if world % p.model_ranks == 0:
        return []
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    names = tuple(name for name in sizes if getattr(p, name) > 1)
    product = " x ".join(stated(p, name) for name in names)
    least = -(-world // p.model_ranks) * p.model_ranks
    text = (
        f"{world} {'ranks are' if world > 1 else 'rank is'} not a multiple of {product} = {p.model_ranks}: "
        f"start {least} (meshwright launch --nproc-per-node {least} on one machine), or change a size"
    )
    return [Problem(names, text)]


def pipeline_problems(c: TrainConfig) -> list[Problem]:
    """Check that the stages of a pipeline have layers, and what their schedule asks for."""
    p = c.parallel
    layers = c.model.num_layers
    pp = p.pipeline_model_parallel_size
    if not layers:
        return []
    # A stage without layers would have nothing to compute.
    if pp > layers:
        text = (
            f"{stated(p, 'pipeline_model_parallel_size')} is above {stated(c.model, 'num_layers')}"
        )
        about = ("pipeline_model_parallel_size", "num_layers")
        return [Problem(about, f"{text}: a stage would have no layer")]
    # The stages are known only if this is right.
    if problem := _virtual_problem(c):
        return [problem]
    out = []
    if p.pipeline_layout:
        try:
            split_layers(p.pipeline_layout, layers, pp * c.chunks)
        except ValueError as error:
            given = with_value("pipeline_layout", str(p.pipeline_layout)[:100])
            out.append(Problem(("pipeline_layout",), f"{given}: {error}"))
    return out + _micro_batches_problems(c)


def _virtual_problem(c: TrainConfig) -> Problem | None:
    """Check a pipeline whose ranks hold several stages each."""
    p = c.parallel
    layers = c.model.num_layers or 0
    pp = p.pipeline_model_parallel_size
    virtual = p.num_layers_per_virtual_pipeline_stage
    if not virtual:
        return None
    name = "num_layers_per_virtual_pipeline_stage"
    by_virtual = stated(p, name)
    if pp == 1:
        return Problem((name,), f"{by_virtual} needs {{pipeline_model_parallel_size}} above 1")
    if layers % (pp * virtual):
        product = f"{stated(p, 'pipeline_model_parallel_size')} x {by_virtual} = {pp * virtual}"
        return Problem(
            ("num_layers", name), f"{stated(c.model, 'num_layers')} is not a multiple of {product}"
        )
    if c.chunks > 1 and p.pipeline_schedule == "gpipe":
        text = f"{{pipeline_schedule=gpipe}} contradicts {by_virtual}, which interleaves 1f1b; leave one out"
        return Problem(("pipeline_schedule", name), text)
    return None


def _micro_batches_problems(c: TrainConfig) -> list[Problem]:
    """Check that each batch makes as many micro-batches as its schedule needs."""
    p = c.parallel
    t = c.training
    out = []
    pp = p.pipeline_model_parallel_size
    # The batches are checked elsewhere, and only valid ones can be counted.
    # Interleaved 1F1B takes micro-batches in rounds of as many as there are stages.
    if c.chunks == 1 or batch_problems(c) or out_of_bounds(t):
        return []
    for size in c.batches:
        number = c.micro_batches(size)
        if number % pp:
            growing = "rampup_batch_size" if t.rampup_batch_size else "step_batch_size_schedule"
            name = growing if size != c.global_batch else "global_batch_size"
            count = f"{with_value(name, size)} makes {number} micro-batches for each rank"
            stages = stated(p, "pipeline_model_parallel_size")
            user = "{num_layers_per_virtual_pipeline_stage}"
            text = f"{count}, not a multiple of {stages}, as {user} needs"
            out.append(Problem((name, "pipeline_model_parallel_size"), text))
    return out


def zero_problems(c: TrainConfig) -> list[Problem]:
    p = c.parallel
    out = []
    copies = p.num_distributed_optimizer_instances
    name = "num_distributed_optimizer_instances"
    if p.zero_stage not in (0, 1, 2, 3):
        return [Problem(("zero_stage",), f"{stated(p, 'zero_stage')} is none of 0, 1, 2, 3")]
    if copies > 1 and not p.zero_stage:
        out.append(
            Problem((name, "zero_stage"), f"{stated(p, name)} needs {{zero_stage=1}}, 2 or 3")
        )
    elif c.dp % copies:
        out.append(
            Problem((name,), f"{stated(p, name)} does not divide the {c.dp} data-parallel ranks")
        )
    # DeepSpeed's flag puts parameters on the host, and only stage 3 divides them among the ranks.
    if p.remote_device == "cpu" and p.zero_stage != 3:
        other = "{cpu_optimizer=True} works with every stage"
        text = f"{{remote_device=cpu}} needs {{zero_stage=3}}, not {p.zero_stage}; {other}"
        out.append(Problem(("remote_device", "zero_stage"), text))
    return out


def fp8_problems(c: TrainConfig) -> list[Problem]:
    p = c.parallel
    m = c.model
    if not c.precision.fp8_format:
        return []
    fp8 = stated(c.precision, "fp8_format")
    out = []
    if m.hidden_size and m.num_attention_heads:
        for width in _uneven_widths(m, p.tensor_model_parallel_size):
            text = f"{fp8}: {width} is not a multiple of 16, as fp8 products need"
            out.append(Problem(("fp8_format",), text))
    # With all layers in bfloat16, nothing is left to multiply in fp8.
    layers = m.num_layers
    if layers and not any(c.precision.multiplies_fp8(i, layers) for i in range(layers)):
        text = (
            f"{fp8}: {{first_last_layers_bf16=True}} leaves none of {layers} layers; "
            "lower {num_layers_at_start_in_bf16}"
        )
        out.append(Problem(("fp8_format", "first_last_layers_bf16"), text))
    return out


def _uneven_widths(m: Model, tp: int) -> list[str]:
    """Return the widths of matrices on a tensor rank that are no multiple of 16."""
    heads = m.num_attention_heads or 1
    heads_width = heads * m.head_dim // tp
    keys_width = 2 * m.groups * m.head_dim // tp
    # The stream has all of the hidden size on each rank; all other widths are cut.
    widths = {
        with_value("hidden_size", m.hidden_size): m.hidden_size or 0,
        with_value("ffn_hidden_size", m.ffn // tp): m.ffn // tp,
        f"the width of the heads {heads_width}": heads_width,
        f"the width of keys and values {keys_width}": keys_width,
    }
    on = " on each tensor rank" if tp > 1 else ""
    return [f"{name}{on}" for name, width in widths.items() if width % 16]
