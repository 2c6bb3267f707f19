"""Every setting of Meshwright: one dataclass field is one flag is one line of help.

Names are Megatron's. `flag()` holds what the parser needs besides name, type and default: the help line, other
spellings, and `only`, the values that work today; any other value is refused with "not yet". `problems()` checks a
whole configuration once and returns every objection in words; nothing here changes a value. No torch is imported,
so `--help`, `--dry-run` and planning start at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal


def flag(
    default: Any,
    help: str,
    *aliases: str,
    only: tuple[Any, ...] | None = None,
    step: int = 0,
) -> Any:
    """A dataclass field with its help line, other spellings, and the values that work before release `step`."""
    metadata = {"help": help, "aliases": aliases, "only": only, "step": step}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Model:
    """The network: GPT-2's architecture by default."""

    num_layers: int | None = flag(None, "transformer layers")
    hidden_size: int | None = flag(None, "width of the residual stream")
    num_attention_heads: int | None = flag(None, "attention heads")
    ffn_hidden_size: int | None = flag(None, "width of the MLP's hidden layer (none: 4 x hidden size)")
    kv_channels: int | None = flag(None, "width of one head (none: hidden size / heads)")
    max_position_embeddings: int | None = flag(None, "rows of the learned position table (none: sequence length)")
    make_vocab_size_divisible_by: int = flag(128, "the printed, padded vocabulary is a multiple of this")
    pad_vocab_size_to: int | None = flag(None, "pad the vocabulary to exactly this size")
    layernorm_epsilon: float = flag(1e-5, "added to the variance in layer norm", "--norm-epsilon")
    init_method_std: float = flag(0.02, "standard deviation of the initial weights")
    hidden_dropout: float = flag(0.1, "dropout of embeddings and of each branch before it joins the residual")
    attention_dropout: float = flag(0.1, "dropout of attention probabilities")
    untie_embeddings_and_output_weights: bool = flag(False, "give the output layer a table of its own")
    bias_gelu_fusion: bool = flag(True, "tanh GELU; off: exact erf GELU, as in Megatron")
    openai_gelu: bool = flag(False, "OpenAI's tanh GELU, whatever the fusion flag says")
    attention_impl: Literal["auto", "sdpa", "reference"] = flag(
        "auto", "auto: SDPA, but the reference on CPU with attention dropout; reference: plain matmul and softmax"
    )
    num_query_groups: int | None = flag(None, "key/value heads of grouped-query attention", only=(None,), step=2)
    group_query_attention: bool = flag(False, "grouped-query attention", only=(False,), step=2)
    position_embedding_type: Literal["learned_absolute", "absolute", "rope", "rotary", "alibi", "none"] = flag(
        "learned_absolute", "how positions enter", only=("learned_absolute", "absolute"), step=2
    )
    use_rotary_position_embeddings: bool = flag(False, "rotary positions", only=(False,), step=2)
    rotary_percent: float = flag(1.0, "share of each head that rotates", only=(1.0,), step=2)
    swiglu: bool = flag(False, "SwiGLU MLP", only=(False,), step=2)
    squared_relu: bool = flag(False, "squared-ReLU MLP", only=(False,), step=2)
    glu_activation: Literal["geglu", "liglu", "reglu", "swiglu"] | None = flag(None, "gated MLP", only=(None,), step=2)
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", "kind of norm", only=("LayerNorm",), step=2)
    apply_layernorm_1p: bool = flag(False, "layer norm weight stored minus one", only=(False,), step=2)
    qk_layernorm: bool = flag(False, "normalise queries and keys", only=(False,), step=2)
    add_bias_linear: bool = flag(True, "biases in linear layers", "--disable-bias-linear", only=(True,), step=2)
    embed_layernorm: bool = flag(False, "layer norm after the embedding", only=(False,), step=2)
    apply_residual_connection_post_layernorm: bool = flag(
        False, "residual from the norm's output", only=(False,), step=2
    )
    init_method_xavier_uniform: bool = flag(False, "Xavier initial weights", only=(False,), step=2)
    num_experts: int | None = flag(None, "mixture of experts", only=(None,), step=9)

    @property
    def ffn(self) -> int:
        return self.ffn_hidden_size or 4 * (self.hidden_size or 0)

    @property
    def head_dim(self) -> int:
        return self.kv_channels or (self.hidden_size or 0) // max(self.num_attention_heads or 1, 1)

    @property
    def gelu(self) -> Literal["tanh", "none"]:
        """The `approximate` argument of torch's GELU."""
        return "tanh" if self.bias_gelu_fusion or self.openai_gelu else "none"


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
    vocab_size: int | None = flag(None, "true vocabulary size, for NullTokenizer and mock data", "--true-vocab-size")


