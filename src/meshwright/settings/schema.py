"""Every setting of Meshwright: one dataclass field is one flag is one line of help.

Names are Megatron's. `flag()` holds what the parser needs besides name, type and default: the help line, other
spellings, and `only`, the values that work today; checks.py refuses any other with "not yet". What follows from the
values is a property beside them. No torch is imported, so `--help`, `--dry-run` and planning start at once.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import MISSING as MISSING
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meshwright.settings.grammar import split_layers


def flag(
    default: Any,
    help: str,
    *aliases: str,
    only: tuple[Any, ...] | None = None,
    step: int = 0,
    bound: Literal["above 0", "from 0", "in [0, 1)"] | None = None,
    needs: str | tuple[str, ...] = (),
    positional: Literal[True, "rest"] | None = None,
) -> Any:
    """Return a dataclass field that is a flag; the default `MISSING` makes it required.

    Args:
        default: Value without the flag.
        help: Line of help.
        aliases: Other spellings.
        only: Values that work before release `step`.
        step: Release in which the other values are planned.
        bound: Range of a number.
        needs: Conditions, keys of `checks.CONDITIONS`, without which the flag has no effect.
        positional: Given without a flag; "rest" takes all that follows. Only in flat dataclasses.
    """
    metadata = {
        "help": help,
        "aliases": aliases,
        "only": only,
        "step": step,
        "bound": bound,
        "needs": (needs,) if isinstance(needs, str) else needs,
        "positional": positional,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def is_flat(config: Any) -> bool:
    """Return whether a configuration's own fields are flags, not groups of them."""
    return "help" in dataclasses.fields(config)[0].metadata


def group_values(config: Any) -> list[Any]:
    """Return the groups of settings of a configuration; a flat one is its own only group."""
    return [config] if is_flat(config) else [getattr(config, f.name) for f in dataclasses.fields(config)]


