"""Every setting of Meshwright: one dataclass field is one flag is one line of help.

Names are Megatron's. `flag()` holds what the parser needs besides name, type and default: the help line, other
spellings, and `only`, the values that work today; any other value is refused with "not yet". `problems()` checks a
whole configuration once and returns every objection in words; nothing here changes a value. No torch is imported,
so `--help`, `--dry-run` and planning start at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal


def flag(
    default: Any,
    help: str,
    *aliases: str,
    only: tuple[Any, ...] | None = None,
    step: int = 0,
    bound: Literal["above 0", "from 0", "in [0, 1)"] | None = None,
) -> Any:
    """A dataclass field with its help line, other spellings, the values that work before release `step`, and its range."""
    metadata = {"help": help, "aliases": aliases, "only": only, "step": step, "bound": bound}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


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
    bias_gelu_fusion: bool = flag(True, "tanh GELU; off: exact erf GELU, as in Megatron")
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
        "GPT2BPETokenizer", "HuggingFaceTokenizer", "PretrainedFromHF", "HFTokenizer", "ByteTokenizer", "NullTokenizer",
        "BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer", "GPTSentencePieceTokenizer",
    ] = flag(
        "GPT2BPETokenizer", "how text becomes ids",
        only=("GPT2BPETokenizer", "HuggingFaceTokenizer", "PretrainedFromHF", "HFTokenizer", "ByteTokenizer",
              "NullTokenizer"),
        step=4,
    )  # fmt: skip
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
        "a2a", "how ranks share a sequence: a2a trades tokens for heads around attention; p2p is a ring",
        only=("a2a",), step=3,
    )  # fmt: skip
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "layers of one of the several pieces that each pipeline rank has: interleaving", bound="above 0"
    )
    pipeline_layout: str | None = flag(
        None, "layers of each stage, as 6,6,6,6, or the stage of each layer, as '[0]*6+[1]*6' (none: even)",
        "--custom-pipeline-stage-id",
    )  # fmt: skip
    pipeline_schedule: Literal["1f1b", "gpipe", "zero-bubble", "zbv", "dualpipev"] = flag(
        "1f1b", "order of a stage's forward and backward passes; with virtual stages 1f1b is interleaved; the last three are "
        "torch's, which compute the weights' gradients later: without --compile"
    )  # fmt: skip
    sequence_parallel: bool = flag(False, "split the activations between layers' matrices over the tensor ranks")
    use_distributed_optimizer: bool = flag(False, "Megatron's name of --zero-stage 1")
    zero_stage: float = flag(
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
    distributed_timeout_minutes: float = flag(10, "longest wait for another rank", bound="above 0")
    local_rank: int | None = flag(None, "passed by launchers; LOCAL_RANK wins", "--local_rank")

    @property
    def model_ranks(self) -> int:
        """Ranks that hold and compute one copy of the model together."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def zero(self) -> int:
        """ZeRO's stage, 0 to 3, by whichever flag."""
        return max(int(self.zero_stage), int(self.use_distributed_optimizer))

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
    exit_on_missing_checkpoint: bool = flag(False, "no checkpoint under --load is an error, not a fresh start")
    ckpt_format: Literal["native", "torch"] = flag("native", "format of --save", only=("native",), step=5)
    finetune: bool = flag(False, "take the weights of --load alone and start at step 0")
    no_load_optim: bool = flag(False, "do not load optimizer state; the step and the schedule go on")
    no_save_optim: bool = flag(False, "do not save optimizer state: smaller, but not to be continued exactly")
    use_checkpoint_args: bool = flag(False, "take the architecture from --load; flags that contradict it are refused")
    save_at_start: bool = flag(False, "save before the first step too", "--save-init")
    keep_last: int | None = flag(None, "keep only this many of the newest checkpoints (none: all)", bound="above 0")
    keep_every: int | None = flag(
        None, "keep steps divisible by this as well", "--save-retain-interval", bound="above 0"
    )
    keep_best: bool = flag(False, "save at each validation that is the best so far, and keep the best")
    universal_checkpoint: bool = flag(False, "load DeepSpeed's universal checkpoint", only=(False,), step=5)
    async_save: bool = flag(False, "save in the background", only=(False,), step=5)
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
class Preprocess:
    """JSON lines to .bin/.idx."""

    input: list[str] = flag([], "JSON-lines file(s), one document a line; - for standard input")
    output_prefix: str | None = flag(None, "files are <prefix>_<key>_document.bin/.idx")
    json_keys: list[str] = flag(["text"], "keys whose text is read", "--json-key")
    append_eod: bool = flag(False, "end each document with the end-of-document id")
    on_error: Literal["stop", "skip"] = flag("stop", "a bad line: stop, or count it and go on")
    dataset_impl: Literal["mmap", "lazy", "cached"] = flag("mmap", "format (lazy and cached are written as mmap)")
    workers: int = flag(1, "worker processes", bound="above 0")
    log_interval: int = flag(1000, "documents between progress lines", bound="above 0")
    split_sentences: bool = flag(False, "cut documents into sentences", only=(False,), step=4)
    keep_newlines: bool = flag(False, "keep newlines between sentences", only=(False,), step=4)
    lang: str = flag("english", "language of --split-sentences", only=("english",), step=4)
    partitions: int = flag(1, "cut the input into parts", only=(1,), step=4)


