"""Generation on one GPU: tokens per second beside transformers, and whether the texts are right.

usage: python benchmarks/gpu_decode.py [--check | --profile | --sweep] [--sizes 345M 1.3B]
                                       [--rows 1 8 64] [--quick] [--torch] [--peers]
                                       [--modern] [--json FILE]

Prompts have 128 random tokens, and 128 are generated, greedily, in bfloat16, by networks of random
weights. A figure is tokens divided by the time from the first prompt to the last token, the best of
three runs after two to warm up. "limit" is that of the memory alone: weights and cache, read once a
step at 4.2 TB/s. "first" is the time to the first token of prompts of 1,024 tokens. A case that
fails is printed, and the others go on.

--check    compare the kernels with float64, and captured texts with plain ones, in seconds
--profile  time one step by kernel
--sweep    time products of one row with other tiles
--quick    no plain steps, with whose texts the captured ones are compared
--torch    captured steps without Triton's kernels too
--modern   the same sizes with the network of the recipe "modern", and heads of 128
--peers    transformers, eager and with a static cache and compiled, in the same run
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import SIZES, VOCAB, attempt, distance, doubled, new_parser, seconds_of

from meshwright.base import device as devices
from meshwright.config.schema import Model, Sampling
from meshwright.data.tokenizers import Null
from meshwright.generation.decoder import Decoder
from meshwright.generation.language_model import LanguageModel
from meshwright.generation.requests import Request
from meshwright.kernels import decode, references
from meshwright.kernels.decode import CachedTexts, DecodeLinear
from meshwright.kernels.heads import HeadSizes
from meshwright.kernels.norm import NormWeights
from meshwright.kernels.qk_norm import HeadNorms
from meshwright.model.gpt import GPT

MUST = {("345M", 1): 1500, ("345M", 8): 9000, ("345M", 64): 40000}
MUST |= {("1.3B", 1): 800, ("1.3B", 8): 5500, ("1.3B", 64): 27000}
PROMPT, NEW, FIRST, PADDED = 128, 128, 1024, 50304
BANDWIDTH = 4.2e12  # bytes per second that an H200 can read
MODERN = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "qk_layernorm": True,
    "swiglu": True,
}
GREEDY = Sampling(greedy=True, out_seq_length=NEW)


class Endless(Null):
    """A vocabulary whose end of document never comes."""

    def __init__(self, size: int) -> None:
        super().__init__(size - 1)
        self.eod = -1


def make(
    m: Model, vocab: int, padded: int, length: int, dtype: torch.dtype, seed: int = 1
) -> LanguageModel:
    """Return a network of random weights on the GPU."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = GPT(m, vocab, padded, length)
    model = model.to(dtype).to_empty(device="cuda").eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if p.ndim == 1 and "ln_" in name and name.endswith("weight"):
            p.fill_(1.0)
        else:
            p.normal_(0, 0.02 if p.ndim > 1 else 0.1)
    return LanguageModel(model, Endless(vocab), 0, length)


def named(size: str, modern: bool = False) -> LanguageModel:
    layers, hidden, heads = SIZES[size]
    m = Model(num_layers=layers, hidden_size=hidden, num_attention_heads=heads)
    if modern:
        m = dataclasses.replace(m, num_attention_heads=hidden // 128, **MODERN)
    return make(m, VOCAB, PADDED, FIRST + NEW, torch.bfloat16)


def prompts(rows: int, length: int, vocab: int = VOCAB) -> list[list[int]]:
    random = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab, (rows, length), generator=random).tolist()  # type: ignore[no-any-return]