@dataclass(frozen=True)
class Data:
    """Token files and the order in which they are read."""

    data_path: list[str] = flag([], "prefix of .bin/.idx (or weight prefix weight prefix ...)", "--dataset")
    seq_length: int | None = flag(None, "tokens of one sample", "--encoder-seq-length")
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
    dataloader_type: Literal["single", "cyclic"] = flag("single", "one pass, or epochs", only=("single",), step=2)
    num_workers: int = flag(2, "batches read ahead by a background thread (0: none)")
    train_data_path: list[str] = flag([], "files of the training set alone", only=([],), step=2)
    valid_data_path: list[str] = flag([], "files of the validation set alone", only=([],), step=2)
    test_data_path: list[str] = flag([], "files of the test set alone", only=([],), step=2)
    eod_mask_loss: bool = flag(False, "no loss after an end of document", only=(False,), step=2)
    reset_position_ids: bool = flag(False, "positions restart after a document", only=(False,), step=2)
    reset_attention_mask: bool = flag(False, "no attention across documents", only=(False,), step=2)
    skip_train_iteration_range: list[str] = flag([], "iterations to skip, as A-B", only=([],), step=2)


@dataclass(frozen=True)
class Training:
    """Batches, length and ends of the run."""

    micro_batch_size: int | None = flag(None, "samples of one forward pass")
    global_batch_size: int | None = flag(None, "samples of one step (none: one micro-batch per rank)")
    train_iters: int | None = flag(None, "steps in all")
    train_samples: int | None = flag(None, "samples in all", only=(None,), step=2)
    train_tokens: int | None = flag(None, "tokens in all", only=(None,), step=2)
    num_accumulation_steps: int | None = flag(
        None, "micro-batches of one step, instead of the global or the micro-batch size", only=(None,), step=3
    )
    rampup_batch_size: list[int] = flag([], "start increment samples", only=([],), step=2)
    seed: int = flag(1234, "seed of weights, dropout and sample order")
    eval_interval: int = flag(1000, "steps between validations")
    eval_iters: int = flag(100, "global batches of one validation")
    exit_interval: int | None = flag(None, "save and leave at steps divisible by this")
    exit_duration_in_mins: float | None = flag(None, "save and leave after this time", only=(None,), step=2)
    exit_signal_handler: bool = flag(True, "on SIGTERM or SIGINT finish the step, save, leave with 143 or 130")
    kill_switch_path: str | None = flag(
        None, "save and leave when this file appears", "--kill-switch-file", only=(None,), step=2
    )
    skip_train: bool = flag(False, "only validate", only=(False,), step=2)
    eval_only: bool = flag(False, "only validate", only=(False,), step=2)
    loss_mean: Literal["global", "microbatch"] = flag(
        "global", "divide by the global batch's unmasked tokens, or take Megatron's mean of micro-batch means"
    )
    on_nonfinite: str = flag("stop", "a NaN or infinite loss: stop, or skip:K steps in a row", only=("stop",), step=2)
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, "recompute activations in the backward pass", only=(None, "full"), step=2
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None, "which layers are recomputed", only=(None, "uniform"), step=2
    )
    recompute_num_layers: int = flag(1, "layers per saved activation", "--checkpoint-num-layers", only=(1,), step=2)
    checkpoint_activations: bool = flag(False, "the older name of --recompute-granularity full")
    recompute_activations: bool = flag(False, "--recompute-granularity selective", only=(False,), step=2)

    @property
    def recompute(self) -> bool:
        return self.checkpoint_activations or self.recompute_granularity == "full"


