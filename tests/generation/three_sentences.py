"""A model of bytes that has learned three sentences."""

import random

from helpers import train_on_texts

CAT, DOG, BEAR = SENTENCES = ["the cat sat.", "a dog ran.", "ein Bär."]
LENGTH = 24
SHAPE = "--num-layers=2 --hidden-size=32 --num-attention-heads=4".split()
SHAPE += [f"--seq-length={LENGTH}", f"--max-position-embeddings={LENGTH}"]


def learn(folder, steps, *tokenizer):
    """Train on documents of one sentence: 6 of 11 the first, 3 the second, 2 the third."""
    texts = random.Random(0).choices(SENTENCES, [6, 3, 2], k=4000)
    flags = "--micro-batch-size=16 --lr=1e-2 --lr-warmup-iters=5 --hidden-dropout=0 --attention-dropout=0"
    return train_on_texts(
        folder, texts, [*tokenizer], [*SHAPE, *flags.split(), f"--train-iters={steps}"]
    )
