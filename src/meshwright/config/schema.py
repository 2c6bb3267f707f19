"""All settings as dataclasses: each field is a flag, under Megatron's name, with a line of help.

What follows from the values is a property beside them. Nothing here imports torch, so that `--help`
and `--dry-run` start at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meshwright.config.fields import (
    MISSING,
    config_fields,
    flag,
    group,
    read_forms,
    spelling,
)
from meshwright.config.grammar import (
    AttentionWindow,
    BatchSchedule,
    BlendStage,
    EvalTasks,
    Iterations,
    Machines,
    OnNonfinite,
    OnSpike,
    PipelineLayout,
    Split,
    WindowSkips,
    describe_eval_tasks,
    layers_with_window,
    prefix_of,
    split_layers,
)
from meshwright.config.length_schedule import LengthSchedule

# Facets that several flags share.
DROPOUT: dict[str, Any] = {"bound": "[0,1)", "resume": "note", "inherited": True}
TIKTOKEN: dict[str, Any] = {"needs": "--tokenizer-type TikTokenizer", "docs": "data"}
ROTARY: dict[str, Any] = {
    "needs": "--position-embedding-type rope",
    "docs": "checkpoints",
    "resume": "tune",
}
SCALED = ROTARY | {"needs": "--rope-scaling"}
WINDOW: dict[str, Any] = {
    "value": "FORM",
    "docs": "checkpoints",
    "resume": "tune",
    "absent": None,
}
LLAMA3 = ROTARY | {"needs": "--rope-scaling llama3"}
YARN = ROTARY | {"needs": "--rope-scaling yarn"}
UNPROVEN: dict[str, Any] = {"resume": "free", "proof": ""}  # changes no number of a step
RECOMPUTED: dict[str, Any] = {
    "needs": "--recompute-granularity full",
    "docs": "memory",
    "resume": "free",
}
SCHEDULE: dict[str, Any] = {"resume": "free", "proof": "fuzz"}
LOSS_SCALE: dict[str, Any] = {"needs": "--fp16", "docs": "schedules"}
FP8: dict[str, Any] = {"needs": "--fp8-format", "docs": "memory"}
FP8_DELAYED: dict[str, Any] = {"needs": "--fp8-format and --fp8-recipe delayed", "docs": "memory"}
FP8_ENDS: dict[str, Any] = {"needs": "--first-last-layers-bf16", "docs": "memory", "proof": ""}
MUP: dict[str, Any] = {"docs": "tuning", "resume": "tune", "absent": None, "only_trains": True}
# where ranks are, and how they meet
START: dict[str, Any] = {"docs": "", "proof": "baseline", "read": "run"}
EVAL_TASKS: dict[str, Any] = {"needs": "--eval-tasks", "docs": "evaluation"}
DECAY_RAMPS = ("linear", "cosine")  # styles of the weight decay that lead from one value to another
WSD = "--lr-decay-style WSD"
DATA_PARALLEL = "several data-parallel ranks"
SAMPLES = "--sample-interval"
SPIKE = "--on-spike"


@dataclass(frozen=True)
@group(resume="refuse")
class Model:
    """The network: GPT-2's architecture by default."""

    num_layers: int | None = flag(None, "number of transformer layers", bound=">0", docs="data")
    hidden_size: int | None = flag(
        None, "width of the residual stream", bound=">0", docs="tutorial"
    )
    num_attention_heads: int | None = flag(
        None, "number of attention heads", bound=">0", docs="checkpoints"
    )
    ffn_hidden_size: int | None = flag(
        None, "width of the MLP's hidden layer (none: 4 x hidden size)", bound=">0", outcome="ffn"
    )
    kv_channels: int | None = flag(
        None,
        "width of a head (none: hidden size / attention heads)",
        bound=">0",
        outcome="head_dim",
    )
    max_position_embeddings: int | None = flag(
        None,
        "rows of the position table (none: sequence length)",
        "--max-absolute-position-embeddings",
        bound=">0",
    )
    make_vocab_size_divisible_by: int = flag(
        128, "pad the vocabulary to a multiple of this", bound=">0", resume="free", read="model"
    )
    pad_vocab_size_to: int | None = flag(
        None, "pad the vocabulary to exactly this size", "--padded-vocab-size", resume="free"
    )
    layernorm_epsilon: float = flag(
        1e-5,
        "added to the variance in the norm",
        "--norm-epsilon",
        bound=">0",
        docs="checkpoints",
        resume="tune",
    )
    init_method_std: float = flag(
        0.02,
        "standard deviation of the initial weights",
        bound=">0",
        docs="extending",
        resume="free",
        inherited=True,
    )
    hidden_dropout: float = flag(
        0.1, "dropout of each branch's output, and of embeddings", docs="tutorial", **DROPOUT
    )
    attention_dropout: float = flag(
        0.1, "dropout probability of attention", docs="tutorial", **DROPOUT
    )
    embedding_dropout: float | None = flag(
        None, "dropout of embeddings (none: --hidden-dropout)", **DROPOUT
    )
    untie_embeddings_and_output_weights: bool = flag(
        False, "use a separate weight for the output layer"
    )
    bias_gelu_fusion: bool = flag(
        True,
        "tanh approximation of GELU; else the exact one",
        needs="a GELU activation",
        outcome="activation",
    )
    attention_impl: Literal["auto", "sdpa", "reference"] = flag(
        "auto",
        "auto: fastest, or reference on CPU with dropout",
        docs="memory randomness",
        resume="note",
        read="model",
    )
    num_query_groups: int | None = flag(
        None,
        "number of key/value heads; enables --group-query-attention",
        "--num-key-value-heads",
        bound=">0",
        outcome="groups",
    )
    group_query_attention: bool = flag(
        False,
        "share key/value heads: one group unless --num-query-groups is given",
        outcome="groups",
    )
    position_embedding_type: Literal[
        "learned_absolute", "absolute", "rope", "rotary", "alibi", "none"
    ] = flag(
        "learned_absolute",
        "position encoding: a learned table, rotary embeddings, ALiBi or none",
        outcome="position",
    )
    rotary_percent: float = flag(1.0, "fraction of each head that is rotated", bound=">0", **ROTARY)
    rotary_base: float = flag(
        10000.0,
        "base of rotary frequencies",
        "--rope-theta",
        "--rotary-position-embeddings-theta",
        bound=">0",
        **ROTARY,
    )
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = flag(
        "none",
        "scaling of rotary frequencies for longer texts: all, or the slow ones as in Llama 3 or YaRN",
        absent="none",
        **ROTARY,
    )
    rope_scaling_factor: float = flag(
        8.0,
        "divide the scaled frequencies by this",
        "--rotary-scaling-factor",
        bound=">0",
        **SCALED,
    )
    original_max_position_embeddings: int | None = flag(
        None,
        "positions that the model had before --rope-scaling llama3 or yarn (none: 8192, for llama3)",
        bound=">0",
        **SCALED | {"needs": "--rope-scaling llama3 or yarn", "outcome": "original_positions"},
    )
    rope_low_freq_factor: float = flag(
        1.0,
        "llama3: pairs that turn fewer times in the original positions are slow",
        bound=">0",
        **LLAMA3,
    )
    rope_high_freq_factor: float = flag(
        4.0, "llama3: pairs that turn more often than this are not scaled", bound=">0", **LLAMA3
    )
    beta_fast: float = flag(
        32.0,
        "yarn: pairs that turn more often in the original positions are not scaled",
        bound=">0",
        **YARN,
    )
    beta_slow: float = flag(
        1.0, "yarn: pairs that turn fewer times than this are slow", bound=">0", **YARN
    )
    rope_attention_factor: float | None = flag(
        None,
        "yarn: multiply rotated queries and keys by this (none: 0.1 ln(factor) + 1)",
        bound=">0",
        **YARN | {"outcome": "attention_factor"},
    )
    window_size: AttentionWindow | None = flag(
        None,
        "attend to this many tokens before each and to itself, L or L,0 as in Megatron (none or -1,0: to all before)",
        **WINDOW | {"outcome": "window"},
    )
    window_attn_skip_freq: WindowSkips | None = flag(
        None,
        "layers without the window: every N-th, or those with 0 in a list such as ([1]*5+[0])*4 (none: no layer)",
        **WINDOW | {"needs": "--window-size", "outcome": "windowed_layers"},
    )
    swiglu: bool = flag(
        False,
        "use a SwiGLU MLP of width 8/3 x hidden size, in multiples of 64 as in Megatron",
        outcome="activation",
    )
    squared_relu: bool = flag(False, "use squared ReLU in the MLP", outcome="activation")
    glu_activation: Literal["geglu", "liglu", "reglu", "swiglu"] | None = flag(
        None, "a gated MLP, 4 x hidden size", outcome="activation"
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", "type of norm")
    layernorm_bias: bool = flag(
        True,
        "add biases in LayerNorm",
        "--disable-layernorm-bias",
        needs="LayerNorm",
        outcome="norm_bias",
        absent=True,
    )
    apply_layernorm_1p: bool = flag(False, "store norm weights minus one", docs="extending")
    qk_layernorm: bool = flag(
        False, "normalize each head's queries and keys", docs="checkpoints", absent=False
    )
    add_bias_linear: bool = flag(True, "add biases in linear layers", "--disable-bias-linear")
    add_qkv_bias: bool = flag(
        False,
        "add biases to queries, keys and values even with --disable-bias-linear",
        outcome="qkv_bias",
    )
    embed_layernorm: bool = flag(False, "apply a norm after the token embedding")
    apply_residual_connection_post_layernorm: bool = flag(
        False, "take the residual from the norm's output"
    )
    use_parallel_residual: bool = flag(
        False,
        "let attention and MLP read the same stream and add both to it, as in GPT-NeoX",
        "--gpt-j-residual",
        absent=False,
    )
    init_method_xavier_uniform: bool = flag(
        False,
        "draw initial weights from Xavier's uniform distribution",
        docs="extending",
        resume="free",
    )
    zero_init_projections: bool = flag(
        False,
        "start the weights that lead into the residual stream, of attention and MLP, at 0",
        docs="schedules extending",
        resume="free",
        absent=False,
        only_trains=True,
    )
    mup_base_hidden_size: int | None = flag(
        None,
        "width that learning rate, weight decay and initial weights are meant for; µP carries them over to this "
        "--hidden-size (none: no µP)",
        bound=">0",
        **MUP,
    )
    mup_base_num_layers: int | None = flag(
        None,
        "depth that they are meant for; CompleteP carries them over to this --num-layers (none: as they are)",
        bound=">0",
        **MUP,
    )
    final_logit_softcapping: float = flag(
        0.0,
        "bound the logits: C tanh(logits / C) with this C (0: no bound)",
        bound=">=0",
        docs="checkpoints faq",
        resume="tune",
        absent=0.0,
    )
    num_experts: int | None = flag(None, "number of experts per layer", only=(None,), resume="note")

    def __post_init__(self) -> None:
        read_forms(self)

    @property
    def ffn(self) -> int:
        """Width of the MLP; that of SwiGLU, with its third matrix, is 2/3, in multiples of 64."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        width = 4 * (self.hidden_size or 0)
        # Two thirds of a smaller one are less than 64.
        if self.swiglu and width >= 4 * 24:
            return width * 2 // 3 // 64 * 64
        return width

    @property
    def head_dim(self) -> int:
        return self.kv_channels or (self.hidden_size or 0) // max(self.num_attention_heads or 1, 1)

    @property
    def width_growth(self) -> float:
        """Width by that of --mup-base-hidden-size."""
        return (self.hidden_size or 1) / (self.mup_base_hidden_size or self.hidden_size or 1)

    @property
    def depth_growth(self) -> float:
        """Depth by that of --mup-base-num-layers."""
        return (self.num_layers or 1) / (self.mup_base_num_layers or self.num_layers or 1)

    @property
    def groups(self) -> int:
        """Number of key/value heads."""
        if self.num_query_groups:
            return self.num_query_groups
        # Megatron's --group-query-attention has one group unless --num-query-groups gives more.
        return 1 if self.group_query_attention else self.num_attention_heads or 1

    @property
    def position(self) -> Literal["learned", "rope", "alibi", "none"]:
        kind = self.position_embedding_type
        if kind in ("rope", "rotary"):
            return "rope"
        if kind in ("alibi", "none"):
            return kind
        return "learned"

    @property
    def dropout_of_embeddings(self) -> float:
        return self.hidden_dropout if self.embedding_dropout is None else self.embedding_dropout

    @property
    def rotating(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def original_positions(self) -> int:
        """Positions before the scaling of rotary frequencies; 8192 are those of Llama 3."""
        return self.original_max_position_embeddings or 8192

    @property
    def attention_factor(self) -> float:
        """Factor of rotated queries and keys, which only YaRN has."""
        if self.rope_scaling != "yarn":
            return 1.0
        # The default is that of the paper (Peng et al. 2023), for queries and keys each.
        default = 0.1 * math.log(max(self.rope_scaling_factor, 1.0)) + 1.0
        return self.rope_attention_factor or default

    @property
    def window(self) -> int:
        """Number of tokens before each that layers with a window see; 0 if no layer has one."""
        return self.window_size.reach if self.window_size else 0

    @property
    def windowed_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with a window."""
        if not self.window:
            return ()
        return layers_with_window(self.window_attn_skip_freq, self.num_layers or 0)

    @property
    def activation(self) -> str:
        """gelu-tanh, gelu, squared-relu, or a gate: swiglu, geglu, liglu, reglu."""
        if self.squared_relu:
            return "squared-relu"
        gate = self.glu_activation or ("swiglu" if self.swiglu else None)
        return gate or ("gelu-tanh" if self.bias_gelu_fusion else "gelu")

    @property
    def gated(self) -> bool:
        return self.activation.endswith("glu")

    @property
    def qkv_bias(self) -> bool:
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def norm_bias(self) -> bool:
        return self.normalization == "LayerNorm" and self.layernorm_bias


TokenizerType = Literal[
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "PretrainedFromHF",
    "HFTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "ByteTokenizer",
    "NullTokenizer",
]


@dataclass(frozen=True)
@group(docs="checkpoints data", resume="free", proof="")
class TokenizerFlags:
    """The tokenizer."""

    tokenizer: str | None = flag(
        None,
        "a folder or file (of train-tokenizer, a run, Hugging Face, GPT-2, SentencePiece, tiktoken, BERT), a name on "
        "the Hugging Face Hub such as gpt2, one of tiktoken's such as cl100k_base, or byte; replaces the flags below "
        "(none: the one found beside the data or in the run)",
        value="PATH",
        docs="",
    )
    tokenizer_type: TokenizerType = flag(
        "GPT2BPETokenizer", "type of tokenizer", "--tokenizer-name", docs=""
    )
    vocab_file: str | None = flag(
        None, "path to GPT-2's vocab.json or BERT's vocab.txt", "--vocab", value="FILE"
    )
    merge_file: str | None = flag(None, "path to GPT-2's merges.txt", "--merges-file", value="FILE")
    tokenizer_model: str | None = flag(
        None,
        "path to a tokenizer.json, a model of SentencePiece or ranks of tiktoken",
        "--tokenizer-name-or-path",
        value="PATH",
        docs="data",
    )
    vocab_size: int | None = flag(
        None,
        "true size, for NullTokenizer, mock data and Megatron's ranks",
        "--true-vocab-size",
        bound=">0",
    )
    tiktoken_pattern: Literal["v1", "v2"] = flag(
        "v2", "how text is split before Megatron's ranks are used", **TIKTOKEN
    )
    tiktoken_num_special_tokens: int = flag(
        1000, "ids before Megatron's ranks", bound=">0", **TIKTOKEN
    )
    tiktoken_special_tokens: list[str] = flag(
        [],
        "the first of these ids (none: <unk> <s> </s> <mask> <pad> <cls> <sep>); <SPECIAL_7> and so on follow",
        "--tokenizer-special-tokens",
        value="WORDS",
        **TIKTOKEN,
    )

    def __hash__(self) -> int:
        return hash(repr(self))  # which a list has not


@dataclass(frozen=True)
@group(docs="data", proof="fuzz")
class Data:
    """Token files and the order in which they are read."""

    data_path: list[str] = flag(
        [],
        "prefix of .bin/.idx, here or at s3://, gs://, or a blend: WEIGHT PREFIX [WEIGHT PREFIX ...]",
        "--dataset",
        value="PREFIX",
        remote=True,
        docs="data evaluation",
    )
    seq_length: int | None = flag(
        None,
        "tokens of one sample",
        "--encoder-seq-length",
        bound=">0",
        docs="checkpoints",
        read="model",
    )
    split: Split = flag(
        Split.read("969, 30, 1"),
        "shares of the documents for training, validation and test",
        value="FORM",
        docs="data evaluation",
    )
    split_arithmetic: Literal["rounded", "cumulative"] = flag(
        "rounded",
        "borders of the split: rounded (Megatron 2019-2023) or cumulative (since October 2023)",
        proof="",
    )
    last_epoch_cutoff: float = flag(
        0.80, "shuffle the last epoch separately if less of it is used (bigscience: 0.95)"
    )
    data_cache_path: str | None = flag(
        None,
        "folder for sample indices (none: index-cache beside the data)",
        value="DIR",
        **UNPROVEN,
    )
    mock_data: bool = flag(False, "train on random tokens instead of files", docs="")
    data_impl: Literal["mmap", "infer", "lazy", "cached"] = flag(
        "mmap", "format of token files; each is read as what it is", docs="", **UNPROVEN
    )
    mmap_warmup: bool = flag(
        False, "read the token files once before training", docs="", **UNPROVEN
    )
    dataloader_type: Literal["single", "cyclic"] = flag(
        "single", "single, or cyclic: reshuffle all samples each epoch"
    )
    num_workers: int = flag(
        2,
        "batches that a background thread reads ahead (0: no thread)",
        bound=">=0",
        docs="",
        resume="free",
    )
    train_data_path: list[str] = flag(
        [],
        "prefix or blend of the training set; whole files, instead of --split",
        value="PREFIX",
        remote=True,
    )
    valid_data_path: list[str] = flag(
        [], "prefix or blend of the validation set", value="PREFIX", remote=True
    )
    test_data_path: list[str] = flag(
        [], "prefix or blend of the test set", value="PREFIX", remote=True, proof=""
    )
    data_args_path: str | None = flag(
        None, "file with the value of --data-path", value="FILE", proof=""
    )
    per_split_data_args_path: str | None = flag(
        None, 'JSON file {"train": [...], "valid": [...], "test": [...]}', value="FILE", proof=""
    )
    train_weighted_split_paths: list[str] = flag(
        [],
        "'NAME: WEIGHT START:END PREFIX, ...': training on parts of files",
        value="FORM",
        proof="",
    )
    valid_weighted_split_paths: list[str] = flag(
        [], "'NAME: ...' 'NAME2: ...': validation sets, with a loss each", value="FORM", proof=""
    )
    test_weighted_split_paths: list[str] = flag(
        [], "test sets, in the same form", value="FORM", proof=""
    )
    train_weighted_split_paths_path: str | None = flag(
        None, "file with the value of --train-weighted-split-paths", value="FILE", proof=""
    )
    valid_weighted_split_paths_path: str | None = flag(
        None, "file with the value of --valid-weighted-split-paths", value="FILE", docs="", proof=""
    )
    test_weighted_split_paths_path: str | None = flag(
        None, "file with the value of --test-weighted-split-paths", value="FILE", docs="", proof=""
    )
    multiple_validation_sets: bool = flag(
        False, "evaluate each path separately", needs="--eval-iters above 0"
    )
    validation_set_names: list[str] = flag(
        [], "names of these sets (none: their file names)", value="FORM", proof=""
    )
    full_validation: bool = flag(
        False, "evaluate once on the whole validation set", needs="--eval-iters above 0"
    )
    blend_stages: list[BlendStage] = flag(
        [],
        "further blends of the training set, each from a point of the run on: 'BEGIN: WEIGHT PREFIX WEIGHT PREFIX ...' "
        "(BEGIN: a sample, or with a unit as in 60% or 2e9tokens)",
        value="FORM",
        resume="free",
    )
    blend_change_at: str | None = flag(
        None,
        "on resume, sample at which the new blend starts, or now",
        needs="--load",
        value="FORM",
        **UNPROVEN,
    )
    data_changed: Literal["refuse", "ok"] = flag(
        "refuse",
        "on resume, if token files hold other documents or tokens than the checkpoint's: refuse, or go on",
        docs="checkpoints",
        needs="--load",
        once=True,
        **UNPROVEN,
    )
    packing: Literal["stream", "best-fit"] = flag(
        "stream",
        "stream: cut the documents, one behind the other, every --seq-length tokens, as Megatron does; best-fit: fill "
        "samples with whole documents, each of which is read alone",
    )
    eod_mask_loss: bool = flag(
        False,
        "mask the loss of the token that follows an end of document",
        needs="--packing stream",
        proof="baseline fuzz",
    )
    reset_position_ids: bool = flag(
        False,
        "restart positions after documents",
        needs=("learned or rotary positions", "--packing stream"),
        proof="baseline fuzz",
    )
    reset_attention_mask: bool = flag(
        False,
        "mask attention across ends of documents",
        needs="--packing stream",
        proof="baseline fuzz",
    )
    skip_train_iteration_range: list[Iterations] = flag(
        [], "ranges A-B of iterations that consume samples untrained", value="FORM"
    )

    def __post_init__(self) -> None:
        """Give a pair of token files one spelling, so that equal settings compare equal."""
        read_forms(self)
        # The groups are frozen, and this is a part of making one.
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            object.__setattr__(self, name, [prefix_of(word) for word in getattr(self, name)])

    @property
    def document_effects(self) -> tuple[bool, bool, bool]:
        """Whether the loss is masked, positions restart and attention ends at ends of documents."""
        if self.packing != "stream":
            return True, True, True
        return self.eod_mask_loss, self.reset_position_ids, self.reset_attention_mask


Tokenizer = TokenizerFlags  # its name in scripts that were written for earlier releases

EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
LENGTHS = ("train_iters", "train_samples", "train_tokens", "train_epochs")


@dataclass(frozen=True)
class Training:
    """Batches, length and end of the run."""

    micro_batch_size: int | Literal["auto"] | None = flag(
        None,
        "samples of one forward pass; auto: the largest number that fits, measured before training",
        bound=">0",
        docs="memory randomness",
        resume="free",
        read="run",
    )
    global_batch_size: int | None = flag(
        None,
        "samples of one step (none: one micro-batch per rank)",
        bound=">0",
        docs="schedules data",
    )
    num_accumulation_steps: int | None = flag(
        None, "micro-batches of one step, in place of a batch size", bound=">0", proof="fuzz"
    )
    train_iters: int | None = flag(None, "number of steps", bound=">0", docs="tutorial")
    train_samples: int | None = flag(
        None, "number of samples, instead of --train-iters", bound=">0"
    )
    train_tokens: int | Literal["auto"] | None = flag(
        None,
        "number of tokens, instead of --train-iters; beside --train-samples, what is used up first ends the run; auto: 20 "
        "for each parameter of the layers, and at most 4 readings of the data; a run notes their number",
        bound=">0",
        docs="recipes",
        proof="fuzz",
    )
    train_epochs: float | None = flag(
        None,
        "readings of the training data, instead of --train-iters; a run notes them as --train-samples",
        "--num-train-epochs",
        bound=">0",
        docs="data",
        proof="",
    )
    rampup_batch_size: list[int] = flag(
        [],
        "START INCREMENT SAMPLES: grow from START by INCREMENT over SAMPLES",
        docs="schedules data",
    )
    step_batch_size_schedule: BatchSchedule | None = flag(
        None,
        "TOKENS:BATCH ...: the global batch from so many tokens on, such as '0:768 250B:1536'",
        value="FORM",
        docs="schedules",
        proof="",
    )
    seq_length_schedule: LengthSchedule | None = flag(
        None,
        "linear:MIN:MAX:STEPS:MULTIPLE, root:MIN:MAX:STEPS:MULTIPLE:DEGREE or STEPS:LENGTH ...: train on the beginning "
        "of each sample, which grows; DeepSpeed's curriculum of sequence lengths",
        value="FORM",
        docs="schedules from-deepspeed",
        proof="baseline",
    )
    seed: int = flag(1234, "random seed of weights, dropout and sample order", bound=">=0")
    eval_interval: int = flag(
        1000, "steps between validations", bound=">0", docs="tutorial", proof="fuzz"
    )
    eval_iters: int = flag(100, "global batches of one validation", bound=">=0", docs="data")
    exit_interval: int | None = flag(
        None, "save and exit at a step divisible by this", bound=">0", **UNPROVEN
    )
    exit_duration_in_mins: float | None = flag(
        None, "save and exit after this many minutes", bound=">0", **UNPROVEN
    )
    exit_signal_handler: bool = flag(
        True, "on SIGTERM or SIGINT finish the step, save and exit with 143 or 130", **UNPROVEN
    )
    exit_signal: list[str] = flag(
        ["SIGUSR1", "SIGUSR2"],
        "further signals that save and exit; the status is 128 + the signal's number",
        value="FORM",
        **UNPROVEN,
    )
    kill_switch_path: str | None = flag(
        None, "save and exit when this file appears", "--kill-switch-file", value="FILE", **UNPROVEN
    )
    skip_train: bool = flag(
        False,
        "load, validate and test without training",
        "--eval-only",
        docs="checkpoints",
        **UNPROVEN,
    )
    verify_layout: int = flag(
        0,
        "before training, compare this many steps of the layout, at reduced size, with one process",
        bound=">=0",
        docs="verifying-layouts",
        **UNPROVEN,
    )
    loss_mean: Literal["global", "microbatch"] = flag(
        "global",
        "global: mean over the unmasked tokens of a batch; microbatch: Megatron's mean of micro-batch means",
    )
    z_loss_coef: float = flag(
        0.0,
        "add this times the mean of the squared log-sum-exp of a token's logits to the training loss",
        bound=">=0",
        docs="faq",
        inherited=True,
    )
    on_nonfinite: OnNonfinite = flag(
        OnNonfinite.read("stop"),
        "on a NaN or infinite loss or gradient: stop; skip:K: skip up to K steps in a row; rollback:K: go back to the "
        "newest checkpoint and pass over the samples since, up to K times until a further one is saved",
        value="FORM",
        resume="free",
        proof="fuzz",
    )
    on_spike: OnSpike = flag(
        OnSpike.read("warn"),
        "on a loss far above the recent ones: off, warn, stop, or rollback:K as with --on-nonfinite",
        value="FORM",
        **UNPROVEN,
    )
    spike_factor: float = flag(
        10.0,
        "a loss this many robust standard deviations (from the median absolute deviation) above the median is a spike",
        bound=">0",
        needs=SPIKE,
        **UNPROVEN,
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, "recompute whole layers, or attention only", docs="parallelism memory", resume="free"
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None,
        "uniform: save one input per --recompute-num-layers; block: recompute only that many layers",
        **RECOMPUTED,
    )
    recompute_num_layers: int = flag(
        1,
        "layers for the method",
        "--checkpoint-num-layers",
        "--activations-checkpoint-num-layers",
        bound=">0",
        **RECOMPUTED,
    )
    checkpoint_in_cpu: bool = flag(
        False,
        "keep in host memory what recomputation starts from: less device memory, slower",
        **RECOMPUTED,
    )
    fused_kernels: Literal["auto", "on", "off"] = flag(
        "auto",
        "run the layers by fused Triton kernels; auto: on a GPU, where they compute the model",
        docs="memory",
        proof="baseline",
    )
    compile: Literal["auto", "on", "off"] = flag(
        "auto",
        "compile the layers with torch.compile; auto: on a GPU, where the fused kernels do not run",
        docs="memory",
        resume="free",
        proof="baseline",
    )
    cuda_graphs: Literal["auto", "on", "off"] = flag(
        "auto",
        "record a step once as CUDA graphs, then replay it; auto: on an NVIDIA GPU where it can pay",
        docs="memory",
        proof="baseline",
    )

    def __post_init__(self) -> None:
        read_forms(self)


@dataclass(frozen=True)
@group(docs="schedules")
class Optimizer:
    """The update and its schedule."""

    optimizer: Literal["adam", "adamw", "sgd", "lion", "muon"] = flag(
        "adam",
        "optimizer; adam is AdamW; muon: Muon for matrices of the layers, AdamW for all other parameters",
        docs="schedules parallelism",
    )
    lr: float | None = flag(
        None, "peak learning rate", "--learning-rate", bound=">0", resume="free"
    )
    embedding_lr: float | None = flag(
        None, "peak learning rate of the token and position tables (none: --lr)", bound=">=0"
    )
    head_lr: float | None = flag(
        None, "peak learning rate of an untied output layer (none: --lr)", bound=">=0"
    )
    vector_lr: float | None = flag(
        None, "peak learning rate of biases and norms (none: --lr)", bound=">=0"
    )
    min_lr: float = flag(0.0, "learning rate at the end of the decay", bound=">=0", **SCHEDULE)
    lr_decay_style: Literal["linear", "cosine", "constant", "inverse-square-root", "WSD"] = flag(
        "linear", "learning rate schedule", resume="free"
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", "shape of the final decay of WSD", needs=WSD, **SCHEDULE
    )
    lr_wsd_decay_iters: int | None = flag(
        None, "steps of the final decay of WSD", bound=">0", needs=WSD, **SCHEDULE
    )
    lr_wsd_decay_samples: int | None = flag(
        None, "samples of the final decay of WSD", bound=">0", needs=WSD, **SCHEDULE
    )
    lr_decay_iters: int | None = flag(
        None, "steps until --min-lr (none: --train-iters)", bound=">0", **UNPROVEN
    )
    lr_decay_samples: int | None = flag(
        None, "samples until --min-lr (none: --train-samples)", bound=">0", **UNPROVEN
    )
    lr_decay_tokens: int | None = flag(None, "tokens until --min-lr", bound=">0", **UNPROVEN)
    lr_warmup_fraction: float | None = flag(
        None, "fraction of the decay used for linear warm-up", bound="[0,1)", **SCHEDULE
    )
    lr_warmup_iters: int = flag(0, "steps of linear warm-up", bound=">=0", **SCHEDULE)
    lr_warmup_samples: int = flag(0, "samples of linear warm-up", bound=">=0", **SCHEDULE)
    lr_warmup_tokens: int = flag(0, "tokens of linear warm-up", bound=">=0", **SCHEDULE)
    lr_warmup_init: float = flag(
        0.0, "learning rate at the start of the warm-up", bound=">=0", needs="a warm-up", **SCHEDULE
    )
    weight_decay: float = flag(
        0.01,
        "decoupled weight decay of matrices (SGD: added to the gradient); none for biases and norms",
        bound=">=0",
        resume="free",
    )
    start_weight_decay: float | None = flag(
        None, "weight decay at the start of its ramp", bound=">=0", **SCHEDULE
    )
    end_weight_decay: float | None = flag(
        None, "weight decay at the end of its ramp", bound=">=0", **SCHEDULE
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine", "rate"] = flag(
        "constant",
        "linear or cosine: ramp from --start-weight-decay to --end-weight-decay; rate: in proportion to the learning "
        "rate, --weight-decay at its peak",
        **SCHEDULE,
    )
    cautious_weight_decay: bool = flag(
        False, "decay only the elements whose update and weight have the same sign (not with SGD)"
    )
    clip_grad: float = flag(
        1.0, "maximum global gradient norm (0: no clipping)", bound=">=0", docs=""
    )
    adam_beta1: float = flag(
        0.9,
        "decay rate of the first moment",
        bound="[0,1)",
        needs="--optimizer adam, adamw or muon",
        docs="",
    )
    adam_beta2: float = flag(
        0.999,
        "decay rate of the second moment",
        bound="[0,1)",
        needs="--optimizer adam, adamw or muon",
        docs="",
    )
    adam_eps: float = flag(
        1e-8,
        "term added to Adam's denominator",
        bound=">0",
        needs="--optimizer adam, adamw or muon",
        docs="",
    )
    optimizer_state_dtype: Literal["float32", "bfloat16", "float8"] = flag(
        "float32",
        "number format of the optimizer's moments and momentum, rounded at random; float8: a byte each",
        docs="memory schedules",
        proof="fuzz",
    )
    sgd_momentum: float = flag(0.9, "momentum of SGD", bound="[0,1)", needs="--optimizer sgd")
    lion_beta1: float = flag(
        0.9,
        "share of the momentum in Lion's update, the rest is the gradient",
        bound="[0,1)",
        needs="--optimizer lion",
    )
    lion_beta2: float = flag(
        0.99, "decay rate of Lion's momentum", bound="[0,1)", needs="--optimizer lion"
    )
    muon_momentum: float = flag(0.95, "momentum of Muon", bound="[0,1)", needs="--optimizer muon")
    muon_num_ns_steps: int = flag(
        5, "Newton-Schulz iterations of Muon", bound=">0", needs="--optimizer muon"
    )
    muon_split_qkv: Literal["off", "on", "groups"] = flag(
        "off",
        "orthogonalise queries, keys and values apart: on, as Megatron does; groups, also those of each query group",
        needs="--optimizer muon",
    )
    muon_tp_mode: Literal["distributed", "duplicated", "blockwise"] = flag(
        "distributed",
        "matrices that tensor ranks share: distributed, duplicated (the same here): whole, each on one rank",
        needs="--optimizer muon",
        docs="parallelism",
        proof="",
    )
    ema: float = flag(
        0.0,
        "keep an exponential moving average of the weights, with a decay such as 0.999, and validate it too (0: off)",
        bound="[0,1)",
        docs="schedules checkpoints",
    )
    override_opt_param_scheduler: bool = flag(
        False,
        "override the checkpoint's schedule",
        "--override-lr-scheduler",
        "--override-opt-param-scheduler",
        docs="schedules checkpoints",
        once=True,
        **SCHEDULE,
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "use the saved schedule",
        "--use-checkpoint-lr-scheduler",
        "--use-checkpoint-opt-param-scheduler",
        **SCHEDULE,
    )

    @property
    def ramps_decay(self) -> bool:
        """Whether the weight decay leads from --start-weight-decay to --end-weight-decay."""
        return self.weight_decay_incr_style in DECAY_RAMPS


@dataclass(frozen=True)
@group(proof="fuzz")
class Precision:
    """Number formats."""

    fp16: bool = flag(False, "train in float16 with loss scaling", docs="schedules", read="run")
    bf16: bool = flag(
        False,
        "train in bfloat16 with float32 master weights and gradients",
        docs="tutorial",
        read="run",
    )
    params_dtype: Literal["float32", "float64"] = flag(
        "float32", "type without --fp16 or --bf16; float64 is for tests", read="run"
    )
    loss_scale: float | None = flag(
        None, "constant loss scale (none: dynamic)", bound=">0", **LOSS_SCALE
    )
    initial_loss_scale: float = flag(
        2.0**32, "initial dynamic loss scale", bound=">0", resume="free", **LOSS_SCALE
    )
    min_loss_scale: float = flag(
        1.0, "minimum dynamic loss scale", bound=">0", proof="", **LOSS_SCALE
    )
    loss_scale_window: float = flag(
        1000, "steps without overflow before the scale doubles", bound=">0", **LOSS_SCALE
    )
    hysteresis: int = flag(2, "overflows before the loss scale halves", bound=">0", **LOSS_SCALE)
    deterministic_mode: bool = flag(
        False,
        "make reruns bit-identical on a GPU, at some cost in speed",
        docs="randomness",
        resume="free",
        proof="baseline",
    )
    fp32_residual_connection: bool = flag(
        False, "keep the residual stream in float32", needs="--fp16 or --bf16"
    )
    fp8_format: Literal["e4m3", "hybrid"] | None = flag(
        None,
        "multiply in 8 bits in all layers: e4m3, or hybrid, with gradients in e5m2; needs --bf16",
        docs="memory",
    )
    fp8_recipe: Literal["delayed", "tensorwise", "mxfp8", "blockwise"] = flag(
        "delayed",
        "fp8 scales, one a tensor: delayed, from earlier steps, or tensorwise, from its own numbers",
        only=("delayed", "tensorwise"),
        **FP8,
    )
    fp8_margin: int = flag(0, "divide fp8 scales by 2^margin", proof="", **FP8)
    fp8_amax_history_len: int = flag(
        1, "steps whose largest values are kept for fp8 scales", bound=">0", **FP8_DELAYED
    )
    fp8_amax_compute_algo: Literal["most_recent", "max"] = flag(
        "most_recent",
        "largest value that decides an fp8 scale: the latest, or the largest kept",
        **FP8_DELAYED,
    )
    first_last_layers_bf16: bool = flag(
        False, "multiply the first and last layers in bfloat16", proof="", **FP8
    )
    num_layers_at_start_in_bf16: int = flag(1, "first layers in bfloat16", bound=">=0", **FP8_ENDS)
    num_layers_at_end_in_bf16: int = flag(1, "last layers in bfloat16", bound=">=0", **FP8_ENDS)

    @property
    def dtype(self) -> str:
        if self.fp16:
            return "float16"
        return "bfloat16" if self.bf16 else self.params_dtype

    def multiplies_fp8(self, layer: int, layers: int) -> bool:
        """Return whether a layer of the full model multiplies in fp8."""
        if not self.fp8_format:
            return False
        first = self.num_layers_at_start_in_bf16
        end = layers - self.num_layers_at_end_in_bf16
        return first <= layer < end or not self.first_last_layers_bf16


@dataclass(frozen=True)
@group(docs="parallelism", resume="free")
class Parallel:
    """How the work is spread over devices."""

    tensor_model_parallel_size: int = flag(
        1, "number of ranks that split each layer's heads and columns", bound=">0", read="run"
    )
    pipeline_model_parallel_size: int = flag(
        1, "number of pipeline stages, each with a part of the layers", bound=">0", read="run"
    )
    context_parallel_size: int = flag(
        1,
        "number of ranks that split each sequence",
        "--ds-sequence-parallel-size",
        bound=">0",
        docs="parallelism randomness",
        read="run",
    )
    cp_comm_type: Literal["a2a", "p2p"] = flag(
        "a2a",
        "a2a: exchange tokens for heads around attention; p2p: a ring",
        only=("a2a",),
        proof="baseline",
        docs="",
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "layers of a virtual stage, for interleaving",
        bound=">0",
        needs="several pieces on a pipeline rank",
    )
    pipeline_layout: PipelineLayout | None = flag(
        None,
        "layers per stage (6,6) or stage per layer ([0]*6+[1]*6); none: even",
        "--custom-pipeline-stage-id",
        value="FORM",
        read="run",
    )
    pipeline_schedule: Literal["1f1b", "gpipe"] = flag(
        "1f1b",
        "order of passes in a pipeline; 1f1b interleaves virtual stages",
        needs="--pipeline-model-parallel-size above 1",
    )
    sequence_parallel: bool = flag(
        False,
        "split activations outside of matrices over tensor ranks",
        needs="--tensor-model-parallel-size above 1",
    )
    tp_overlap: Literal["auto", "on", "off"] = flag(
        "auto",
        "copy rows between tensor ranks during products; auto: from 16 MiB of rows, where GPUs map memory",
        needs="--sequence-parallel",
    )
    data_parallel_sums: Literal["auto", "copies", "collectives"] = flag(
        "auto",
        "add gradients by copies of symmetric memory or by collectives; auto: copies where GPUs map memory",
        needs=DATA_PARALLEL,
        proof="baseline",
    )
    zero_stage: int = flag(
        0,
        "shard over data-parallel ranks: 1 optimizer state, 2 also gradients, 3 also weights",
        needs=DATA_PARALLEL,
    )
    num_distributed_optimizer_instances: int = flag(
        1,
        "number of groups of data-parallel ranks, each with one complete copy (hybrid sharding)",
        bound=">0",
    )
    deepspeed_config: str | None = flag(
        None,
        "DeepSpeed JSON file for what no flag sets",
        "--deepspeed-config",
        value="FILE",
        docs="",
        proof="baseline",
    )
    remote_device: Literal["none", "cpu", "nvme"] = flag(
        "none",
        "cpu: keep ZeRO 3's shards of weights and optimizer state in host memory",
        only=("none", "cpu"),
        docs="",
    )
    cpu_optimizer: bool = flag(
        False,
        "keep optimizer state and masters in host memory",
        "--optimizer-cpu-offload",
        docs="schedules parallelism",
    )
    num_gpus_per_node: int = flag(
        1, "number of processes to start on this machine, one per device", bound=">0", **START
    )
    num_nodes: int = flag(
        1, "number of machines; give each of them the same command", bound=">0", **START
    )
    node_ips: Machines | None = flag(
        None,
        "comma-separated addresses of the machines, the leading one first",
        value="FORM",
        **START,
    )
    world_size: int | None = flag(
        None,
        "number of ranks (none: as started); any number with --dry-run",
        bound=">0",
        docs="parallelism data",
        read="run",
    )
    rank: int | None = flag(
        None,
        "rank of --world-size that --dry-run sets up, without its device (none: no rank)",
        bound=">=0",
        **START,
    )
    device: str = flag(
        "auto",
        "auto (an accelerator if there is one), cpu, cuda, npu, xpu ..., or one, as cuda:1",
        value="FORM",
        **START,
    )
    distributed_backend: str | None = flag(
        None,
        "nccl, gloo ... (none: the device's)",
        needs="several processes",
        value="FORM",
        **START,
    )
    distributed_timeout_minutes: float = flag(10, "minutes to wait for another rank", **START)
    start_timeout_seconds: float = flag(30, "seconds to wait at the start for all ranks", **START)
    check_replicas_interval: int = flag(
        100,
        "steps between comparisons of the weights that several ranks hold, which saves make too (0: none)",
        "--check-weight-hash-across-dp-replicas-interval",
        bound=">=0",
        docs="",
        proof="baseline",
    )
    local_rank: int | None = flag(
        None,
        "set by launchers; LOCAL_RANK takes precedence",
        "--local_rank",
        hidden=True,
        once=True,
        **START,
    )

    def __post_init__(self) -> None:
        read_forms(self)

    @property
    def model_ranks(self) -> int:
        """Number of ranks that hold one copy of the model together."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    @property
    def offloads(self) -> bool:
        """Whether optimizer state is in host memory."""
        return self.cpu_optimizer or self.remote_device == "cpu"


@dataclass(frozen=True)
@group(docs="checkpoints", resume="free", proof="")
class Checkpoint:
    """Saving and loading."""

    save: str | None = flag(
        None,
        "folder or s3://, gs:// address to save checkpoints to",
        value="DIR",
        remote=True,
        docs="checkpoints storage",
    )
    load: str | None = flag(
        None,
        "folder or s3://, gs:// address to load a checkpoint from, to resume or go on",
        value="DIR",
        word="DIR",
        read="run",
        remote=True,
        docs="checkpoints storage",
    )
    local_dir: str | None = flag(
        None,
        "folder for the local copies of s3:// and gs:// addresses (none: ~/.cache/meshwright)",
        needs="an address such as s3://bucket/run",
        value="DIR",
        read="run",
        docs="storage",
    )
    save_interval: int | None = flag(
        None,
        "steps between checkpoints (none: at the end)",
        "--persistent-save-interval",
        bound=">=0",
        needs="--save",
        docs="tutorial",
    )
    save_on_each_node: Literal["auto", "yes", "no"] = flag(
        "auto",
        "each node keeps its part on a disk of its own: found out at the start (auto), yes, or no: --save must be shared",
        needs="--save",
        docs="checkpoints",
        resume="free",
    )
    save_copies: int = flag(
        1,
        "where nodes keep their parts on disks of their own: how many keep each (2: one may be lost)",
        bound=">0",
        needs="--save",
    )
    save_overwrite: bool = flag(
        False,
        "start a new run, moving the one in --save and --run-dir aside",
        needs="--save or --run-dir",
        once=True,
    )
    verify: Literal["read", "full"] = flag(
        "read", "on load, verify checksums of the chunks read, or of every byte", read="model"
    )
    trust_pickle: bool = flag(
        False,
        "run a checkpoint's code; only if you trust its author",
        needs="--load",
        read="model",
        once=True,
    )
    exit_on_missing_checkpoint: bool = flag(
        False, "fail if --load has no checkpoint", needs="--load", docs=""
    )
    ckpt_format: Literal["native", "torch"] = flag(
        "native", "native, or torch: Megatron-LM's files", needs="--save", proof="baseline fuzz"
    )
    save_hf: str | None = flag(
        None,
        "at the end of training, export the model to this folder in Hugging Face format",
        value="DIR",
    )
    finetune: bool = flag(
        False, "load only the weights and start at step 0", needs="--load", once=True
    )
    no_load_optim: bool = flag(
        False,
        "do not load optimizer state; the step and the schedule continue",
        needs="--load",
        once=True,
    )
    no_save_optim: bool = flag(
        False, "save no optimizer state: smaller, but resuming is not exact", needs="--save"
    )
    use_checkpoint_args: bool = flag(
        False,
        "use a checkpoint's architecture, as without this flag; until there is one, that of the flags",
        once=True,
    )
    save_at_start: bool = flag(
        False, "save a checkpoint before the first step", "--save-init", needs="--save", docs=""
    )
    keep_last: int | None = flag(
        None,
        "number of newest checkpoints to keep (none: all)",
        "--most-recent-k",
        bound=">0",
        needs="--save",
    )
    keep_every: int | None = flag(
        None,
        "also keep checkpoints of steps divisible by this",
        "--save-retain-interval",
        bound=">0",
        needs=("--save", "--keep-last"),
    )
    average_last: int = flag(
        0,
        "read the mean of the weights of this many newest saved steps; train: validate it at the end (0: off)",
        bound=">=0",
        needs=("--save", "--eval-iters above 0"),
        docs="schedules checkpoints",
        read="model",
    )
    weights: Literal["plain", "ema"] = flag(
        "plain",
        "read a checkpoint's weights, or their average that --ema kept; train: only with --finetune",
        read="model",
        once=True,
    )
    keep_best: bool = flag(
        False,
        "save and keep the step with the lowest validation loss so far",
        needs=("--save", "--eval-iters above 0"),
        docs="checkpoints data",
    )
    async_save: bool | None = flag(
        None,
        "save in the background (none: only on accelerators)",
        needs="--save",
        proof="baseline fuzz",
    )
    save_error: Literal["stop", "warn"] = flag(
        "stop",
        "after a full or failing disk: stop, or go on, try again at the next save, and end with 74 if that fails",
        needs="--save",
        docs="",
    )
    run_dir: str | None = flag(
        None,
        "folder or address for config.toml, metrics.jsonl, log.txt and report.html (none: --save)",
        value="DIR",
        docs="",
        remote=True,
    )


@dataclass(frozen=True)
@group(resume="free", proof="")
class Logging:
    """Logging and reports."""

    log_interval: int = flag(100, "steps between log lines", bound=">0", docs="tutorial")
    log_format: Literal["auto", "short", "megatron", "table", "normal", "libai"] = flag(
        "auto",
        "lines on stdout: short; Megatron's log; or that log with each logged step as a row of OneFlow's table, "
        "its name=value form or LiBai's line (auto: short on a terminal and in a notebook, else megatron); "
        "log.txt has Megatron's",
        "--metric-print-format",
    )
    steps_per_print: int | None = flag(
        None,
        "steps between DeepSpeed's lines `steps: ... samples/sec: ...` (none: off)",
        bound=">0",
    )
    progress: bool = flag(True, "show a progress bar on stderr if it is a terminal")
    tensorboard: bool = flag(
        True, "write TensorBoard files, if TensorBoard is installed and the run has a folder"
    )
    tensorboard_dir: str | None = flag(
        None, "folder for TensorBoard files (none: tensorboard/ in the run's folder)", value="DIR"
    )
    tensorboard_log_interval: int = flag(1, "steps between TensorBoard points", bound=">0")
    tensorboard_queue_size: int = flag(
        1000, "TensorBoard points held before they are written", bound=">0"
    )
    log_timers_to_tensorboard: bool = flag(False, "log timers to TensorBoard")
    log_batch_size_to_tensorboard: bool = flag(False, "log the batch size to TensorBoard")
    # The alias has Megatron's own misspelling.
    log_learning_rate_to_tensorboard: bool = flag(
        True, "log the learning rate", "--no-log-learnig-rate-to-tensorboard"
    )
    log_loss_scale_to_tensorboard: bool = flag(True, "log the loss scale to TensorBoard")
    log_validation_ppl_to_tensorboard: bool = flag(
        False, "log validation perplexity to TensorBoard"
    )
    log_memory_to_tensorboard: bool = flag(False, "log device memory to TensorBoard")
    log_world_size_to_tensorboard: bool = flag(False, "log the number of ranks to TensorBoard")
    log_params_norm: bool = flag(False, "log the norm of the parameters")
    log_num_zeros_in_grad: bool = flag(False, "log the number of zeros in the gradients")
    timing_log_level: Literal["0", "1", "2"] = flag(
        "0",
        "timers to log: 1 forward-backward and optimizer, 2 also their parts; each waits for the device",
        docs="memory",
    )
    timing_log_option: Literal["max", "minmax", "all"] = flag(
        "minmax", "maximum over ranks, both ends, or all"
    )
    wandb_project: str | None = flag(None, "Weights & Biases project to log to", value="FORM")
    wandb_exp_name: str | None = flag(
        None, "Weights & Biases run name (none: the name of the run's folder)", value="FORM"
    )
    wandb_save_dir: str | None = flag(
        None, "folder for Weights & Biases files (none: wandb/ in the run's folder)", value="DIR"
    )
    trackio_project: str | None = flag(
        None, "Trackio project to log to, under the name of the run's folder", value="FORM"
    )
    sample_interval: int | None = flag(
        None, "steps between samples of text from the model (none: off)", bound=">0"
    )
    sample_prompts: list[str] = flag(
        [], "beginnings of these samples (none: one from nothing)", needs=SAMPLES, value="WORDS"
    )
    sample_length: int = flag(64, "most new tokens of such a sample", bound=">0", needs=SAMPLES)
    sample_temperature: float = flag(
        0.8,
        "temperature of these samples (0: always the likeliest token)",
        bound=">=0",
        needs=SAMPLES,
    )
    profile: bool = flag(
        False,
        "trace steps --profile-step-start to --profile-step-end with torch's profiler",
        docs="memory",
        needs="--save or --run-dir",
    )
    profile_step_start: int = flag(10, "first step to profile", bound=">0", needs="--profile")
    profile_step_end: int = flag(12, "step before which profiling ends", needs="--profile")
    eval_tasks: EvalTasks | None = flag(None, describe_eval_tasks, value="FORM", docs="evaluation")
    eval_tasks_interval: int | None = flag(
        None,
        "steps between these scores (none: such that they take under 1 % of the time)",
        bound=">0",
        **EVAL_TASKS,
    )
    eval_tasks_device: str | None = flag(
        None,
        "score in a separate process on this device, such as cpu or cuda:1, from a snapshot of the weights "
        "(none: between two steps, on the devices of the run)",
        value="FORM",
        **EVAL_TASKS,
    )
    log_straggler: bool = flag(True, "name ranks that take 1.5 x the median time of a step or more")
    nvidia_smi_at: list[int] = flag(
        [],
        "after these iterations, print nvidia-smi's use and memory of each machine's GPUs",
        bound=">0",
    )

    def __post_init__(self) -> None:
        read_forms(self)


@dataclass(frozen=True)
@group(docs="generation")
class Sampling:
    """How text is generated."""

    temperature: float = flag(1.0, "divide the logits by this (0: as --greedy)", bound=">=0")
    greedy: bool = flag(False, "always take the most likely token")
    top_k: int = flag(0, "sample from the k most likely tokens (0: all)", "--top_k", bound=">=0")
    top_p: float = flag(
        0.0, "sample from the top tokens of this probability (0: all)", "--top_p", bound="[0,1]"
    )
    min_p: float = flag(
        0.0,
        "sample from tokens of at least this share of the likeliest one's probability",
        "--min_p",
        bound="[0,1]",
    )
    repetition_penalty: float = flag(
        1.0,
        "divide logits of tokens in the text by this, and multiply negative ones",
        "--repetition_penalty",
        bound=">0",
    )
    out_seq_length: int = flag(1024, "maximum number of new tokens", "--max-new-tokens", bound=">0")
    recompute: bool = flag(False, "generate without a key/value cache: same text, slower")


@dataclass(frozen=True)
@group(docs="generation")
class TextFlags:
    """Prompts, and where the texts go."""

    prompt: str | None = flag(None, "print a continuation of this text", value="WORDS")
    prompts: str | None = flag(
        None,
        "continue each line of this file, or each JSON line {prompt: TEXT, max_tokens: 9, ...}; - is stdin",
        value="FILE",
    )
    output: str | None = flag(
        None, "file for the texts (none: standard output)", value="PATH", docs="tutorial"
    )
    json: bool = flag(False, "write JSON lines with tokens; the default for *.jsonl", docs="data")
    num_return_sequences: int = flag(
        1, "number of continuations of each prompt", "--num_return_sequences", bound=">0"
    )
    stop: list[str] = flag(
        [], "end a text before any of these strings; \\n and \\t stand for characters", value="NAME"
    )
    logprobs: int | None = flag(
        None,
        "with --json: log-probabilities of the tokens, and of this many likeliest ones",
        bound=">=0",
    )
    beam_width: int | None = flag(
        None,
        "search for the likeliest texts, keeping this many candidates",
        "--num-beams",
        bound=">0",
    )
    length_penalty: float | None = flag(
        None, "power of the length by which --beam-width divides the log-probability (none: 1)"
    )
    interactive: bool = flag(
        False, "read prompts interactively; the default if no other flag gives them", docs=""
    )
    dialogue: Literal["plain", "megatron"] = flag(
        "plain", "form of --interactive: plain, or Megatron's script's", docs=""
    )
    num_samples: int = flag(
        0, "number of unconditional samples to write to --genfile (0: prompts)", bound=">=0"
    )
    genfile: str | None = flag(None, "output file of --num-samples, in JSON lines", value="FILE")
    sample_input_file: str | None = flag(
        None,
        "file with one prompt per line; the output is in Megatron's form",
        value="FILE",
        docs="",
    )
    sample_output_file: str | None = flag(
        None,
        "file for the continuations (none: the name of the input file + .out)",
        value="FILE",
        docs="",
    )


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a training run."""

    model: Model = Model()
    tokenizer: TokenizerFlags = TokenizerFlags()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()

    @property
    def world(self) -> int:
        """Number of ranks: as started, or as OneFlow's flags will start them."""
        p = self.parallel
        return p.world_size or p.num_gpus_per_node * p.num_nodes

    @property
    def dp(self) -> int:
        """Number of data-parallel groups, which read different samples."""
        return max(1, self.world // max(1, self.parallel.model_ranks))

    @property
    def chunks(self) -> int:
        """Number of stages on each pipeline rank; 1 without interleaving."""
        p = self.parallel
        per_chunk = p.pipeline_model_parallel_size * (p.num_layers_per_virtual_pipeline_stage or 0)
        if not per_chunk:
            return 1
        return max(1, (self.model.num_layers or 0) // per_chunk)

    @functools.cached_property
    def stages(self) -> list[int]:
        """Layers of each stage in model order; stage s is on rank s modulo their number."""
        p = self.parallel
        return split_layers(
            p.pipeline_layout,
            self.model.num_layers or 0,
            p.pipeline_model_parallel_size * self.chunks,
        )

    @functools.cached_property
    def batch_schedule(self) -> list[tuple[int, int]]:
        """The consumed samples from which a global batch counts, and that batch; or nothing."""
        schedule = self.training.step_batch_size_schedule
        if schedule is None:
            return []
        length = self.data.seq_length or 1
        return [(tokens // length, batch) for tokens, batch in schedule.stages]

    @property
    def batches(self) -> list[int]:
        """Numbers of samples by which every global batch can be divided if these can."""
        # A ramp-up begins with its first number and grows by its second.
        numbers = {self.global_batch, *self.training.rampup_batch_size[:2]}
        numbers.update(batch for _, batch in self.batch_schedule)
        return sorted(numbers)

    @property
    def micro_batch(self) -> int:
        """Samples of one forward pass of a rank; `auto` counts as 1."""
        t = self.training
        if t.micro_batch_size is None and t.global_batch_size and t.num_accumulation_steps:
            return max(1, t.global_batch_size // (t.num_accumulation_steps * self.dp))
        # A start that measures it puts the number found in the place of auto.
        return 1 if t.micro_batch_size in (None, "auto") else int(t.micro_batch_size)

    @property
    def global_batch(self) -> int:
        """Samples of one step over all ranks, after the ramp-up."""
        t = self.training
        return t.global_batch_size or self.micro_batch * (t.num_accumulation_steps or 1) * self.dp

    def sample_length(self, step: int) -> int:
        """Return the tokens that a step, of which the first is 1, reads of each sample."""
        schedule = self.training.seq_length_schedule
        return (self.data.seq_length or 1) if schedule is None else schedule.length(step)

    @property
    def sample_lengths(self) -> list[int]:
        """Every length that samples have during the run, the last one last."""
        schedule = self.training.seq_length_schedule
        if schedule is None:
            return [self.data.seq_length or 1]
        return [length for _, length in schedule.stages]

    @property
    def sample_lengths_end(self) -> int:
        """The steps after which samples have the last of their lengths."""
        schedule = self.training.seq_length_schedule
        return 0 if schedule is None else schedule.stages[-1][0]

    def tokens_of(self, samples: float) -> float:
        """Return the tokens that the first samples of the run give."""
        schedule = self.training.seq_length_schedule
        if schedule is None:
            return samples * (self.data.seq_length or 1)
        # Steps have one size: a batch that grows is refused beside the schedule.
        return self.global_batch * schedule.tokens(samples / self.global_batch)

    def samples_with(self, tokens: int) -> int:
        """Return the samples from the run's beginning on that have so many tokens, rounded up."""
        samples = max(0, int(self.in_samples(None, tokens=tokens)) - 1)
        # Up to here the number may be off by a rounding; those of whole samples are integers.
        while round(self.tokens_of(samples)) < tokens:
            samples += 1
        return samples

    def micro_batches(self, size: int) -> int:
        """Return the forward passes of one rank in a step of `size` samples."""
        return size // (self.micro_batch * self.dp)

    def batch(self, consumed: int) -> int:
        """Return the samples of the step after `consumed` ones: the ramp-up, by Megatron's rule."""
        if self.batch_schedule:
            return next(
                batch for start, batch in reversed(self.batch_schedule) if consumed >= start
            )
        if not self.training.rampup_batch_size:
            return self.global_batch
        # The increments from START to the full batch are spread evenly over SAMPLES.
        start, increment, samples = self.training.rampup_batch_size
        increments = (self.global_batch - start) // increment
        if consumed > samples or not increments:
            return self.global_batch
        # In Megatron's order of operations: the rounding decides at which sample a batch grows.
        grown = int(consumed / (samples / increments)) * increment
        return min(start + grown, self.global_batch)

    @property
    def lengths(self) -> list[str]:
        """Return the settings that decide the length of the run; it needs exactly one.

        Megatron-DeepSpeed's scripts give samples and tokens: those that are used up first decide.
        With --seq-length-schedule they may give steps and tokens too.
        """
        t = self.training
        given = [name for name in LENGTHS if getattr(t, name) is not None]
        if not isinstance(t.train_tokens, int):
            return given
        if given == ["train_samples", "train_tokens"]:
            return ["train_samples" if self.samples == t.train_samples else "train_tokens"]
        if given == ["train_iters", "train_tokens"] and t.seq_length_schedule is not None:
            return ["train_iters" if self.samples is None else "train_tokens"]
        return given

    @functools.cached_property
    def samples(self) -> int | None:
        """Total number of samples, or None if the length is given in steps."""
        t = self.training
        if not isinstance(t.train_tokens, int):
            return t.train_samples
        if t.seq_length_schedule is None:
            samples = t.train_tokens // (self.data.seq_length or 1)
        else:
            # Samples of different lengths are counted by whole steps.
            steps = math.floor(t.seq_length_schedule.steps(t.train_tokens / self.global_batch))
            samples = steps * self.global_batch
            if t.train_iters is not None and t.train_iters <= steps:
                return None
        return samples if t.train_samples is None else min(samples, t.train_samples)

    @functools.cached_property
    def steps(self) -> int:
        """Total number of steps; an incomplete last batch is dropped."""
        if self.samples is None:
            return self.training.train_iters or 0
        steps = consumed = 0
        # While the batch grows, steps are counted one by one.
        size = self.batch(0)
        while size < self.global_batch and consumed + size <= self.samples:
            consumed += size
            steps += 1
            size = self.batch(consumed)
        return steps + (self.samples - consumed) // self.global_batch

    def is_over(self, step: int, consumed: int) -> bool:
        """Return whether no step is left after so many steps and samples."""
        if self.samples is None:
            return step >= self.steps
        return consumed + self.batch(consumed) > self.samples

    def in_samples(
        self, steps: int | None, samples: int | None = None, tokens: float | None = None
    ) -> float:
        """Return a length of the schedule in samples, from whichever unit is given."""
        if samples:
            return samples
        lengths = self.training.seq_length_schedule
        if tokens and lengths is not None:
            return self.global_batch * lengths.steps(tokens / self.global_batch)
        if tokens and tokens >= (self.data.seq_length or 1):
            return tokens // (self.data.seq_length or 1)
        # Steps count with the batch after the ramp-up.
        return (steps or 0) * self.global_batch

    @property
    def decay_samples(self) -> float:
        o = self.optimizer
        given = self.in_samples(o.lr_decay_iters, o.lr_decay_samples, o.lr_decay_tokens)
        return given or self.samples or self.steps * self.global_batch

    @property
    def warmup_samples(self) -> float:
        o = self.optimizer
        if o.lr_warmup_fraction is not None:
            if self.decays_by_tokens:
                tokens = o.lr_warmup_fraction * (o.lr_decay_tokens or 0)
                return self.in_samples(None, tokens=tokens)
            return o.lr_warmup_fraction * self.decay_samples
        return self.in_samples(o.lr_warmup_iters, o.lr_warmup_samples, o.lr_warmup_tokens)

    @property
    def decays_by_tokens(self) -> bool:
        """Whether the learning rate falls with tokens, whose number differs from step to step."""
        return bool(self.training.seq_length_schedule and self.optimizer.lr_decay_tokens)

    @property
    def wsd_samples(self) -> float:
        return self.in_samples(
            self.optimizer.lr_wsd_decay_iters, self.optimizer.lr_wsd_decay_samples
        )


def flags_with(config: type, facet: str, *values: object) -> tuple[str, ...]:
    """Return the names of the settings whose facet has one of these values."""
    fields = config_fields(config).items()
    return tuple(name for name, (_, f, _) in fields if f.metadata[facet] in values)


# Settings that the weights were trained with; no later run may change them.
ARCHITECTURE = flags_with(TrainConfig, "resume", "refuse", "tune")
# Settings that a checkpoint states and a run that loads it takes over, unless a flag gives another.
STATED = flags_with(TrainConfig, "inherited", True)
# Settings that decide a property together, or by a default: the property is compared.
OUTCOME = {
    f.name: f.metadata["outcome"] for f in dataclasses.fields(Model) if f.metadata["outcome"]
}
# Options of the network, at the values of networks without them: what a checkpoint of an earlier
# release does not record.
ABSENT = {
    f.name: f.metadata["absent"]
    for f in dataclasses.fields(Model)
    if f.metadata["absent"] is not MISSING
}
# Those that weights compute with: another program's network has none unless its reader finds one.
ABSENT_COMPUTED = {
    f.name: ABSENT[f.name]
    for f in dataclasses.fields(Model)
    if f.name in ABSENT and not f.metadata["only_trains"]
}


def options_of(m: Model) -> list[str]:
    """Return the options that this network computes with and others need not know.

    One that needs another option, as the list of windows does, is a detail of that one.
    """
    fields = Model.__dataclass_fields__
    flags = {spelling(name) for name in ABSENT}
    out = []
    for name, value in ABSENT_COMPUTED.items():
        is_detail = not flags.isdisjoint(fields[name].metadata["needs"])
        if is_detail or getattr(m, name) == value:
            continue
        # A switch of one kind of norm changes nothing in a network of the other kind.
        outcome = OUTCOME.get(name, name)
        if getattr(m, outcome) != getattr(dataclasses.replace(m, **{name: value}), outcome):
            out.append(name)
    return out


# Settings in several units, and settings that take another's value where they are left open,
# with the amount that is compared.
AMOUNTS: dict[str, Callable[[TrainConfig], Any]] = {
    **dict.fromkeys(("train_iters", "train_samples", "train_tokens"), lambda c: c.steps),
    **dict.fromkeys(
        ("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens"), lambda c: c.decay_samples
    ),
    **dict.fromkeys(
        ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens"),
        lambda c: c.warmup_samples,
    ),
    "max_position_embeddings": lambda c: c.model.max_position_embeddings or c.data.seq_length,
    "embedding_dropout": lambda c: c.model.dropout_of_embeddings,
    "run_dir": lambda c: c.checkpoint.run_dir or c.checkpoint.save,
}
# Settings that complete what a checkpoint does not say of itself.
DESCRIBING = {*ARCHITECTURE, *flags_with(TrainConfig, "read", "model")} | {
    f.name for f in dataclasses.fields(TokenizerFlags)
}
# Settings that matter to the commands that read a trained model.
READING = {*ARCHITECTURE, *flags_with(TrainConfig, "read", "model", "run")}


@dataclass(frozen=True)
class ReadConfig:
    """Base of the settings of commands that read a trained model; each adds groups of its own."""

    model: Model = Model()
    tokenizer: TokenizerFlags = TokenizerFlags()
    data: Data = Data()
    training: Training = Training()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()


@dataclass(frozen=True)
class GenerateConfig(ReadConfig):
    """Settings of `meshwright generate`."""

    texts: TextFlags = TextFlags()
    sampling: Sampling = Sampling()
    logging: Logging = Logging()

    # Megatron's generation takes every training flag; these are the ones that matter here.
    USES: ClassVar[frozenset[str]] = frozenset(
        {
            f.name
            for group in (TextFlags, Sampling, TokenizerFlags)
            for f in dataclasses.fields(group)
        }
        | {*READING, "seed", "deterministic_mode"}
    )