@dataclass(frozen=True)
class Optimizer:
    """The update and its schedule."""

    optimizer: Literal["adam", "adamw", "sgd", "muon"] = flag("adam", "update rule", only=("adam", "adamw"), step=2)
    lr: float | None = flag(None, "peak learning rate", "--learning-rate")
    min_lr: float = flag(0.0, "learning rate at the end of the decay")
    lr_decay_style: Literal["linear", "cosine", "constant", "inverse-square-root", "WSD"] = flag(
        "linear", "shape of the decay", only=("linear", "cosine", "constant"), step=2
    )
    lr_decay_iters: int | None = flag(None, "steps until --min-lr is reached (none: --train-iters)")
    lr_decay_samples: int | None = flag(None, "samples until --min-lr", only=(None,), step=2)
    lr_warmup_fraction: float | None = flag(None, "share of the decay that warms up")
    lr_warmup_iters: int = flag(0, "steps of warm-up")
    lr_warmup_samples: int = flag(0, "samples of warm-up", only=(0,), step=2)
    weight_decay: float = flag(0.01, "decoupled decay of matrices; biases and norms have none")
    start_weight_decay: float | None = flag(None, "decay at the start", only=(None,), step=2)
    end_weight_decay: float | None = flag(None, "decay at the end", only=(None,), step=2)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", "how the decay grows", only=("constant",), step=2
    )
    clip_grad: float = flag(1.0, "largest global gradient norm (0: no clipping)")
    adam_beta1: float = flag(0.9, "decay of Adam's mean")
    adam_beta2: float = flag(0.999, "decay of Adam's variance")
    adam_eps: float = flag(1e-8, "added to Adam's denominator")
    sgd_momentum: float = flag(0.9, "momentum of SGD", only=(0.9,), step=2)
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
    loss_scale: float | None = flag(None, "constant loss scale (none: dynamic)")
    initial_loss_scale: float = flag(2.0**32, "dynamic loss scale at the start")
    min_loss_scale: float = flag(1.0, "least dynamic loss scale")
    loss_scale_window: float = flag(1000, "clean steps before the scale doubles")
    hysteresis: int = flag(2, "overflows before the scale halves")
    deterministic_mode: bool = flag(False, "bit-identical reruns on a GPU, at some cost")
    fp32_residual_connection: bool = flag(False, "keep the residual in float32", only=(False,), step=2)
    fp16_lm_cross_entropy: bool = flag(False, "loss in half precision", only=(False,), step=2)

    @property
    def dtype(self) -> str:
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else self.params_dtype


@dataclass(frozen=True)
class Parallel:
    """How the work is spread over devices."""

    tensor_model_parallel_size: int = flag(1, "devices that share one layer", only=(1,), step=3)
    pipeline_model_parallel_size: int = flag(1, "stages of layers", only=(1,), step=3)
    context_parallel_size: int = flag(1, "devices that share one sequence", only=(1,), step=3)
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, "interleaving", only=(None,), step=3)
    sequence_parallel: bool = flag(False, "split activations between tensor ranks", only=(False,), step=3)
    use_distributed_optimizer: bool = flag(False, "ZeRO stage 1", only=(False,), step=3)
    zero_stage: float = flag(0, "ZeRO stage", only=(0,), step=3)
    deepspeed: bool = flag(False, "take ZeRO and precision from --deepspeed_config", only=(False,), step=3)
    deepspeed_config: str | None = flag(None, "DeepSpeed's JSON", "--deepspeed-config", only=(None,), step=3)
    deepspeed_activation_checkpointing: bool = flag(False, "DeepSpeed's recompute", only=(False,), step=3)
    partition_activations: bool = flag(False, "split saved activations", only=(False,), step=3)
    remote_device: Literal["none", "cpu", "nvme"] = flag("none", "where ZeRO 3 keeps weights", only=("none",), step=3)
    cpu_optimizer: bool = flag(False, "optimizer state in host memory", only=(False,), step=3)
    num_gpus_per_node: int = flag(1, "processes started on each node", only=(1,), step=3)
    num_nodes: int = flag(1, "nodes", only=(1,), step=3)
    node_ips: str | None = flag(None, "addresses of the nodes, with commas between", only=(None,), step=3)
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "where to run (auto: a GPU if there is one)")
    distributed_backend: Literal["nccl", "gloo"] | None = flag(None, "how ranks talk (none: what the device wants)")
    distributed_timeout_minutes: int = flag(10, "longest wait for another rank")
    local_rank: int | None = flag(None, "passed by launchers; LOCAL_RANK wins", "--local_rank")