def generate(decoder: Decoder, requests: list[Request]) -> tuple[list[list[int]], float, float]:
    """Return the new tokens, the seconds of all and those to the last row's first token."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    first = 0.0
    ids = {decoder.submit(request): n for n, request in enumerate(requests)}
    out: list[list[int]] = [[] for _ in requests]
    while decoder.waiting or decoder.active:
        for event in decoder.step():
            out[ids[event.id]].append(event.token)
        if not first and all(out):
            first = time.perf_counter() - start
    return out, time.perf_counter() - start, first


# Correctness


def check_kernels() -> None:
    """Compare with float64; bfloat16's own rounding is about 4e-3."""
    draw = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 8):
        for kind, normed in (("gelu-tanh", "layer"), ("swiglu", "rms"), ("", None), ("", "layer")):
            n, k = (3000, 1024) if normed else (1024, 4096)
            centers = normed == "layer"
            shift = draw(k) if centers else None
            weights = None if normed is None else NormWeights(draw(k), shift, 1e-5, centers=centers)
            wide = n * (1 + (kind == "swiglu"))
            layer = DecodeLinear(draw(wide, k) * k**-0.5, draw(wide), weights, kind)
            x, residual = draw(rows, k) + 1, None if kind or normed else draw(rows, n)
            want = decode.linear_of_rows(doubled(x), doubled(layer), doubled(residual))
            error = distance(decode.linear(x, layer, residual), want)
            print(
                f"{'ok' if error < 1e-2 else 'WRONG'} linear {rows} rows {kind or '-'} {normed or '-'}: {error:.1e}"
            )
    for groups, per_group, dim, half in ((16, 1, 64, 0), (4, 4, 128, 64), (2, 1, 96, 48)):
        for rows in (1, 8, 64):
            sizes, room = HeadSizes(groups, per_group, dim), 1088
            keys, values = draw(rows + 1, room, groups, dim), draw(rows + 1, room, groups, dim)
            used = torch.randint(0, 1000, (rows + 1,), device="cuda")
            texts = CachedTexts(
                keys, values, torch.randperm(rows + 1, device="cuda")[:rows], used, 1024
            )
            angles = torch.randn(room, half, device="cuda")
            rotation = (angles.cos(), angles.sin()) if half else None
            qkv = draw(rows, groups * (per_group + 2) * dim)
            weights = [NormWeights(draw(dim), None, 1e-5, centers=False) for _ in range(2)]
            for norms in (None, HeadNorms(*weights)):
                want = decode.attend.plain(
                    qkv.double(), doubled(texts), sizes, rotation, doubled(norms)
                )
                errors = [
                    distance(decode.attend(qkv, texts, sizes, rotation, norms), want)
                    for _ in range(20)
                ]
                print(
                    f"{'ok' if max(errors) < 1e-2 else 'WRONG'} attend {rows} rows {tuple(sizes)}"
                    f"{', normed' if norms else ''}: {max(errors):.1e}"
                )


def check_texts() -> None:
    """Compare captured texts with plain ones: unequal prompts, all kinds of choices, few slots."""
    shape = {"num_layers": 3, "hidden_size": 512, "num_attention_heads": 8}
    shapes = {
        "gpt2": Model(**shape),
        "llama": Model(
            **shape,
            position_embedding_type="rope",
            num_query_groups=2,
            normalization="RMSNorm",
            swiglu=True,
        ),
        "modern": Model(**shape, **MODERN),
    }
    every = [
        GREEDY,
        Sampling(out_seq_length=NEW),
        Sampling(temperature=0.7, top_p=0.9, top_k=50, out_seq_length=NEW),
    ]
    every.append(Sampling(greedy=True, repetition_penalty=1.3, out_seq_length=NEW))
    for name, m in shapes.items():
        model = make(m, 1000, 1024, 512, torch.float32)
        for slots, settings in (
            (1, every[:1]),
            (1, every[1:2]),
            (3, every[:1]),
            (8, every),
            (20, every),
        ):
            requests = [
                Request(
                    p[: 1 + 13 * i % 120],
                    settings[i % len(settings)],
                    stream=i,
                    logprobs=i % 3 or None,
                )
                for i, p in enumerate(prompts(slots + 2, 128, 1000))
            ]
            plain, *_ = generate(Decoder(model, slots, graphs="off"), requests)
            decoder = Decoder(model, slots, graphs="on")
            for turn in range(2):
                got, *_ = generate(decoder, requests)
                same = sum(a == b for a, b in zip(got, plain, strict=True))
                word = "ok" if same == len(plain) else "WRONG"
                print(
                    f"{word} {name}, {slots} slots, turn {turn}: {same} of {len(plain)} texts equal",
                    flush=True,
                )
            assert decoder.steps is not None
            plain_ones = [
                k for k in decoder.steps.tried if decoder.steps.runs[k].__name__ != "replayed"
            ]
            if plain_ones or not decoder.steps.tried:
                print(
                    f"WRONG: {len(plain_ones)} of {len(decoder.steps.tried)} steps were not captured"
                )


