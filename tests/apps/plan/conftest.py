"""Plans whose figures are not measured, which takes seconds."""

from __future__ import annotations

import pytest

from meshwright.apps.plan import memory, prediction
from meshwright.apps.plan.estimate import memory_of_ranks
from meshwright.apps.plan.memory import RankMemory
from meshwright.base.device_profiles import DeviceProfile
from meshwright.config.schema import TrainConfig


@pytest.fixture
def estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let closed forms stand for what is measured."""

    def of_rank(config: TrainConfig, padded: int, rank: int, profile: DeviceProfile) -> RankMemory:
        return memory_of_ranks(config, padded, profile)[rank]

    monkeypatch.setattr(prediction, "measured_operations", lambda config, padded, profile: None)
    monkeypatch.setattr(memory, "memory_of_ranks", memory_of_ranks)
    monkeypatch.setattr(memory, "memory_of_rank", of_rank)
