"""Our training step beside a plain loop of the same model on the same tokens, in turns.

usage: python benchmarks/loop.py [--pairs 20] [--steps 10]
       python benchmarks/loop.py --gpu 345M 1.3B [--data PREFIX] [--out FILE.jsonl]

Without --gpu, the demo's model on the CPU beside a loop as textbooks and nanoGPT write it, each
with its own reader. With --gpu, a model in bfloat16 on one GPU beside a loop that has the same
network, kernels, compiled blocks and batches, but nothing of parallel/: what the layout costs where
there is none. A pair is some steps of both, and the order alternates.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import SIZES, describe_machine, new_parser
from torch import Tensor, nn

from meshwright import console
from meshwright import device as devices
from meshwright.data.datasets import build_datasets
from meshwright.data.files.indexed import Indexed
from meshwright.data.files.writer import Writer
from meshwright.data.loader import Batch, Loader, LoaderSpec, Samples
from meshwright.model import pick
from meshwright.model.gpt import GPT, initialise
from meshwright.model.loss import loss_sum, token_losses
from meshwright.model.positions import Positions
from meshwright.optim.rules import treatment
from meshwright.parallel.flat import FlatStore
from meshwright.parallel.layout import Layout
from meshwright.parallel.store import StoreSpec
from meshwright.settings import flags, schema
from meshwright.tokenizers import padded_size
from meshwright.training import network
from meshwright.training.step import Network, StepSettings, train_step

# The demo's model and batch.
LAYERS, HIDDEN, HEADS, SEQ, VOCAB, BATCH = 4, 128, 4, 128, 4096, 8
MICRO = {"345M": 32, "1.3B": 16, "2.7B": 8, "tiny": 2}  # samples of a step on a GPU
TRAINING = (
    "--hidden-dropout 0 --attention-dropout 0 --lr 1.5e-4 --lr-decay-style constant --weight-decay 0.1 "
    "--clip-grad 1.0 --seed 1234 --eval-iters 0 --vocab-size 50257 --train-iters 100000 --world-size 1"
)
LR = 1.5e-4


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=20, help="interleaved pairs (default: 20)")
    parser.add_argument("--steps", type=int, default=10, help="steps of each half of a pair (default: 10)")
    parser.add_argument("--gpu", nargs="+", choices=SIZES, metavar="MODEL", help=f"on one GPU: {', '.join(SIZES)}")
    parser.add_argument("--data", help="with --gpu, prefix of .bin/.idx in GPT-2's vocabulary (default: random tokens)")
    parser.add_argument("--flags", default="", help="with --gpu, more flags of train")
    parser.add_argument("--out", type=Path, help="with --gpu, a file that gets a line of JSON for each model")
    given = parser.parse_args()
    console.set_stream(None)
    print(f"{describe_machine('torch')}; {torch.get_num_threads()} threads; {given.pairs} pairs of {given.steps} steps")
    if not given.gpu:
        with tempfile.TemporaryDirectory() as folder:
            compare_on_cpu(Path(folder), given.pairs, given.steps)
    for model in given.gpu or ():
        data = f"--data-path {given.data} --split 100,0,0" if given.data else "--mock-data"
        row = compare_on_gpu(model, f"{data} {given.flags}", given.pairs, given.steps)
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def compare(ours: Callable[[], Any], plain: Callable[[], Any], pairs: int, steps: int) -> dict[str, Any]:
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
        print(f"pair {pair + 1:2}: ours {medians['ours']:7.2f} ms, plain {medians['plain']:7.2f} ms, {ratios[-1]:.3f}")
    gc.unfreeze()
    print(f"ours / plain loop: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    return {"ms": {name: statistics.median(times) for name, times in ms.items()}, "pairs": ratios}


# On the CPU, beside nanoGPT's loop


def compare_on_cpu(folder: Path, pairs: int, steps: int) -> None:
    rng = np.random.RandomState(0)
    with Writer(folder / "data", np.uint16) as writer:
        for _ in range(400):
            writer.add(rng.randint(0, VOCAB, 2000))
            writer.end_document()
    ours, plain = our_steps(folder / "data"), plain_steps(folder / "data.bin")
    compare(lambda: next(ours), lambda: next(plain), pairs, steps)


def losses(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    return {"loss": token_losses(logits, batch.labels, VOCAB)}


def our_steps(prefix: Path) -> Iterator[float]:
    m = schema.Model(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, hidden_dropout=0.0, attention_dropout=0.0
    )
    with torch.device("meta"):
        model = GPT(m, VOCAB, VOCAB, SEQ)
    cpu = torch.device("cpu")
    params = FlatStore([model], StoreSpec(schema.Optimizer(weight_decay=0.1), torch.float32, cpu, VOCAB))
    params.initialise(lambda masters: initialise(masters, m, VOCAB, 1))
    data = Samples(Indexed(prefix), range(400), 4096, SEQ, seed=1)
    net = Network(parts=[model], store=params, loss=losses, device=cpu)
    for batches in Loader(data, LoaderSpec(BATCH, lambda consumed: BATCH, VOCAB, workers=2, at_end="wrap")):
        loss, norm, *_ = train_step(net, batches, StepSettings(1, 1e-3, 0.1))
        yield torch.stack((loss, norm)).tolist()[0]


class PlainBlock(nn.Module):
    """A GPT-2 block as textbooks and nanoGPT write it."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.fc, self.out = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))  # type: ignore[no-any-return]


class PlainGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.blocks = nn.Sequential(*(PlainBlock() for _ in range(LAYERS)))
        self.ln_f = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        logits = F.linear(self.ln_f(self.blocks(x)), self.wte.weight)
        return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))


def plain_steps(path: Path) -> Iterator[float]:
    torch.manual_seed(1)
    model = PlainGPT()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == m] for m in (True, False))
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3, fused=True
    )
    data = np.memmap(path, dtype=np.uint16, mode="r")

    def get(shift: int) -> Tensor:
        return torch.stack([torch.from_numpy(data[i + shift : i + shift + SEQ].astype(np.int64)) for i in starts])

    while True:
        starts = torch.randint(len(data) - SEQ - 1, (BATCH,)).tolist()
        loss = model(get(0), get(1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        yield loss.item()


# On one GPU, beside a loop without parallel/


def compare_on_gpu(model: str, more: str, pairs: int, steps: int) -> dict[str, Any]:
    layers, hidden, heads = SIZES[model]
    shape = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads}"
    length = "--seq-length 2048" if model == "2.7B" else f"--seq-length {32 if model == 'tiny' else 1024}"
    sizes = f"{shape} {length} --micro-batch-size {MICRO[model]} --global-batch-size {MICRO[model]}"
    words = f"{sizes} {TRAINING} {'' if model == 'tiny' else '--bf16'} {more}".split()
    config = flags.parse_settings(schema.TrainConfig, words, "train").config
    device, (vocab, padded) = devices.open_device(config.parallel.device), vocabulary_of(config)
    net = network.build_network(network.Spec(config, Layout(), device, vocab, padded))
    with device:
        net.store.initialise(drawing(config, vocab))
    net.store.publish_weights()
    plain = PlainLoop(config, device)
    data = build_datasets(config, vocab)["train"]
    spec = LoaderSpec(
        config.micro_batch,
        config.batch,
        vocab,
        workers=config.data.num_workers,
        length=config.data.seq_length + 1,
        device=device,
        at_end="wrap",
    )
    readers = [iter(Loader(data, spec)) for _ in range(2)]
    losses: tuple[list[float], list[float]] = [], []

    def our_step() -> None:
        loss, norm, *_ = train_step(net, next(readers[0]), StepSettings(config.training.seed, LR, 0.1))
        losses[0].append(torch.stack([loss.double(), norm.double()]).tolist()[0])

    figures = compare(our_step, lambda: losses[1].append(plain.step(next(readers[1]))[0]), pairs, steps)
    for reader in readers:
        reader.close()
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    print(f"{model}: {figures['ms']}; losses at most {apart:.4f} apart", flush=True)
    return {"model": model, "flags": " ".join(words), "losses": losses, "machine": describe_machine("torch")} | figures


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
                std = m.init_method_std / (2 * m.num_layers) ** 0.5 if kind == "proj" else m.init_method_std
                random = torch.Generator(p.device).manual_seed(zlib.crc32(f"{config.training.seed}/{name}".encode()))
                p[:rows] = torch.empty(rows, *p.shape[1:], device=p.device).normal_(0, std, generator=random)
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
            self.model = GPT(config.model, self.vocab, padded, config.data.seq_length, block, options)
        self.model.to_empty(device=device)
        drawing(config, self.vocab)(self.model.named_parameters())
        self.masters = {name: p.detach().float().clone() for name, p in self.model.named_parameters()}
        self.model.to(torch.bfloat16 if config.precision.bf16 else torch.float32)
        if options.compiled:
            pick.compile_blocks(self.model)
        for p in self.masters.values():
            p.grad = torch.zeros_like(p)
        o = config.optimizer
        groups = [[p for name, p in self.masters.items() if treatment(o, None, name, p).decay == on] for on in (1, 0)]
        self.adamw = torch.optim.AdamW(
            [{"params": groups[0], "weight_decay": o.weight_decay}, {"params": groups[1], "weight_decay": 0.0}],
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
            logits = self.model(b.tokens, Positions(b.sample_ids, None, self.config.training.seed, b.first_sample))
            loss = loss_sum(token_losses(logits, b.labels, self.vocab), b.loss_mask) / tokens
            loss.backward()
            total = total + loss.detach()
        params, masters = list(self.model.parameters()), list(self.masters.values())
        with torch.no_grad():
            torch._foreach_copy_([p.grad for p in masters], [p.grad for p in params])
            norm = torch.nn.utils.clip_grad_norm_(masters, self.config.optimizer.clip_grad, foreach=True)
            self.adamw.step()
            torch._foreach_copy_(params, masters)
        for p in params:
            p.grad = None
        return torch.stack([total.double(), norm.double()]).tolist()


if __name__ == "__main__":
    main()
