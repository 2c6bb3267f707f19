"""One step on one rank."""

import dataclasses
import weakref

import torch

from helpers import TINY
from meshwright.data.loader import Batch
from meshwright.model.loss import token_losses
from meshwright.training.micro_step import Network
from meshwright.training.step import StepSettings, train_step
from stores import CPU, VOCAB, make


def test_the_logits_are_freed_before_the_layers_backward_pass():
    """They are a step's largest tensor, and nothing needs them after the head's backward pass."""
    model, store = make(dataclasses.replace(TINY, hidden_dropout=0.0, attention_dropout=0.0))
    logits, alive = [], []

    def losses(x, batch):
        logits.append(weakref.ref(x))
        return {"loss": token_losses(x, batch.labels, VOCAB)}

    last_block = list(model.h.values())[-1]
    last_block.register_full_backward_hook(lambda *_: alive.append(logits[0]() is not None))
    tokens = torch.randint(0, VOCAB, (2, 16))
    net = Network(parts=[model], store=store, loss=losses, device=CPU)
    train_step(net, [Batch(tokens, tokens.roll(1, 1), torch.arange(2))], StepSettings(1, 1e-2, 0.1))
    assert alive == [False]