# Speed


def limit(size: str, rows: int) -> float:
    """Return tokens per second if each step only reads the weights and the cache."""
    layers, hidden, _ = SIZES[size]
    weights = 2 * (12 * layers * hidden**2 + VOCAB * hidden)
    cache = rows * (PROMPT + NEW / 2) * layers * hidden * 4
    return rows * BANDWIDTH / (weights + cache)


def ours(model: LanguageModel, rows: int, graphs: str) -> dict[str, Any]:
    decoder = Decoder(model, rows, graphs=graphs)  # type: ignore[arg-type]
    requests = [Request(p, GREEDY, stream=i) for i, p in enumerate(prompts(rows, PROMPT))]
    runs = [generate(decoder, requests) for _ in range(2 if graphs == "off" else 5)]
    one = dataclasses.replace(GREEDY, out_seq_length=1)
    long = [Request(p, one) for p in prompts(rows, FIRST)]
    first = min(generate(decoder, long)[2] for _ in range(3))
    seconds, until = min((s, f) for _, s, f in runs)
    return {
        "tokens": runs[-1][0],
        "per_second": rows * NEW / seconds,
        "step_ms": (seconds - until) / (NEW - 1) * 1e3,
        "first_ms": first * 1e3,
    }


def peer(size: str, rows: int, compiled: bool) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, hidden, heads = SIZES[size]
    sizes = {
        "vocab_size": VOCAB,
        "n_positions": FIRST + NEW,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
    }
    shape = GPT2Config(**sizes, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    with torch.device("cuda"):
        model = GPT2LMHeadModel(shape).to(torch.bfloat16).eval()
    how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    if compiled:
        how["cache_implementation"] = "static"  # which transformers compiles by itself
    times = []
    ids = torch.tensor(prompts(rows, PROMPT), device="cuda")
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {"per_second": rows * NEW / min(times)}


def agreement(model: LanguageModel, a: list[list[int]], b: list[list[int]]) -> str:
    """Say how far texts agree, and how near the two likeliest logits were where they part."""
    gaps = []
    for n, (x, y) in enumerate(zip(a, b, strict=True)):
        at = next((i for i, (s, t) in enumerate(zip(x, y, strict=True)) if s != t), None)
        if at is not None:
            text = prompts(len(a), PROMPT)[n] + x[:at]
            logits = model.logits(text)[-1].float()
            gaps.append(float(logits[x[at]] - logits[y[at]]) / float(logits.std()))
    if not gaps:
        return "equal"
    return f"{len(gaps)} of {len(a)} part, where logits differ by at most {max(map(abs, gaps)):.3f} deviations"


@contextmanager
def without_triton() -> Iterator[None]:
    """Let every kernel's plain reference run."""
    with mock.patch.object(references, "is_triton", lambda x: False):
        yield


def speed(
    sizes: list[str], rows: list[int], modern: bool, peers: bool, quick: bool, torch_alone: bool
) -> list[dict[str, Any]]:
    table = []
    for size in sizes:
        model = attempt(size, named, size, modern)
        for b in rows if model is not None else []:
            line: dict[str, Any] = {
                "size": size,
                "rows": b,
                "must": MUST.get((size, b)),
                "limit": limit(size, b),
            }
            tokens = {}
            for name, graphs in (("plain", "off"), ("captured", "on"))[quick:]:
                found = attempt(f"{size} {b} {name}", ours, model, b, graphs)
                if found is not None:
                    tokens[name] = found.pop("tokens")
                    if name != "plain" and "plain" in tokens:
                        found["texts"] = attempt(
                            "texts", agreement, model, tokens[name], tokens["plain"]
                        )
                    line[name] = found
                    show(name, line)
            if torch_alone:
                with without_triton():
                    line["torch alone"] = attempt(f"{size} {b} torch alone", ours, model, b, "on")
                if line["torch alone"]:
                    line["torch alone"].pop("tokens")
                show("torch alone", line)
            for name, compiled in (
                (("transformers", False), ("static, compiled", True)) if peers else ()
            ):
                line[name] = attempt(f"{size} {b} {name}", peer, size, b, compiled)
                show(name, line)
            table.append(line)
        model = None
        torch.cuda.empty_cache()
    return table


def show(name: str, line: dict[str, Any]) -> None:
    if not (found := line[name]):
        return
    more = [
        f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}"
        for k, v in found.items()
        if k != "per_second"
    ]
    share = found["per_second"] / line["limit"]
    print(
        f"{line['size']} x {line['rows']:<3} {name:<17}{found['per_second']:9,.0f} tokens/s, "
        f"must {line['must'] or 0:>6,}, {share:4.0%} of the limit; {', '.join(more)}",
        flush=True,
    )


