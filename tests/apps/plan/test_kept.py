"""What a search keeps under a key is what it would compute again for each layout with that key."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from meshwright.apps.plan.bounds import Bounds
from meshwright.apps.plan.estimates import MemoryEstimates
from meshwright.apps.plan.prediction import Machine, find_machine
from meshwright.apps.plan.search import Freedom, Search
from meshwright.apps.plan.timing import StepTerms
from meshwright.config import flags
from meshwright.config.schema import TrainConfig

SMALL = "--preset gpt3-1.3b --num-layers 4 --global-batch-size 8 --bf16 --train-iters 10 --lr-decay-iters 10"


class Recomputed(dict[Any, Any]):
    """A dictionary that seems to be empty, so that all is computed again, and compares it."""

    def __init__(self, name: str, compared: Counter[str]) -> None:
        super().__init__()
        self.name, self.compared = name, compared
        compared[name] += 0

    def __contains__(self, key: object) -> bool:
        return False

    def __setitem__(self, key: Any, value: Any) -> None:
        if super().__contains__(key):
            assert self[key] == value, f"{self.name}: {key} has two values"
            self.compared[self.name] += 1
        super().__setitem__(key, value)


@pytest.mark.parametrize(
    ("words", "gib"),
    [
        ("--world-size 4 --zero-stage 3 --seq-length 128 --hidden-size 256", 40),  # the host is slower
        ("--world-size 4 --num-layers 5 --hidden-dropout 0 --attention-dropout 0", 6),
        ("--world-size 8 --pipeline-model-parallel-size 4 --window-size 64", 5),
    ],
)
def test_no_key_has_two_values(words: str, gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds for every dictionary of these classes that is empty at first."""
    compared = Counter[str]()
    for owner in (Bounds, MemoryEstimates, Search, StepTerms):

        def begin(self: Any, *given: Any, real: Any = owner.__init__, **more: Any) -> None:
            real(self, *given, **more)
            for name in [name for name, value in vars(self).items() if value == {}]:
                setattr(self, name, Recomputed(f"{type(self).__name__}.{name}", compared))

        monkeypatch.setattr(owner, "__init__", begin)
    monkeypatch.setattr("meshwright.training.parameters.COUNTED", Recomputed("COUNTED", compared))
    config = flags.parse_settings(
        TrainConfig, [*SMALL.split(), *words.split(), "--mock-data"], "meshwright train"
    ).config
    machine = find_machine("a100-40")
    machine = Machine(dataclasses.replace(machine.profile, memory_bytes=gib << 30), machine.links)
    Search(machine, 50_257, Freedom(), 10).run(config)
    assert len(compared) >= 11 and all(compared[f"Bounds.{name}"] for name in ("work", "parts", "after"))
    assert compared["MemoryEstimates.states"] and compared["COUNTED"]