@dataclass(frozen=True)
class Checkpoint:
    """Saving and loading."""

    save: str | None = flag(None, "folder for checkpoints")
    load: str | None = flag(None, "folder to continue from")
    save_interval: int | None = flag(None, "steps between checkpoints (0 or none: only at the end)")
    save_overwrite: bool = flag(False, "start anew in a --save folder that holds checkpoints, moving them aside")
    verify: Literal["read", "full"] = flag("read", "on load, check the chunks that are read, or every byte")
    exit_on_missing_checkpoint: bool = flag(False, "no checkpoint under --load is an error, not a fresh start")
    ckpt_format: Literal["native", "torch"] = flag("native", "format of --save", only=("native",), step=5)
    finetune: bool = flag(False, "load weights only and start at step 0", only=(False,), step=2)
    no_load_optim: bool = flag(False, "do not load optimizer state", only=(False,), step=2)
    no_load_rng: bool = flag(False, "do not load the random state", only=(False,), step=2)
    no_save_optim: bool = flag(False, "do not save optimizer state", only=(False,), step=2)
    no_save_rng: bool = flag(False, "do not save the random state", only=(False,), step=2)
    use_checkpoint_args: bool = flag(False, "take the architecture from the checkpoint", only=(False,), step=2)
    universal_checkpoint: bool = flag(False, "load DeepSpeed's universal checkpoint", only=(False,), step=5)
    async_save: bool = flag(False, "save in the background", only=(False,), step=5)
    run_dir: str | None = flag(None, "folder of config.toml, metrics.jsonl, report.html (none: --save)")


@dataclass(frozen=True)
class Logging:
    """What is told while it runs."""

    log_interval: int = flag(100, "steps between log lines")
    progress: bool = flag(True, "progress bar on stderr when it is a terminal")
    tensorboard_dir: str | None = flag(None, "TensorBoard files", only=(None,), step=2)
    tensorboard_log_interval: int = flag(1, "steps between TensorBoard points", only=(1,), step=2)
    tensorboard_queue_size: int = flag(1000, "points kept before they are written", only=(1000,), step=2)
    log_timers_to_tensorboard: bool = flag(False, "timers in TensorBoard", only=(False,), step=2)
    log_batch_size_to_tensorboard: bool = flag(False, "batch size in TensorBoard", only=(False,), step=2)
    log_learning_rate_to_tensorboard: bool = flag(
        True, "learning rate in TensorBoard", "--no-log-learnig-rate-to-tensorboard", only=(True,), step=2
    )  # Megatron's own misspelling
    log_loss_scale_to_tensorboard: bool = flag(True, "loss scale in TensorBoard", only=(True,), step=2)
    log_validation_ppl_to_tensorboard: bool = flag(False, "perplexity in TensorBoard", only=(False,), step=2)
    log_memory_to_tensorboard: bool = flag(False, "memory in TensorBoard", only=(False,), step=2)
    log_world_size_to_tensorboard: bool = flag(False, "number of ranks in TensorBoard", only=(False,), step=2)
    log_params_norm: bool = flag(False, "log the norm of the weights", only=(False,), step=2)
    log_num_zeros_in_grad: bool = flag(False, "log zeros among gradients", only=(False,), step=2)
    timing_log_level: int = flag(0, "detail of timers", only=(0,), step=2)
    timing_log_option: Literal["max", "minmax", "all"] = flag(
        "minmax", "slowest rank, slowest and fastest, or every rank", only=("minmax",), step=2
    )
    wandb_project: str | None = flag(None, "Weights & Biases project", only=(None,), step=2)


@dataclass(frozen=True)
class Sampling:
    """How text is generated."""

    temperature: float = flag(1.0, "divide logits by this")
    greedy: bool = flag(False, "take the most likely token")
    top_k: int = flag(0, "sample among the k most likely (0: all)", "--top_k")
    top_p: float = flag(0.0, "sample among the smallest set of this probability (0: all)", "--top_p")
    out_seq_length: int = flag(1024, "most new tokens")
    num_samples: int = flag(0, "this many unconditional samples into --genfile (0: file or interactive)")
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
    workers: int = flag(1, "worker processes")
    log_interval: int = flag(1000, "documents between progress lines")
    split_sentences: bool = flag(False, "cut documents into sentences", only=(False,), step=4)
    keep_newlines: bool = flag(False, "keep newlines between sentences", only=(False,), step=4)
    lang: str = flag("english", "language of --split-sentences", only=("english",), step=4)
    partitions: int = flag(1, "cut the input into parts", only=(1,), step=4)


