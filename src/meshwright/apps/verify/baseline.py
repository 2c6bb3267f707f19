"""The small baseline of a run: the same layout and options in float64, with few small layers.

Sizes shrink to what the layout can still divide; a run that is small already keeps its own. The
data are random tokens. What the baseline leaves out is listed, for the certificate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshwright.config import checks
from meshwright.config.fast_paths import FUSED_BLOCK, unknown_to
from meshwright.config.fields import baseline_settings, with_settings
from meshwright.config.grammar import PipelineLayout
from meshwright.config.length_schedule import LengthSchedule
from meshwright.config.problem import SettingsError, listed
from meshwright.config.schema import (
    Checkpoint,
    Data,
    Logging,
    Model,
    Optimizer,
    Parallel,
    Precision,
    TokenizerFlags,
    TrainConfig,
    Training,
)
from meshwright.training.small_run import SAMPLES

HEAD = 8  # width of a head
SCALE = 2.0**10  # of the loss in float16
RATE = 1e-2  # of learning
SMALL = dict(num_layers=8, hidden_size=64, num_attention_heads=16)
SMALL_LENGTH = 64
SMALL_VOCABULARY = 512
SMALL_BATCH = 32


@dataclass(frozen=True)
class Baseline:
    """The small run to compare in, and the parts of the real one that it leaves out."""

    config: TrainConfig  # in float64
    in_own_precision: TrainConfig | None  # the same in the run's; None if that is float64
    left_out: list[str]  # parts of the run about which the comparison says nothing

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the sizes and numbers that the baseline does not share with the run."""
        c = self.config
        m = c.model
        out: dict[str, Any] = {}
        for name in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
        ):
            value = getattr(m, name)
            if value is not None:
                out[name] = value
        return out | {
            "seq_length": c.data.seq_length,
            "vocab_size": c.tokenizer.vocab_size,
            "micro_batch": c.micro_batch,
            "global_batch": c.global_batch,
            "pipeline_layout": c.stages,
            "lr": c.optimizer.lr,
            "clip_grad": c.optimizer.clip_grad,
            "hidden_dropout": m.hidden_dropout,
        }