@dataclass(frozen=True)
class Evaluate:
    """What is scored."""

    input: list[str] = flag([], "text files, or .jsonl/.json with one document a line")
    json_keys: list[str] = flag(["text"], "keys whose text is read from JSON lines", "--json-key")
    overlapping_eval: int | None = flag(
        None, "tokens a window moves on (none: half the sequence length)", bound="above 0"
    )
    json: bool = flag(False, "print one JSON line instead of a table")


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
        if p.pipeline_schedule in ("zbv", "dualpipev"):
            return 2
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

    def problems(self, data: bool = True) -> list[str]:
        """Every objection in words; `data`: token files are needed."""
        t, o, d, c, p = self.training, self.optimizer, self.data, self.checkpoint, self.parallel
        out = not_yet(self) + unusable(self) + architecture_problems(self.model, self.data)
        layout = parallel_problems(self)
        sizes = batch_problems(self)
        known = not sizes and not out_of_bounds(t)
        out += layout + precision_problems(self.precision) + sizes + schedule_problems(self, known)
        out += recompute_problems(t, self.model) + data_problems(d, data) + logging_problems(self.logging)
        if t.seed >= 2**32 - 2:
            out.append(f"--seed {t.seed} must be below {2**32 - 2}: numpy's generators take 32 bits, and two are added")
        if allowed_in_a_row(t.on_nonfinite) is None:
            out.append(f"--on-nonfinite {t.on_nonfinite!r} is neither stop nor skip:K with a whole number K above 0")
        if c.save_interval and not c.save:
            out.append(f"--save-interval {c.save_interval} without --save: nowhere to save")
        if c.use_checkpoint_args and not c.load:
            out.append("--use-checkpoint-args without --load: there is no checkpoint to take them from")
        if t.skip_train and not c.load and not t.eval_iters:
            out.append("--skip-train with --eval-iters 0: nothing would be done")
        if o.override_opt_param_scheduler and o.use_checkpoint_opt_param_scheduler:
            out.append("--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler contradict each other")
        if p.offloads and o.optimizer == "muon":
            said = "--cpu-optimizer" if p.cpu_optimizer else "--remote-device cpu"
            out.append(f"{said} with --optimizer muon: its matrix products belong on the device")
        return out

    def notices(self) -> list[str]:
        """Flags that are right and do nothing with the others as they are."""
        m, p, t, d, c, o = self.model, self.precision, self.training, self.data, self.checkpoint, self.optimizer
        q = self.parallel
        sharded = f"--zero-stage {q.zero}" if q.zero_stage >= 1 else "--use-distributed-optimizer"
        idle = {
            f"--loss-scale {p.loss_scale} has no effect without --fp16": p.loss_scale is not None and not p.fp16,
            "--fp32-residual-connection has no effect without --fp16 or --bf16": p.fp32_residual_connection
            and not (p.fp16 or p.bf16),
            f"--recompute-method {t.recompute_method} has no effect without --recompute-granularity full":
            t.recompute_method is not None and t.recompute != "full",
            f"--recompute-num-layers {t.recompute_num_layers} has no effect without --recompute-granularity full":
            t.recompute_num_layers != 1 and t.recompute != "full",
            "--exit-on-missing-checkpoint has no effect without --load": c.exit_on_missing_checkpoint and not c.load,
            "--finetune has no effect without --load": c.finetune and not c.load,
            "--no-load-optim has no effect without --load": c.no_load_optim and not c.load,
            "--save-overwrite has no effect without --save": c.save_overwrite and not c.save,
            "--keep-last and --keep-every and --keep-best have no effect without --save":
            not c.save and bool(c.keep_last or c.keep_every or c.keep_best),
            f"--keep-every {c.keep_every} has no effect without --keep-last: all are kept":
            c.keep_every is not None and not c.keep_last,
            f"--reset-position-ids has no effect with --position-embedding-type {m.position_embedding_type}":
            d.reset_position_ids and m.position in ("none", "alibi"),
            f"--rotary-percent {m.rotary_percent} has no effect without --position-embedding-type rope":
            m.rotary_percent != 1 and m.position != "rope",
            f"--rotary-base {m.rotary_base:g} has no effect without --position-embedding-type rope":
            m.rotary_base != 10000 and m.position != "rope",
            f"--sgd-momentum {o.sgd_momentum} has no effect without --optimizer sgd":
            o.sgd_momentum != 0.9 and o.optimizer != "sgd",
            "--muon-momentum and --muon-num-ns-steps have no effect without --optimizer muon":
            (o.muon_momentum, o.muon_num_ns_steps) != (0.95, 5) and o.optimizer != "muon",
            f"--lr-wsd-decay-style {o.lr_wsd_decay_style} has no effect without --lr-decay-style WSD":
            o.lr_wsd_decay_style != "exponential" and o.lr_decay_style != "WSD",
            f"--distributed-backend {q.distributed_backend} has no effect with one process":
            q.distributed_backend is not None and self.world == 1,
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1":
            q.sequence_parallel and q.tensor_model_parallel_size == 1,
            f"{sharded} has no effect with one data-parallel rank":
            q.zero > 0 and self.dp * q.context_parallel_size == 1,
            f"--use-distributed-optimizer is ZeRO 1: --zero-stage {q.zero_stage:g} goes further":
            q.use_distributed_optimizer and q.zero_stage > 1,
            f"--pipeline-schedule {q.pipeline_schedule} has no effect with --pipeline-model-parallel-size 1":
            q.pipeline_schedule != "1f1b" and q.pipeline_model_parallel_size == 1,
            f"--num-layers-per-virtual-pipeline-stage {q.num_layers_per_virtual_pipeline_stage} has no effect: each "
            "pipeline rank has one piece": q.num_layers_per_virtual_pipeline_stage is not None and self.chunks == 1,
            "--partition-activations has no effect: --sequence-parallel splits activations over the tensor ranks":
            q.partition_activations,
            "--deepspeed without --deepspeed_config: the flags alone decide": q.deepspeed and not q.deepspeed_config,
            "--deepspeed-activation-checkpointing: whole layers are recomputed; Megatron-DeepSpeed does it only with "
            "--checkpoint-activations": t.deepspeed_activation_checkpointing and not t.checkpoint_activations,
            "--swiglu and --glu-activation are both given: the gate is --glu-activation's":
            m.swiglu and m.glu_activation is not None,
            "--profile without --run-dir or --save: the table is printed, no trace is kept":
            self.logging.profile and not (c.run_dir or c.save),
            f"--profile begins at step {self.logging.profile_step_start}, after the end of the run":
            self.logging.profile and t.train_iters is not None and self.logging.profile_step_start > t.train_iters,
            "--log-timers-to-tensorboard has only the iteration's time with --timing-log-level 0":
            self.logging.log_timers_to_tensorboard and self.logging.timing_log_level == "0",
            "--mock-data: the files of --data-path and its sisters are not read":
            d.mock_data and bool(d.data_path or d.train_data_path or d.valid_data_path or d.test_data_path),
            "--keep-best has no effect with --eval-iters 0: nothing is validated": c.keep_best and not t.eval_iters,
            "--no-save-optim and --save-at-start have no effect without --save":
            not c.save and (c.no_save_optim or c.save_at_start),
            f"--lr-warmup-init {o.lr_warmup_init} has no effect without a warm-up":
            o.lr_warmup_init > 0 and not (o.lr_warmup_fraction or o.lr_warmup_iters or o.lr_warmup_samples
                                          or o.lr_warmup_tokens),
            "--lr-wsd-decay-iters and -samples have no effect without --lr-decay-style WSD":
            bool(o.lr_wsd_decay_iters or o.lr_wsd_decay_samples) and o.lr_decay_style != "WSD",
        }  # fmt: skip
        return [line for line, applies in idle.items() if applies]