@dataclass(frozen=True)
class Evaluate:
    """What is scored."""

    input: list[str] = flag([], "text files, or .jsonl/.json with one document a line")
    json_keys: list[str] = flag(["text"], "keys whose text is read from JSON lines", "--json-key")
    overlapping_eval: int | None = flag(None, "tokens a window moves on (none: half the sequence length)")
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
    def global_batch(self) -> int:
        return self.training.global_batch_size or self.training.micro_batch_size or 1

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.training.micro_batch_size or 1)

    def problems(self) -> list[str]:
        out = (
            not_yet(self)
            + unusable(self)
            + architecture_problems(self.model, self.data)
            + precision_problems(self.precision)
        )
        t, o, d, c = self.training, self.optimizer, self.data, self.checkpoint
        out += positive(t, "micro_batch_size", "global_batch_size", "train_iters", "eval_interval")
        out += positive(o, "lr", "lr_decay_iters", "adam_eps") + positive(self.logging, "log_interval")
        out += positive(t, "exit_interval") + positive(self.parallel, "distributed_timeout_minutes")
        if not 0 <= d.last_epoch_cutoff <= 1:
            out.append(f"--last-epoch-cutoff {d.last_epoch_cutoff} is not in [0, 1]")
        out += not_negative(t, "seed", "eval_iters") + not_negative(o, "min_lr", "weight_decay", "clip_grad")
        out += not_negative(o, "lr_warmup_iters") + not_negative(d, "num_workers") + not_negative(c, "save_interval")
        if t.seed >= 2**32 - 2:
            out.append(f"--seed {t.seed} must be below {2**32 - 2}: numpy's generators take 32 bits, and two are added")
        if t.micro_batch_size is None:
            out.append("--micro-batch-size is needed: samples of one forward pass")
        elif t.micro_batch_size > 0 and t.global_batch_size and t.global_batch_size % t.micro_batch_size:
            out.append(
                f"--global-batch-size {t.global_batch_size} is not a multiple of --micro-batch-size "
                f"{t.micro_batch_size}; the nearest multiple is "
                f"{max(1, round(t.global_batch_size / t.micro_batch_size)) * t.micro_batch_size}"
            )
        if t.train_iters is None:
            out.append("--train-iters is needed: how many steps")
        if o.lr is None:
            out.append("--lr is needed: the peak learning rate")
        elif o.min_lr > o.lr:
            out.append(f"--min-lr {o.min_lr} is above --lr {o.lr}")
        if o.lr_warmup_fraction is not None and o.lr_warmup_iters:
            out.append("--lr-warmup-fraction and --lr-warmup-iters both set the warm-up: give one")
        if o.lr_warmup_fraction is not None and not 0 <= o.lr_warmup_fraction < 1:
            out.append(f"--lr-warmup-fraction {o.lr_warmup_fraction} is not in [0, 1)")
        decay = o.lr_decay_iters or t.train_iters
        if decay and o.lr_warmup_iters >= decay:
            out.append(f"--lr-warmup-iters {o.lr_warmup_iters} is not below the decay's {decay} iterations")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(o, name) < 1:
                out.append(f"--{name.replace('_', '-')} {getattr(o, name)} is not in [0, 1)")
        if o.override_opt_param_scheduler and o.use_checkpoint_opt_param_scheduler:
            out.append("--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler contradict each other")
        if not d.data_path and not d.mock_data:
            out.append("--data-path is needed (a prefix written by `meshwright preprocess`), or --mock-data")
        if len(d.data_path) > 1:
            out.append(f"--data-path with {len(d.data_path)} values, a blend of files: not yet (planned for step 2)")
        out += split_problems(d.split)
        if c.save_interval and not c.save:
            out.append(f"--save-interval {c.save_interval} without --save: nowhere to save")
        if self.tokenizer.tokenizer_type == "NullTokenizer" or d.mock_data:
            out += positive(self.tokenizer, "vocab_size")
        return out

    def notices(self) -> list[str]:
        """Flags that are right and do nothing with the others as they are."""
        p, t, out = self.precision, self.training, []
        if p.loss_scale is not None and not p.fp16:
            out.append(f"--loss-scale {p.loss_scale} has no effect without --fp16")
        if t.recompute_method and not t.recompute:
            out.append(f"--recompute-method {t.recompute_method} has no effect without --recompute-granularity")
        if self.checkpoint.exit_on_missing_checkpoint and not self.checkpoint.load:
            out.append("--exit-on-missing-checkpoint has no effect without --load")
        if self.checkpoint.save_overwrite and not self.checkpoint.save:
            out.append("--save-overwrite has no effect without --save")
        if self.parallel.distributed_backend:
            out.append(f"--distributed-backend {self.parallel.distributed_backend} has no effect with one process")
        return out


# Settings that the weights were trained with, so that no later run may change them.
ARCHITECTURE = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels",
                "max_position_embeddings", "layernorm_epsilon", "untie_embeddings_and_output_weights",
                "bias_gelu_fusion", "openai_gelu")  # fmt: skip
