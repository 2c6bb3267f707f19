"""Every number of every kind of file is replaced by lies: none costs memory or time.

Each case is an honest file in which one number is another. It is refused with a reason, or opened
where the number does not matter. The suite takes a sample of all pairs of number and lie, the long
tier takes all.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import copy
import json
import math
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import binary_files
import deepspeed_files
import megatron_files
import pytest
import sentencepiece
import torch
import yaml
from corpora import write_pair
from measured import in_child, outcome_of
from safetensors.torch import save_file
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers

from meshwright.checkpoint import claims, loading, manifests, native
from meshwright.checkpoint.formats import HUGGING_FACE
from meshwright.checkpoint.pickle import pickles
from meshwright.checkpoint.steps import StepLocation
from meshwright.compat.formats.table import (
    DEEPSPEED,
    LITGPT,
    MEGATRON,
    NANOGPT,
    ONEFLOW,
    TORCH_DIST,
    UNIVERSAL,
)
from meshwright.config.schema import TokenizerFlags
from meshwright.data import tokenizers
from meshwright.data.files.indexed import Indexed

pytestmark = pytest.mark.whole

LIES: dict[str, Any] = {
    "-5": -5,
    "2.5": 2.5,
    "1e9": 10**9,
    "1e17": 10**17,
    "2^16 - 1": (1 << 16) - 1,
    "2^32 - 1": (1 << 32) - 1,
    "2^62": 1 << 62,
    "2^64 - 1": (1 << 64) - 1,
    "1e30": 10**30,
    "1e308": 1e308,
    "nan": math.nan,
    "a text": "9" * 100_000,
    "a list": [1] * 20_000,
    "none": None,
    "a table": {"a": 1},
}
SAMPLE = 41  # one case of so many is taken; without a common factor with the number of LIES
MEMORY, SECONDS = 500 << 20, 10.0
H, V, P, F = 4, 8, 6, 8  # width, ids, positions and width within the MLP


class Honest(NamedTuple):
    kind: str  # the name of a format, or of another kind of file
    write: Callable[[Path], Path]  # the folder that is opened
    file: str  # in the folder, with the numbers
    read: Callable[[Path], Any] = partial(torch.load, weights_only=False)
    save: Callable[[Any, Path], Any] = torch.save
    within: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def open(self, folder: Path) -> Any:
        if self.kind in OPENERS:
            return OPENERS[self.kind](folder / self.file)
        return loading.open_step(StepLocation(self.kind, folder, 1, folder))


def gpt2(folder: Path, rows: str = "in, out") -> dict[str, torch.Tensor]:
    layer = {"ln_1": (H,), "attn.c_attn": (H, 3 * H), "attn.c_proj": (H, H), "ln_2": (H,)}
    layer |= {"mlp.c_fc": (H, F), "mlp.c_proj": (F, H)}
    out = {"transformer.wte.weight": torch.ones(V, H), "transformer.wpe.weight": torch.ones(P, H)}
    for name, shape in (
        {f"h.0.{name}": shape for name, shape in layer.items()} | {"ln_f": (H,)}
    ).items():
        out[f"transformer.{name}.weight"] = torch.ones(shape if rows == "in, out" else shape[::-1])
        out[f"transformer.{name}.bias"] = torch.ones(shape[-1])
    return out


def write_hugging_face(config: dict[str, Any], folder: Path) -> Path:
    if config["model_type"] == "gpt2":
        tensors = gpt2(folder)
    else:
        shapes = {
            "self_attn.q_proj": (H, H),
            "self_attn.k_proj": (2, H),
            "self_attn.v_proj": (2, H),
        }
        shapes |= {
            "self_attn.o_proj": (H, H),
            "mlp.gate_proj": (F, H),
            "mlp.up_proj": (F, H),
            "mlp.down_proj": (H, F),
        }
        shapes |= {"input_layernorm": (H,), "post_attention_layernorm": (H,)}  # type: ignore[dict-item]
        tensors = {
            f"model.layers.0.{name}.weight": torch.ones(shape) for name, shape in shapes.items()
        }
        tensors |= {
            "model.embed_tokens.weight": torch.ones(V, H),
            "model.norm.weight": torch.ones(H),
        }
        tensors["lm_head.weight"] = torch.ones(V, H)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_litgpt(folder: Path) -> Path:
    shapes = {
        "norm_1": (H,),
        "norm_2": (H,),
        "attn.qkv": (H + 4, H),
        "attn.proj": (H, H),
        "mlp.fc_1": (F, H),
    }
    shapes |= {"mlp.fc_2": (F, H), "mlp.proj": (H, F)}
    tensors = {
        f"transformer.h.0.{name}.weight": torch.ones(shape) for name, shape in shapes.items()
    }
    tensors |= {"transformer.wte.weight": torch.ones(V, H), "lm_head.weight": torch.ones(V, H)}
    torch.save(tensors | {"transformer.ln_f.weight": torch.ones(H)}, folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(yaml.dump(LIT))
    return folder


def write_nanogpt(folder: Path) -> Path:
    model = gpt2(folder, "out, in")
    args = {
        "n_layer": 1,
        "n_head": 2,
        "n_embd": H,
        "block_size": P,
        "bias": True,
        "vocab_size": V,
        "dropout": 0.0,
    }
    decayed = [name for name, t in model.items() if t.ndim > 1]
    order = [model[name] for name in (*decayed, *(name for name in model if name not in decayed))]
    state = {
        n: {"step": torch.tensor(3.0), "exp_avg": t, "exp_avg_sq": t} for n, t in enumerate(order)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    groups = [
        group | {"params": list(range(len(decayed)))},
        group | {"params": list(range(len(decayed), len(order)))},
    ]
    config = {
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "min_lr": 1e-4,
    }
    config |= {
        "warmup_iters": 2,
        "lr_decay_iters": 7,
        "max_iters": 8,
        "decay_lr": True,
        "grad_clip": 1.0,
    }
    tree = {
        "model": model,
        "model_args": args,
        "config": config,
        "iter_num": 3,
        "best_val_loss": 1.0,
    }
    torch.save(tree | {"optimizer": {"state": state, "param_groups": groups}}, folder / "ckpt.pt")
    return folder


def write_oneflow(folder: Path) -> Path:
    for theirs, tensor in gpt2(folder).items():
        name = (
            re.sub(r"^transformer\.(?:h\.0\.)?", "", theirs)
            .replace(".weight", "-weight")
            .replace(".bias", "-bias")
        )
        name = re.sub(r"^(attn|mlp)\.", r"\1-", name).replace("ln_", "layernorm_")
        name = name.removesuffix("-weight") if name.startswith("w") else name
        path = folder / f"model-{'h0-' if '.h.0.' in theirs else ''}{name}"
        path.mkdir()
        (path / "out").write_bytes(tensor.numpy().tobytes())
        save_meta({"dims": list(tensor.shape)}, path / "meta")
    return folder


def read_meta(path: Path) -> dict[str, Any]:
    return {"dims": [int(n) for n in re.findall(r"dim: (\d+)", path.read_text())]}


def save_meta(tree: dict[str, Any], path: Path) -> None:
    dims = "".join(f"  dim: {n}\n" for n in tree["dims"])
    path.write_text(f"shape {{\n{dims}}}\ndata_type: kFloat\n")


def write_torch_dist(folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    layer = {
        "self_attention.linear_qkv": (3 * H, H),
        "self_attention.linear_proj": (H, H),
        "mlp.linear_fc1": (F, H),
    }
    layer |= {"mlp.linear_fc2": (H, F), "input_layernorm": (H,), "pre_mlp_layernorm": (H,)}  # type: ignore[dict-item]
    tree = {f"decoder.layers.{name}.weight": torch.ones(2, *shape) for name, shape in layer.items()}
    tree |= {
        f"embedding.{name}_embeddings.weight": torch.ones(V, H) for name in ("word", "position")
    }
    tree["decoder.final_layernorm.weight"] = torch.ones(H)
    dcp.save(tree, checkpoint_id=folder, no_dist=True)
    args = argparse.Namespace(
        num_attention_heads=2, global_batch_size=4, consumed_train_samples=40, weight_decay=0.1
    )
    scheduler = {
        "max_lr": 1e-3,
        "min_lr": 1e-5,
        "lr_warmup_steps": 16,
        "num_steps": 80,
        "lr_decay_style": "cosine",
    }
    scheduler |= {"lr_decay_steps": 800, "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 800}
    common = {"args": args, "iteration": 10, "optimizer": {"param_groups": [{"step": 10}]}}
    torch.save(common | {"opt_param_scheduler": scheduler}, folder / "common.pt")
    return folder


def write_deepspeed(folder: Path, **how: Any) -> Path:
    return deepspeed_files.write(folder, deepspeed_files.model(), **how)


def write_megatron(folder: Path, **how: Any) -> Path:
    f = megatron_files.Form(hidden=8, ffn=8, heads=2, groups=2, **how)
    p = megatron_files.plain(f)
    return megatron_files.write(folder / "iter_0000007", f, p)


def write_native(folder: Path) -> Path:
    tensors = {
        "wte.weight": native.undivided(torch.ones(V, H)),
        "ln_f.bias": native.undivided(torch.ones(H)),
    }
    native.save_step(
        folder, 3, tensors, {"iteration": 3, "consumed_train_samples": 24}, {"num_layers": 1}
    )
    return folder


def save_manifest(tree: Any, path: Path) -> None:
    files = {name: manifests.File(**file) for name, file in tree["files"].items()}
    path.write_bytes(manifests.encode_manifest(files))


def save_listed(tree: Any, path: Path) -> None:
    """Write a file of a native step, and its new hash into the manifest."""
    path.write_text(json.dumps(tree))
    raw, manifest = path.read_bytes(), path.with_name("manifest.json")
    content = read_json(manifest)
    content["files"][path.name] = {"size": len(raw), "sha256": manifests.sha256([raw])}
    save_manifest(content, manifest)


def write_tokens(folder: Path) -> Path:
    write_pair(folder / "tokens", [[[1, 2, 3]], [[4, 5]]])
    return folder


def write_tokenizer_json(folder: Path) -> Path:
    tokenizers.train_bpe(["the theme of the thesis, the other then " * 20], 300, folder)
    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    library = Library(model)
    library.add_special_tokens(["<|endoftext|>"])
    library.normalizer = normalizers.Replace("a", "b")  # type: ignore[assignment]
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    library.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("x", 0, 0)])
    library.enable_truncation(5)
    library.save(str(folder / "tokenizer.json"))
    return folder


def write_pieces(folder: Path) -> Path:
    with open(folder / "tokenizer.model", "wb") as file:
        lines = iter(["the theme of the thesis, the other then"] * 20)
        fixed: dict[str, Any] = {"minloglevel": 2, "num_threads": 1, "hard_vocab_limit": False}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=file,
            vocab_size=300,
            model_type="bpe",
            byte_fallback=True,
            **fixed,
        )
    return folder


def write_ranks(folder: Path) -> Path:
    lines = [f"{base64.b64encode(bytes([n])).decode()} {n}\n" for n in range(256)]
    (folder / "tiny.tiktoken").write_text("".join(lines))
    special = {"pattern": r"\w+|\s+|[^\w\s]+", "special_tokens": {"<|endoftext|>": 300}}
    (folder / "encoding.json").write_text(json.dumps(special))
    return folder


def read_ranks(path: Path) -> Any:
    return [
        [token, int(rank)]
        for token, rank in (line.split() for line in path.read_text().splitlines())
    ]


def save_ranks(tree: Any, path: Path) -> None:
    path.write_text("".join(f"{token} {rank}\n" for token, rank in tree))


def encode(path: Path) -> str:
    """Encode and decode a text with the tokenizer of a file."""
    made = tokenizers.build_tokenizer(TokenizerFlags(tokenizer=str(path)))
    return made.decode(made.encode("the other theme"))


OPENERS: dict[str, Callable[[Path], Any]] = {
    "native": lambda path: native.open_native(path.parent, 3, verify="full"),
    "tokens": lambda path: Indexed(path.with_suffix(""), in_full=True),
    "tokenizer": encode,
    "ranks": lambda path: encode(path.with_name("tiny.tiktoken")),
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_embd": H,
    "n_head": 2,
    "n_positions": P,
    "vocab_size": V,
    "n_inner": F,
}
GPT2 |= {"layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
LLAMA = {
    "model_type": "qwen2",
    "hidden_size": H,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": V,
}
LLAMA |= {
    "num_key_value_heads": 2,
    "head_dim": 1,
    "intermediate_size": F,
    "max_position_embeddings": P,
}
LLAMA |= {
    "rms_norm_eps": 1e-6,
    "sliding_window": 3,
    "max_window_layers": 1,
    "use_sliding_window": True,
}  # type: ignore[dict-item]
LLAMA |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 1e4}  # type: ignore[dict-item]
LIT = {
    "n_layer": 1,
    "n_embd": H,
    "n_head": 4,
    "n_query_groups": 2,
    "head_size": 1,
    "intermediate_size": F,
}
LIT |= {
    "block_size": P,
    "padded_vocab_size": V,
    "rotary_percentage": 1.0,
    "norm_eps": 1e-5,
    "rope_base": 10_000,
}
LIT |= {
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "parallel_residual": False,
}
LIT |= {"sliding_window_size": 3, "sliding_window_indices": [1], "rope_condense_ratio": 1}  # type: ignore[dict-item]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def save_json(tree: Any, path: Path) -> None:
    path.write_text(json.dumps(tree))


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def save_yaml(tree: Any, path: Path) -> None:
    path.write_text(yaml.dump(tree))


def read_pickle(path: Path) -> Any:
    import pickle

    return pickle.loads(path.read_bytes())  # noqa: S301  dcp.save has just written it


def save_pickle(tree: Any, path: Path) -> None:
    import pickle

    path.write_bytes(pickle.dumps(tree))


RANK, DATA_RANK = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
CLASSES = deepspeed_files.as_deepspeeds
HONEST = {
    "Megatron": Honest(MEGATRON, write_megatron, "mp_rank_00/model_optim_rng.pt"),
    "Megatron with masters": Honest(
        MEGATRON, partial(write_megatron, state="masters"), "mp_rank_00/model_optim_rng.pt"
    ),
    "Megatron of 2019": Honest(
        MEGATRON,
        partial(write_megatron, state="2019", words="2019", version=0),
        "mp_rank_00/model_optim_rng.pt",
        within=megatron_files.megatron_classes,
    ),
    "DeepSpeed": Honest(DEEPSPEED, write_deepspeed, RANK, within=CLASSES),
    "DeepSpeed's optimizer": Honest(DEEPSPEED, write_deepspeed, DATA_RANK, within=CLASSES),
    "ZeRO-3": Honest(
        DEEPSPEED,
        partial(write_deepspeed, stage=3),
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        within=CLASSES,
    ),
    "universal": Honest(
        UNIVERSAL, lambda p: deepspeed_files.joined_by_hand(p, deepspeed_files.model()), RANK
    ),
    "torch_dist": Honest(TORCH_DIST, write_torch_dist, "common.pt"),
    "torch_dist's metadata": Honest(
        TORCH_DIST, write_torch_dist, ".metadata", read_pickle, save_pickle
    ),
    "nanoGPT": Honest(NANOGPT, write_nanogpt, "ckpt.pt"),
    "litgpt": Honest(LITGPT, write_litgpt, "model_config.yaml", read_yaml, save_yaml),
    "GPT-2": Honest(
        HUGGING_FACE, partial(write_hugging_face, GPT2), "config.json", read_json, save_json
    ),
    "Qwen": Honest(
        HUGGING_FACE, partial(write_hugging_face, LLAMA), "config.json", read_json, save_json
    ),
    "OneFlow": Honest(
        ONEFLOW, write_oneflow, "model-h0-attn-c_attn-weight/meta", read_meta, save_meta
    ),
    "our manifest": Honest(
        "native", write_native, "iter_0000003/manifest.json", read_json, save_manifest
    ),
    "our index": Honest("native", write_native, "iter_0000003/index.json", read_json, save_listed),
    "our state": Honest("native", write_native, "iter_0000003/state.json", read_json, save_listed),
    "zip": Honest(
        MEGATRON,
        write_megatron,
        "mp_rank_00/model_optim_rng.pt",
        binary_files.read_directory,
        binary_files.save_layout,
    ),
    "safetensors": Honest(
        HUGGING_FACE,
        partial(write_hugging_face, GPT2),
        "model.safetensors",
        binary_files.read_safetensors,
        binary_files.save_safetensors,
    ),
    "tokens": Honest(
        "tokens", write_tokens, "tokens.idx", binary_files.read_index, binary_files.save_layout
    ),
    "tokenizer.json": Honest(
        "tokenizer", write_tokenizer_json, "tokenizer.json", read_json, save_json
    ),
    "SentencePiece": Honest(
        "tokenizer",
        write_pieces,
        "tokenizer.model",
        binary_files.read_protobuf,
        binary_files.save_protobuf,
    ),
    "tiktoken": Honest("tokenizer", write_ranks, "tiny.tiktoken", read_ranks, save_ranks),
    "tiktoken's settings": Honest("ranks", write_ranks, "encoding.json", read_json, save_json),
}
# One of each kind of reader; the long tier takes all of all.
SAMPLED = (
    "Megatron",
    "DeepSpeed's optimizer",
    "torch_dist's metadata",
    "GPT-2",
    "our index",
    "zip",
    "safetensors",
)
SAMPLED += "tokens", "tokenizer.json", "SentencePiece", "tiktoken"
Path_ = tuple[Any, ...]


def children(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield keys and values: of a large table the first three, of a list also the last two."""
    if isinstance(tree, dict):
        yield from (item for n, item in enumerate(tree.items()) if n < 3 or len(tree) < 40)
    elif isinstance(tree, list | tuple):
        items = list(enumerate(tree))
        yield from items[:3] + items[3:][-2:]
    elif not isinstance(tree, torch.Tensor | torch.dtype) and hasattr(tree, "__dict__"):
        yield from vars(tree).items()