# Settings that the weights were trained with, so that no later run may change them.
ARCHITECTURE = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels",
                "max_position_embeddings", "layernorm_epsilon", "untie_embeddings_and_output_weights",
                "bias_gelu_fusion", "openai_gelu", "squared_relu", "swiglu", "glu_activation", "num_query_groups",
                "group_query_attention", "position_embedding_type", "use_rotary_position_embeddings", "rotary_percent",
                "rotary_base", "normalization", "apply_layernorm_1p", "qk_layernorm", "add_bias_linear", "add_qkv_bias",
                "embed_layernorm", "apply_residual_connection_post_layernorm")  # fmt: skip
# Where a default or another flag decides, what is compared is the outcome.
OUTCOME = {"ffn_hidden_size": "ffn", "kv_channels": "head_dim", "bias_gelu_fusion": "activation",
           "openai_gelu": "activation", "squared_relu": "activation", "swiglu": "activation",
           "glu_activation": "activation", "num_query_groups": "groups", "group_query_attention": "groups",
           "position_embedding_type": "position", "use_rotary_position_embeddings": "position",
           "add_qkv_bias": "qkv_bias"}  # fmt: skip


# What matters to the commands that read a trained model.
_READING = {*ARCHITECTURE, "attention_impl", "seq_length", "micro_batch_size", "fp16", "bf16", "params_dtype", "device",
            "local_rank", "load", "verify", "make_vocab_size_divisible_by"}  # fmt: skip


@dataclass(frozen=True)
class GenerateConfig:
    """Everything generation is made of: a run's settings, and how to sample."""

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
        | {*_READING, "seed", "deterministic_mode"}
    )

    def problems(self) -> list[str]:
        s = self.sampling
        out = not_yet(self) + unusable(self) + precision_problems(self.precision)
        out += micro_problems(self.training) + one_device_problems(self.parallel, "generate")
        if not self.checkpoint.load:
            out.append("a checkpoint is needed: `meshwright generate DIR` or --load DIR")
        if s.top_p > 1:
            out.append(f"--top_p {s.top_p} is above 1")
        if s.num_samples and not s.genfile:
            out.append(f"--num-samples {s.num_samples} writes to a file: name it with --genfile")
        if s.sample_output_file and not s.sample_input_file:
            out.append("--sample-output-file holds continuations: name the prompts with --sample-input-file")
        modes = [bool(s.num_samples), bool(s.sample_input_file), s.interactive, s.prompt is not None]
        if sum(modes) > 1:
            out.append("--num-samples, --sample-input-file, --prompt and --interactive are four modes: give one")
        return out


@dataclass(frozen=True)
class PreprocessConfig:
    """Everything preprocessing is made of."""

    preprocess: Preprocess = Preprocess()
    tokenizer: Tokenizer = Tokenizer()

    def problems(self) -> list[str]:
        p = self.preprocess
        out = not_yet(self) + unusable(self)
        if not p.input:
            out.append("--input is needed: a JSON-lines file")
        if not p.output_prefix:
            out.append("--output-prefix is needed: where to write")
        return out


@dataclass(frozen=True)
class EvaluateConfig:
    """Everything an evaluation is made of."""

    evaluate: Evaluate = Evaluate()
    model: Model = Model()
    tokenizer: Tokenizer = Tokenizer()
    data: Data = Data()
    training: Training = Training()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()

    USES: ClassVar[frozenset[str]] = frozenset(
        {f.name for group in (Evaluate, Tokenizer) for f in dataclasses.fields(group)} | _READING
    )

    def problems(self) -> list[str]:
        e = self.evaluate
        out = not_yet(self) + unusable(self) + precision_problems(self.precision)
        out += micro_problems(self.training) + one_device_problems(self.parallel, "evaluate")
        if not self.checkpoint.load:
            out.append("a checkpoint is needed: `meshwright evaluate DIR` or --load DIR")
        if not e.input:
            out.append("--input is needed: text or JSON-lines files")
        return out


EVERY = (TrainConfig, GenerateConfig, PreprocessConfig, EvaluateConfig)


def contradictions(asked: Model, saved: Model, names: Collection[str] = ARCHITECTURE) -> list[str]:
    """Every one of these settings that is not what the checkpoint has."""
    out, defaults = [], Model()
    for name in names:
        outcome = OUTCOME.get(name, name)
        ours, theirs = (getattr(m, outcome) for m in (asked, saved))
        if ours == theirs or getattr(asked, name) is None:  # what was left open only follows another flag
            continue
        group = [n for n in names if OUTCOME.get(n, n) == outcome]
        said = [n for n in group if getattr(asked, n) != getattr(defaults, n)]
        if name in (said or group):  # where several flags make one outcome: those that were said
            out.append(f"{spelling(name)} {getattr(asked, name)}, the checkpoint has {theirs}")
    return out


def spelling(name: str) -> str:
    """The flag of a field: Megatron keeps three underscores and so do we."""
    return "--" + name.replace("_", "-").replace("opt-param", "opt_param").replace(
        "deepspeed-config", "deepspeed_config"
    )


def not_yet(config: Any) -> list[str]:
    """Values that exist in the vocabulary and not in this release."""
    out = []
    for group in (getattr(config, f.name) for f in dataclasses.fields(config)):
        for f in dataclasses.fields(group):
            value, only = getattr(group, f.name), f.metadata["only"]
            if only is not None and value not in only:
                works = " or ".join(str(v) for v in only)
                when = f"planned for step {f.metadata['step']}" if 0 < f.metadata["step"] < 9 else "not planned"
                out.append(f"{spelling(f.name)} {value}: not yet ({when}); works: {works}")
    return out