# Where a default or another flag decides, what is compared is the outcome.
OUTCOME = {"ffn_hidden_size": "ffn", "kv_channels": "head_dim", "bias_gelu_fusion": "gelu", "openai_gelu": "gelu"}


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
        | {*ARCHITECTURE, "attention_impl", "seq_length", "seed", "micro_batch_size", "fp16", "bf16", "params_dtype"}
        | {"deterministic_mode", "device", "local_rank", "load", "verify", "make_vocab_size_divisible_by"}
    )

    def problems(self) -> list[str]:
        s = self.sampling
        out = not_yet(self) + unusable(self) + precision_problems(self.precision)
        out += positive(self.training, "micro_batch_size") + positive(self.data, "seq_length")
        out += not_negative(s, "top_k", "top_p", "num_samples") + positive(s, "temperature", "out_seq_length")
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
        out = not_yet(self) + unusable(self) + positive(p, "workers", "log_interval")
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

    def problems(self) -> list[str]:
        e = self.evaluate
        out = not_yet(self) + unusable(self) + precision_problems(self.precision)
        out += positive(self.data, "seq_length") + positive(self.training, "micro_batch_size")
        out += positive(e, "overlapping_eval")
        if not self.checkpoint.load:
            out.append("a checkpoint is needed: `meshwright evaluate DIR` or --load DIR")
        if not e.input:
            out.append("--input is needed: text or JSON-lines files")
        return out


EVERY = (TrainConfig, GenerateConfig, PreprocessConfig, EvaluateConfig)


def contradictions(asked: Model, saved: Model, names: Collection[str] = ARCHITECTURE) -> list[str]:
    """Every one of these settings that is not what the checkpoint has."""
    out = []
    for name in names:
        ours, theirs = (getattr(m, OUTCOME.get(name, name)) for m in (asked, saved))
        if ours != theirs and getattr(asked, name) is not None:  # what was left open only follows another flag
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
    """Values that no setting can have: an empty text, often an unset shell variable, and numbers beyond counting."""
    out = []
    for group in (getattr(config, f.name) for f in dataclasses.fields(config)):
        for f in dataclasses.fields(group):
            value = getattr(group, f.name)
            if f.name != "prompt" and (value == "" or (isinstance(value, list) and "" in value)):
                out.append(f"{spelling(f.name)} is empty; leave the flag out, or is a shell variable unset?")
            elif type(value) is int and abs(value) >= 2**31 and f.name != "seed":
                out.append(f"{spelling(f.name)} {value:.3g} must be below {2**31}")
    return out


def positive(group: Any, *names: str) -> list[str]:
    return [
        f"{spelling(n)} {getattr(group, n)} must be above 0"
        for n in names
        if getattr(group, n) is not None and not getattr(group, n) > 0
    ]


def not_negative(group: Any, *names: str) -> list[str]:
    return [
        f"{spelling(n)} {getattr(group, n)} must not be below 0"
        for n in names
        if getattr(group, n) is not None and not getattr(group, n) >= 0
    ]


def architecture_problems(m: Model, d: Data) -> list[str]:
    out = positive(m, "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels")
    out += positive(m, "max_position_embeddings", "make_vocab_size_divisible_by", "layernorm_epsilon")
    out += positive(m, "init_method_std") + positive(d, "seq_length")
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
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(m, name) < 1:
            out.append(f"{spelling(name)} {getattr(m, name)} is not in [0, 1)")
    return out


def precision_problems(p: Precision) -> list[str]:
    out = positive(p, "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
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
    if len(shares) > 3 or min(shares) < 0 or not sum(shares) > 0:
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


# Architecture and recipe, never parallel sizes. The GPT-2 recipe is Megatron-LM's examples/pretrain_gpt.sh.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-117m": _gpt2(12, 768, 12),
    "gpt2-345m": _gpt2(24, 1024, 16),
    "gpt2-762m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    "gpt3-1.3b": _gpt3(24, 2048, 16, 512, 2e-4),  # the paper says 24 heads of 128, which 2048 does not hold
    "gpt3-2.7b": _gpt3(32, 2560, 32, 512, 1.6e-4),
    "gpt3-6.7b": _gpt3(32, 4096, 32, 1024, 1.2e-4),
    "gpt3-13b": _gpt3(40, 5120, 40, 1024, 1.0e-4),  # the paper's 5140 is not a multiple of its 40 heads
    "gpt3-175b": _gpt3(96, 12288, 96, 1536, 0.6e-4),
}