def profile(sizes: list[str], rows: list[int], modern: bool) -> None:
    """Print the device's time of steps by kernel, mean of 20."""
    for size in sizes:
        model = named(size, modern)
        for b in rows:
            decoder = Decoder(model, b, graphs="on")
            for p in prompts(b, PROMPT):
                decoder.submit(Request(p, GREEDY))
            for _ in range(8):
                decoder.step()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(20):
                    decoder.step()
                torch.cuda.synchronize()
                wall = time.perf_counter() - start
            totals: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
            for event in seen.events() or []:
                if event.device_type == torch.autograd.DeviceType.CUDA:
                    totals[event.name][0] += 1
                    totals[event.name][1] += event.device_time
            print(
                f"{size} x {b}: {wall / 20 * 1e6:.0f} us a step, kernels {sum(t for _, t in totals.values()) / 20:.0f}"
            )
            for name, (count, spent) in sorted(totals.items(), key=lambda item: -item[1][1])[:14]:
                print(
                    f"  {spent / 20:8.1f} us  {count / 20:6.1f} x {spent / count:6.2f} us  {name[:90]}"
                )


SHAPES = ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096), (2048, 8192), (50304, 1024))
TILES = ((1, 4), (2, 4), (4, 4), (8, 4), (4, 8), (8, 8), (16, 8))  # columns, warps


def sweep() -> None:
    """Time products of one row with several tiles; weights exceed the cache."""
    for n, k in SHAPES:
        found = [
            (tile, attempt(f"{n} x {k}, {tile}", product_time, n, k, tile))
            for tile in (None, *TILES)
        ]
        said = [
            f"{'/'.join(map(str, tile or ('chosen',)))} {t * 1e6:.2f}" for tile, t in found if t
        ]
        print(
            f"{n} x {k}, us by tile, limit {2e6 * n * k / BANDWIDTH:.2f}: {'  '.join(said)}",
            flush=True,
        )


def product_time(n: int, k: int, tile: tuple[int, int] | None) -> float:
    from meshwright.kernels.triton import decode as decode_triton

    draw = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    norm = NormWeights(draw(k), draw(k), 1e-5) if n > k else None
    layers = [
        DecodeLinear(draw(n, k), None, norm) for _ in range(max(2, 200_000_000 // (2 * n * k)))
    ]
    x, residual = draw(1, k), None if norm else draw(1, n)
    shape = None if tile is None else decode_triton.LinearTile(*tile)
    each = [(layer,) for layer in layers]
    return seconds_of(lambda layer: decode_triton.linear_of_row(x, layer, residual, shape), each)


def main() -> None:
    parser = new_parser(__doc__)
    for flag in ("--check", "--profile", "--sweep", "--modern", "--peers", "--quick", "--torch"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--sizes", nargs="+", default=["345M", "1.3B"], choices=SIZES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    devices.open_device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.check:
        for check in (check_kernels, check_texts):
            attempt(check.__name__, check)
    elif args.profile:
        attempt("profile", profile, args.sizes, args.rows, args.modern)
    elif args.sweep:
        attempt("sweep", sweep)
    else:
        table = speed(args.sizes, args.rows, args.modern, args.peers, args.quick, args.torch)
        if args.json:
            args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
