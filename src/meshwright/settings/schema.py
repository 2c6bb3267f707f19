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

    num_layers: int | None = flag(None, "transformer layers", bound="above 0")
    hidden_size: int | None = flag(None, "width of the residual stream", bound="above 0")
    num_attention_heads: int | None = flag(None, "attention heads", bound="above 0")
    ffn_hidden_size: int | None = flag(None, "width of the MLP's hidden layer (none: 4 x hidden size)", bound="above 0")
    kv_channels: int | None = flag(None, "width of one head (none: hidden size / heads)", bound="above 0")
    max_position_embeddings: int | None = flag(
        None, "rows of the learned position table (none: sequence length)", bound="above 0"
    )
    make_vocab_size_divisible_by: int = flag(
        128, "the printed, padded vocabulary is a multiple of this", bound="above 0"
    )
    pad_vocab_size_to: int | None = flag(None, "pad the vocabulary to exactly this size")
    layernorm_epsilon: float = flag(1e-5, "added to the variance in layer norm", "--norm-epsilon", bound="above 0")
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", bound="above 0")
    hidden_dropout: float = flag(
        0.1, "dropout of embeddings and of each branch before it joins the residual", bound="in [0, 1)"
    )
    attention_dropout: float = flag(0.1, "dropout of attention probabilities", bound="in [0, 1)")
    untie_embeddings_and_output_weights: bool = flag(False, "give the output layer a table of its own")
    bias_gelu_fusion: bool = flag(True, "tanh GELU; without it the exact erf GELU, as in Megatron")
    openai_gelu: bool = flag(False, "OpenAI's tanh GELU, whatever the fusion flag says")
    attention_impl: Literal["auto", "sdpa", "reference"] = flag(
        "auto", "auto: SDPA, but the reference on CPU with attention dropout; reference: plain matmul and softmax"
    )
    num_query_groups: int | None = flag(
        None,
        "key/value heads that the attention heads share (none: one each); also without --group-query-attention",
        bound="above 0",
    )
    group_query_attention: bool = flag(False, "grouped-query attention, with one group unless --num-query-groups says")
    position_embedding_type: Literal["learned_absolute", "absolute", "rope", "rotary", "alibi", "none"] = flag(
        "learned_absolute", "how positions enter: a learned table, rotation, a bias by distance, or not at all"
    )
    use_rotary_position_embeddings: bool = flag(False, "the older name of --position-embedding-type rope")
    rotary_percent: float = flag(1.0, "share of each head that rotates", bound="above 0")
    rotary_base: float = flag(10000.0, "base of the rotation's wave lengths", "--rope-theta", bound="above 0")
    swiglu: bool = flag(False, "SwiGLU MLP, by default 8/3 x hidden size wide, down to a multiple of 64 (as Megatron)")
    squared_relu: bool = flag(False, "squared-ReLU MLP")
    glu_activation: Literal["geglu", "liglu", "reglu", "swiglu"] | None = flag(
        None, "gated MLP of hidden width 4 x hidden size, as in Megatron-DeepSpeed"
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", "kind of norm")
    apply_layernorm_1p: bool = flag(False, "norm weights are stored minus one")
    qk_layernorm: bool = flag(False, "normalise each head's queries and keys")
    add_bias_linear: bool = flag(True, "biases in linear layers", "--disable-bias-linear")
    add_qkv_bias: bool = flag(False, "biases of queries, keys and values even with --disable-bias-linear")
    embed_layernorm: bool = flag(False, "norm after the token embedding")
    apply_residual_connection_post_layernorm: bool = flag(False, "the residual goes on from the norm's output")
    init_method_xavier_uniform: bool = flag(False, "Xavier uniform initial weights instead of normal ones")
    num_experts: int | None = flag(None, "mixture of experts", only=(None,), step=9)

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
        "how text becomes ids",
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
    vocab_file: str | None = flag(None, "GPT-2's vocab.json", "--vocab")
    merge_file: str | None = flag(None, "GPT-2's merges.txt", "--merges-file")
    tokenizer_model: str | None = flag(None, "a tokenizer.json file", "--tokenizer-name-or-path")
    vocab_size: int | None = flag(
        None, "true vocabulary size, for NullTokenizer and mock data", "--true-vocab-size", bound="above 0"
    )


@dataclass(frozen=True)
class Data:
    """Token files and the order in which they are read."""

    data_path: list[str] = flag(
        [], "prefix of .bin/.idx, or a blend: weight prefix weight prefix and so on", "--dataset"
    )
    seq_length: int | None = flag(None, "tokens of one sample", "--encoder-seq-length", bound="above 0")
    split: str = flag("969, 30, 1", "shares of train, validation and test")
    split_arithmetic: Literal["rounded", "cumulative"] = flag(
        "rounded", "borders of the split: rounded (2019-2023 Megatron) or cumulative (since October 2023)"
    )
    last_epoch_cutoff: float = flag(
        0.80, "shuffle the last epoch apart if it is less full than this (bigscience: 0.95)"
    )
    data_cache_path: str | None = flag(None, "folder of the sample indices (none: index-cache beside the data)")
    mock_data: bool = flag(False, "random tokens instead of files")
    data_impl: Literal["mmap", "infer", "lazy", "cached"] = flag("mmap", "format of the files", only=("mmap", "infer"))
    mmap_warmup: bool = flag(False, "read the files once beforehand")
    dataloader_type: Literal["single", "cyclic"] = flag(
        "single", "single: the samples' own shuffled order; cyclic: a new order of all samples in each epoch"
    )
    num_workers: int = flag(2, "batches read ahead by a background thread (0: none)", bound="from 0")
    train_data_path: list[str] = flag([], "prefix or blend of the training set, whole files; instead of --split")
    valid_data_path: list[str] = flag([], "prefix or blend of the validation set")
    test_data_path: list[str] = flag([], "prefix or blend of the test set")
    data_args_path: str | None = flag(None, "file that holds what --data-path would")
    per_split_data_args_path: str | None = flag(
        None, 'JSON file {"train": [...], "valid": [...], "test": [...]} of what the three flags above would hold'
    )
    train_weighted_split_paths: list[str] = flag(
        [],
        "'NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX ...': the training set, of shares of files' documents",
    )
    valid_weighted_split_paths: list[str] = flag(
        [], "'NAME: WEIGHT START:END PREFIX, ...' 'NAME2: ...': validation sets, each with a loss of its own"
    )
    test_weighted_split_paths: list[str] = flag([], "the same for test sets")
    train_weighted_split_paths_path: str | None = flag(None, "file that holds what --train-weighted-split-paths would")
    valid_weighted_split_paths_path: str | None = flag(None, "file that holds what --valid-weighted-split-paths would")
    test_weighted_split_paths_path: str | None = flag(None, "file that holds what --test-weighted-split-paths would")
    multiple_validation_sets: bool = flag(
        False, "each path of --valid-data-path is a set of its own, with its own loss"
    )
    validation_set_names: list[str] = flag([], "names of these sets (none: the names of their files)")
    full_validation: bool = flag(False, "each validation reads all of its set once, instead of --eval-iters batches")
    blend_change_at: str | None = flag(
        None,
        "sample of a continued run from which on the blend is the one given now, not its own; now: the next sample",
    )
    eod_mask_loss: bool = flag(False, "no loss for what follows an end of document: it is not predictable")
    reset_position_ids: bool = flag(False, "positions restart after each end of document")
    reset_attention_mask: bool = flag(False, "no attention across an end of document")
    skip_train_iteration_range: list[str] = flag(
        [], "iterations A-B ... that are passed over: their samples are used up, nothing is trained, logged or saved"
    )


@dataclass(frozen=True)
class Training:
    """Batches, length and ends of the run."""

    micro_batch_size: int | Literal["auto"] | None = flag(
        None, "samples of one forward pass; auto: the most that fit, found before the first step", bound="above 0"
    )
    global_batch_size: int | None = flag(None, "samples of one step (none: one micro-batch per rank)", bound="above 0")
    num_accumulation_steps: int | None = flag(
        None, "micro-batches of one step, instead of the global or the micro-batch size", bound="above 0"
    )
    train_iters: int | None = flag(None, "steps in all", bound="above 0")
    train_samples: int | None = flag(None, "samples in all, instead of --train-iters", bound="above 0")
    train_tokens: int | None = flag(None, "tokens in all, instead of --train-iters", bound="above 0")
    rampup_batch_size: list[int] = flag(
        [], "START INCREMENT SAMPLES: the global batch grows from START by INCREMENT over so many samples"
    )
    seed: int = flag(1234, "seed of weights, dropout and sample order", bound="from 0")
    eval_interval: int = flag(1000, "steps between validations", bound="above 0")
    eval_iters: int = flag(100, "global batches of one validation", bound="from 0")
    exit_interval: int | None = flag(None, "save and leave at steps divisible by this", bound="above 0")
    exit_duration_in_mins: float | None = flag(None, "save and leave after this time", bound="above 0")
    exit_signal_handler: bool = flag(True, "on SIGTERM or SIGINT finish the step, save, leave with 143 or 130")
    kill_switch_path: str | None = flag(None, "save and leave when this file appears", "--kill-switch-file")
    skip_train: bool = flag(False, "load, validate and test, but do not train", "--eval-only")
    loss_mean: Literal["global", "microbatch"] = flag(
        "global", "divide by the global batch's unmasked tokens, or take Megatron's mean of micro-batch means"
    )
    on_nonfinite: str = flag("stop", "a NaN or infinite loss or gradient: stop, or skip:K steps in a row, then stop")
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, "recompute in the backward pass: whole layers, or the attention alone"
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None, "uniform: every --recompute-num-layers layers share one saved input; block: only the first so many layers"
    )
    recompute_num_layers: int = flag(1, "see --recompute-method", "--checkpoint-num-layers", bound="above 0")
    checkpoint_activations: bool = flag(False, "the older name of --recompute-granularity full")
    recompute_activations: bool = flag(False, "the older name of --recompute-granularity selective")
    deepspeed_activation_checkpointing: bool = flag(False, "Megatron-DeepSpeed's name of --recompute-granularity full")
    compile: Literal["auto", "on", "off"] = flag("auto", "torch.compile of the layers; auto: on a GPU")

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
        "adam", "update rule; adam is AdamW; muon: for the layers' matrices, scaled to AdamW's rate, AdamW for the rest"
    )
    lr: float | None = flag(None, "peak learning rate", "--learning-rate", bound="above 0")
    min_lr: float = flag(0.0, "learning rate at the end of the decay", bound="from 0")
    lr_decay_style: Literal["linear", "cosine", "constant", "inverse-square-root", "WSD"] = flag(
        "linear", "shape of the decay"
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", "shape of the last part of WSD, which is constant before it"
    )
    lr_wsd_decay_iters: int | None = flag(None, "steps of that last part", bound="above 0")
    lr_wsd_decay_samples: int | None = flag(None, "samples of that last part", bound="above 0")
    lr_decay_iters: int | None = flag(None, "steps until --min-lr is reached (none: --train-iters)", bound="above 0")
    lr_decay_samples: int | None = flag(None, "samples until --min-lr (none: --train-samples)", bound="above 0")
    lr_decay_tokens: int | None = flag(None, "tokens until --min-lr", bound="above 0")
    lr_warmup_fraction: float | None = flag(None, "share of the decay that warms up", bound="in [0, 1)")
    lr_warmup_iters: int = flag(0, "steps of warm-up", bound="from 0")
    lr_warmup_samples: int = flag(0, "samples of warm-up", bound="from 0")
    lr_warmup_tokens: int = flag(0, "tokens of warm-up", bound="from 0")
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up", bound="from 0")
    weight_decay: float = flag(
        0.01, "decay of matrices, decoupled (of SGD: added to the gradient); biases and norms have none", bound="from 0"
    )
    start_weight_decay: float | None = flag(None, "weight decay at the start of its ramp", bound="from 0")
    end_weight_decay: float | None = flag(None, "weight decay at the end of its ramp", bound="from 0")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", "how the weight decay goes from start to end over the run"
    )
    clip_grad: float = flag(1.0, "largest global gradient norm (0: no clipping)", bound="from 0")
    adam_beta1: float = flag(0.9, "decay of Adam's mean", bound="in [0, 1)")
    adam_beta2: float = flag(0.999, "decay of Adam's variance", bound="in [0, 1)")
    adam_eps: float = flag(1e-8, "added to Adam's denominator", bound="above 0")
    sgd_momentum: float = flag(0.9, "momentum of SGD", bound="in [0, 1)")
    muon_momentum: float = flag(0.95, "momentum of Muon", bound="in [0, 1)")
    muon_num_ns_steps: int = flag(5, "Newton-Schulz steps of Muon", bound="above 0")
    override_opt_param_scheduler: bool = flag(
        False, "on resume, these schedule flags win over the checkpoint's", "--override-lr-scheduler"
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "on resume, the checkpoint's schedule wins over these flags", "--use-checkpoint-lr-scheduler"
    )


