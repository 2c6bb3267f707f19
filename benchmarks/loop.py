"""Our training step beside a plain loop of the same model on the same tokens, in turns.

usage: python benchmarks/loop.py [--pairs 20] [--steps 10]
       python benchmarks/loop.py --cpu 10M 124M [--turns 8]
       python benchmarks/loop.py --gpu 345M 1.3B [--data PREFIX] [--out FILE.jsonl]

Without --gpu, the demo's model on the CPU beside a loop as textbooks and nanoGPT write it, each
with its own reader. With --cpu, GPT-2 of that size in float32 and bfloat16 beside that loop, as it
is and compiled, and beside the step's own matrix products timed alone, which no step can beat. With
--gpu, a model in bfloat16 on one GPU beside a loop that has the same
network, kernels, compiled blocks and batches, but nothing of parallel/: what the layout costs where
there is none. A pair is some steps of both, and the order alternates.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import SIZES, attempt, describe_machine, new_parser, print_head, print_row
from torch import Tensor, nn

from meshwright.base import console
from meshwright.base import device as devices
from meshwright.config import flags, schema
from meshwright.data.datasets import build_datasets
from meshwright.data.files.indexed import Indexed
from meshwright.data.files.writer import Writer
from meshwright.data.loader import Batch, Loader, LoaderSpec, Samples
from meshwright.model import pick
from meshwright.model.counts import padded_size
from meshwright.model.gpt import GPT, initialise
from meshwright.model.loss import loss_sum, token_losses
from meshwright.model.positions import Positions
from meshwright.optim.rules import param_group
from meshwright.parallel.flat import FlatStore
from meshwright.parallel.layout import Layout
from meshwright.parallel.store import StoreSpec
from meshwright.training import network
from meshwright.training.micro_step import Network
from meshwright.training.step import StepSettings, train_step


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT-2 and of its batch."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    batch: int

    def flags(self) -> str:
        sizes = f"--num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads {self.heads}"
        batch = f"--micro-batch-size {self.batch} --global-batch-size {self.batch}"
        return f"{sizes} --seq-length {self.seq} {batch} --vocab-size {self.vocab}"


DEMO = Shape(4, 128, 4, 128, 4096, 8)
ON_CPU = {"10M": Shape(6, 384, 6, 256, 65, 12), "124M": Shape(12, 768, 12, 64, 50257, 4)}
MICRO = {"345M": 32, "1.3B": 16, "2.7B": 8, "tiny": 2}  # samples of a step on a GPU
TRAINING = (
    "--hidden-dropout 0 --attention-dropout 0 --lr 1.5e-4 --lr-decay-style constant --weight-decay 0.1 "
    "--clip-grad 1.0 --seed 1234 --eval-iters 0 --train-iters 100000 --world-size 1"
)
LR = 1.5e-4


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=20, help="interleaved pairs (default: 20)")
    parser.add_argument(
        "--steps", type=int, default=10, help="steps of each half of a pair (default: 10)"
    )
    parser.add_argument(
        "--cpu", nargs="+", choices=ON_CPU, metavar="MODEL", help=f"on a CPU: {', '.join(ON_CPU)}"
    )
    parser.add_argument(
        "--turns", type=int, default=8, help="with --cpu, steps of each, in turns (default: 8)"
    )
    parser.add_argument(
        "--gpu", nargs="+", choices=SIZES, metavar="MODEL", help=f"on one GPU: {', '.join(SIZES)}"
    )
    parser.add_argument(
        "--data",
        help="with --gpu, prefix of .bin/.idx in GPT-2's vocabulary (default: random tokens)",
    )
    parser.add_argument("--flags", default="", help="with --gpu, more flags of train")
    parser.add_argument(
        "--out", type=Path, help="with --gpu, a file that gets a line of JSON for each model"
    )
    given = parser.parse_args()
    console.set_stream(None)
    amount = f"{given.turns} turns" if given.cpu else f"{given.pairs} pairs of {given.steps} steps"
    print(f"{describe_machine('torch')}; {torch.get_num_threads()} threads; {amount}", flush=True)
    for model in given.cpu or ():
        compare_with_limit(model, ON_CPU[model], given.turns)
    if not given.gpu and not given.cpu:
        with tempfile.TemporaryDirectory() as folder:
            compare_on_cpu(Path(folder), given.pairs, given.steps)
    for model in given.gpu or ():
        data = f"--data-path {given.data} --split 100,0,0" if given.data else "--mock-data"
        row = compare_on_gpu(model, f"{data} {given.flags}", given.pairs, given.steps)
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def compare(
    ours: Callable[[], Any], plain: Callable[[], Any], pairs: int, steps: int
) -> dict[str, Any]:
    """Run both in turns; print and return the milliseconds of their steps."""
    loops, ms = {"ours": ours, "plain": plain}, {"ours": list[float](), "plain": list[float]()}
    for step in loops.values():
        for _ in range(max(5, steps // 2)):
            step()
    ratios = []
    gc.collect()
    gc.freeze()
    for pair in range(pairs):
        medians = {}
        for name in ("ours", "plain") if pair % 2 == 0 else ("plain", "ours"):
            times = []
            for _ in range(steps):
                start = time.perf_counter()
                loops[name]()
                times.append(1e3 * (time.perf_counter() - start))
            medians[name] = statistics.median(times)
            ms[name] += times
        ratios.append(medians["ours"] / medians["plain"])
        print(
            f"pair {pair + 1:2}: ours {medians['ours']:7.2f} ms, plain {medians['plain']:7.2f} ms, {ratios[-1]:.3f}"
        )
    gc.unfreeze()
    print(
        f"ours / plain loop: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
    )
    return {"ms": {name: statistics.median(times) for name, times in ms.items()}, "pairs": ratios}


# On the CPU, beside nanoGPT's loop


def compare_on_cpu(folder: Path, pairs: int, steps: int) -> None:
    rng = np.random.RandomState(0)
    with Writer(folder / "data", np.uint16) as writer:
        for _ in range(400):
            writer.add(rng.randint(0, DEMO.vocab, 2000))
            writer.end_document()
    ours, plain = our_steps(folder / "data"), PlainTraining(DEMO, folder / "data.bin")
    compare(lambda: next(ours), plain.step, pairs, steps)


def losses(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    return {"loss": token_losses(logits, batch.labels, DEMO.vocab)}


def our_steps(prefix: Path) -> Iterator[float]:
    m = schema.Model(
        num_layers=DEMO.layers,
        hidden_size=DEMO.hidden,
        num_attention_heads=DEMO.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    with torch.device("meta"):
        model = GPT(m, DEMO.vocab, DEMO.vocab, DEMO.seq)
    cpu = torch.device("cpu")
    params = FlatStore(
        [model], StoreSpec(schema.Optimizer(weight_decay=0.1), torch.float32, cpu, DEMO.vocab)
    )
    params.initialise(lambda masters: initialise(masters, m, DEMO.vocab, 1))
    data = Samples(Indexed(prefix), range(400), 4096, DEMO.seq, seed=1)
    net = Network(parts=[model], store=params, loss=losses, device=cpu)
    for batches in Loader(
        data,
        LoaderSpec(DEMO.batch, lambda consumed: DEMO.batch, DEMO.vocab, workers=2, at_end="wrap"),
    ):
        loss, norm, *_ = train_step(net, batches, StepSettings(1, 1e-3, 0.1))
        yield torch.stack((loss, norm)).tolist()[0]


class PlainBlock(nn.Module):
    """A GPT-2 block as textbooks and nanoGPT write it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, self.heads = shape.hidden, shape.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc, self.out = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(c, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))  # type: ignore[no-any-return]


class PlainGPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte, self.wpe = (
            nn.Embedding(shape.vocab, shape.hidden),
            nn.Embedding(shape.seq, shape.hidden),
        )
        self.blocks = nn.Sequential(*(PlainBlock(shape) for _ in range(shape.layers)))
        self.ln_f = nn.LayerNorm(shape.hidden)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        logits = F.linear(self.ln_f(self.blocks(x)), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class PlainTraining:
    """nanoGPT's loop in float32, on tokens of a .bin file or on random ones."""

    def __init__(self, shape: Shape, path: Path | None = None) -> None:
        torch.manual_seed(1)
        self.shape, self.model = shape, PlainGPT(shape)
        matrices, vectors = (
            [p for p in self.model.parameters() if (p.ndim > 1) == m] for m in (True, False)
        )
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=1e-3, fused=True)
        if path is None:
            self.data: Any = (
                np.random.RandomState(0).randint(0, shape.vocab, 100_000).astype(np.uint16)
            )
        else:
            self.data = np.memmap(path, dtype=np.uint16, mode="r")

    def step(self, model: Callable[..., Any] | None = None) -> float:
        """Take a step, by the compiled model if one is given."""
        seq = self.shape.seq
        starts = torch.randint(len(self.data) - seq - 1, (self.shape.batch,)).tolist()
        tokens, labels = (
            torch.stack(
                [
                    torch.from_numpy(self.data[i + shift : i + shift + seq].astype(np.int64))
                    for i in starts
                ]
            )
            for shift in (0, 1)
        )
        loss = (self.model if model is None else model)(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return loss.item()  # type: ignore[no-any-return]


# On the CPU, beside what its products alone take


def compare_with_limit(name: str, shape: Shape, turns: int) -> None:
    """Take one step of each in turns; print the medians, and the products' share of them."""
    plain = PlainTraining(shape)
    compiled = torch.compile(plain.model)
    loops: dict[str, Callable[[], Any]] = {
        "ours fp32": our_loop(shape, ""),
        "ours bf16": our_loop(shape, "--bf16"),
        "plain fp32": plain.step,
        "plain fp32, compiled": lambda: plain.step(compiled),
        "products fp32": products_of(shape, torch.float32),
        "products bf16": products_of(shape, torch.bfloat16),
    }
    for label in list(loops):
        if [attempt(label, loops[label]) for _ in range(2)][1] is None:  # as where nothing compiles
            del loops[label]
    ms: dict[str, list[float]] = {label: [] for label in loops}
    gc.collect()
    gc.freeze()
    for turn in range(turns):
        labels = list(loops)
        for label in labels[turn % len(labels) :] + labels[: turn % len(labels)]:
            start = time.perf_counter()
            loops[label]()
            ms[label].append(1e3 * (time.perf_counter() - start))
    gc.unfreeze()
    print(f"\n{name}: {shape.batch} x {shape.seq} tokens")
    print_head("", "ms", "share of the products' limit", "times as fast as the plain loop")
    for label, times in ms.items():
        limit = ms["products bf16" if "bf16" in label else "products fp32"]
        share, speed = (
            statistics.median(a / b for a, b in zip(of, times, strict=True))
            for of in (limit, ms["plain fp32"])
        )
        print_row(label, f"{statistics.median(times):.0f}", f"{share:.0%}", f"{speed:.2f}")


def our_loop(shape: Shape, precision: str) -> Callable[[], list[float]]:
    config, net, read = build_ours(
        f"{shape.flags()} {TRAINING} --mock-data --device cpu {precision}".split()
    )
    batches = [next(read) for _ in range(4)]
    numbers = itertools.cycle(batches)

    def step() -> list[float]:
        loss, norm, *_ = train_step(net, next(numbers), StepSettings(config.training.seed, LR, 0.1))
        return [loss.item(), norm.item()]

    return step


def products_of(shape: Shape, dtype: torch.dtype) -> Callable[[], int]:
    """Return a function that multiplies what a step multiplies, and does nothing else.

    A map's weights are multiplied forward, for the inputs' gradient and for their own. Attention's
    scores and sums count half: of the pairs of tokens, a causal mask leaves that many.
    """
    n, h, heads = shape.batch * shape.seq, shape.hidden, shape.heads
    sizes = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)] * shape.layers + [(h, shape.vocab)]
    maps = {
        (i, o): tuple(torch.randn(s).to(dtype) for s in ((n, i), (o, i), (n, o)))
        for i, o in set(sizes)
    }
    q, k = (torch.randn(shape.batch * heads, shape.seq, h // heads).to(dtype) for _ in range(2))
    scores = torch.randn(shape.batch * heads, shape.seq, shape.seq).to(dtype)

    def multiply() -> int:
        for size in sizes:
            x, weight, grad = maps[size]
            x @ weight.t(), grad @ weight, grad.t() @ x
        for _ in range(3 * shape.layers // 2):
            q @ k.mT, scores @ k
        return len(sizes)

    return multiply


# On one GPU, beside a loop without parallel/


def compare_on_gpu(model: str, more: str, pairs: int, steps: int) -> dict[str, Any]:
    layers, hidden, heads = SIZES[model]
    length = 2048 if model == "2.7B" else 32 if model == "tiny" else 1024
    sizes = Shape(layers, hidden, heads, length, 50257, MICRO[model]).flags()
    words = f"{sizes} {TRAINING} {'' if model == 'tiny' else '--bf16'} {more}".split()
    config, net, first = build_ours(words)
    readers = [first, read_batches(config, net.device)]
    plain = PlainLoop(config, net.device)
    losses: tuple[list[float], list[float]] = [], []

    def our_step() -> None:
        loss, norm, *_ = train_step(
            net, next(readers[0]), StepSettings(config.training.seed, LR, 0.1)
        )
        losses[0].append(torch.stack([loss.double(), norm.double()]).tolist()[0])

    figures = compare(
        our_step, lambda: losses[1].append(plain.step(next(readers[1]))[0]), pairs, steps
    )
    for reader in readers:
        reader.close()
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    print(f"{model}: {figures['ms']}; losses at most {apart:.4f} apart", flush=True)
    return {
        "model": model,
        "flags": " ".join(words),
        "losses": losses,
        "machine": describe_machine("torch"),
    } | figures


def build_ours(words: list[str]) -> tuple[Any, Network, Any]:
    """Return the settings of these flags, the network, drawn, and a reader of its batches."""
    config = flags.parse_settings(schema.TrainConfig, words, "train").config
    device, (vocab, padded) = devices.open_device(config.parallel.device), vocabulary_of(config)
    net = network.build_network(network.Spec(config, Layout(), device, vocab, padded))
    with device:
        net.store.initialise(drawing(config, vocab))
    net.store.publish_weights()
    return config, net, read_batches(config, device)


def read_batches(config: Any, device: torch.device) -> Any:
    vocab, _ = vocabulary_of(config)
    spec = LoaderSpec(
        config.micro_batch,
        config.batch,
        vocab,
        workers=config.data.num_workers,
        length=config.data.seq_length + 1,
        device=device,
        at_end="wrap",
    )
    return iter(Loader(build_datasets(config, vocab)["train"], spec))


def vocabulary_of(config: Any) -> tuple[int, int]:
    """Return the true and the padded size."""
    vocab, m = config.tokenizer.vocab_size, config.model
    tp = config.parallel.tensor_model_parallel_size
    return vocab, padded_size(vocab, m.make_vocab_size_divisible_by, tp, m.pad_vocab_size_to)


def drawing(config: Any, vocab: int) -> Callable[[Iterable[tuple[str, Any]]], None]:
    """Draw as initialise in model/gpt.py does, by generators of the device, which are fast."""
    m = config.model

    @torch.no_grad()
    def draw(masters: Iterable[tuple[str, Any]]) -> None:
        for name, p in masters:
            kind = name.removesuffix(".weight").split(".")[-1]
            if name.endswith("bias"):
                p.zero_()
            elif p.ndim == 1:
                p.fill_(1.0)
            else:
                rows = vocab if kind in ("wte", "lm_head") else p.shape[0]
                std = (
                    m.init_method_std / (2 * m.num_layers) ** 0.5
                    if kind == "proj"
                    else m.init_method_std
                )
                random = torch.Generator(p.device).manual_seed(
                    zlib.crc32(f"{config.training.seed}/{name}".encode())
                )
                p[:rows] = torch.empty(rows, *p.shape[1:], device=p.device).normal_(
                    0, std, generator=random
                )
                p[rows:] = 0

    return draw


class PlainLoop:
    """The same network, kernels, compiled blocks, precision and update without parallel/.

    It has bfloat16 parameters, each a tensor of its own, whose gradients autograd keeps; float32
    masters, each likewise; torch's clip_grad_norm_ and fused AdamW over them; and copies between
    them by torch._foreach_copy_. A loop over float32 parameters with autocast is slower.
    """

    def __init__(self, config: Any, device: Any) -> None:
        self.config, self.device = config, device
        self.vocab, padded = vocabulary_of(config)
        options = pick.options(config.training, config.model, config.precision, device)
        block, _ = pick.pick(config.model, device, options)
        with torch.device("meta"):
            self.model = GPT(
                config.model, self.vocab, padded, config.data.seq_length, block, options
            )
        self.model.to_empty(device=device)
        drawing(config, self.vocab)(self.model.named_parameters())
        self.masters = {
            name: p.detach().float().clone() for name, p in self.model.named_parameters()
        }
        self.model.to(torch.bfloat16 if config.precision.bf16 else torch.float32)
        if options.compiled:
            pick.compile_blocks(self.model)
        for p in self.masters.values():
            p.grad = torch.zeros_like(p)
        o = config.optimizer
        groups = [
            [p for name, p in self.masters.items() if param_group(o, None, name, p).decay == on]
            for on in (1, 0)
        ]
        self.adamw = torch.optim.AdamW(
            [
                {"params": groups[0], "weight_decay": o.weight_decay},
                {"params": groups[1], "weight_decay": 0.0},
            ],
            lr=1.5e-4,
            betas=(o.adam_beta1, o.adam_beta2),
            eps=o.adam_eps,
            fused=True,
        )

    def step(self, micro: list[Any]) -> list[float]:
        self.model.train()
        total, tokens = 0.0, sum(b.unmasked for b in micro)
        for b in micro:
            b = b.to(self.device)
            logits = self.model(
                b.tokens, Positions(b.sample_ids, None, self.config.training.seed, b.first_sample)
            )
            loss = loss_sum(token_losses(logits, b.labels, self.vocab), b.loss_mask) / tokens
            loss.backward()
            total = total + loss.detach()
        params, masters = list(self.model.parameters()), list(self.masters.values())
        with torch.no_grad():
            torch._foreach_copy_([p.grad for p in masters], [p.grad for p in params])
            norm = torch.nn.utils.clip_grad_norm_(
                masters, self.config.optimizer.clip_grad, foreach=True
            )
            self.adamw.step()
            torch._foreach_copy_(params, masters)
        for p in params:
            p.grad = None
        return torch.stack([total.double(), norm.double()]).tolist()


if __name__ == "__main__":
    main()