def numbers(tree: Any, before: Path_ = ()) -> Iterator[Path_]:
    """Yield where numbers lie, without those that repeat under another key of a list."""
    for key, value in children(tree):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield (*before, key)
        elif len(before) < 6 and "rng" not in str(key):
            yield from numbers(value, (*before, key))


def replaced(tree: Any, path: Path_, value: Any) -> Any:
    """Return the tree with another value there; containers that cannot be changed become others."""
    key, *rest = path
    if isinstance(tree, dict):
        return tree | {key: replaced(tree[key], tuple(rest), value) if rest else value}
    if isinstance(tree, list | tuple):
        out = list(tree)
        out[key] = replaced(out[key], tuple(rest), value) if rest else value
        return out if isinstance(tree, list) else tuple(out)
    out_object = copy.copy(tree)
    object.__setattr__(
        out_object, key, replaced(getattr(tree, key), tuple(rest), value) if rest else value
    )
    return out_object


def lies(honest: Honest, folder: Path, sample: int) -> Iterator[tuple[str, str, str, float]]:
    """Yield what becomes of one of `sample` lies in turn: its name, and its outcome."""
    path = folder / honest.file
    with honest.within(), pickles.READ.kept():
        tree = honest.read(path)
        places = list(numbers(tree))
        cases = [(place, name) for place in places for name in LIES][::sample]
        for place, name in cases:
            try:
                honest.save(replaced(tree, place, LIES[name]), path)
            # no such file can be written
            except (TypeError, ValueError, OverflowError, struct.error):
                continue
            opened: list[Any] = []
            outcome = outcome_of(lambda: opened.append(honest.open(folder)))  # noqa: B023
            state = getattr(opened[0], "state", {}) if opened else {}
            wrong = [n for n in ("iteration", "consumed_train_samples") if not is_counter(state, n)]
            yield (
                (f"{'.'.join(map(str, place))} = {name}", *outcome)
                if not wrong
                else (str(place), "kept", name, 0.0)
            )


