"""The batches that one rank reads: of training from any sample on, and of validations."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import replace
from typing import Literal

from meshwright.data.datasets import Datasets
from meshwright.data.loader import Batch, Loader, LoaderSpec
from meshwright.data.samples import Dataset


class Feed:
    """The data sets of a run, and a thread that reads ahead of training."""

    def __init__(self, datasets: Datasets, spec: LoaderSpec) -> None:
        self.datasets = datasets
        self.spec = spec
        self.train_steps: Generator[list[Batch], None, None] | None = None

    def next(self, consumed: int, iteration: int) -> list[Batch]:
        """Return the micro-batches of the next step; after `close`, of that after these counts."""
        if self.train_steps is None:
            self.train_steps = self.steps(self.train_set, self.spec, consumed, iteration)
        return next(self.train_steps)

    def read_again(self, consumed: int, iteration: int) -> list[Batch]:
        """Return the micro-batches of the training step after so many samples and iterations."""
        # Closing the generator ends the thread that has begun to read ahead.
        with contextlib.closing(
            self.steps(self.train_set, self.spec, consumed, iteration)
        ) as steps:
            return next(steps)

    def validate(
        self, dataset: Dataset, consumed: int, step_size: int, at_end: Literal["wrap", "mask"]
    ) -> Generator[list[Batch], None, None]:
        """Yield the micro-batches of each step of a validation, without end."""
        # The steps of a validation have one size and length, while training may let them grow.
        spec = replace(
            self.spec,
            step_size=lambda consumed: step_size,
            length_at=lambda step: None,
            at_end=at_end,
        )
        return self.steps(dataset, spec, consumed)

    def steps(
        self, dataset: Dataset, spec: LoaderSpec, consumed: int, iteration: int = 0
    ) -> Generator[list[Batch], None, None]:
        return iter(Loader(dataset, spec, consumed, iteration))

    def sets_of(self, split: str) -> dict[str, Dataset]:
        """Return the data sets of "valid" or "test" by their keys."""
        # Where there are several validation sets, their keys are "valid/NAME".
        return {
            key: d
            for key, d in self.datasets.items()
            if d is not None and key.split("/")[0] == split
        }

    @property
    def train_set(self) -> Dataset:
        dataset = self.datasets["train"]
        assert dataset is not None
        return dataset

    def close(self) -> None:
        """End the thread that reads ahead; `next` begins anew."""
        if self.train_steps is not None:
            self.train_steps.close()
            self.train_steps = None