def unusable(config: Any) -> list[str]:
    """Values that no setting can have: an empty text, often an unset shell variable, and numbers out of bounds."""
    out = []
    for group in (getattr(config, f.name) for f in dataclasses.fields(config)):
        out += out_of_bounds(group)
        for f in dataclasses.fields(group):
            value = getattr(group, f.name)
            if f.name != "prompt" and (value == "" or (isinstance(value, list) and "" in value)):
                out.append(f"{spelling(f.name)} is empty; leave the flag out, or is a shell variable unset?")
            elif type(value) is int and abs(value) >= 2**31 and f.name != "seed":
                out.append(f"{spelling(f.name)} {value:.3g} must be below {2**31}")
    return out


def out_of_bounds(group: Any) -> list[str]:
    """Numbers that are not where their flag says they must be."""
    out = []
    for f in dataclasses.fields(group):
        bound, value = f.metadata["bound"], getattr(group, f.name)
        if bound is None or not isinstance(value, int | float):
            continue
        right = {"above 0": value > 0, "from 0": value >= 0, "in [0, 1)": 0 <= value < 1}[bound]
        words = {"above 0": "must be above 0", "from 0": "must not be below 0", "in [0, 1)": "is not in [0, 1)"}[bound]
        if not right:
            out.append(f"{spelling(f.name)} {value} {words}")
    return out


def architecture_problems(m: Model, d: Data) -> list[str]:
    out = []
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(m, name) is None:
            out.append(f"{spelling(name)} is needed (or --preset, which gives a whole architecture)")
    if d.seq_length is None:
        out.append("--seq-length is needed: tokens of one sample")
    elif m.max_position_embeddings and m.max_position_embeddings < d.seq_length:
        out.append(
            f"--max-position-embeddings {m.max_position_embeddings} is below --seq-length {d.seq_length}: "
            "positions past the table would have no embedding"
        )
    h, n = m.hidden_size, m.num_attention_heads
    if h and n and n > 0 and not m.kv_channels and h % n:
        out.append(
            f"--hidden-size {h} is not a multiple of --num-attention-heads {n}: change one, or set --kv-channels"
        )
    if n and m.num_query_groups and m.num_query_groups > 0 and n % m.num_query_groups:
        out.append(f"--num-attention-heads {n} is not a multiple of --num-query-groups {m.num_query_groups}")
    if m.position == "rope" and (m.rotary_percent > 1 or m.rotating % 2 or m.rotating < 2):
        out.append(
            f"--rotary-percent {m.rotary_percent} of heads of {m.head_dim} lets {m.rotating} numbers rotate: "
            "an even number up to the whole head is needed"
        )
    if m.position == "learned" and m.use_rotary_position_embeddings:
        out.append("--use-rotary-position-embeddings contradicts --position-embedding-type")
    if m.squared_relu and (m.swiglu or m.glu_activation):
        out.append("--squared-relu contradicts --swiglu and --glu-activation: an MLP has one activation")
    return out


def batch_problems(c: TrainConfig) -> list[str]:
    """Micro-batch, accumulation, global batch, ramp-up, and how long the run is."""
    t = c.training
    micro, whole, number = t.micro_batch_size, t.global_batch_size, t.num_accumulation_steps
    if out_of_bounds(t):
        return []  # told already, and nothing can be reckoned
    if micro == "auto" and (whole is None or number is not None):
        return ["--micro-batch-size auto needs --global-batch-size, and no --num-accumulation-steps"]
    p = c.parallel
    if micro == "auto" and (p.model_ranks > 1 or p.zero > 1):
        what = f"ZeRO {p.zero}" if p.model_ranks == 1 else f"a model on {p.model_ranks} ranks"
        return [f"--micro-batch-size auto with {what}: what fits is tried by each rank alone; give a number"]
    out = []
    ranks = f" x {c.dp} data-parallel ranks" if c.dp > 1 else ""
    if micro is None and not (whole and number):
        out.append("--micro-batch-size is needed: samples of one forward pass (or auto)")
    elif isinstance(micro, int) and whole and number and micro * number * c.dp != whole:
        out.append(
            f"--micro-batch-size {micro} x --num-accumulation-steps {number}{ranks} is {micro * number * c.dp}, not the "
            f"--global-batch-size {whole}: leave one of the three out"
        )
    elif whole and whole % (unit := (number or 1 if micro is None else c.micro_batch) * c.dp):
        said = f"--num-accumulation-steps {number}" if micro is None else f"--micro-batch-size {micro}"
        said += f"{ranks} = {unit}" if ranks else ""
        nearest = max(1, round(whole / unit)) * unit
        out.append(f"--global-batch-size {whole} is not a multiple of {said}; the nearest multiple is {nearest}")
    lengths = [n for n in ("train_iters", "train_samples", "train_tokens") if getattr(t, n) is not None]
    if not lengths:
        out.append("--train-iters is needed: how many steps (or --train-samples, or --train-tokens)")
    elif len(lengths) > 1:
        out.append(f"{' and '.join(map(spelling, lengths))} all say how long the run is: give one")
    if t.rampup_batch_size:
        out += rampup_problems(c)
    if not out and lengths[0] != "train_iters" and c.steps == 0:
        what = f"{spelling(lengths[0])} {getattr(t, lengths[0])}"
        out.append(f"{what} is less than one global batch of {c.batch(0)} samples")
    return out


def micro_problems(t: Training) -> list[str]:
    """Of the commands that only read: they take no more than a number."""
    return ["--micro-batch-size auto is for training"] if t.micro_batch_size == "auto" else []


def rampup_problems(c: TrainConfig) -> list[str]:
    ramp, whole, micro = c.training.rampup_batch_size, c.global_batch, c.micro_batch
    said = f"--rampup-batch-size {' '.join(map(str, ramp))}"
    if len(ramp) != 3 or min(ramp) <= 0:
        return [f"{said}: three numbers above 0 are needed: START INCREMENT SAMPLES"]
    start, increment, samples = ramp
    out = []
    if c.samples is None:
        out.append(f"{said} needs the length in samples: --train-samples or --train-tokens instead of --train-iters")
    if samples / start > 10**6:
        out.append(f"{said}: up to {samples / start:.0f} steps of ramp-up; at most a million")
    elif start > whole or (whole - start) % increment:
        out.append(f"{said}: from {start} in steps of {increment} the --global-batch-size {whole} is never reached")
    elif start % (micro * c.dp) or increment % (micro * c.dp):  # auto counts as 1: a divisor of every size is chosen
        ranks = f" x {c.dp} data-parallel ranks = {micro * c.dp}" if c.dp > 1 else ""
        unit = f"--micro-batch-size {c.training.micro_batch_size or micro}{ranks}"
        out.append(f"{said}: {start} and {increment} must be multiples of {unit}")
    return out


