"""Named benchmarks: `python -m meshwright.bench NAME`, each printing a table of what it measured.

loop    our training step against a plain nanoGPT-style loop of the same model on the same tokens,
in interleaved pairs
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import console
from meshwright.data.files.indexed import Indexed
from meshwright.data.files.writer import Writer
from meshwright.data.loader import Batch, Loader, LoaderSpec, Samples
from meshwright.model.gpt import GPT, initialise
from meshwright.model.loss import token_losses
from meshwright.parallel.flat import FlatStore
from meshwright.parallel.store import StoreSpec
from meshwright.settings import schema as config
from meshwright.training.step import Network, StepSettings, train_step

# The demo's model and batch.
LAYERS, HIDDEN, HEADS, SEQ, VOCAB, BATCH = 4, 128, 4, 128, 4096, 8


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m meshwright.bench", description=__doc__)
    parser.add_argument("name", nargs="?", choices=["loop"], default="loop")
    parser.add_argument("--pairs", type=int, default=20, help="interleaved pairs (default: 20)")
    parser.add_argument("--steps", type=int, default=10, help="steps of each half of a pair (default: 10)")
    given = parser.parse_args(argv)
    console.set_stream(None)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {given.pairs} pairs of {given.steps} steps")
    with tempfile.TemporaryDirectory() as folder:
        ratios = loop(Path(folder), given.pairs, given.steps)
    print(f"ours / plain loop: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    return 0


def loop(folder: Path, pairs: int, steps: int) -> list[float]:
    """Time of our steps over time of the plain loop's, for each pair; the order alternates."""
    rng = np.random.RandomState(0)
    with Writer(folder / "data", np.uint16) as writer:
        for _ in range(400):
            writer.add(rng.randint(0, VOCAB, 2000))
            writer.end_document()
    ours, plain = our_steps(folder / "data"), plain_steps(folder / "data.bin")
    for step in (ours, plain):
        for _ in range(5):
            next(step)
    ratios = []
    for pair in range(pairs):
        took = {}
        for step in (ours, plain) if pair % 2 == 0 else (plain, ours):
            start = time.perf_counter()
            for _ in range(steps):
                next(step)
            took[step] = (time.perf_counter() - start) / steps * 1e3
        ratios.append(took[ours] / took[plain])
        print(f"pair {pair + 1:2}: ours {took[ours]:7.2f} ms, plain {took[plain]:7.2f} ms, ratio {ratios[-1]:.3f}")
    return ratios


def losses(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    return {"loss": token_losses(logits, batch.labels, VOCAB)}


def our_steps(prefix: Path) -> Iterator[float]:
    m = config.Model(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, hidden_dropout=0.0, attention_dropout=0.0
    )
    with torch.device("meta"):
        model = GPT(m, VOCAB, VOCAB, SEQ)
    cpu = torch.device("cpu")
    params = FlatStore(model, StoreSpec(config.Optimizer(weight_decay=0.1), torch.float32, cpu, VOCAB))
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