@dataclass(frozen=True)
class Model:
    """The network: GPT-2's architecture by default."""

    num_layers: int | None = flag(None, "number of transformer layers", bound="above 0")
    hidden_size: int | None = flag(None, "width of the residual stream", bound="above 0")
    num_attention_heads: int | None = flag(None, "number of attention heads", bound="above 0")
    ffn_hidden_size: int | None = flag(None, "width of the MLP's hidden layer (none: 4 x hidden size)", bound="above 0")
    kv_channels: int | None = flag(
        None, "width of one attention head (none: hidden size / attention heads)", bound="above 0"
    )
    max_position_embeddings: int | None = flag(
        None, "rows of the learned position table (none: sequence length)", bound="above 0"
    )
    make_vocab_size_divisible_by: int = flag(128, "pad the vocabulary to a multiple of this", bound="above 0")
    pad_vocab_size_to: int | None = flag(None, "pad the vocabulary to exactly this size")
    layernorm_epsilon: float = flag(1e-5, "added to the variance in the norm", "--norm-epsilon", bound="above 0")
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", bound="above 0")
    hidden_dropout: float = flag(
        0.1,
        "dropout probability of embeddings and of each branch before it joins the residual stream",
        bound="in [0, 1)",
    )
    attention_dropout: float = flag(0.1, "dropout probability of attention", bound="in [0, 1)")
    untie_embeddings_and_output_weights: bool = flag(False, "use a separate weight for the output layer")
    bias_gelu_fusion: bool = flag(
        True, "tanh approximation of GELU; without it the exact GELU, as in Megatron", needs="a GELU activation"
    )
    openai_gelu: bool = flag(
        False, "use OpenAI's tanh approximation of GELU even without --bias-gelu-fusion", needs="a GELU activation"
    )
    attention_impl: Literal["auto", "sdpa", "reference"] = flag(
        "auto", "auto: SDPA, or the reference on CPU with attention dropout; reference: plain matmul and softmax"
    )
    num_query_groups: int | None = flag(
        None,
        "key/value heads shared by the attention heads (none: one for each head); also enables --group-query-attention",
        bound="above 0",
    )
    group_query_attention: bool = flag(
        False, "use grouped-query attention, with a single group unless --num-query-groups is given"
    )
    position_embedding_type: Literal["learned_absolute", "absolute", "rope", "rotary", "alibi", "none"] = flag(
        "learned_absolute", "position encoding: a learned table, rotary embeddings, ALiBi, or none"
    )
    use_rotary_position_embeddings: bool = flag(False, "old name of --position-embedding-type rope")
    rotary_percent: float = flag(
        1.0, "fraction of each head that is rotated", bound="above 0", needs="--position-embedding-type rope"
    )
    rotary_base: float = flag(
        10000.0,
        "base of the rotary frequencies",
        "--rope-theta",
        bound="above 0",
        needs="--position-embedding-type rope",
    )
    swiglu: bool = flag(
        False,
        "use a SwiGLU MLP; its default width is 8/3 x hidden size, rounded down to a multiple of 64 (as Megatron)",
    )
    squared_relu: bool = flag(False, "use squared ReLU in the MLP")
    glu_activation: Literal["geglu", "liglu", "reglu", "swiglu"] | None = flag(
        None, "use a gated MLP of hidden width 4 x hidden size, as in Megatron-DeepSpeed"
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", "type of norm")
    apply_layernorm_1p: bool = flag(False, "store norm weights minus one")
    qk_layernorm: bool = flag(False, "normalize each head's queries and keys")
    add_bias_linear: bool = flag(True, "add biases in linear layers", "--disable-bias-linear")
    add_qkv_bias: bool = flag(False, "add biases to queries, keys and values even with --disable-bias-linear")
    embed_layernorm: bool = flag(False, "apply a norm after the token embedding")
    apply_residual_connection_post_layernorm: bool = flag(False, "take the residual from the norm's output")
    init_method_xavier_uniform: bool = flag(
        False, "draw initial weights from the Xavier uniform distribution instead of a normal one"
    )
    num_experts: int | None = flag(None, "number of experts per layer", only=(None,), step=9)

    @property
    def ffn(self) -> int:
        """A gate costs a third matrix, so SwiGLU is two thirds as wide, in multiples of 64 (Megatron's rule), if there are."""
        h = self.hidden_size or 0
        return self.ffn_hidden_size or (4 * h * 2 // 3 // 64 * 64 if self.swiglu and h >= 24 else 4 * h)

    @property
    def head_dim(self) -> int:
        return self.kv_channels or (self.hidden_size or 0) // max(self.num_attention_heads or 1, 1)

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.num_query_groups or (1 if self.group_query_attention else self.num_attention_heads or 1)

    @property
    def position(self) -> Literal["learned", "rope", "alibi", "none"]:
        kind = self.position_embedding_type
        if self.use_rotary_position_embeddings or kind in ("rope", "rotary"):
            return "rope"
        return "alibi" if kind == "alibi" else "none" if kind == "none" else "learned"

    @property
    def rotating(self) -> int:
        """Numbers of a head that rotate."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def activation(self) -> str:
        """gelu-tanh, gelu, squared-relu, or a gate: swiglu, geglu, liglu, reglu."""
        if self.squared_relu:
            return "squared-relu"
        gate = self.glu_activation or ("swiglu" if self.swiglu else None)
        return gate or ("gelu-tanh" if self.bias_gelu_fusion or self.openai_gelu else "gelu")

    @property
    def gated(self) -> bool:
        return self.activation.endswith("glu")

    @property
    def qkv_bias(self) -> bool:
        return self.add_bias_linear or self.add_qkv_bias


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back."""

    tokenizer_type: Literal[
        "GPT2BPETokenizer",
        "HuggingFaceTokenizer",
        "PretrainedFromHF",
        "HFTokenizer",
        "ByteTokenizer",
        "NullTokenizer",
        "BertWordPieceLowerCase",
        "BertWordPieceCase",
        "SentencePieceTokenizer",
        "GPTSentencePieceTokenizer",
    ] = flag(
        "GPT2BPETokenizer",
        "type of tokenizer",
        only=(
            "GPT2BPETokenizer",
            "HuggingFaceTokenizer",
            "PretrainedFromHF",
            "HFTokenizer",
            "ByteTokenizer",
            "NullTokenizer",
        ),
        step=4,
    )
    vocab_file: str | None = flag(None, "path to GPT-2's vocab.json", "--vocab")
    merge_file: str | None = flag(None, "path to GPT-2's merges.txt", "--merges-file")
    tokenizer_model: str | None = flag(None, "path to a tokenizer.json", "--tokenizer-name-or-path")
    vocab_size: int | None = flag(
        None, "true vocabulary size, for NullTokenizer and mock data", "--true-vocab-size", bound="above 0"
    )


@dataclass(frozen=True)
class Data:
    """Token files and the order in which they are read."""

    data_path: list[str] = flag([], "prefix of .bin/.idx, or a blend: WEIGHT PREFIX [WEIGHT PREFIX ...]", "--dataset")
    seq_length: int | None = flag(None, "tokens of one sample", "--encoder-seq-length", bound="above 0")
    split: str = flag("969, 30, 1", "shares of the documents for training, validation and test")
    split_arithmetic: Literal["rounded", "cumulative"] = flag(
        "rounded",
        "how borders of the split are computed: rounded (Megatron 2019-2023) or cumulative (since October 2023)",
    )
    last_epoch_cutoff: float = flag(
        0.80, "shuffle the last epoch separately if less than this fraction of it is used (bigscience: 0.95)"
    )
    data_cache_path: str | None = flag(None, "folder for sample indices (none: index-cache beside the data)")
    mock_data: bool = flag(False, "train on random tokens instead of files")
    data_impl: Literal["mmap", "infer", "lazy", "cached"] = flag(
        "mmap", "format of the token files", only=("mmap", "infer")
    )
    mmap_warmup: bool = flag(False, "read the token files once before training")
    dataloader_type: Literal["single", "cyclic"] = flag(
        "single", "single: shuffled samples in a fixed order; cyclic: reshuffle all samples in each epoch"
    )
    num_workers: int = flag(2, "batches that a background thread reads ahead (0: no thread)", bound="from 0")
    train_data_path: list[str] = flag([], "prefix or blend of the training set; whole files, instead of --split")
    valid_data_path: list[str] = flag([], "prefix or blend of the validation set")
    test_data_path: list[str] = flag([], "prefix or blend of the test set")
    data_args_path: str | None = flag(None, "file with the value of --data-path")
    per_split_data_args_path: str | None = flag(
        None, 'JSON file {"train": [...], "valid": [...], "test": [...]} with the values of the three flags above'
    )
    train_weighted_split_paths: list[str] = flag(
        [], "'NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX ...': training set made of parts of files"
    )
    valid_weighted_split_paths: list[str] = flag(
        [], "'NAME: WEIGHT START:END PREFIX, ...' 'NAME2: ...': validation sets, each with its own loss"
    )
    test_weighted_split_paths: list[str] = flag([], "test sets, in the same form")
    train_weighted_split_paths_path: str | None = flag(None, "file with the value of --train-weighted-split-paths")
    valid_weighted_split_paths_path: str | None = flag(None, "file with the value of --valid-weighted-split-paths")
    test_weighted_split_paths_path: str | None = flag(None, "file with the value of --test-weighted-split-paths")
    multiple_validation_sets: bool = flag(
        False, "evaluate each path of --valid-data-path separately, with its own loss", needs="--eval-iters above 0"
    )
    validation_set_names: list[str] = flag([], "names of these sets (none: their file names)")
    full_validation: bool = flag(
        False,
        "evaluate on the whole validation set once, instead of --eval-iters batches",
        needs="--eval-iters above 0",
    )
    blend_change_at: str | None = flag(
        None,
        "in a continued run, sample from which the blend given now replaces the old one; now: the next sample",
        needs="--load; a new run has one blend from its first sample",
    )
    eod_mask_loss: bool = flag(False, "mask the loss of the token that follows an end of document")
    reset_position_ids: bool = flag(
        False, "restart positions after each end of document", needs="learned or rotary positions"
    )
    reset_attention_mask: bool = flag(False, "mask attention across ends of documents")
    skip_train_iteration_range: list[str] = flag(
        [], "ranges A-B of iterations to skip: their samples are consumed without training, logging or saving"
    )


@dataclass(frozen=True)
class Training:
    """Batches, length and ends of the run."""

    micro_batch_size: int | Literal["auto"] | None = flag(
        None,
        "samples of one forward pass; auto: the largest number that fits, measured before the first step",
        bound="above 0",
    )
    global_batch_size: int | None = flag(None, "samples of one step (none: one micro-batch per rank)", bound="above 0")
    num_accumulation_steps: int | None = flag(
        None, "micro-batches of one step, instead of the global batch size or the micro-batch size", bound="above 0"
    )
    train_iters: int | None = flag(None, "number of steps", bound="above 0")
    train_samples: int | None = flag(None, "number of samples, instead of --train-iters", bound="above 0")
    train_tokens: int | None = flag(None, "number of tokens, instead of --train-iters", bound="above 0")
    rampup_batch_size: list[int] = flag(
        [], "START INCREMENT SAMPLES: increase the global batch size from START by INCREMENT over SAMPLES samples"
    )
    seed: int = flag(1234, "random seed of weights, dropout and sample order", bound="from 0")
    eval_interval: int = flag(1000, "steps between validations", bound="above 0")
    eval_iters: int = flag(100, "global batches of one validation", bound="from 0")
    exit_interval: int | None = flag(None, "save and exit at a step divisible by this", bound="above 0")
    exit_duration_in_mins: float | None = flag(None, "save and exit after this many minutes", bound="above 0")
    exit_signal_handler: bool = flag(
        True, "on SIGTERM or SIGINT finish the step, save, and exit with status 143 or 130"
    )
    kill_switch_path: str | None = flag(None, "save and exit when this file appears", "--kill-switch-file")
    skip_train: bool = flag(False, "load, validate and test without training", "--eval-only")
    loss_mean: Literal["global", "microbatch"] = flag(
        "global",
        "global: divide by the unmasked tokens of the global batch; microbatch: Megatron's mean of micro-batch means",
    )
    on_nonfinite: str = flag(
        "stop", "on a NaN or infinite loss or gradient: stop, or skip:K to skip up to K steps in a row"
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, "recompute activations in the backward pass: whole layers, or only the attention"
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None,
        "uniform: save one input per --recompute-num-layers layers; block: recompute only that many layers",
        needs="--recompute-granularity full",
    )
    recompute_num_layers: int = flag(
        1,
        "number of layers for --recompute-method",
        "--checkpoint-num-layers",
        bound="above 0",
        needs="--recompute-granularity full",
    )
    checkpoint_activations: bool = flag(False, "old name of --recompute-granularity full")
    recompute_activations: bool = flag(False, "old name of --recompute-granularity selective")
    deepspeed_activation_checkpointing: bool = flag(False, "Megatron-DeepSpeed's name of --recompute-granularity full")
    compile: Literal["auto", "on", "off"] = flag("auto", "compile the layers with torch.compile; auto: on a GPU")

    @property
    def recompute(self) -> Literal["full", "selective"] | None:
        full = self.checkpoint_activations or self.deepspeed_activation_checkpointing
        if full or self.recompute_granularity == "full":
            return "full"
        return "selective" if self.recompute_activations or self.recompute_granularity == "selective" else None


@dataclass(frozen=True)
class Optimizer:
    """The update and its schedule."""

    optimizer: Literal["adam", "adamw", "sgd", "muon"] = flag(
        "adam", "optimizer; adam is AdamW; muon: Muon for matrices of the layers, AdamW for all other parameters"
    )
    lr: float | None = flag(None, "peak learning rate", "--learning-rate", bound="above 0")
    min_lr: float = flag(0.0, "learning rate at the end of the decay", bound="from 0")
    lr_decay_style: Literal["linear", "cosine", "constant", "inverse-square-root", "WSD"] = flag(
        "linear", "learning rate schedule"
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", "shape of the final decay of WSD", needs="--lr-decay-style WSD"
    )
    lr_wsd_decay_iters: int | None = flag(
        None, "steps of the final decay of WSD", bound="above 0", needs="--lr-decay-style WSD"
    )
    lr_wsd_decay_samples: int | None = flag(
        None, "samples of the final decay of WSD", bound="above 0", needs="--lr-decay-style WSD"
    )
    lr_decay_iters: int | None = flag(
        None, "steps until the learning rate reaches --min-lr (none: --train-iters)", bound="above 0"
    )
    lr_decay_samples: int | None = flag(
        None, "samples until the learning rate reaches --min-lr (none: --train-samples)", bound="above 0"
    )
    lr_decay_tokens: int | None = flag(None, "tokens until the learning rate reaches --min-lr", bound="above 0")
    lr_warmup_fraction: float | None = flag(None, "fraction of the decay used for linear warm-up", bound="in [0, 1)")
    lr_warmup_iters: int = flag(0, "steps of linear warm-up", bound="from 0")
    lr_warmup_samples: int = flag(0, "samples of linear warm-up", bound="from 0")
    lr_warmup_tokens: int = flag(0, "tokens of linear warm-up", bound="from 0")
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up", bound="from 0", needs="a warm-up")
    weight_decay: float = flag(
        0.01,
        "decoupled weight decay of matrices (with SGD, added to the gradient); biases and norms have none",
        bound="from 0",
    )
    start_weight_decay: float | None = flag(None, "weight decay at the start of its ramp", bound="from 0")
    end_weight_decay: float | None = flag(None, "weight decay at the end of its ramp", bound="from 0")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", "shape of the ramp from --start-weight-decay to --end-weight-decay"
    )
    clip_grad: float = flag(1.0, "maximum global gradient norm (0: no clipping)", bound="from 0")
    adam_beta1: float = flag(
        0.9, "decay rate of Adam's first moment", bound="in [0, 1)", needs="Adam; --optimizer is sgd"
    )
    adam_beta2: float = flag(
        0.999, "decay rate of Adam's second moment", bound="in [0, 1)", needs="Adam; --optimizer is sgd"
    )
    adam_eps: float = flag(1e-8, "term added to Adam's denominator", bound="above 0", needs="Adam; --optimizer is sgd")
    sgd_momentum: float = flag(0.9, "momentum of SGD", bound="in [0, 1)", needs="--optimizer sgd")
    muon_momentum: float = flag(0.95, "momentum of Muon", bound="in [0, 1)", needs="--optimizer muon")
    muon_num_ns_steps: int = flag(5, "Newton-Schulz iterations of Muon", bound="above 0", needs="--optimizer muon")
    override_opt_param_scheduler: bool = flag(
        False, "on resume, use these schedule flags instead of the checkpoint's", "--override-lr-scheduler"
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "on resume, use the checkpoint's schedule instead of these flags", "--use-checkpoint-lr-scheduler"
    )


@dataclass(frozen=True)
class Precision:
    """Number formats."""

    fp16: bool = flag(False, "train in float16 with loss scaling")
    bf16: bool = flag(False, "train in bfloat16 with float32 master weights and gradients")
    params_dtype: Literal["float32", "float64"] = flag(
        "float32", "type of the parameters without --fp16 or --bf16; float64 is for tests"
    )
    loss_scale: float | None = flag(None, "constant loss scale (none: dynamic)", bound="above 0", needs="--fp16")
    initial_loss_scale: float = flag(2.0**32, "initial dynamic loss scale", bound="above 0", needs="--fp16")
    min_loss_scale: float = flag(1.0, "minimum dynamic loss scale", bound="above 0", needs="--fp16")
    loss_scale_window: float = flag(
        1000, "steps without overflow before the loss scale doubles", bound="above 0", needs="--fp16"
    )
    hysteresis: int = flag(2, "overflows before the loss scale halves", bound="above 0", needs="--fp16")
    deterministic_mode: bool = flag(False, "make reruns bit-identical on a GPU, at some cost in speed")
    fp32_residual_connection: bool = flag(False, "keep the residual stream in float32", needs="--fp16 or --bf16")

    @property
    def dtype(self) -> str:
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else self.params_dtype


@dataclass(frozen=True)
class Parallel:
    """How the work is spread over devices."""

    tensor_model_parallel_size: int = flag(
        1, "number of ranks that split each layer's heads and columns", bound="above 0"
    )
    pipeline_model_parallel_size: int = flag(
        1, "number of pipeline stages, each with a part of the layers", bound="above 0"
    )
    context_parallel_size: int = flag(1, "number of ranks that split each sequence", bound="above 0")
    cp_comm_type: Literal["a2a", "p2p"] = flag(
        "a2a",
        "communication of context parallelism; a2a: exchange tokens for heads around attention; p2p: a ring",
        only=("a2a",),
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "layers of each virtual pipeline stage; interleaves several stages on a rank",
        bound="above 0",
        needs="several pieces on a pipeline rank",
    )
    pipeline_layout: str | None = flag(
        None,
        "layers of each stage, as 6,6,6,6, or the stage of each layer, as '[0]*6+[1]*6' (none: even)",
        "--custom-pipeline-stage-id",
    )
    pipeline_schedule: Literal["1f1b", "gpipe", "zero-bubble", "zbv"] = flag(
        "1f1b",
        "pipeline schedule; with virtual stages 1f1b is interleaved; zero-bubble and zbv, torch's, compute weight gradients later and exclude --compile",
        needs="--pipeline-model-parallel-size above 1",
    )
    sequence_parallel: bool = flag(
        False,
        "split activations outside the tensor-parallel matrices over the tensor ranks",
        needs="--tensor-model-parallel-size above 1",
    )
    use_distributed_optimizer: bool = flag(
        False, "Megatron's name of --zero-stage 1", needs="several data-parallel ranks"
    )
    zero_stage: int = flag(
        0,
        "shard over data-parallel ranks: 1 optimizer state, 2 also gradients, 3 also weights; 0 nothing",
        needs="several data-parallel ranks",
    )
    num_distributed_optimizer_instances: int = flag(
        1, "number of groups of data-parallel ranks, each holding one complete copy (hybrid sharding)", bound="above 0"
    )
    deepspeed: bool = flag(
        False, "accepted together with --deepspeed_config", needs="--deepspeed_config; the flags alone decide"
    )
    deepspeed_config: str | None = flag(
        None, "DeepSpeed JSON file for ZeRO, precision and batch sizes that no flag sets", "--deepspeed-config"
    )
    partition_activations: bool = flag(False, "no effect; see --sequence-parallel")
    remote_device: Literal["none", "cpu", "nvme"] = flag(
        "none", "cpu: keep ZeRO 3's shards of weights and optimizer state in host memory", only=("none", "cpu")
    )
    cpu_optimizer: bool = flag(
        False, "keep master weights and optimizer state in host memory and update them there", "--optimizer-cpu-offload"
    )
    num_gpus_per_node: int = flag(1, "number of processes to start on this machine, one per device", bound="above 0")
    num_nodes: int = flag(1, "number of machines; give each of them the same command", bound="above 0")
    node_ips: str | None = flag(None, "comma-separated addresses of the machines, the leading one first")
    world_size: int | None = flag(
        None, "total number of ranks (none: as started); with --dry-run any number can be tried", bound="above 0"
    )
    device: str = flag(
        "auto",
        "device: auto (an accelerator if there is one), cpu, cuda, npu, xpu ..., optionally with a number, as cuda:1",
    )
    distributed_backend: str | None = flag(
        None,
        "communication backend: nccl, gloo, hccl, xccl ... (none: the default of the device)",
        needs="several processes",
    )
    distributed_timeout_minutes: float = flag(10, "minutes to wait for another rank")
    start_timeout_seconds: float = flag(30, "seconds to wait at the start for all ranks")
    local_rank: int | None = flag(None, "set by launchers; LOCAL_RANK takes precedence", "--local_rank")

    @property
    def model_ranks(self) -> int:
        """Ranks that hold and compute one copy of the model together."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def zero(self) -> int:
        """ZeRO's stage, 0 to 3, by whichever flag."""
        return max(self.zero_stage, int(self.use_distributed_optimizer))

    @property
    def offloads(self) -> bool:
        """Optimizer state is in host memory."""
        return self.cpu_optimizer or self.remote_device == "cpu"


@dataclass(frozen=True)
class Checkpoint:
    """Saving and loading."""

    save: str | None = flag(None, "folder to save checkpoints to")
    load: str | None = flag(None, "folder to load a checkpoint from")
    save_interval: int | None = flag(
        None, "steps between checkpoints (0 or none: only at the end)", bound="from 0", needs="--save"
    )
    save_overwrite: bool = flag(
        False, "start a new run in a --save folder that holds checkpoints, moving them aside", needs="--save"
    )
    verify: Literal["read", "full"] = flag(
        "read", "on load, verify the checksums of the chunks that are read, or of every byte"
    )
    trust_pickle: bool = flag(
        False,
        "run whatever another program's checkpoint asks for; only for files whose author you trust",
        needs="--load",
    )
    exit_on_missing_checkpoint: bool = flag(
        False, "fail instead of starting from scratch if --load has no checkpoint", needs="--load"
    )
    ckpt_format: Literal["native", "torch"] = flag(
        "native", "format of --save: native, or torch for Megatron-LM's mp_rank_00/model_optim_rng.pt", needs="--save"
    )
    save_hf: str | None = flag(None, "at the end of training, export the model to this folder in Hugging Face format")
    finetune: bool = flag(False, "load only the weights and start at step 0", needs="--load")
    no_load_optim: bool = flag(False, "do not load optimizer state; the step and the schedule continue", needs="--load")
    no_save_optim: bool = flag(
        False, "do not save optimizer state: smaller files, but no exact resumption", needs="--save"
    )
    use_checkpoint_args: bool = flag(False, "require a checkpoint; its architecture is used with or without this flag")
    save_at_start: bool = flag(False, "save a checkpoint before the first step", "--save-init", needs="--save")
    keep_last: int | None = flag(
        None, "number of newest checkpoints to keep (none: all)", bound="above 0", needs="--save"
    )
    keep_every: int | None = flag(
        None,
        "also keep checkpoints of steps divisible by this",
        "--save-retain-interval",
        bound="above 0",
        needs=("--save", "--keep-last; all are kept"),
    )
    keep_best: bool = flag(
        False,
        "save whenever the validation loss is the lowest so far, and keep the best checkpoint",
        needs=("--save", "--eval-iters above 0"),
    )
    universal_checkpoint: bool = flag(False, "no effect; --load recognizes DeepSpeed's universal checkpoints")
    async_save: bool | None = flag(None, "save in the background (none: only on accelerators)", needs="--save")
    run_dir: str | None = flag(None, "folder for config.toml, metrics.jsonl and report.html (none: --save)")


@dataclass(frozen=True)
class Logging:
    """What is told while it runs."""

    log_interval: int = flag(100, "steps between log lines", bound="above 0")
    progress: bool = flag(True, "show a progress bar on stderr if it is a terminal")
    tensorboard: bool = flag(True, "write TensorBoard files, if TensorBoard is installed and the run has a folder")
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard files (none: tensorboard/ in the run's folder)")
    tensorboard_log_interval: int = flag(1, "steps between TensorBoard points", bound="above 0")
    tensorboard_queue_size: int = flag(1000, "TensorBoard points held before they are written", bound="above 0")
    log_timers_to_tensorboard: bool = flag(False, "log timers to TensorBoard")
    log_batch_size_to_tensorboard: bool = flag(False, "log the batch size to TensorBoard")
    log_learning_rate_to_tensorboard: bool = flag(
        True, "log the learning rate to TensorBoard", "--no-log-learnig-rate-to-tensorboard"
    )  # Megatron's own misspelling
    log_loss_scale_to_tensorboard: bool = flag(True, "log the loss scale to TensorBoard")
    log_validation_ppl_to_tensorboard: bool = flag(False, "log validation perplexity to TensorBoard")
    log_memory_to_tensorboard: bool = flag(False, "log device memory to TensorBoard")
    log_world_size_to_tensorboard: bool = flag(False, "log the number of ranks to TensorBoard")
    log_params_norm: bool = flag(False, "log the norm of the parameters")
    log_num_zeros_in_grad: bool = flag(False, "log the number of zeros in the gradients")
    timing_log_level: Literal["0", "1", "2"] = flag(
        "0", "timers to log: 1 forward-backward and optimizer, 2 also their parts; each waits for the device"
    )
    timing_log_option: Literal["max", "minmax", "all"] = flag(
        "minmax", "log the maximum over ranks, the minimum and maximum, or all ranks"
    )
    wandb_project: str | None = flag(None, "Weights & Biases project to log to")
    wandb_exp_name: str | None = flag(None, "Weights & Biases run name (none: the name of the run's folder)")
    wandb_save_dir: str | None = flag(None, "folder for Weights & Biases files (none: wandb/ in the run's folder)")
    profile: bool = flag(False, "trace steps --profile-step-start to --profile-step-end with torch's profiler")
    profile_step_start: int = flag(10, "first step to profile", bound="above 0", needs="--profile")
    profile_step_end: int = flag(12, "step before which profiling ends", needs="--profile")


@dataclass(frozen=True)
class Sampling:
    """How text is generated."""

    temperature: float = flag(1.0, "divide the logits by this", bound="above 0")
    greedy: bool = flag(False, "always take the most likely token")
    top_k: int = flag(0, "sample from the k most likely tokens (0: all)", "--top_k", bound="from 0")
    top_p: float = flag(
        0.0, "sample from the most likely tokens with this total probability (0: all)", "--top_p", bound="from 0"
    )
    out_seq_length: int = flag(1024, "maximum number of new tokens", bound="above 0")
    num_samples: int = flag(
        0, "number of unconditional samples to write to --genfile (0: continue prompts)", bound="from 0"
    )
    genfile: str | None = flag(None, "output file of --num-samples, in JSON lines")
    sample_input_file: str | None = flag(None, "file with one prompt per line")
    sample_output_file: str | None = flag(None, "file for the continuations (none: the name of the input file + .out)")
    interactive: bool = flag(
        False, "read prompts interactively; the default without --num-samples and --sample-input-file"
    )
    prompt: str | None = flag(None, "print a continuation of this text")
    recompute: bool = flag(False, "generate without a key/value cache: same text, slower")


@dataclass(frozen=True)
class TrainConfig:
    """Everything a training run is made of."""

    model: Model = Model()
    tokenizer: Tokenizer = Tokenizer()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()

    @property
    def world(self) -> int:
        """Ranks in all: as started, or as OneFlow's flags will have them started."""
        p = self.parallel
        return p.world_size or p.num_gpus_per_node * p.num_nodes

    @property
    def dp(self) -> int:
        """Groups of ranks that read different samples."""
        return max(1, self.world // max(1, self.parallel.model_ranks))

    @property
    def chunks(self) -> int:
        """Pieces of the model that each pipeline rank has; 1 without interleaving."""
        p = self.parallel
        if p.pipeline_schedule == "zbv":
            return min(2, p.pipeline_model_parallel_size)
        per_chunk = p.pipeline_model_parallel_size * (p.num_layers_per_virtual_pipeline_stage or 0)
        return max(1, (self.model.num_layers or 0) // per_chunk) if per_chunk else 1

    @functools.cached_property
    def stages(self) -> list[int]:
        """Layers of each stage in the model's order; stage s belongs to pipeline rank s modulo the pipeline's size."""
        p = self.parallel
        return split_layers(p.pipeline_layout, self.model.num_layers or 0, p.pipeline_model_parallel_size * self.chunks)

    @property
    def micro_batch(self) -> int:
        """Samples of one forward pass of one data-parallel rank; `auto` has been resolved by then."""
        t = self.training
        if t.micro_batch_size is None and t.global_batch_size and t.num_accumulation_steps:
            return max(1, t.global_batch_size // (t.num_accumulation_steps * self.dp))
        return 1 if t.micro_batch_size in (None, "auto") else int(t.micro_batch_size)

    @property
    def global_batch(self) -> int:
        """Samples of one step over all ranks, at the end of a ramp-up."""
        t = self.training
        return t.global_batch_size or self.micro_batch * (t.num_accumulation_steps or 1) * self.dp

    def micro_batches(self, size: int) -> int:
        """Forward passes of one rank in a step of `size` samples."""
        return size // (self.micro_batch * self.dp)

    def batch(self, consumed: int) -> int:
        """Samples of the step that begins after `consumed` ones: the ramp-up, by Megatron's rule."""
        if not self.training.rampup_batch_size:
            return self.global_batch
        start, increment, samples = self.training.rampup_batch_size
        increments = (self.global_batch - start) // increment
        if consumed > samples or not increments:
            return self.global_batch
        return min(start + int(consumed / (samples / increments)) * increment, self.global_batch)

    @functools.cached_property
    def samples(self) -> int | None:
        """Samples in all, where the length is not given in steps."""
        t = self.training
        return t.train_tokens // (self.data.seq_length or 1) if t.train_tokens else t.train_samples

    @functools.cached_property
    def steps(self) -> int:
        """Steps in all; a last batch that would be cut short is left out."""
        if self.samples is None:
            return self.training.train_iters or 0
        steps = consumed = 0
        while (size := self.batch(consumed)) < self.global_batch and consumed + size <= self.samples:
            consumed += size
            steps += 1
        return steps + (self.samples - consumed) // self.global_batch

    def in_samples(self, steps: int | None, samples: int | None = None, tokens: int | None = None) -> int:
        """A length of the schedule, however it is given."""
        return samples or (tokens or 0) // (self.data.seq_length or 1) or (steps or 0) * self.global_batch

    @property
    def decay_samples(self) -> int:
        o = self.optimizer
        given = self.in_samples(o.lr_decay_iters, o.lr_decay_samples, o.lr_decay_tokens)
        return given or self.samples or self.steps * self.global_batch

    @property
    def warmup_samples(self) -> float:
        o = self.optimizer
        if o.lr_warmup_fraction is not None:
            return o.lr_warmup_fraction * self.decay_samples
        return self.in_samples(o.lr_warmup_iters, o.lr_warmup_samples, o.lr_warmup_tokens)

    @property
    def wsd_samples(self) -> int:
        return self.in_samples(self.optimizer.lr_wsd_decay_iters, self.optimizer.lr_wsd_decay_samples)


# Settings that the weights were trained with, so that no later run may change them: all of the network's but these.
ARCHITECTURE = tuple(
    f.name
    for f in dataclasses.fields(Model)
    if f.name
    not in (
        "make_vocab_size_divisible_by",
        "pad_vocab_size_to",
        "init_method_std",
        "init_method_xavier_uniform",
        "hidden_dropout",
        "attention_dropout",
        "attention_impl",
        "num_experts",
    )
)
# Where a default or another flag decides, what is compared is the outcome.
OUTCOME = {
    "ffn_hidden_size": "ffn",
    "kv_channels": "head_dim",
    "bias_gelu_fusion": "activation",
    "openai_gelu": "activation",
    "squared_relu": "activation",
    "swiglu": "activation",
    "glu_activation": "activation",
    "num_query_groups": "groups",
    "group_query_attention": "groups",
    "position_embedding_type": "position",
    "use_rotary_position_embeddings": "position",
    "add_qkv_bias": "qkv_bias",
}


# Settings that matter to the commands that read a trained model.
READING = {
    *ARCHITECTURE,
    "attention_impl",
    "seq_length",
    "micro_batch_size",
    "fp16",
    "bf16",
    "params_dtype",
    "device",
    "local_rank",
    "load",
    "verify",
    "trust_pickle",
    "make_vocab_size_divisible_by",
}


@dataclass(frozen=True)
class GenerateConfig:
    """Settings of `meshwright generate`."""

    sampling: Sampling = Sampling()
    model: Model = Model()
    tokenizer: Tokenizer = Tokenizer()
    data: Data = Data()
    training: Training = Training()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()

    # Megatron's generation takes every training flag; these are the ones that matter here.
    USES: ClassVar[frozenset[str]] = frozenset(
        {f.name for group in (Sampling, Tokenizer) for f in dataclasses.fields(group)}
        | {*READING, "seed", "deterministic_mode"}
    )


def spelling(name: str) -> str:
    """The flag of a field: Megatron keeps three underscores and so do we."""
    return "--" + name.replace("_", "-").replace("opt-param", "opt_param").replace(
        "deepspeed-config", "deepspeed_config"
    )