def make_baseline(config: TrainConfig, on_accelerator: bool = False) -> Baseline:
    """Return the baseline of a run, whose length of training is left to the caller."""
    c = config
    model, parallel = (c.model, c.parallel) if is_small(c) else shrink(c)
    ranks = c.parallel.tensor_model_parallel_size * c.parallel.context_parallel_size
    length = c.data.seq_length or 0
    if not length or length > SMALL_LENGTH:
        # At least 16 tokens, in a multiple of the ranks that share them out.
        length = -(-16 // ranks) * ranks
    positions = model.max_position_embeddings
    if positions:
        # A few more than are used, as in most runs, but no large table.
        positions = max(length, min(positions, length + 8))

    # torch's kernels draw other dropout in other layouts, and take no float64 with masks.
    is_masked = c.data.document_effects[-1] or model.position == "alibi"
    drops = model.attention_dropout and (on_accelerator or model.attention_impl == "sdpa")
    impl = model.attention_impl
    if drops or (on_accelerator and is_masked):
        impl = "reference"
    model = replace(
        model,
        max_position_embeddings=positions,
        attention_impl=impl,
        hidden_dropout=model.hidden_dropout or 0.1,
    )
    tokenizer, model = vocabulary(c, model)
    baseline = replace(
        c,
        model=model,
        tokenizer=tokenizer,
        data=data(c.data, length),
        training=training(c, length, on_accelerator),
        optimizer=optimizer(c.optimizer),
        precision=replace(Precision(**baseline_settings(c.precision)), params_dtype="float64"),
        parallel=replace(parallel, deepspeed_config=None, world_size=c.world),
        checkpoint=Checkpoint(**baseline_settings(c.checkpoint)),
        logging=Logging(log_params_norm=True, progress=False, tensorboard=False),
    )
    own = None if c.precision.dtype == "float64" else in_own_precision(baseline, c.precision)
    if wrong := checks.problems(baseline) or (own and checks.problems(own)):
        raise SettingsError(listed(wrong, "the small baseline of these settings cannot run"))
    return Baseline(baseline, own, left_out(c, impl, on_accelerator))


def in_own_precision(baseline: TrainConfig, p: Precision) -> TrainConfig:
    """Return the baseline in another precision, with a loss scale that grows and never overflows.

    Without clipping, a rounding of the norm changes no update. Products in fp8 are left out.
    """
    precision = replace(
        Precision(**baseline_settings(p)),
        fp16=p.fp16,
        bf16=p.bf16,
        params_dtype=p.params_dtype,
        fp32_residual_connection=p.fp32_residual_connection,
        loss_scale=min(p.loss_scale, SCALE) if p.loss_scale else None,
        initial_loss_scale=SCALE,
        loss_scale_window=2,
        hysteresis=p.hysteresis,
    )
    return with_settings(replace(baseline, precision=precision), lr=RATE, clip_grad=0.0)


def alone(config: TrainConfig) -> TrainConfig:
    """Return the same run in one process, by the plain layers and without recomputation."""
    micro = config.micro_batch
    # With a mean over all tokens of a step, the size of micro-batches must not matter.
    is_even = all(batch % 2 == 0 for batch in config.batches)
    if config.training.loss_mean == "global" and is_even:
        micro = 2
    training = replace(
        config.training,
        micro_batch_size=micro,
        num_accumulation_steps=None,
        global_batch_size=config.global_batch,
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=1,
        checkpoint_in_cpu=False,
        fused_kernels="off",
        compile="off",
        cuda_graphs="off",
    )
    parallel = Parallel(world_size=1, device=config.parallel.device)
    return replace(config, training=training, parallel=parallel)


def is_small(c: TrainConfig) -> bool:
    """Return whether a run's model needs no reduction."""
    for name, most in SMALL.items():
        size = getattr(c.model, name)
        if not size or size > most:
            return False
    return c.model.ffn <= 256


def shrink(c: TrainConfig) -> tuple[Model, Parallel]:
    """Return a small model, and the pipeline that cuts it in the same way."""
    m = c.model
    layers, parallel = shrink_stages(c)

    # As few heads as all ranks can share. If several share a key in the run, two do.
    tp = c.parallel.tensor_model_parallel_size
    unit = tp * c.parallel.context_parallel_size
    heads = m.num_attention_heads or 1
    groups = m.groups
    few = unit * min(2, max(1, groups // unit))
    few_heads = few * min(2, heads // groups)

    # Heads may be narrower or wider than the residual stream.
    hidden = m.hidden_size or 1
    width = few_heads * HEAD
    small = width
    if heads * m.head_dim < hidden:
        small = 2 * width
    elif heads * m.head_dim > hidden:
        small = max(width // 2, 4)
    # The MLP as wide beside the stream as in the run, in columns that all ranks can share.
    ffn = tp * max(1, round(small * m.ffn / hidden / tp))
    rotary = m.rotary_percent
    if m.position == "rope":
        rotary = max(rotary, 2 / HEAD)
    if int(HEAD * rotary) % 2:
        rotary = 0.5

    model = replace(
        m,
        num_layers=layers,
        hidden_size=small,
        num_attention_heads=few_heads,
        num_query_groups=few if groups < heads else None,
        group_query_attention=groups < heads,
        kv_channels=HEAD,
        ffn_hidden_size=ffn,
        rotary_percent=rotary,
        # The baseline has grown as the run has.
        mup_base_hidden_size=m.mup_base_hidden_size and max(1, round(small / m.width_growth)),
        mup_base_num_layers=m.mup_base_num_layers and max(1, round(layers / m.depth_growth)),
    )
    return model, parallel


def shrink_stages(c: TrainConfig) -> tuple[int, Parallel]:
    """Return a small number of layers, and the pipeline that cuts them in the same way."""
    p = c.parallel
    stages = c.stages
    layers = c.model.num_layers or 0
    virtual = p.num_layers_per_virtual_pipeline_stage
    if p.pipeline_layout and virtual is None:
        # Stages of different sizes stay so: 2, 7, 7, 4 layers become 1, 3, 3, 2.
        sizes = sorted(set(stages))
        counts = [sizes.index(size) + 1 for size in stages]
        layout = PipelineLayout.read(",".join(map(str, counts)))
        return sum(counts), replace(p, pipeline_layout=layout)
    if p.pipeline_layout:
        return layers, p
    each = 2 if len(stages) <= 2 and min(stages) > 1 else 1
    if virtual:
        p = replace(p, num_layers_per_virtual_pipeline_stage=each)
    return each * len(stages) + layers % len(stages), p


def vocabulary(c: TrainConfig, m: Model) -> tuple[TokenizerFlags, Model]:
    """Return a small vocabulary that leaves rows of padding on the last tensor rank."""
    size = c.tokenizer.vocab_size
    if c.data.mock_data and size and size <= SMALL_VOCABULARY:
        return TokenizerFlags(vocab_size=size), m
    unit = 8 * c.parallel.tensor_model_parallel_size
    # All ranks have equally many rows. The last three are padding, as a real vocabulary has some.
    rows = unit * -(-40 // unit)
    padded = rows if m.pad_vocab_size_to else None
    m = replace(m, make_vocab_size_divisible_by=8, pad_vocab_size_to=padded)
    return TokenizerFlags(vocab_size=rows - 3), m


def training(c: TrainConfig, length: int, on_accelerator: bool) -> Training:
    """Return few micro-batches of few samples, and the options of the passes."""
    t = c.training
    pp = c.parallel.pipeline_model_parallel_size
    number = c.micro_batches(c.global_batch)
    micro = c.micro_batch
    if number * micro * c.dp > SMALL_BATCH:
        micro = min(micro, 2)
        number = min(number, 2 * pp if pp > 1 else 3)
    batch = number * micro * c.dp
    # A batch that grows does so once, by what all ranks pass at once.
    unit = micro * c.dp * (pp if pp > 1 and number % pp == 0 else 1)
    grows = t.rampup_batch_size or t.step_batch_size_schedule
    ramp = [unit, unit, 2 * unit] if grows and batch > unit else []
    # So do samples, from about the half of them, which the ranks share out too.
    ranks = c.parallel.tensor_model_parallel_size * c.parallel.context_parallel_size
    half = length // ranks // 2 * ranks
    grown = LengthSchedule.read(f"0:{half} 1:{length}") if half else None
    # Of a stage's layers, some are recomputed if some are in the run.
    layers = t.recompute_num_layers
    if not is_small(c):
        each = max(1, shrink_stages(c)[0] // len(c.stages))
        layers = max(1, min(layers, each - (layers < max(c.stages))))
    return replace(
        Training(**baseline_settings(t)),
        micro_batch_size=micro,
        global_batch_size=batch,
        rampup_batch_size=ramp,
        seq_length_schedule=grown if t.seq_length_schedule is not None else None,
        recompute_num_layers=layers,
        eval_iters=1,
        train_iters=None if ramp else 10**4,
        train_samples=SAMPLES if ramp else None,
        # Triton's interpreter, which a CPU needs for the kernels, computes float64 too.
        fused_kernels="on" if t.fused_kernels == "on" and not on_accelerator else "off",
        compile="off",
        cuda_graphs="off",
    )


def data(d: Data, length: int) -> Data:
    """Return random tokens whose ends of documents mean what the run's borders of documents do."""
    masks_loss, resets_positions, resets_attention = d.document_effects
    return replace(
        Data(**baseline_settings(d)),
        mock_data=True,
        seq_length=length,
        num_workers=0,
        eod_mask_loss=masks_loss,
        reset_position_ids=resets_positions,
        reset_attention_mask=resets_attention,
    )


def optimizer(o: Optimizer) -> Optimizer:
    """Return the same rule with a constant learning rate so high that each step matters."""
    # SGD has no second moment, so its steps are as small as the gradients.
    rate = 0.3 if o.optimizer == "sgd" else RATE
    clip = 0.25 if o.clip_grad else 0.0
    # Gradients that are 0 but for rounding would else be enlarged to steps of full size.
    least = max(o.adam_eps, 1e-6)
    return replace(
        Optimizer(**baseline_settings(o)),
        lr=rate,
        lr_decay_style="constant",
        clip_grad=clip,
        adam_eps=least,
    )


def left_out(c: TrainConfig, impl: str, on_accelerator: bool) -> list[str]:
    """Return what the run has and the baseline has not, each as a reader would ask for it."""
    t = c.training
    p = c.precision
    m = c.model
    low = "" if p.params_dtype == "float64" else "float32"
    if p.bf16 or p.fp16:
        low = "bf16" if p.bf16 else "fp16"
    is_long = (c.data.seq_length or 0) > SMALL_LENGTH or c.global_batch > SMALL_BATCH
    is_known = not unknown_to(FUSED_BLOCK, m)
    fused = on_accelerator and t.fused_kernels != "off" and is_known and t.compile != "on"
    compiles_itself = on_accelerator and not fused and t.compile == "auto"
    is_compiled = t.compile == "on" or compiles_itself
    has_graphs = t.cuda_graphs == "on" or (on_accelerator and t.cuda_graphs == "auto")
    is_scheduled = c.optimizer.lr_decay_style != "constant"
    listed = {
        f"saving and resuming in {low}: compared in float64": low,
        "overflows in fp16: the loss scale is small": p.fp16,
        f"fp8 products (--fp8-format {p.fp8_format})": p.fp8_format,
        "fused kernels: both runs have plain layers": fused,
        "compiled layers": is_compiled,
        "CUDA graphs": has_graphs,
        "torch's kernels of attention: the reference computes it": impl != m.attention_impl,
        "the files of the data: both runs read random tokens": True,
        "packing: random documents end where a token says so": c.data.packing != "stream",
        "the sizes of the run: see the reduced ones": not is_small(c) or is_long,
        "the schedule of the learning rate, which is constant": is_scheduled,
    }
    return [line for line, applies in listed.items() if applies]