@dataclass(frozen=True)
class Precision:
    """Number formats."""

    fp16: bool = flag(False, "half precision with loss scaling")
    bf16: bool = flag(False, "bfloat16 weights and activations, float32 master weights and gradients")
    params_dtype: Literal["float32", "float64"] = flag("float32", "without --fp16/--bf16; float64 is for tests")
    loss_scale: float | None = flag(None, "constant loss scale (none: dynamic)", bound="above 0")
    initial_loss_scale: float = flag(2.0**32, "dynamic loss scale at the start", bound="above 0")
    min_loss_scale: float = flag(1.0, "least dynamic loss scale", bound="above 0")
    loss_scale_window: float = flag(1000, "clean steps before the scale doubles", bound="above 0")
    hysteresis: int = flag(2, "overflows before the scale halves", bound="above 0")
    deterministic_mode: bool = flag(False, "bit-identical reruns on a GPU, at some cost")
    fp32_residual_connection: bool = flag(False, "keep the residual stream in float32 under --fp16 or --bf16")

    @property
    def dtype(self) -> str:
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else self.params_dtype


@dataclass(frozen=True)
class Parallel:
    """How the work is spread over devices."""

    tensor_model_parallel_size: int = flag(1, "ranks that share each layer's heads and columns", bound="above 0")
    pipeline_model_parallel_size: int = flag(1, "ranks that follow one another, each with its layers", bound="above 0")
    context_parallel_size: int = flag(1, "ranks that share each sequence", bound="above 0")
    cp_comm_type: Literal["a2a", "p2p"] = flag(
        "a2a", "how ranks share a sequence: a2a trades tokens for heads around attention; p2p is a ring", only=("a2a",)
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "layers of one of the several pieces that each pipeline rank has: interleaving", bound="above 0"
    )
    pipeline_layout: str | None = flag(
        None,
        "layers of each stage, as 6,6,6,6, or the stage of each layer, as '[0]*6+[1]*6' (none: even)",
        "--custom-pipeline-stage-id",
    )
    pipeline_schedule: Literal["1f1b", "gpipe", "zero-bubble", "zbv"] = flag(
        "1f1b",
        "order of a stage's forward and backward passes; with virtual stages 1f1b is interleaved; the last two are "
        "torch's, which compute the weights' gradients later: without --compile",
    )
    sequence_parallel: bool = flag(False, "split the activations between layers' matrices over the tensor ranks")
    use_distributed_optimizer: bool = flag(False, "Megatron's name of --zero-stage 1")
    zero_stage: int = flag(
        0, "what data-parallel ranks share out: 1 optimizer state, 2 gradients too, 3 weights too; 0 nothing"
    )
    num_distributed_optimizer_instances: int = flag(
        1, "groups of data-parallel ranks, each sharing out one whole copy (hybrid sharding)", bound="above 0"
    )
    deepspeed: bool = flag(False, "said with --deepspeed_config; by itself it changes nothing")
    deepspeed_config: str | None = flag(
        None, "a DeepSpeed JSON file: ZeRO, precision and batch sizes that the flags leave open", "--deepspeed-config"
    )
    partition_activations: bool = flag(False, "no effect: --sequence-parallel splits activations over tensor ranks")
    remote_device: Literal["none", "cpu", "nvme"] = flag(
        "none", "cpu: ZeRO 3's shards of weights and state are in host memory", only=("none", "cpu")
    )
    cpu_optimizer: bool = flag(
        False, "master weights and optimizer state in host memory, updated there", "--optimizer-cpu-offload"
    )
    num_gpus_per_node: int = flag(1, "processes that are started here, one for each device", bound="above 0")
    num_nodes: int = flag(1, "machines; each is given the same command", bound="above 0")
    node_ips: str | None = flag(None, "addresses of the machines, with commas between; the first one leads")
    world_size: int | None = flag(
        None, "ranks in all (none: as started); with --dry-run any number can be tried", bound="above 0"
    )
    device: str = flag("auto", "auto: an accelerator if there is one; cpu, cuda, npu, xpu ..., perhaps as cuda:1")
    distributed_backend: str | None = flag(
        None, "how ranks talk: nccl, gloo, hccl, xccl ... (none: what the device wants)"
    )
    distributed_timeout_minutes: float = flag(10, "longest wait for another rank")
    start_timeout_seconds: float = flag(30, "longest wait at the start until all ranks are there")
    local_rank: int | None = flag(None, "passed by launchers; LOCAL_RANK wins", "--local_rank")

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

    save: str | None = flag(None, "folder for checkpoints")
    load: str | None = flag(None, "folder to continue from")
    save_interval: int | None = flag(None, "steps between checkpoints (0 or none: only at the end)", bound="from 0")
    save_overwrite: bool = flag(False, "start anew in a --save folder that holds checkpoints, moving them aside")
    verify: Literal["read", "full"] = flag("read", "on load, check the chunks that are read, or every byte")
    trust_pickle: bool = flag(
        False, "run whatever another program's checkpoint asks for: only for files whose author you trust"
    )
    exit_on_missing_checkpoint: bool = flag(False, "no checkpoint under --load is an error, not a fresh start")
    ckpt_format: Literal["native", "torch"] = flag(
        "native", "format of --save: ours, or torch for Megatron-LM's mp_rank_00/model_optim_rng.pt"
    )
    save_hf: str | None = flag(None, "at the end of training, write the model as a Hugging Face folder here")
    finetune: bool = flag(False, "take the weights of --load alone and start at step 0")
    no_load_optim: bool = flag(False, "do not load optimizer state; the step and the schedule go on")
    no_save_optim: bool = flag(False, "do not save optimizer state: smaller, but not to be continued exactly")
    use_checkpoint_args: bool = flag(
        False, "a checkpoint must be there; what it says of the architecture is taken from it with or without this"
    )
    save_at_start: bool = flag(False, "save before the first step too", "--save-init")
    keep_last: int | None = flag(None, "keep only this many of the newest checkpoints (none: all)", bound="above 0")
    keep_every: int | None = flag(
        None, "keep steps divisible by this as well", "--save-retain-interval", bound="above 0"
    )
    keep_best: bool = flag(False, "save at each validation that is the best so far, and keep the best")
    universal_checkpoint: bool = flag(False, "no effect: DeepSpeed's universal checkpoints are recognised by --load")
    async_save: bool | None = flag(
        None, "training goes on while a checkpoint is written, from a copy in host memory (none: on accelerators)"
    )
    run_dir: str | None = flag(None, "folder of config.toml, metrics.jsonl, report.html (none: --save)")


