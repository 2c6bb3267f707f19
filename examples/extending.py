"""A network, a loss and data of one's own: a GPT that learns to add.

    python examples/extending.py [FOLDER] [STEPS]

It trains STEPS steps in two runs, the second continuing the first, and lets the network work out a few sums. On two ranks:

    meshwright launch --nproc-per-node 2 examples/extending.py [FOLDER] [STEPS]
"""

import os
import sys

import numpy as np
import torch.nn.functional as F
from torch import nn

from meshwright.errors import UserError
from meshwright.generation import engine
from meshwright.model.attention import Attention
from meshwright.model.gpt import GPT, join
from meshwright.model.layers import MLP, Norm
from meshwright.settings import schema as config
from meshwright.tokenizers import Bytes
from meshwright.training import run as train

SEQ = 48
tokenizer = Bytes()  # ids 0 ... 255 are bytes, 256 ends a document


class Parallel(nn.Module):
    """Attention and MLP read the same norm and are added together: x + attn(ln(x)) + mlp(ln(x)), as in GPT-J."""

    def __init__(self, m, layer, options):
        super().__init__()
        self.p = m.hidden_dropout
        self.ln_1 = Norm(m, m.hidden_size)
        self.attn = Attention(m, layer, options.recompute == "selective")
        self.mlp = MLP(m)

    def forward(self, residual, pending, shared, before, after):
        x = join(residual, pending, before, self.p)  # what the block before left open
        y = self.ln_1(x)
        return x, self.attn(y, shared) + self.mlp(y)  # the next block, or the head, adds them


def z_loss(logits, batch):
    """Cross entropy, and a small pull of the logits' normaliser to 1, which keeps them from drifting (PaLM's z-loss)."""
    logits = logits.float()
    entropy = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none").view(batch.labels.shape)
    return entropy + 1e-4 * logits.logsumexp(-1) ** 2  # [B, T]; masked and averaged by the caller


class Sums:
    """Sample k: `3+14=17`, an end of document, the next sum, and so on, drawn from a generator seeded by k alone."""

    def __init__(self, size, seed):
        self.size, self.seed = size, seed

    def __len__(self):
        return self.size

    def __getitem__(self, k):
        random, ids = np.random.default_rng([self.seed, k]), []
        while len(ids) < SEQ + 1:
            a, b = random.integers(0, 20, 2)
            ids += [*tokenizer.encode(f"{a}+{b}={a + b}"), tokenizer.eod]
        return np.array(ids[: SEQ + 1], dtype=np.int64)

    def locate(self, k, position):
        return f"token {position} of sum sample {k}"


def settings(folder, steps, exit_interval=None):
    """One field is one flag."""
    return config.TrainConfig(
        model=config.Model(
            num_layers=2, hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0
        ),
        tokenizer=config.Tokenizer(tokenizer_type="ByteTokenizer"),
        data=config.Data(seq_length=SEQ, eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True),
        training=config.Training(
            micro_batch_size=16, train_iters=steps, exit_interval=exit_interval, eval_interval=100, eval_iters=2
        ),
        optimizer=config.Optimizer(lr=4e-3, min_lr=4e-4, lr_decay_style="cosine", lr_warmup_fraction=0.05),
        checkpoint=config.Checkpoint(save=folder, load=folder),
        logging=config.Logging(log_interval=50, tensorboard=False),
    )


def answer(network, question):
    """The most likely continuation."""
    network.eval()

    def best(row, logits):
        return int(logits.argmax())

    ((ids, ended),) = engine.complete(network, [tokenizer.encode(question)], 4, SEQ, tokenizer.eod, best)
    return tokenizer.decode(ids) if ended else None


def main(folder="sums", steps=600):
    networks = []

    def model(*sizes, options):
        networks.append(GPT(*sizes, block=Parallel, options=options))
        return networks[-1]

    datasets = {"train": Sums(10**9, seed=1), "valid": Sums(10**6, seed=2), "test": None}
    for exit_interval in (steps // 2, None):  # the first run stops halfway, the second one continues it
        try:
            status = train.run(settings(folder, steps, exit_interval), model, z_loss, datasets)
        except UserError as error:  # what its user can mend; without words, another rank tells it
            if str(error):
                print(f"extending: error: {error}", file=sys.stderr)
            status = error.status
        if status:
            return status
    if os.environ.get("RANK", "0") != "0":  # the weights are the same on every rank: one of them is enough to ask
        return 0
    questions = [(7, 5), (12, 7), (3, 14), (19, 19), (0, 8)]
    answers = [answer(networks[-1], f"{a}+{b}=") for a, b in questions]
    for (a, b), c in zip(questions, answers, strict=True):
        print(f"{a}+{b}={c}")
    right = sum(c == str(a + b) for (a, b), c in zip(questions, answers, strict=True))
    print(f"{right} of {len(questions)} right")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2], *map(int, sys.argv[2:3])))
