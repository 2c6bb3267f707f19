"""Choose vocabulary, model and number of steps from the amount of text, the speed and the minutes.

A trial measures one size on this machine; how much faster or slower the others are is what
`meshwright plan` predicts.

The numbers come from runs of 1.2 million tokens on two cores, compared at equal time. Muon, the
network of Qwen 3 (which the Hugging Face export knows), small batches and few wide heads helped
most: 1.57 bits per byte of unseen Python, where GPT-2's network and AdamW reached 1.79. The rates,
the momentum and the head of the two smallest sizes come from runs of 750 to 3,000 steps of the
smallest (benchmarks/records/2026-11-27-four-gpus).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

FEWEST_STEPS = 20  # the fewest that make a run
USEFUL_STEPS = 200  # steps of the smallest size, the fewest after which a model has learnt words
READS = 4  # tokens to be read per parameter of the layers before a larger model is worth its time
PARAMETERS_PER_TOKEN = 2  # most parameters of the layers per token of text
FULL_BATCH = 8192  # tokens of a step that keep an accelerator busy
ENOUGH_STEPS = 2000  # steps that a text must still give in larger batches
VALIDATED = 20  # batches of a validation, at most; no more than a twentieth of the steps
EPOCHS = 12  # most readings of a text; more only learn it by heart


@dataclass(frozen=True)
class Size:
    """Sizes of a model, its batch, and the peak learning rate of Muon.

    With `table_lr`, a rate of its own for the table of tokens, the head has weights of its own.
    """

    layers: int
    hidden: int
    heads: int
    length: int
    batch: int
    lr: float
    table_lr: float | None = None

    @property
    def parameters(self) -> int:
        """Parameters of the layers."""
        return 12 * self.layers * self.hidden**2

    def cost(self, vocab: int) -> int:
        """Multiplications per token: those of the layers and of the head."""
        return self.parameters + vocab * self.hidden

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.length


SIZES = [
    Size(4, 128, 2, 128, 8, 6e-3, 2e-2),
    Size(4, 192, 3, 128, 8, 6e-3, 2e-2),
    Size(6, 256, 4, 256, 8, 6e-3),
    Size(6, 384, 6, 256, 16, 4e-3),
    Size(8, 512, 8, 512, 32, 3e-3),
    Size(12, 768, 12, 1024, 32, 2e-3),
]


@dataclass(frozen=True)
class MeasuredSpeed:
    """The result of a trial: how fast this machine trains a model of one size.

    `predict` returns the tokens per second that `meshwright plan` expects of a size, 0 if there is
    no room for it.
    """

    trial: Size
    tokens_per_second: float
    predict: Callable[[Size], float]
    accelerator: bool = False

    def speed(self, size: Size) -> float:
        """Return the tokens per second of another size."""
        return self.tokens_per_second * self.predict(size) / self.predict(self.trial)


@dataclass(frozen=True)
class TrainingPlan:
    size: Size
    steps: int
    dropout: float
    epochs: float
    limit: str  # what ends the training: "time" or "text"


def vocabulary_for(text_bytes: int, wide: float, accelerator: bool) -> int:
    """Return a vocabulary size; `wide` is the share of the bytes that are not ASCII.

    Rare words are not learnt, and the head costs as much as layers do. A script with thousands of
    characters needs some merges for each.
    """
    size = 512
    for text, larger in (
        (300_000, 1024),
        (2_000_000, 2048),
        (5_000_000, 4096),
        (20_000_000, 8192),
        (100_000_000, 16384),
        (1_000_000_000, 32768),
    ):
        if text_bytes >= text:
            size = larger
    if not accelerator:
        size = min(size, 4096)
    return 2 * size if wide > 0.3 else size


def grow(size: Size, tokens: int) -> Size:
    """Enlarge a batch for an accelerator, which needs the same time for it, if the text allows.

    The learning rate grows with the root of the batch, at most to twice its value.
    """
    batch = size.batch
    while batch * size.length < FULL_BATCH:
        doubled = 2 * batch * size.length
        if EPOCHS * tokens < ENOUGH_STEPS * doubled:
            break
        batch *= 2
    return replace(size, batch=batch, lr=size.lr * min(math.sqrt(batch / size.batch), 2))


def trial_size(
    tokens: int, accelerator: bool, predict: Callable[[Size], float], seconds: float
) -> Size:
    """Return the size to measure: on an accelerator, the one that the plan would choose.

    Small models would only wait for the host there.
    """
    if not accelerator:
        return SIZES[0]
    # As if the smallest size ran at the speed that the plan expects.
    first = grow(SIZES[0], tokens)
    machine = MeasuredSpeed(first, predict(first), predict, accelerator)
    return plan_training(tokens, machine, seconds).size


def useful(machine: MeasuredSpeed) -> float:
    """Return the seconds of training below which a model is hardly worth its minutes."""
    return USEFUL_STEPS * SIZES[0].tokens / machine.speed(SIZES[0])


def validating(steps: float) -> float:
    """Return how many times as long as its steps a run takes with its five validations.

    They need no backward pass, which is two thirds of a step.
    """
    return 1 + 5 / 3 * min(VALIDATED / max(steps, 1), 1 / 20)


def most_steps(size: Size, tokens: int) -> int:
    """Return the number of steps after which more would only teach the text by heart."""
    return EPOCHS * tokens // size.tokens


def plan_training(tokens: int, machine: MeasuredSpeed, seconds: float) -> TrainingPlan:
    """Plan a training of `seconds` on a text of so many tokens."""
    # The largest model that the text and the time are enough for.
    sizes = [grow(size, tokens) for size in SIZES] if machine.accelerator else SIZES
    chosen = sizes[0]
    for size in sizes:
        # Too large for the text, which it would learn by heart.
        if size.parameters > PARAMETERS_PER_TOKEN * tokens:
            continue
        # What it would read in the time must be worth its parameters.
        read = min(machine.speed(size) * seconds, EPOCHS * tokens)
        if size.parameters * READS <= read:
            chosen = size

    # The steps that fit into the time, and those that the text is worth.
    fitting = machine.speed(chosen) * seconds / chosen.tokens
    by_time = int(fitting / validating(fitting))
    by_text = most_steps(chosen, tokens)
    steps = max(min(by_time, by_text), FEWEST_STEPS)
    steps = steps // 10 * 10  # a round number

    # A text that is read often is learnt by heart without dropout.
    epochs = steps * chosen.tokens / max(tokens, 1)
    dropout = 0.2
    if epochs < 2:
        dropout = 0.0
    elif epochs < 6:
        dropout = 0.1
    return TrainingPlan(chosen, steps, dropout, epochs, "text" if by_text < by_time else "time")
