"""LiBai's settings as flags of `meshwright train`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from meshwright.base.errors import UserError
from meshwright.base.hints import did_you_mean
from meshwright.config.expressions import read_expression
from meshwright.config.flags import parse_settings
from meshwright.config.schema import TrainConfig
from meshwright.data.sets import samples_of_epochs

TABLES = ("model", "train", "optim", "dataloader", "tokenization", "graph")  # LiBai reads no others
# Table -> key=flag that takes the value; a flag without = has the key's name.
_FLAGS = {
    "model.cfg": """num_layers hidden_layers=num-layers hidden_size ffn_hidden_size intermediate_size=ffn-hidden-size
        num_attention_heads layernorm_epsilon max_seq_length=max-position-embeddings max_position_embeddings
        embedding_dropout_prob=embedding-dropout attention_dropout_prob=attention-dropout
        output_dropout_prob=hidden-dropout initializer_range=init-method-std""",
    "train": """train_micro_batch_size=micro-batch-size global_batch_size num_accumulation_steps seed
        train_iter=train-iters log_period=log-interval evaluation.eval_period=eval-interval
        dist.tensor_parallel_size=tensor-model-parallel-size
        dist.pipeline_parallel_size=pipeline-model-parallel-size""",
    "optim": "lr weight_decay eps=adam-eps momentum=sgd-momentum params.clip_grad_max_norm=clip-grad",
    "tokenization": "tokenizer.vocab_file=vocab-file tokenizer.merges_file=merge-file make_vocab_size_divisible_by",
    "dataloader": "train.num_workers=num-workers",
}
FLAGS = {
    f"{table}.{key}": "--" + (flag or key).replace("_", "-")
    for table, words in _FLAGS.items()
    for key, _, flag in (word.partition("=") for word in words.split())
}
# Reason -> keys whose other values would give another result, and the value.
_FIXED: dict[str, dict[str, Any]] = {
    "the last matrices of a layer are always drawn smaller": {
        "model.cfg.use_scaled_init_for_output_weights": True
    },
    "AdamW's bias correction is always on": {"optim.do_bias_correction": True},
    "the gradient is clipped by its Euclidean norm": {"optim.params.clip_grad_norm_type": 2},
    "only matrices decay": {
        "optim.params.weight_decay_norm": 0,
        "optim.params.weight_decay_bias": 0,
    },
    "the length is train.train_iter or train.train_epoch": {"train.train_samples": None},
    "--resume goes on where the run ended": {
        "train.start_iter": 0,
        "train.consumed_train_samples": 0,
    },
    "give steps: train.checkpointer.period, train.evaluation.eval_period": {
        "train.checkpointer.save_model_after_n_epoch": None,
        "train.evaluation.eval_after_n_epoch": None,
    },
    "the warm-up is linear": {"train.scheduler.warmup_method": "linear"},
    "saves and validations are counted in steps": {
        "train.checkpointer.save_model_after_n_epoch": None,
        "train.evaluation.eval_after_n_epoch": None,
    },
}
FIXED = {key: (value, why) for why, keys in _FIXED.items() for key, value in keys.items()}
# Reason -> keys that change nothing here.
_IDLE = {
    "the fastest kernels are chosen": """model.cfg.bias_gelu_fusion model.cfg.bias_dropout_fusion
        model.cfg.scale_mask_softmax_fusion model.cfg.scale_mask_softmax_dropout_fusion
        model.cfg.multihead_attention_fusion""",
    "attention scores are computed in a range that needs no scaling": "model.cfg.apply_query_key_layer_scaling",
    "train.amp.enabled decides": "model.cfg.amp_enabled",
    "the size of the tokenizer's vocabulary is taken": "model.cfg.vocab_size",
    "the devices decide": "train.dist.data_parallel_size train.dist.num_nodes train.dist.num_gpus_per_node",
    "NCCL decides": "train.nccl_fusion_threshold_mb train.nccl_fusion_max_ops train.rdma_enabled",
    "batches go to the device of the rank": "train.input_placement_device",
    "validation prints loss and perplexity, of its first samples": """train.evaluation.evaluator
        train.evaluation.eval_metric train.evaluation.eval_mode train.consumed_valid_samples""",
    "there is one mode, and the layout is given by its sizes": "graph",
    "preprocessing decides": "tokenization.append_eod",
    "LiBai's GPT reads embedding_, attention_ and output_dropout_prob": """
        model.cfg.hidden_dropout_prob model.cfg.attention_probs_dropout_prob""",
    "LiBai's GPT reads hidden_size and ffn_hidden_size": "model.cfg.intermediate_size model.cfg.head_size",
    "it is for BERT": "tokenization.tokenizer.do_lower_case tokenization.tokenizer.do_chinese_wwm",
    "the length of the training decides": "dataloader.train.train_val_test_num_samples",
    "it is the only one": "dataloader.train._target_ optim.params._target_ tokenization._target_",
}
IDLE = {key: why for why, keys in _IDLE.items() for key in keys.split()}
# beside the defaults
READ = (
    "train.resume",
    "train.scheduler.eta_min",
    "train.scheduler.end_learning_rate",
    "dataloader.test",
)
# Style, and the name and default of the last rate: LiBai's alpha is a fraction of the first.
SCHEDULES = {
    "WarmupCosineLR": ("cosine", "alpha", 0.0),
    "WarmupCosineAnnealingLR": ("cosine", "eta_min", 0.0),
}
SCHEDULES["WarmupPolynomialLR"] = ("linear", "end_learning_rate", 1e-4)
DATASET = {"_target_", "name", "data_prefix", "indexed_dataset", "max_seq_length", "seed"}
TEST_DATASET = {*DATASET, "max_num_samples"}
TEST_LOADER = {"_target_", "dataset", "test_batch_size", "num_workers", "seed"}
TESTS_ARE = (
    "each set of dataloader.test has a validation loss of its own, of as many samples as the others"
)


def to_flags(
    config: dict[str, Any], defaults: dict[str, Any], world: int
) -> tuple[list[str], list[str]]:
    """Return the flags of a resolved config, and notes on settings without effect."""
    settings, usual = (
        dict(flattened({t: c.get(t, {}) for t in TABLES})) for c in (config, defaults)
    )
    settings = {
        key.replace("optim.parameters.", "optim.params."): value for key, value in settings.items()
    }
    if odd := of_other_kinds(settings, usual):
        raise UserError("\n  ".join(odd))
    sizes = {
        key: settings[key]
        for key in (f"train.dist.{way}_parallel_size" for way in ("tensor", "pipeline"))
    }
    if small := [f"{key} {size} must be above 0" for key, size in sizes.items() if size < 1]:
        raise UserError("\n  ".join(small))
    copies = max(1, world // math.prod(sizes.values()))
    given, wrong, notes = dict[str, str](), list[str](), dict[str, None]()
    if epochs := settings.pop("train.train_epoch", 0):
        length, steps = settings["train.train_iter"] or 0, steps_of(epochs, settings, copies)
        settings["train.train_iter"] = max(length, steps)
        said = (
            f"train.train_iter, {length} steps, and train.train_epoch, {steps} steps of this data"
        )
        notes[f"the length is the larger of {said}"] = None
    for key, value in settings.items():
        ignored = idle_name(key)
        if flag := FLAGS.get(key):
            if value is not None and given.setdefault(flag, str(value)) != str(value):
                wrong.append(
                    f"{key} is {value}, but {flag} is {given[flag]} by another key; give one"
                )
        elif key in FIXED:
            if value != FIXED[key][0]:
                wrong.append(f"{key}={value!r} is refused: {FIXED[key][1]}; give {FIXED[key][0]!r}")
        elif ignored:
            if usual.get(key, value if key.endswith("_target_") else None) != value:
                notes[f"{ignored} has no effect: {IDLE[ignored]}"] = None
        elif key not in (known := {*usual, *READ}):
            wrong.append(
                f"{key} is no setting here{did_you_mean(key, [*known, *FLAGS, *FIXED, *IDLE], 0.8)}"
            )
    if wrong:
        raise UserError("\n  ".join(wrong))
    out = [word for pair in given.items() for word in pair]
    out += model(settings) + update(settings, copies) + training(settings, copies) + data(settings)
    if settings.get("dataloader.test"):
        notes[TESTS_ARE] = None
    if settings.get("train.warmup_ratio"):
        notes["the decay starts after the warm-up, as Megatron's; LiBai's starts at step 0"] = None
    return out, list(notes)


def of_other_kinds(settings: dict[str, Any], usual: dict[str, Any]) -> list[str]:
    """Return what to say of texts where LiBai's config has a number or a switch."""
    kinds = {bool: "True or False", int: "a number", float: "a number"}
    return [
        f"{key}={settings[key]} must be {kinds[type(value)]}, such as {value}"
        for key, value in usual.items()
        if type(value) in kinds and isinstance(settings.get(key), str) and not idle_name(key)
    ]