def is_counter(state: dict[str, Any], name: str) -> bool:
    return type(state.get(name, 0)) is int and 0 <= state.get(name, 0) <= claims.STEPS


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        *(pytest.param(name, SAMPLE, id=name) for name in SAMPLED),
        *(pytest.param(name, 1, id=f"all of {name}", marks=pytest.mark.long) for name in HONEST),
    ],
)
@pytest.mark.fault("F28")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.promise(
    "What a file says about sizes is checked before memory is taken", "Memory and time are bounded"
)
def test_no_number_costs_memory_or_time(
    name: str, sample: int, tmp_path: Path, figures: Callable[..., None]
) -> None:
    honest = HONEST[name]
    folder = honest.write(tmp_path)
    assert outcome_of(lambda: honest.open(folder))[:2] == ("opened", "")
    outcomes, end, memory, reader = in_child(
        partial(lies, honest, folder, sample), 100 if sample > 1 else 500
    )
    wrong = [
        f"{case}: {kind} {seconds:.1f} s: {text[:200]}"
        for case, kind, text, seconds in outcomes
        if kind not in ("refused", "opened")
        or (kind == "refused" and str(folder) not in text)
        or seconds > SECONDS
    ]
    figures(lies=f"{len(outcomes) - len(wrong)}/{len(outcomes)}", lies_mb=[memory / 1e6])
    assert not wrong and not end and memory + reader < MEMORY, "\n".join(
        [f"{memory >> 20} and {reader >> 20} MB {end}", *wrong[:20]]
    )
    assert outcomes
    shutil.rmtree(folder)
