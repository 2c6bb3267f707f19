"""A trained model from its folder, and decoding with a key/value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright import flags, tokenizers
from meshwright.checkpoint import native, store
from meshwright.config import Tokenizer as TokenizerFlags
from meshwright.config import TrainConfig
from meshwright.errors import BAD_DATA, UserError
from meshwright.kernels.pick import pick
from meshwright.model.attention import Cache, Where
from meshwright.model.gpt import GPT
from meshwright.tokenizers import Tokenizer

# Given flags that must equal the checkpoint's, since the weights were trained with them.
ARCHITECTURE = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "layernorm_epsilon",
                "untie_embeddings_and_output_weights", "bias_gelu_fusion", "openai_gelu")  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A trained model, ready to read and write text."""

    model: GPT
    tokenizer: Tokenizer
    step: int
    positions: int  # the longest sequence
    device: torch.device


def load(
    folder: str, given: dict[str, Any], vocabulary: TokenizerFlags, dtype: torch.dtype, device: torch.device,
    verify: str, say: Callable[[str], None],
) -> Run:  # fmt: skip
    """The newest whole step under `folder`; `given` are architecture flags of the command line, to be compared."""
    root, step = store.split_path(folder)
    if step is None:
        step, notes = store.latest(root)
        for note in notes:
            say(note)
    if step is None:
        raise UserError(f"no checkpoint in {folder}", BAD_DATA)
    state, saved = native.read_state(root, step), native.read_config(root, step)
    config, _ = flags.build(
        TrainConfig, [("checkpoint", flags.from_saved(TrainConfig, saved, f"{root} at step {step}"))]
    )
    refuse_contradictions(given, saved, state["positions"])
    tokenizer = find_tokenizer(vocabulary, root, state["true_vocab_size"])
    with torch.device("meta"):
        block, _ = pick(config.model, device)
        model = GPT(config.model, state["true_vocab_size"], state["padded_vocab_size"], state["positions"], block)
    model = model.to(dtype).to_empty(device=device).eval()
    want = {}
    for name, p in model.named_parameters():
        p.requires_grad_(False)
        rows = model.vocab if name in ("wte.weight", "lm_head.weight") else p.shape[0]
        p[rows:] = 0
        want[name] = native.whole(p[:rows])
    native.load(root, want, verify=verify, say=say, step=step, optimizer=False)
    return Run(model, tokenizer, step, state["positions"], device)


def refuse_contradictions(given: dict[str, Any], saved: dict[str, Any], positions: int) -> None:
    out = [
        f"--{name.replace('_', '-')} {given[name]}, the checkpoint was trained with {saved[name]}"
        for name in ARCHITECTURE
        if name in given and given[name] != saved[name] and not _same(name, given[name], saved)
    ]
    for name in ("max_position_embeddings", "seq_length"):
        if given.get(name) is not None and given[name] > positions:
            out.append(f"--{name.replace('_', '-')} {given[name]}, the checkpoint has {positions} positions")
    if out:
        raise UserError(
            "these flags contradict the checkpoint (leave them out, it knows them):\n  " + "\n  ".join(out), BAD_DATA
        )


def _same(name: str, value: Any, saved: dict[str, Any]) -> bool:
    """A width written out equals the default that left it open."""
    if name == "ffn_hidden_size":
        return bool(value == (saved[name] or 4 * saved["hidden_size"]))
    if name == "kv_channels":
        return bool(value == (saved[name] or saved["hidden_size"] // saved["num_attention_heads"]))
    return False


def find_tokenizer(t: TokenizerFlags, root: Path, size: int) -> Tokenizer:
    """The flags' vocabulary if they name one, else the run's own; it must have the model's size."""
    kept = root / "tokenizer"
    named = t.vocab_file or t.merge_file or t.tokenizer_model or t.tokenizer_type != "GPT2BPETokenizer"
    if not named and not kept.is_dir():
        raise UserError(f"{root} holds no tokenizer/ folder: give --vocab-file and --merge-file, or --tokenizer-type")
    tokenizer = tokenizers.build(t, None if named else kept)
    if tokenizer.size != size:
        raise UserError(
            f"the tokenizer has {tokenizer.size} ids, the checkpoint {size}: it was trained with another", BAD_DATA
        )
    return tokenizer


def decode(
    model: GPT, prompts: list[list[int]], max_new: int, seq_length: int, eod: int,
    choose: Callable[[int, Tensor], int], use_cache: bool = True,
) -> Iterator[list[int | None]]:  # fmt: skip
    """Continue a batch of prompts; yield each row's new token, or None where it has none.

    All rows move one column at a time from the end of the shortest prompt, longer prompts keeping their own tokens, so
    positions agree and one cache serves all. A row ends with the token `eod` (which is yielded), after max_new tokens, or
    when it fills seq_length.
    """
    assert prompts and all(0 < len(p) <= seq_length for p in prompts)
    device = model.wte.weight.device
    ends = [min(seq_length, len(p) + max_new) for p in prompts]
    tokens = torch.full((len(prompts), max(ends)), eod, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    done = [end <= len(p) for p, end in zip(prompts, ends, strict=True)]
    caches = {i: Cache(len(prompts), max(ends)) for i in range(model.layers)} if use_cache else {}
    fed, column = 0, min(map(len, prompts))
    while not all(done):
        where = Where(positions=torch.arange(fed, column, device=device), caches=caches)
        with torch.inference_mode():
            logits = model(tokens[:, fed:column], where, last_only=True)[:, 0]
        fed = column if use_cache else 0
        new: list[int | None] = [None] * len(prompts)
        for row, prompt in enumerate(prompts):
            if column < len(prompt) or done[row]:
                continue
            token = new[row] = choose(row, logits[row])
            tokens[row, column] = token
            done[row] = token == eod or column + 1 == ends[row]
        column += 1
        yield new