@dataclass(frozen=True)
class Logging:
    """What is told while it runs."""

    log_interval: int = flag(100, "steps between log lines", bound="above 0")
    progress: bool = flag(True, "progress bar on stderr when it is a terminal")
    tensorboard: bool = flag(True, "TensorBoard files, if it is installed and there is a folder for them")
    tensorboard_dir: str | None = flag(None, "folder of TensorBoard files (none: tensorboard/ in the run's folder)")
    tensorboard_log_interval: int = flag(1, "steps between TensorBoard points", bound="above 0")
    tensorboard_queue_size: int = flag(1000, "points kept before they are written", bound="above 0")
    log_timers_to_tensorboard: bool = flag(False, "timers in TensorBoard")
    log_batch_size_to_tensorboard: bool = flag(False, "batch size in TensorBoard")
    log_learning_rate_to_tensorboard: bool = flag(
        True, "learning rate in TensorBoard", "--no-log-learnig-rate-to-tensorboard"
    )  # Megatron's own misspelling
    log_loss_scale_to_tensorboard: bool = flag(True, "loss scale in TensorBoard")
    log_validation_ppl_to_tensorboard: bool = flag(False, "perplexity in TensorBoard")
    log_memory_to_tensorboard: bool = flag(False, "memory of the device in TensorBoard")
    log_world_size_to_tensorboard: bool = flag(False, "number of ranks in TensorBoard")
    log_params_norm: bool = flag(False, "log the norm of the weights")
    log_num_zeros_in_grad: bool = flag(False, "log how many gradients are exactly zero")
    timing_log_level: Literal["0", "1", "2"] = flag(
        "0", "timers in the log: 1 forward-backward and optimizer, 2 their parts too; each waits for the device"
    )
    timing_log_option: Literal["max", "minmax", "all"] = flag(
        "minmax", "times of the slowest rank, of the fastest and the slowest, or of every rank"
    )
    wandb_project: str | None = flag(None, "log to this project of Weights & Biases")
    wandb_exp_name: str | None = flag(None, "name of the run there (none: the run folder's name)")
    wandb_save_dir: str | None = flag(None, "folder of its files (none: wandb/ in the run's folder)")
    profile: bool = flag(False, "trace the steps from --profile-step-start to --profile-step-end with torch's profiler")
    profile_step_start: int = flag(10, "first profiled step", bound="above 0")
    profile_step_end: int = flag(12, "the step before which profiling ends")


@dataclass(frozen=True)
class Sampling:
    """How text is generated."""

    temperature: float = flag(1.0, "divide logits by this", bound="above 0")
    greedy: bool = flag(False, "take the most likely token")
    top_k: int = flag(0, "sample among the k most likely (0: all)", "--top_k", bound="from 0")
    top_p: float = flag(0.0, "sample among the smallest set of this probability (0: all)", "--top_p", bound="from 0")
    out_seq_length: int = flag(1024, "most new tokens", bound="above 0")
    num_samples: int = flag(
        0, "this many unconditional samples into --genfile (0: file or interactive)", bound="from 0"
    )
    genfile: str | None = flag(None, "output of --num-samples, JSON lines")
    sample_input_file: str | None = flag(None, "one prompt per line")
    sample_output_file: str | None = flag(None, "continuations (none: the input's name + .out)")
    interactive: bool = flag(False, "ask for prompts, as without --num-samples and --sample-input-file")
    prompt: str | None = flag(None, "print the continuation of this text")
    recompute: bool = flag(False, "no key/value cache: same text, slower")


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
