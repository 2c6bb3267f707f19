"""Every number of every kind of file is replaced by lies: none costs memory or time.

Each case is an honest file in which one number is another. It is refused with a reason, or opened
where the number does not matter. The suite takes a sample of all pairs of number and lie, the long
tier takes all.
"""

from __future__ import annotations

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
H, V = 4, 8  # width and ids


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


# The tests of the formats have the writers; they are imported where a case needs them.


def write_hugging_face(name: str, folder: Path) -> Path:
    from test_huggingface import theirs

    theirs(name).save_pretrained(folder)
    return folder


def write_litgpt(folder: Path) -> Path:
    from test_litgpt import KINDS, litgpts, network, save

    return save(folder, litgpts(network("windows in turn")), KINDS["windows in turn"][2])


def write_nanogpt(folder: Path) -> Path:
    from test_nanogpt import SAVED, Trainer, save_checkpoint

    return save_checkpoint(folder, Trainer().train(SAVED).tree())


def write_oneflow(folder: Path) -> Path:
    from test_oneflow_checkpoints import make_weights, write_oneflow_gpt

    write_oneflow_gpt(folder, make_weights())
    return folder


def write_torch_dist(folder: Path) -> Path:
    from test_torch_dist import small, write

    return write(folder, small())


def read_meta(path: Path) -> dict[str, Any]:
    return {"dims": [int(n) for n in re.findall(r"dim: (\d+)", path.read_text())]}


def save_meta(tree: dict[str, Any], path: Path) -> None:
    dims = "".join(f"  dim: {n}\n" for n in tree["dims"])
    path.write_text(f"shape {{\n{dims}}}\ndata_type: kFloat\n")


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
        HUGGING_FACE, partial(write_hugging_face, "gpt2"), "config.json", read_json, save_json
    ),
    "Qwen": Honest(
        HUGGING_FACE, partial(write_hugging_face, "qwen3-yarn"), "config.json", read_json, save_json
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
        partial(write_hugging_face, "gpt2"),
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