def idle_name(key: str) -> str | None:
    """Return the entry of the settings without effect that a key belongs to."""
    return next((k for k in IDLE if key == k or key.startswith(f"{k}.")), None)


def target(settings: dict[str, Any], key: str, known: dict[str, Any]) -> Any:
    name = str(settings.get(key)).rpartition(".")[2]
    if name not in known:
        raise UserError(f"{key} {name} is refused; known are {', '.join(known)}")
    return known[name]


def model(s: dict[str, Any]) -> list[str]:
    target(s, "model._target_", {"GPTForPreTraining": "gpt"})
    target(s, "tokenization.tokenizer._target_", {"GPT2Tokenizer": "gpt2"})
    layers = s.get("model.cfg.num_layers", s.get("model.cfg.hidden_layers"))
    stages, size = (
        s.get("train.dist.custom_pipeline_stage_id"),
        s["train.dist.pipeline_parallel_size"],
    )
    if (other := s.get("train.dist.pipeline_num_layers")) not in (None, layers):
        raise UserError(
            f"train.dist.pipeline_num_layers {other!r} must be model.cfg.num_layers {layers!r}"
        )
    # LiBai's: fewer on the last stage
    if stages is None and size >= 4 and layers >= 8 and layers % size == 0:
        many = layers + min(size - 1, layers // size)
        counts = [many // size + (n >= size - many % size) for n in range(size)]
        stages = [n for n, count in enumerate(counts) for _ in range(count)][:layers]
    out = ["--apply-residual-connection-post-layernorm"] * bool(
        s.get("model.cfg.apply_residual_post_layernorm")
    )
    out += ["--pipeline-layout", str(stages)] if stages and size > 1 else []
    return [*out, "--no-bias-gelu-fusion"]  # OneFlow's GELU is the exact one


def update(s: dict[str, Any], copies: int) -> list[str]:
    out = ["--optimizer", target(s, "optim._target_", {"AdamW": "adamw", "SGD": "sgd"})]
    if "optim.betas" in s:
        out += ["--adam-beta1", str(s["optim.betas"][0]), "--adam-beta2", str(s["optim.betas"][1])]
    style, key, low = target(s, "train.scheduler._target_", SCHEDULES)
    if other := [k for _, k, _ in SCHEDULES.values() if k != key and f"train.scheduler.{k}" in s]:
        raise UserError(
            f"train.scheduler.{other[0]} is no setting of this schedule, whose last rate is {key}"
        )
    low = s.get(f"train.scheduler.{key}", low) * (s["optim.lr"] if key == "alpha" else 1)
    out += ["--lr-decay-style", style, "--min-lr", f"{low:.10g}"]
    if warmup := math.ceil(s["train.train_iter"] * s.get("train.warmup_ratio", 0)):
        first = s["optim.lr"] * s.get("train.scheduler.warmup_factor", 0)
        out += ["--lr-warmup-iters", str(warmup), "--lr-warmup-init", f"{first:.10g}"]
    if s["train.amp.enabled"]:
        out += f"--fp16 --initial-loss-scale {65536 * copies} --loss-scale-window 2000 --hysteresis 1".split()
    return out


def training(s: dict[str, Any], copies: int) -> list[str]:
    folder = str(s["train.output_dir"])
    out = ["--run-dir", folder, "--log-format", "libai"]
    if s["train.checkpointer.period"]:
        out += ["--save", folder, "--save-interval", str(s["train.checkpointer.period"])]
        out += ["--keep-last", str(s["train.checkpointer.max_to_keep"])]
    again = ["--load", folder, "--exit-on-missing-checkpoint"] if s.get("train.resume") else []
    weights = Path(s["train.load_weight"] or "")
    if weights.name == "model_final" and not weights.exists():
        weights = weights.parent  # where the last step of a run lies here
    start = ["--load", str(weights), "--finetune"] if s["train.load_weight"] else []
    out += again or [*start, "--save-overwrite"]
    out += ["--recompute-granularity", "full"] if s["train.activation_checkpoint.enabled"] else []
    zero = s["train.zero_optimization.stage"] if s["train.zero_optimization.enabled"] else 0
    out += ["--zero-stage", str(zero)] if zero else []
    samples = s["train.evaluation.eval_iter"] * s["train.test_micro_batch_size"] * copies
    batches = math.ceil(samples / batch_of(s, copies))
    return [*out, "--eval-iters", str(batches if s["train.evaluation.enabled"] else 0)]


def batch_of(s: dict[str, Any], copies: int) -> int:
    """Return the samples of one step."""
    micro, number = s["train.train_micro_batch_size"] or 1, s["train.num_accumulation_steps"] or 1
    return int(s["train.global_batch_size"] or micro * copies * number)


def steps_of(epochs: float, s: dict[str, Any], copies: int) -> int:
    """Return the steps of so many readings of the training data."""
    config = parse_settings(TrainConfig, [*data(s), "--train-epochs", "1"], "", check=False).config
    return math.ceil(samples_of_epochs(config) * epochs / batch_of(s, copies))


def data(s: dict[str, Any]) -> list[str]:
    sets, splits = s["dataloader.train.dataset"], s["dataloader.train.splits"]
    weights = s.get("dataloader.train.weights") or [1.0]
    if not sets or any(split != splits[0] for split in splits) or len(weights) != len(sets):
        raise UserError(
            "dataloader.train needs a dataset, a weight for each, and the same splits for all"
        )
    if more := {key for one in sets for key in one} - DATASET:
        raise UserError(f"dataloader.train.dataset: {', '.join(sorted(more))} is no setting here")
    words = [
        str(x)
        for w, one in zip(weights, sets, strict=True)
        for x in (w, one["indexed_dataset"]["data_prefix"])
    ]
    words = ["--data-path", *(words[1:] if len(sets) == 1 else words)]
    return [
        *words,
        "--split",
        ",".join(map(str, splits[0])),
        "--seq-length",
        str(sets[0]["max_seq_length"]),
        *test_sets(s.get("dataloader.test") or [], sets[0]["max_seq_length"]),
    ]


def test_sets(loaders: list[dict[str, Any]], length: int) -> list[str]:
    """Return the flags of the sets beside those that the training's files are divided into."""
    groups = []
    for number, loader in enumerate(loaders):
        where = f"dataloader.test[{number}]"
        dataset = loader["dataset"]
        if more := (loader.keys() - TEST_LOADER) | (dataset.keys() - TEST_DATASET):
            raise UserError(f"{where}: {', '.join(sorted(more))} is no setting here")
        if dataset["max_seq_length"] != length:
            raise UserError(
                f"{where}.dataset.max_seq_length {dataset['max_seq_length']} must be the training's {length}"
            )
        groups.append(f"test{number}: {dataset['indexed_dataset']['data_prefix']}")
    return ["--valid-weighted-split-paths", *groups] if groups else []


def override(config: dict[str, Any], words: Collection[str]) -> None:
    """Apply words such as `train.amp.enabled=True` or `train.sets[0].path=a/b` to tables.

    A value is an expression without names, true, false or null, or else a text. The first part of
    the key must exist; further tables are made.
    """
    for word in words:
        key, _, text = word.lstrip("+").partition("=")
        parts = re.sub(r"\[(\d+)\]", r".\1", key).split(".")
        names: list[Any] = [
            int(name) if re.fullmatch("[0-9]{1,6}", name) else name for name in parts
        ]
        if len(names) < 2:
            raise UserError(f"{word} is not a setting; give TABLE.KEY=VALUE")
        table: Any = config
        for depth, name in enumerate(names[:-1]):
            if isinstance(table, list):
                table = table[name] if name in range(len(table)) else None
            else:
                table = table.setdefault(name, {}) if depth else table.get(name)
            if not isinstance(table, dict | list):
                raise UserError(f"{word}: no table {'.'.join(map(str, names[: depth + 1]))}")
        if isinstance(table, list) and names[-1] not in range(len(table)):
            raise UserError(f"{word}: the list has no item {names[-1]}")
        try:
            table[names[-1]] = {"true": True, "false": False, "null": None}[text.lower()]
        except KeyError:
            try:
                table[names[-1]] = read_expression(text)
            except ValueError:
                table[names[-1]] = text


def flattened(table: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values; lists are values."""
    for key, item in table.items():
        if isinstance(item, dict):
            yield from flattened(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
