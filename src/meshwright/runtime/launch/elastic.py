"""Decide how many ranks a run goes on with when machines come and go.

The numbers of ranks that a command can train with are known before anything starts. Then, whenever
the machines change, machine 0 takes the largest that is there. This module imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.base.errors import UserError
from meshwright.base.storage.addresses import address_of
from meshwright.config import check_layout, check_steps, flags
from meshwright.config.fields import with_settings
from meshwright.config.problem import Problem, SettingsError, listed
from meshwright.config.schema import TrainConfig

CompleteSettings = Callable[[flags.Parsed[TrainConfig]], TrainConfig]
ELASTIC_FLAGS = "--min-ranks and --max-ranks"
TRAIN_SCRIPT = "pretrain_gpt.py"  # the script whose flags are those of train


@dataclass(frozen=True)
class Shape:
    """A number of ranks that a command can run on, and the division of its global batch there."""

    ranks: int
    group: int = 1  # ranks that should share a machine: those of one tensor-parallel group
    dp: int = 0  # data-parallel size; 0 for a script, whose flags are its own
    micro: int | None = None  # samples of a micro-batch; None: as the command says
    number: int | None = None  # micro-batches of each replica; None if measured at the start
    is_smaller: bool = False  # whether the micro-batch is smaller than the command's

    @property
    def flags(self) -> list[str]:
        """Flags to add to the command."""
        return [f"--micro-batch-size={self.micro}"] if self.is_smaller else []

    def describe(self) -> str:
        if not self.dp:
            return ""
        text = f": data-parallel size {self.dp}"
        if self.number:
            noun = "micro-batch" if self.number == 1 else "micro-batches"
            text += f", {self.number} {noun} of {self.micro} each"
        if self.is_smaller:
            text += ", so that the global batch divides"
        return text


def take_as_given(parsed: flags.Parsed[TrainConfig]) -> TrainConfig:
    return parsed.config


def parse_train(
    command: list[str], ranks: int, complete: CompleteSettings = take_as_given
) -> TrainConfig:
    """Return the settings of train on so many ranks; --load may complete the model."""
    words = [f"--world-size={ranks}", *command[1:]]
    parsed = flags.parse_settings(TrainConfig, words, "meshwright train", check=False)
    # A checkpoint that is not there yet completes nothing: the run begins with the flags.
    load = parsed.config.checkpoint.load
    if load and (address_of(load) or Path(load).exists()):
        return complete(parsed)
    return parsed.config


def is_train(command: list[str]) -> bool:
    return command[0] == "train" or Path(command[0]).name == TRAIN_SCRIPT


def find_shapes(
    command: list[str], least: int, most: int, complete: CompleteSettings = take_as_given
) -> list[Shape]:
    """Return what `command` can run on, from the largest number of ranks to the smallest.

    The global batch and the tensor, pipeline and context sizes stay; a micro-batch may become
    smaller. `complete` takes a model's settings from --load. Raise UserError if no number from
    `least` to `most` fits.
    """
    if not is_train(command):
        if not command[0].endswith(".py"):
            raise UserError(f"{ELASTIC_FLAGS} are for train and for scripts, not for {command[0]}")
        return [Shape(ranks) for ranks in range(most, least - 1, -1)]
    # Check what the flags say first, and then what the checkpoint adds.
    require_resumable(parse_train(command, most), command)
    config = parse_train(command, most, complete)
    # Whole replicas of the model, so multiples of its ranks, from the most down.
    step = config.parallel.model_ranks
    numbers = range(most // step * step, max(least, 1) - 1, -step)
    fits = [fit_ranks(command, ranks, config) for ranks in numbers]
    shapes = [fit for fit in fits if isinstance(fit, Shape)]
    if not shapes:
        range_of = f"--min-ranks {least} to --max-ranks {most}"
        if not fits:
            raise UserError(
                f"{range_of}: no multiple of {step}, the ranks of one replica, is among them"
            )
        why = next(listed(fit) for fit in fits if isinstance(fit, list))
        raise SettingsError(f"{range_of}: nothing fits the command: {why}")
    return shapes


def save_folder(command: list[str]) -> str | None:
    """Return the --save of train, None for a script."""
    return parse_train(command, 1).checkpoint.save if is_train(command) else None


def require_resumable(config: TrainConfig, command: list[str]) -> None:
    """Refuse a command that would begin again, or compute something else, with other ranks."""
    c = config.checkpoint
    t = config.training
    if not c.save or c.load != c.save:
        raise SettingsError(
            f"{ELASTIC_FLAGS} need {{save=FOLDER}} and {{load=FOLDER}}, the same: the run continues from there"
        )
    if t.global_batch_size is None:
        raise SettingsError(
            f"{ELASTIC_FLAGS} need {{global_batch_size}}: else the batch would follow the number of ranks"
        )
    if any(word.partition("=")[0] in ("--world-size", "--world_size") for word in command):
        raise SettingsError(f"{{world_size}} contradicts {ELASTIC_FLAGS}; leave it out")


def fit_ranks(command: list[str], ranks: int, completed: TrainConfig) -> Shape | list[Problem]:
    """Return how the command runs on so many ranks, or why it does not."""
    config = dataclasses.replace(parse_train(command, ranks), model=completed.model)
    t = config.training
    wanted = t.micro_batch_size
    first_problems = list[Problem]()
    # The micro-batches to try: that of the command, then smaller ones that divide a replica's
    # share. These change no result where a step's loss is the mean over all its tokens.
    share = (t.global_batch_size or 0) // config.dp
    sizes = [config.micro_batch]
    if isinstance(wanted, int) and not t.num_accumulation_steps and t.loss_mean == "global":
        for size in range(min(wanted, share), 0, -1):
            if share % size == 0 and size != wanted:
                sizes.append(size)
    for size in sizes:
        if size != config.micro_batch:
            config = with_settings(config, micro_batch_size=size)
        problems = check_steps.batch_problems(config)
        if config.model.num_layers:  # else the ranks will say what is missing
            problems = check_layout.parallel_problems(config) + problems
        if not problems:
            number = None if wanted == "auto" else config.micro_batches(config.global_batch)
            tensor = config.parallel.tensor_model_parallel_size
            return Shape(ranks, tensor, config.dp, size, number, size != sizes[0])
        first_problems = first_problems or problems
    return first_problems


def choose_shape(
    shapes: Sequence[Shape], machines: Mapping[int, int]
) -> tuple[Shape, dict[int, int]] | None:
    """Return the largest shape for these machines, given with their ranks, and the share of each.

    Tensor-parallel groups stay within machines that can hold them. Machine 0 always takes part.
    """
    for shape in shapes:
        left = shape.ranks
        shares = {}
        for node, ranks in sorted(machines.items()):
            usable = ranks
            if ranks >= shape.group:  # whole groups; a smaller machine can only share one
                usable = ranks // shape.group * shape.group
            share = min(usable, left)
            if share:
                shares[node] = share
                left -= share
        # Machine 0 has the store, so that it must take part.
        if left == 0 and 0 in shares:
            return shape, shares
    return None


def describe_choice(
    shape: Shape, shares: Mapping[int, int], machines: Mapping[int, int], most: int
) -> str:
    """Return "3 of 4 ranks: data-parallel size 3, 4 micro-batches of 1 each"."""
    text = f"{shape.ranks} of {most} ranks{shape.describe()}"
    if idle := min(sum(machines.values()), most) - sum(shares.values()):
        text += f"; {idle} more do{'es' * (idle == 1)} not fit the command and stay{'s' * (idle == 1)} idle"
    return text