def parallel_problems(c: TrainConfig) -> list[str]:
    """Whether the ranks, the model and the batches can be divided as asked."""
    p, m = c.parallel, c.model
    out = naming_problems(p)
    if p.deepspeed_config:
        try:
            with open(p.deepspeed_config, "rb"):
                pass
        except (OSError, ValueError) as error:
            out.append(f"--deepspeed_config {p.deepspeed_config}: {getattr(error, 'strerror', error)}")
    if out_of_bounds(p) or out_of_bounds(m) or out_of_bounds(c.data):
        return out  # told already, and nothing can be reckoned
    tp, pp, cp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size
    by_tp, by_cp = f"--tensor-model-parallel-size {tp}", f"--context-parallel-size {cp}"
    if c.world % p.model_ranks:
        sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "context_parallel_size": cp}
        product = " x ".join(f"{spelling(n)} {size}" for n, size in sizes.items() if size > 1)
        least = -(-c.world // p.model_ranks) * p.model_ranks
        out.append(
            f"{c.world} {'ranks are' if c.world > 1 else 'rank is'} not a multiple of {product} = {p.model_ranks}: "
            f"start {least}, or change a size"
        )
    heads, groups, seq = m.num_attention_heads or 0, m.groups, c.data.seq_length or 0
    if heads % tp:
        out.append(f"--num-attention-heads {heads} is not a multiple of {by_tp}")
    elif groups % tp:
        out.append(f"--num-query-groups {groups} is not a multiple of {by_tp}")
    elif heads // tp % cp:
        out.append(
            f"--num-attention-heads {heads} / {by_tp} is {heads // tp}, not a multiple of {by_cp}: each rank computes "
            "some heads of the whole sequence"
        )
    elif groups // tp % cp:
        out.append(f"--num-query-groups {groups} / {by_tp} is {groups // tp}, not a multiple of {by_cp}")
    if m.ffn % tp:
        out.append(f"--ffn-hidden-size {m.ffn} is not a multiple of {by_tp}")
    if m.pad_vocab_size_to and m.pad_vocab_size_to % tp:
        out.append(f"--pad-vocab-size-to {m.pad_vocab_size_to} is not a multiple of {by_tp}")
    if seq % cp:
        out.append(f"--seq-length {seq} is not a multiple of {by_cp}")
    elif p.sequence_parallel and seq // cp % tp:
        said = f"--seq-length {seq}" + (f" / {by_cp} is {seq // cp}," if cp > 1 else " is")
        out.append(f"{said} not a multiple of {by_tp}, as --sequence-parallel needs")
    if cp > 1 and m.attention_dropout > 0:
        out.append(
            f"{by_cp} with --attention-dropout {m.attention_dropout}: its mask would depend on the layout; "
            "give --attention-dropout 0"
        )
    if c.optimizer.optimizer == "muon" and (tp > 1 or p.zero):
        other = by_tp if tp > 1 else f"ZeRO {p.zero}"
        out.append(f"--optimizer muon with {other}: it needs whole matrices; give --tensor-model-parallel-size 1 and "
                   "--zero-stage 0, or --optimizer adam")  # fmt: skip
    return out + pipeline_problems(c) + zero_problems(c)


def naming_problems(p: Parallel) -> list[str]:
    """Of the words that torch will read, their form; whether it knows them is found out where they are used."""
    out = []
    if not re.fullmatch(r"auto|(?!auto)[a-z]+(:[0-9]{1,4})?", p.device):
        out.append(f"--device {p.device!r} is not auto, cpu, cuda, npu ... or one of several, as cuda:1")
    if p.distributed_backend is not None and not re.fullmatch(r"[A-Za-z0-9_:,]+", p.distributed_backend):
        out.append(f"--distributed-backend {p.distributed_backend!r} is no name such as nccl, gloo or hccl")
    return out


def pipeline_problems(c: TrainConfig) -> list[str]:
    p, layers = c.parallel, c.model.num_layers
    pp, virtual = p.pipeline_model_parallel_size, p.num_layers_per_virtual_pipeline_stage
    by_pp = f"--pipeline-model-parallel-size {pp}"
    if not layers:
        return []
    if pp > layers:
        return [f"{by_pp} is above --num-layers {layers}: a stage would have no layer"]
    kind = p.pipeline_schedule
    if pp > 1 and kind in ("zero-bubble", "zbv", "dualpipev"):
        said = f"--pipeline-schedule {kind}"
        if kind != "zero-bubble" and (virtual or layers < 2 * pp):
            return [f"{said} gives each rank two stages: --num-layers {layers} must be at least 2 x {by_pp}, without "
                    "--num-layers-per-virtual-pipeline-stage"]  # fmt: skip
        if p.zero == 3 or c.training.compile == "on":
            other = "--zero-stage 3" if p.zero == 3 else "--compile on"
            return [f"{said} with {other}: the weights' gradients are computed apart; give --pipeline-schedule 1f1b"]
    if virtual:
        said = f"--num-layers-per-virtual-pipeline-stage {virtual}"
        if pp == 1:
            return [f"{said} needs --pipeline-model-parallel-size above 1"]
        if layers % (pp * virtual):
            return [f"--num-layers {layers} is not a multiple of {by_pp} x {said} = {pp * virtual}"]
        if c.chunks > 1 and p.pipeline_schedule == "gpipe":
            return [f"--pipeline-schedule gpipe contradicts {said}, which interleaves 1f1b: leave one out"]
    out = []
    if p.pipeline_layout:
        try:
            split_layers(p.pipeline_layout, layers, pp * c.chunks)
        except ValueError as error:
            out.append(f"--pipeline-layout {p.pipeline_layout[:100]}: {error}")
    t = c.training
    if kind != "zbv" and (c.chunks > 1 or kind == "zero-bubble") and not batch_problems(c) and not out_of_bounds(t):
        # With its start and its increment all sizes of a ramp-up are multiples.
        for size in sorted({c.global_batch, *t.rampup_batch_size[:2]}):
            number = c.micro_batches(size)
            if kind == "dualpipev" and number < 2 * pp:
                out.append(
                    f"--pipeline-schedule dualpipev needs 2 x {by_pp} micro-batches for each rank, there are {number}"
                )
            elif number % pp and kind != "dualpipev":
                what = "--rampup-batch-size" if size != c.global_batch else "--global-batch-size"
                out.append(
                    f"{what} {size} makes {number} micro-batches for each rank, not a multiple of {by_pp}, as "
                    + (
                        "--num-layers-per-virtual-pipeline-stage needs"
                        if virtual
                        else f"--pipeline-schedule {kind} needs"
                    )
                )
    return out


def zero_problems(c: TrainConfig) -> list[str]:
    p, out = c.parallel, []
    copies = p.num_distributed_optimizer_instances
    if p.zero_stage not in (0, 1, 2, 3):
        return [f"--zero-stage {p.zero_stage:g} is none of 0, 1, 2, 3"]
    if copies > 1 and not p.zero:
        out.append(
            f"--num-distributed-optimizer-instances {copies} needs --zero-stage 1, 2 or 3: nothing is shared out"
        )
    elif c.dp % copies:
        out.append(f"--num-distributed-optimizer-instances {copies} does not divide the {c.dp} data-parallel ranks")
    if p.remote_device == "cpu" and p.zero != 3:
        out.append(f"--remote-device cpu is for --zero-stage 3, not {p.zero}; --cpu-optimizer is for all of them")
    return out


def one_device_problems(p: Parallel, command: str) -> list[str]:
    """Of the commands that only read."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "world_size")
    return naming_problems(p) + [
        f"{spelling(n)} {getattr(p, n)}: {command} runs on one device: it loads a checkpoint of any layout; give 1"
        for n in sizes
        if (getattr(p, n) or 1) > 1
    ]


PARTS = "--pipeline-model-parallel-size, times the pieces of each rank,"


def split_layers(layout: str | None, layers: int, stages: int) -> list[int]:
    """Layers of each stage, in order; ValueError in words if `layout` does not give them."""
    if layout is None:
        # The last stage has the head, the first one the embedding, and under 1F1B the earlier a stage the more
        # activations wait in it: the layers that are over go to the middle, to the later stages first.
        order = sorted(range(stages), key=lambda i: (i == stages - 1, i == 0, abs(2 * i - stages + 1), -i))
        more = order[: layers % stages]
        return [layers // stages + (i in more) for i in range(stages)]
    if "[" in layout:
        ids = stage_numbers(layout)
        for layer, (before, stage) in enumerate(zip(ids, ids[1:], strict=False), 1):
            if stage < before:
                raise ValueError(f"layer {layer} goes back from stage {before} to {stage}")
        if ids[-1] >= stages:
            raise ValueError(f"there is a stage {ids[-1]}, but {PARTS} gives 0 to {stages - 1}")
        if len(ids) != layers:
            raise ValueError(f"{len(ids)} layers have a stage, but --num-layers is {layers}")
        counts = [ids.count(stage) for stage in range(stages)]
    elif re.fullmatch(r"\s*[0-9]{1,9}\s*(,\s*[0-9]{1,9}\s*)*", layout):
        counts = [int(n) for n in layout.split(",")]
    else:
        raise ValueError("neither the layers of each stage, as 6,6,6,6, nor the stage of each layer, as [0]*6+[1]*6")
    if len(counts) != stages:
        raise ValueError(f"{len(counts)} stages, but {PARTS} gives {stages}")
    if 0 in counts:
        raise ValueError(f"stage {counts.index(0)} has no layer (a list of each layer's stage stands in brackets)")
    if sum(counts) != layers:
        raise ValueError(f"{sum(counts)} layers, but --num-layers is {layers}")
    return counts


def stage_numbers(layout: str) -> list[int]:
    """LiBai's custom_pipeline_stage_id: lists, joined by + and repeated by *, as `[0]*6 + [1]*6`."""
    out: list[int] = []
    for term in layout.split("+"):
        found = re.fullmatch(r"\s*\[([0-9 ]{1,6}(?:,[0-9 ]{1,6})*)\]\s*(?:\*\s*([0-9]{1,4}))?\s*", term)
        if not found or not all(n.strip().isdigit() for n in found[1].split(",")):
            raise ValueError(f"{term.strip()[:30]!r} is not a list of stages such as [0,0,1] or [0]*6")
        out += [int(n) for n in found[1].split(",")] * int(found[2] or 1)
        if len(out) > 10**5:
            raise ValueError(f"more than {10**5} layers")
    if not out:
        raise ValueError("no layer has a stage")
    return out


def schedule_problems(c: TrainConfig, known: bool) -> list[str]:
    """Learning rate, weight decay and the rest of the update; `known`: how long the run is."""
    o, t = c.optimizer, c.training
    out = []
    if o.lr is None and not t.skip_train:
        out.append("--lr is needed: the peak learning rate")
    for name in ("min_lr", "lr_warmup_init"):
        if o.lr is not None and getattr(o, name) > o.lr:
            out.append(f"{spelling(name)} {getattr(o, name)} is above --lr {o.lr}")
    by_steps = [n for n in ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters") if getattr(o, n)]
    by_samples = [n for n in ("lr_decay_samples", "lr_decay_tokens", "lr_warmup_samples", "lr_warmup_tokens",
                              "lr_wsd_decay_samples") if getattr(o, n)]  # fmt: skip
    wrong = by_samples if c.samples is None else by_steps
    if wrong and (t.train_iters or c.samples):
        length = "--train-iters" if c.samples is None else "--train-samples"
        unit = "steps" if c.samples is None else "samples"
        out.append(f"{' and '.join(map(spelling, wrong))} cannot be mixed with {length}: give all lengths in {unit}")
    warmups = [n for n in ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens") if getattr(o, n)]
    warmups += ["lr_warmup_fraction"] * (o.lr_warmup_fraction is not None)
    if len(warmups) > 1:
        out.append(f"{' and '.join(map(spelling, sorted(warmups)))} both set the warm-up: give one")
    if o.lr_decay_samples and o.lr_decay_tokens:
        out.append("--lr-decay-samples and --lr-decay-tokens both set the decay: give one")
    if o.muon_num_ns_steps >= 100:
        out.append(f"--muon-num-ns-steps {o.muon_num_ns_steps}: below 100; 5 are enough")
    if out or wrong or out_of_bounds(o) or not known or not c.steps:
        return out
    if c.decay_samples <= c.warmup_samples:
        decay, warmup = (f"{x / c.global_batch:g} iterations" if c.samples is None else f"{x:g} samples"
                         for x in (c.decay_samples, c.warmup_samples))  # fmt: skip
        out.append(f"{spelling(warmups[0])}: a warm-up of {warmup} is not below the decay's {decay}")
    if o.lr_decay_style == "WSD" and not 0 < c.wsd_samples <= c.decay_samples - c.warmup_samples:
        out.append(
            "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples, the length of its last part, "
            "which must lie between the warm-up and the end of the decay"
        )
    if o.weight_decay_incr_style == "constant":
        for name in ("start_weight_decay", "end_weight_decay"):
            if getattr(o, name) is not None:
                out.append(f"{spelling(name)} needs --weight-decay-incr-style linear or cosine")
    elif o.start_weight_decay is None or o.end_weight_decay is None:
        out.append(
            f"--weight-decay-incr-style {o.weight_decay_incr_style} needs --start-weight-decay and --end-weight-decay"
        )
    return out


def recompute_problems(t: Training, m: Model) -> list[str]:
    out = []
    if t.recompute == "full" and (t.recompute_activations or t.recompute_granularity == "selective"):
        out.append("--recompute-granularity selective contradicts full recomputation: give one")
    if m.num_layers and t.recompute_num_layers > m.num_layers and t.recompute == "full":
        out.append(f"--recompute-num-layers {t.recompute_num_layers} is above --num-layers {m.num_layers}")
    return out


def data_problems(d: Data, needed: bool) -> list[str]:
    out = []
    if d.num_workers > 1024:
        out.append(f"--num-workers {d.num_workers} batches would be read ahead: at most 1024")
    if not 0 <= d.last_epoch_cutoff <= 1:
        out.append(f"--last-epoch-cutoff {d.last_epoch_cutoff} is not in [0, 1]")
    parts = [n for n in ("train_data_path", "valid_data_path", "test_data_path") if getattr(d, n)]
    if d.data_path and parts:
        out.append(f"--data-path, which --split divides, contradicts {' and '.join(map(spelling, parts))}: give either")
    if needed and not d.data_path and not d.train_data_path and not d.mock_data:
        out.append("--data-path is needed (a prefix written by `meshwright preprocess`), or --mock-data")
    for name in ("data_path", *parts):
        try:
            blend(getattr(d, name))
        except ValueError as error:
            out.append(f"{spelling(name)}: {error}")
    try:
        skipped(d.skip_train_iteration_range)
    except ValueError as error:
        out.append(f"--skip-train-iteration-range: {error}")
    return out + split_problems(d.split)


def blend(values: list[str]) -> tuple[list[float] | None, list[str]]:
    """`w1 p1 w2 p2 ...` as weights and prefixes; prefixes alone have no weights: their sizes decide."""
    numbers = [as_number(v) for v in values]
    if len(values) < 2 or not any(n is not None for n in numbers):
        return None, values
    weights, prefixes = numbers[::2], values[1::2]
    if len(values) % 2 or None in weights:
        raise ValueError(f"{' '.join(values)[:200]}: a blend is WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes alone")
    kept = [w for w in weights if w is not None]
    if min(kept) < 0 or not 0 < sum(kept) < float("inf"):
        raise ValueError(f"the weights {' '.join(values[::2])[:200]} must not be below 0 nor all 0")
    return kept, prefixes


def as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def skipped(ranges: list[str]) -> list[tuple[int, int]]:
    """`A-B` ... as pairs in order, both ends skipped."""
    out = []
    for text in ranges:
        first, dash, last = text.partition("-")
        if not (dash and re.fullmatch("[0-9]{1,9}-[0-9]{1,9}", text) and 1 <= int(first) <= int(last)):
            raise ValueError(f"{text!r} is not a range A-B of iterations, from 1 on")
        out.append((int(first), int(last)))
    out.sort()
    for (_, end), (begin, _) in zip(out, out[1:], strict=False):
        if begin <= end:
            raise ValueError(f"the ranges {' '.join(ranges)} overlap")
    return out


def allowed_in_a_row(on_nonfinite: str) -> int | None:
    """How many non-finite steps in a row are skipped; None if it says neither stop nor skip:K."""
    word, _, number = on_nonfinite.partition(":")
    if on_nonfinite == "stop":
        return 0
    return int(number) if word == "skip" and re.fullmatch("[1-9][0-9]{0,5}", number) else None


def logging_problems(g: Logging) -> list[str]:
    out = []
    if g.profile and g.profile_step_end <= g.profile_step_start:
        out.append(f"--profile-step-end {g.profile_step_end} is not above --profile-step-start {g.profile_step_start}")
    if not g.wandb_project and (g.wandb_exp_name or g.wandb_save_dir):
        out.append("--wandb-exp-name and --wandb-save-dir need --wandb-project")
    return out


def precision_problems(p: Precision) -> list[str]:
    out = []
    if p.fp16 and p.loss_scale is None and p.min_loss_scale > p.initial_loss_scale:
        out.append(f"--min-loss-scale {p.min_loss_scale:g} is above --initial-loss-scale {p.initial_loss_scale:g}")
    if p.fp16 and p.bf16:
        out.append("--fp16 and --bf16 exclude each other")
    if (p.fp16 or p.bf16) and p.params_dtype == "float64":
        out.append(f"--params-dtype float64 contradicts --{'fp16' if p.fp16 else 'bf16'}")
    return out


def split_shares(split: str) -> list[float]:
    """'949,50,1' or '949/50/1' as three shares; missing ones are 0."""
    parts = [float(x) for x in split.replace("/", ",").split(",")]
    return (parts + [0.0] * 3)[: max(3, len(parts))]


def split_problems(split: str) -> list[str]:
    try:
        shares = split_shares(split)
    except ValueError:
        return [f"--split {split!r} is not three numbers such as 949,50,1"]
    if len(shares) > 3 or not 0 < sum(shares) < math.inf or min(shares) < 0:
        return [f"--split {split!r} must be at most three numbers, none below 0 and not all 0"]
    return []


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """Radford et al. 2019, table 2: four sizes of 12 to 48 layers, 1024 positions; dropout 0.1, batch 512."""
    return {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": 1024,
        "max_position_embeddings": 1024, "lr": 1.5e-4, "min_lr": 1e-5, "lr_decay_style": "cosine",
        "lr_warmup_fraction": 0.01, "weight_decay": 0.01, "clip_grad": 1.0, "train_iters": 500_000,
        "lr_decay_iters": 320_000, "micro_batch_size": 4, "global_batch_size": 512,
    }  # fmt: skip


def _gpt3(layers: int, hidden: int, heads: int, batch: int, lr: float) -> dict[str, Any]:
    """Brown et al. 2020, table 2.1 (batch given there in tokens of 2048-token sequences) and appendix B.

    300 billion tokens in all, cosine decay to a tenth over 260 billion, 375 million tokens of warm-up.
    """
    steps = 300_000_000_000 // (batch * 2048)
    return {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": 2048,
        "max_position_embeddings": 2048, "lr": lr, "min_lr": lr / 10, "lr_decay_style": "cosine",
        "lr_decay_iters": steps * 260 // 300, "lr_warmup_fraction": round(0.375 / 260, 6), "weight_decay": 0.1,
        "clip_grad": 1.0, "adam_beta2": 0.95, "train_iters": steps, "micro_batch_size": 1,
        "global_batch_size": batch, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip


def _ascend(layers: int, hidden: int, heads: int, seq: int, batch: int, micro: int, lr: float, least: float,
            recompute: bool = True, scale: float | None = None) -> dict[str, Any]:  # fmt: skip
    """Ascend's GPT-2_for_PyTorch, test/train_full_8p.sh: five sizes, no dropout, fp16 from a scale of 2^12.

    Its global batch is spread over 8 devices; here as everywhere micro-batches make it up.
    """
    return {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": seq,
        "max_position_embeddings": seq, "global_batch_size": batch, "micro_batch_size": micro, "lr": lr, "min_lr": least,
        "lr_decay_style": "cosine", "lr_decay_iters": 320_000, "lr_warmup_fraction": 0.01, "weight_decay": 0.01,
        "clip_grad": 1.0, "train_iters": 500_000, "hidden_dropout": 0.0, "attention_dropout": 0.0, "fp16": True,
        "initial_loss_scale": 2.0**12, "loss_scale_window": 500.0, "loss_scale": scale, "split": "949,50,1",
        "checkpoint_activations": recompute, "log_interval": 100, "eval_interval": 1000, "eval_iters": 10,
        "num_workers": 16,
    }  # fmt: skip


def _oneflow(layers: int, hidden: int, heads: int, seq: int, micro: int, batch: int) -> dict[str, Any]:
    """OneFlow-Benchmark's LanguageModeling/GPT, examples/: the sizes of the scripts named beside them, with the recipe of
    examples/pretrain.sh, which they share."""
    return {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": seq,
        "max_position_embeddings": seq, "micro_batch_size": micro, "global_batch_size": batch, "train_iters": 500_000,
        "lr": 1.5e-4, "min_lr": 1e-5, "lr_decay_style": "cosine", "lr_decay_iters": 320_000, "lr_warmup_fraction": 0.01,
        "weight_decay": 0.01, "clip_grad": 1.0, "fp16": True, "checkpoint_activations": True, "split": "949,50,1",
        "seed": 12345, "log_interval": 100,
    }  # fmt: skip


# Architecture and recipe, never parallel sizes. The GPT-2 recipe is Megatron-LM's examples/pretrain_gpt.sh.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-117m": _gpt2(12, 768, 12),
    "gpt2-345m": _gpt2(24, 1024, 16),
    "gpt2-762m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    "ascend-345m": _ascend(24, 1024, 16, 1024, 16, 4, 1.5e-4, 1.5e-5),
    "ascend-1.3b": _ascend(24, 2048, 16, 1024, 32, 8, 2e-4, 2e-5),
    "ascend-2.7b": _ascend(32, 2560, 32, 2048, 32, 8, 1.6e-4, 1.6e-5),
    "ascend-3.7b": _ascend(32, 3072, 32, 2048, 16, 4, 1.2e-4, 1.2e-5),
    "ascend-345m-without-mp": _ascend(24, 1024, 16, 1024, 64, 8, 1.5e-4, 1e-5, False, 65536.0),
    "oneflow-117m": _oneflow(12, 768, 12, 1024, 8, 8),  # pretrain_117M.sh
    "oneflow-345m": _oneflow(24, 1024, 16, 1024, 8, 8),  # pretrain_345M.sh
    "oneflow-16x1536": _oneflow(16, 1536, 16, 2048, 8, 16),  # pretrain_1n8d_2x4x1_16_1536x16.sh
    "oneflow-24x2304": _oneflow(24, 2304, 24, 2048, 8, 512),  # distribute_pretrain_4n8d_2x4x4_512_2304x24.sh
    "gpt3-125m": _gpt3(12, 768, 12, 256, 6e-4),
    "gpt3-350m": _gpt3(24, 1024, 16, 256, 3e-4),
    "gpt3-760m": _gpt3(24, 1536, 16, 256, 2.5e-4),
    "gpt3-1.3b": _gpt3(24, 2048, 16, 512, 2e-4),  # the paper says 24 heads of 128, which 2048 does not hold
    "gpt3-2.7b": _gpt3(32, 2560, 32, 512, 1.6e-4),
    "gpt3-6.7b": _gpt3(32, 4096, 32, 1024, 1.2e-4),
    "gpt3-13b": _gpt3(40, 5120, 40, 1024, 1.0e-4),  # the paper's 5140 is not a multiple of its 40 heads
    "gpt3-175b": _gpt3(96, 12288, 96, 1536, 0.6e-4),
}
