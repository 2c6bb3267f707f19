"""Train with your own model, loss and data: a GPT that learns to add.

    python examples/extending.py [FOLDER] [STEPS]

It trains STEPS steps in two runs, the second of which continues the first, and then asks the
network a few sums. On two ranks:

    meshwright launch --nproc-per-node 2 examples/extending.py [FOLDER] [STEPS]
"""

import os
import sys

import numpy as np
import torch.nn.functional as F
from torch import nn

import meshwright
from meshwright.config import schema
from meshwright.data.tokenizers import Bytes
from meshwright.model.attention import Attention
from meshwright.model.gpt import GPT, join
from meshwright.model.layers import MLP, Norm

SEQ = 48
tokenizer = Bytes()  # ids 0 ... 255 are bytes, 256 is the end of document


class Parallel(nn.Module):
    """A block that adds attention and MLP of one norm, as GPT-J: x + attn(ln(x)) + mlp(ln(x))."""

    def __init__(self, m, layer, options):
        super().__init__()
        self.p = m.hidden_dropout
        self.ln_1 = Norm(m, m.hidden_size)
        self.attn = Attention(m, layer, options.recompute == "selective")
        self.mlp = MLP(m)

    def forward(self, residual, pending, shared, before, after):
        x = join(residual, pending, before, self.p)  # add what the block before left open
        y = self.ln_1(x)
        return x, self.attn(y, shared) + self.mlp(y)  # the next block, or the head, adds them


def z_loss(logits, batch):
    """Return the loss per token: cross entropy and PaLM's z-loss.

    The z-loss pulls the logits' normaliser towards 1, which keeps it from drifting.
    """
    logits = logits.float()
    entropy = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none").view(
        batch.labels.shape
    )
    return entropy + 1e-4 * logits.logsumexp(-1) ** 2  # [B, T]; the caller masks and averages it


class Sums:
    """Samples of sums: `3+14=17`, an end of document, the next sum, and so on.

    Sample k is drawn from a generator seeded by k.
    """

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
    """Return the settings; each field is a flag of the same name."""
    return schema.TrainConfig(
        model=schema.Model(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        tokenizer=schema.TokenizerFlags(tokenizer_type="ByteTokenizer"),
        data=schema.Data(
            seq_length=SEQ, eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True
        ),
        training=schema.Training(
            micro_batch_size=16,
            train_iters=steps,
            exit_interval=exit_interval,
            eval_interval=100,
            eval_iters=2,
        ),
        optimizer=schema.Optimizer(
            lr=4e-3, min_lr=4e-4, lr_decay_style="cosine", lr_warmup_fraction=0.05
        ),
        checkpoint=schema.Checkpoint(save=folder, load=folder),
        logging=schema.Logging(log_interval=50, tensorboard=False),
    )


def answer(network, question):
    """Return the most likely continuation."""
    model = meshwright.LanguageModel(network.eval(), tokenizer, step=0, seq_length=SEQ)
    return model.generate(question, max_new_tokens=4, greedy=True)


def main(folder="sums", steps=600):
    networks = []

    def model(*sizes, options):
        networks.append(GPT(*sizes, block=Parallel, options=options))
        return networks[-1]

    datasets = {"train": Sums(10**9, seed=1), "valid": Sums(10**6, seed=2), "test": None}
    for exit_interval in (steps // 2, None):  # the first run stops halfway, the second continues it
        try:
            config = settings(folder, steps, exit_interval)
            meshwright.train(config, model=model, loss=z_loss, datasets=datasets)
        except meshwright.UserError as error:
            if str(error):  # empty if another rank reports it
                print(f"extending: error: {error}", file=sys.stderr)
            return error.status
    if os.environ.get("RANK", "0") != "0":  # every rank has the same weights, so one asks
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
